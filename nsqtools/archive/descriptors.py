"""How many topics fit under the limit of open files.

A topic takes a connection to each nsqd that has it. Its files are open only while something is
written, by the few threads that write, so a small reserve is enough for any number of topics. It
must never be used up by connections: what is delivered and cannot be written only goes in circles.

Topics that do not fit wait for their turn: those that have been quiet for a while are let go, after
their files are finished, and wait in their place. nsqd keeps what is published meanwhile.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Iterable, Sequence, Set

from nsqtools.archive.topic_archiver import TopicArchiver
from nsqtools.errors import OutputError

log = logging.getLogger("nsqtools")

RESERVE = 48  # files of the writing threads, connections being made, requests to daemons

REST_AFTER_S = 5.0  # without a message
REST_SHARE = 4  # at most one of so many topics at a time

MANY = 1 << 20


def free_descriptors() -> int:
    """Return how many may still be taken for connections; negative when there are too many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > MANY:
        return MANY
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:  # not one is left to look with
        used = soft
    return soft - used - RESERVE


class Waiting:
    """The topics that do not fit.

    ``direct`` is how many nsqd are given by address. A topic rests after ``rest_after_s`` without
    a message.
    """

    def __init__(self, direct: int, rest_after_s: float = 0.0) -> None:
        self._cost = max(1, direct)  # descriptors of a topic
        self._rest_after_s = max(REST_AFTER_S, rest_after_s)
        self._topics: dict[str, None] = {}  # the one that has waited longest first
        self._resting: set[str] = set()
        self.quiet_since_s: dict[str, float] = {}  # of those that were archived until then
        self._reported = 0

    @property
    def topics(self) -> Set[str]:
        return set(self._topics)

    @property
    def unseen(self) -> Set[str]:
        """Those that were not archived yet."""
        return self._topics.keys() - self.quiet_since_s.keys()

    def fitting(self, topics: Iterable[str], archivers: Sequence[TopicArchiver]) -> list[str]:
        """Return those of some topics that can begin; the others wait from now on.

        Raises `OutputError` when not even one topic fits.
        """
        topics = list(topics)
        if not topics:
            return []
        room = max(0, self._room(archivers) // self._cost)
        if room == 0 and not archivers:
            raise OutputError(
                "the limit of open files is too low to archive even one topic",
                hint="Raise it: ulimit -n, or LimitNOFILE= of the systemd unit.",
            )
        self._topics.update(dict.fromkeys(topics[room:]))
        if len(self._topics) > self._reported:
            log.error(
                "%d topics wait until others are quiet, as the limit of open files is reached "
                "(raise ulimit -n): %s",
                len(self._topics),
                ", ".join(self._topics),
            )
        self._reported = len(self._topics)
        return topics[:room]

    def take(self) -> list[str]:
        """Return all that wait, in their order; `fitting` has them wait again."""
        topics = list(self._topics)
        self._topics.clear()
        return topics

    def forget(self, topics: Iterable[str]) -> None:
        """These are gone."""
        for topic in topics:
            self._topics.pop(topic, None)

    def to_rest(self, archivers: Sequence[TopicArchiver]) -> list[TopicArchiver]:
        """Return those to be stopped for the benefit of those that wait."""
        surplus = -(self._room(archivers) // self._cost) if archivers else 0
        wanted = max(surplus, min(len(self._topics), -(-len(archivers) // REST_SHARE)))
        if wanted <= 0:
            return []
        now = time.monotonic()
        quiet = [
            (since, archiver)
            for archiver in archivers
            if (since := archiver.is_idle_since_s) is not None and now - since >= self._rest_after_s
        ]
        quiet.sort(key=lambda each: each[0])
        for since, archiver in quiet[:wanted]:
            self._resting.add(archiver.topic)
            self.quiet_since_s[archiver.topic] = since
        return [archiver for _, archiver in quiet[:wanted]]

    def has_rested(self, topic: str) -> bool:
        """A topic has ended: return whether it was to rest; then it waits for its next turn."""
        if topic not in self._resting:
            return False
        self._resting.discard(topic)
        self._topics[topic] = None
        return True

    def _room(self, archivers: Sequence[TopicArchiver]) -> int:
        """How many descriptors are free, less those of connections that are still to be made."""
        connections = [len(archiver.consumer.connections) for archiver in archivers]
        self._cost = max(self._cost, *connections, 1)
        return free_descriptors() - sum(self._cost - count for count in connections)
