"""Which topics to consume: those whose names match a pattern, now and later.

Every nsqlookupd and nsqd is asked, at once and again and again, and the answers are united: one
that is down hides nothing that another knows. Only when all have answered a topic that none named
is suspected to be deleted.

The lists of nsqd show which have a topic, too. Its consumer can begin with those, ask seldom
itself, and soon when a list shows that a further one has the topic.

Trap: a topic that is taken for deleted and is not would be consumed no more. And the consumer of a
deleted topic would create it again when it reconnects. So only nsqd decides (`Deletions`), and only
after the topic has lost its connections; an nsqlookupd that was restarted has nothing to say.
"""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import re
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import open_cluster
from nsqtools.cluster.topics import named_topics, topics_on_nsqds
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import Address

log = logging.getLogger("nsqtools")


class Troubles:
    """What is wrong now, reported when it begins, when it changes and when it is over.

    Without it what is tried again every few seconds would fill the log with one line. Keys are what
    is in trouble: a topic, an address.
    """

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def has(self, key: str, what: str) -> None:
        """There is trouble; ``what`` is logged unless it was the last thing said of the key."""
        if self._said.get(key) != what:
            self._said[key] = what
            log.warning("%s", what)

    def over(self, key: str, what: str = "") -> None:
        """There is none; ``what`` is logged if there was."""
        if self._said.pop(key, None) is not None and what:
            log.warning("%s", what)

    def only(self, keys: Iterable[str], what: str) -> None:
        """All others are over; ``{}`` in ``what`` becomes the key."""
        for key in set(self._said).difference(keys):
            self.over(key, what.format(key))


ASK_AGAIN_S = 1.0
ASK_SELDOM_S = 5.0  # while the nsqd that may have them do not answer


@dataclass(frozen=True, slots=True)
class KnownTopics:
    """The topics that were named; ``is_complete`` when every daemon answered.

    ``nsqd`` are the addresses of those that have a topic, as nsqlookupd names them. ``spread`` are
    the topics that a further nsqd has since the last time.
    """

    names: frozenset[str]
    is_complete: bool
    nsqd: Mapping[str, set[Address]]
    spread: frozenset[str]


class TopicDiscovery:
    """Asks for the topics whose name contains ``pattern``, a regular expression (as nsq_to_file).

    Raises `ConfigurationError` for a pattern that is not one.
    """

    def __init__(self, pattern: str, connection: ConnectionSettings) -> None:
        try:
            self._matches = re.compile(pattern).search
        except re.error as exc:
            raise ConfigurationError(
                f"{pattern!r} is not a regular expression: {exc}",
                hint="For example '^orders[.]': topics whose name begins so.",
            ) from None
        self._connection = connection
        self._troubles = Troubles()
        self._nsqd: Mapping[str, set[Address]] = {}

    def ask(self) -> KnownTopics:
        """Ask all daemons. Failures are logged; raises the first one when none answered."""
        with open_cluster(self._connection) as cluster:
            names, failures = named_topics(cluster)
            answers, _ = cluster.known_nodes()
        for failure in failures:
            address = str(failure.address)
            self._troubles.has(address, f"cannot list the topics of {address}: {failure.error}")
        self._troubles.only([str(failure.address) for failure in failures], "{} answers again")
        nsqd: dict[str, set[Address]] = collections.defaultdict(set)
        for known in itertools.chain(*answers.values()):
            for topic in filter(self._matches, known.topics - known.tombstoned):
                nsqd[topic].add(known.node.tcp)
        spread = frozenset(topic for topic in nsqd if nsqd[topic] - self._nsqd.get(topic, set()))
        self._nsqd = nsqd
        return KnownTopics(frozenset(filter(self._matches, names)), not failures, nsqd, spread)


class Deletions:
    """Finds out which topics every nsqd has lost. `suspect` is for any thread."""

    def __init__(self, connection: ConnectionSettings) -> None:
        self._connection = connection
        self._suspects: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ask_at_s = 0.0
        self._troubles = Troubles()

    def suspect(self, topic: str) -> None:
        """A topic has lost a connection, or is not listed any more."""
        self._suspects.put(topic)

    def confirmed(self, is_cut_off: Callable[[str], bool]) -> set[str]:
        """Return the suspects without any connection that no nsqd has."""
        now = time.monotonic()
        if now < self._ask_at_s or self._suspects.empty():
            return set()
        suspects = set()
        while not self._suspects.empty():
            suspects.add(self._suspects.get())
        suspects = set(filter(is_cut_off, suspects))
        if not suspects:
            return set()
        names, are_all = self._ask()
        self._ask_at_s = time.monotonic() + (ASK_AGAIN_S if are_all else ASK_SELDOM_S)
        missing = suspects - names
        if are_all:
            return missing
        for topic in missing:
            self._suspects.put(topic)
        return set()

    def found_again(self, topics: Set[str]) -> set[str]:
        """Return those of some topics that some nsqd has."""
        return self._ask()[0] & topics

    def _ask(self) -> tuple[set[str], bool]:
        try:
            with open_cluster(self._connection) as cluster:
                found = topics_on_nsqds(cluster)
        except (NsqError, OSError) as exc:
            self._troubles.has("", f"cannot ask which topics there are: {exc}; trying again")
            return set(), False
        self._troubles.over("")
        return found
