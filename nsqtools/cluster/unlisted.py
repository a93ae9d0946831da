"""Topics that nobody needs to wait for: nsqlookupd knows them, and names no nsqd that has them.

Whoever consumes until a channel is empty waits while a topic has no connection: it may still be
made, or nsqd is being restarted. nsqlookupd keeps the name of a topic when the last nsqd that had
it is gone, and then the wait would be for ever and without a word. So nsqlookupd decides, and only
when it has named no nsqd for `UNLISTED_S` on end: an nsqd that was restarted, or whose nsqlookupd
was, is registered again before that.

An nsqd that is given by address is tried for ever, which the client reports; then nothing here is
decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Set

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import open_cluster
from nsqtools.errors import NotFoundError, NsqError

UNLISTED_S = 20.0  # nsqd registers at a restarted nsqlookupd within 15
ASK_EVERY_S = 1.0


class UnlistedTopics:
    """Asks while a topic has no connection. Used on one thread.

    ``found`` are those that no nsqd has, as of the last call of `among`.
    """

    def __init__(
        self, connection: ConnectionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.found: Set[str] = frozenset()
        self._connection = connection
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._ask_at_s = 0.0

    def among(self, unconnected: Collection[str]) -> Set[str]:
        """Return those of all topics without a connection that no nsqd has.

        To be called again and again, with what has no connection then.
        """
        self._since_s = {t: since for t, since in self._since_s.items() if t in unconnected}
        connection = self._connection
        if connection.nsqd_tcp_addresses or not connection.lookupd_http_addresses:
            return self.found
        now = self._clock()
        if unconnected and now >= self._ask_at_s:
            listed = self._listed()
            for topic in unconnected:
                if listed is None or topic in listed:
                    self._since_s.pop(topic, None)
                else:
                    self._since_s.setdefault(topic, now)
            now = self._clock()
            self._ask_at_s = now + ASK_EVERY_S
        self.found = {t for t, since in self._since_s.items() if now - since >= UNLISTED_S}
        return self.found

    def refuse(self, topics: Iterable[str]) -> None:
        """Raise `NotFoundError` when any of these topics is among those found."""
        if names := ", ".join(sorted(self.found & set(topics))):
            raise NotFoundError(
                f"no nsqd has topic {names}, which only nsqlookupd knows",
                hint="Run again when the nsqd that had it is back, or delete it: nsq topic delete.",
            )

    def _listed(self) -> set[str] | None:
        """Return the topics that some nsqd is named for; None when nobody answers."""
        try:
            with open_cluster(self._connection) as cluster:
                answers, _ = cluster.known_nodes()
        except (NsqError, OSError):
            return None
        if not answers:
            return None
        return {topic for nodes in answers.values() for node in nodes for topic in node.topics}
