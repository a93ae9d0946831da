"""The consumers of an archiver: one for each topic, with options that fit how many there are.

Each consumer asks nsqlookupd which nsqd have its topic, and a thousand of them ask often. Those of
a fleet begin with what the discovery of topics has just found, and ask seldom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from nsqtools.archive.archive_settings import ArchiveSource
from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.protocol.names import Address

FLEET_POLL_S = 0.2  # between the lookups of all topics of a fleet
LONGEST_POLL_S = 300.0  # the client's limit


class Consumers:
    """Makes them. ``on_lost`` is called with the topic of each connection that fails or is lost.

    With ``is_fleet`` somebody else finds out where topics are; a poll interval that the user chose
    is kept. ``looked_up`` are the nsqd that have just been found, by topic.
    """

    def __init__(
        self, source: ArchiveSource, on_lost: Callable[[str], None], *, is_fleet: bool
    ) -> None:
        self.looked_up: Mapping[str, Iterable[Address]] = {}
        self._source = source
        self._on_lost = on_lost
        self._is_fleet = is_fleet and "lookupd_poll_interval" not in source.connection.options
        self._topics = 0
        self._options: dict[int, ClientOptions] = {}  # checking them takes longer than the rest

    def expect(self, topics: int) -> None:
        """So many topics are archived now."""
        if topics != self._topics:
            self._topics = topics
            self._options.clear()

    def make(self, topic: str, max_in_flight: int, backlog: Backlog) -> Consumer:
        """Return the consumer of a topic."""
        connection = self._source.connection
        return Consumer(
            topic,
            self._source.channel,
            nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
            lookupd_http_addresses=connection.lookupd_http_addresses,
            options=self._options_for(max_in_flight),
            address_map=connection.address_map,
            on_error=lambda error: self._on_lost(topic),
            backlog=backlog,
            looked_up=self.looked_up.get(topic, ()),
        )

    def _options_for(self, max_in_flight: int) -> ClientOptions:
        options = self._options.get(max_in_flight)
        if options is None:
            options = replace(self._source.options, max_in_flight=max_in_flight)
            if self._is_fleet:
                wanted_s = min(self._topics * FLEET_POLL_S, LONGEST_POLL_S)
                interval_s = max(options.lookupd_poll_interval_s, wanted_s)
                options = replace(options, lookupd_poll_interval_s=interval_s)
            self._options[max_in_flight] = options
        return options
