"""One look at a cluster after the other: what `nsq stat` and `nsq top` show."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsqtools.cluster.directory import Cluster, DaemonFailure, NodeReport
from nsqtools.cluster.names import is_pattern, matches, missing
from nsqtools.cluster.stats import RateMeter, Row, totals


@dataclass(frozen=True, slots=True)
class Sample:
    """A look. ``rows`` are those of each nsqd; ``has_rates`` tells whether time was measured."""

    time_ns: int
    rows: list[Row]
    reports: tuple[NodeReport, ...]
    failures: tuple[DaemonFailure, ...]
    has_rates: bool

    @property
    def totals(self) -> list[Row]:
        """The rows of all nsqd together."""
        return totals(self.rows)


@dataclass(frozen=True, slots=True)
class Subject:
    """What to look at: names or patterns of topics and channels, none for all.

    With channels named, topics themselves are not shown.
    """

    topics: Sequence[str] = ()
    channels: Sequence[str] = ()
    clients: bool = False
    memory: bool = False

    def covers(self, row: Row) -> bool:
        """Tell whether the row is looked at."""
        if not matches(row.topic, self.topics):
            return False
        if not row.channel:
            return not self.channels
        return matches(row.channel, self.channels)

    def check(self, rows: Sequence[Row]) -> None:
        """Raises `NotFoundError` for a name that no row has; a pattern may match nothing."""
        topics = {row.topic for row in rows}
        for topic in self.topics:
            if not is_pattern(topic) and topic not in topics:
                raise missing("topic", topic, topics)
        channels = {row.channel for row in rows if matches(row.topic, self.topics)} - {""}
        for channel in self.channels:
            if not is_pattern(channel) and channel not in channels:
                raise missing("channel", channel, channels)


class Sampler:
    """Looks at a cluster, again and again. `stop` it from any thread."""

    def __init__(self, cluster: Cluster, subject: Subject) -> None:
        self._cluster = cluster
        self._subject = subject
        self._meter = RateMeter()
        self._looks = 0
        self._stopped = threading.Event()

    def look(self, *, clients: bool = False) -> Sample:
        """Take one sample; ``clients``: with the consumers, whatever the subject says.

        The first time it raises `NotFoundError`, and the first failure when nobody answers. Later
        that is a sample with nothing but failures: a long run outlives a bad moment.
        """
        subject = self._subject
        only = subject.topics[0] if len(subject.topics) == 1 else ""
        stats = self._cluster.stats(
            # nsqd leaves the rest out itself where one name is asked for
            "" if is_pattern(only) or not self._looks else only,
            clients=clients or subject.clients,
            memory=subject.memory,
            required=not self._looks,
        )
        rows = self._meter.measure(stats.nodes)
        if not self._looks:
            subject.check(rows)
        self._looks += 1
        return Sample(
            time.time_ns(),
            [row for row in rows if subject.covers(row)],
            stats.nodes,
            stats.failures,
            self._looks > 1,
        )

    def samples(self, interval_s: float, count: int | None = None) -> Iterator[Sample]:
        """Sample every ``interval_s`` seconds, the first time after one interval, with rates.

        The looks keep to their moments however long an answer takes. Ends after ``count``, and
        when `stop` is called.
        """
        next_s = time.monotonic()
        self.look()
        taken = 0
        while count is None or taken < count:
            next_s = max(next_s + interval_s, time.monotonic())
            if self._stopped.wait(next_s - time.monotonic()):
                return
            yield self.look()
            taken += 1

    def stop(self) -> None:
        """End `samples`."""
        self._stopped.set()
