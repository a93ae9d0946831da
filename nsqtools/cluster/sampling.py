"""Samples of a cluster, one after the other: what `nsq stat` and `nsq top` show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nsqtools.cluster.answer_reading import SumReader
from nsqtools.cluster.directory import Cluster, DaemonFailure, NodeReport
from nsqtools.cluster.name_patterns import is_pattern, matches, on_no_nsqd, select
from nsqtools.cluster.queue_rows import QueueRow, RateMeter, totals
from nsqtools.errors import NotFoundError
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.stats import StatsReader


@dataclass(frozen=True)
class Sample:
    """One sample. ``rows`` are those of each nsqd; ``has_rates`` from the second sample on.

    ``sum_rows`` makes their totals.
    """

    time_ns: int
    rows: list[QueueRow]
    reports: tuple[NodeReport, ...]
    failures: tuple[DaemonFailure, ...]
    has_rates: bool
    sum_rows: Callable[[list[QueueRow]], list[QueueRow]] = field(default=totals, repr=False)

    @cached_property
    def totals(self) -> list[QueueRow]:
        """The rows of all nsqd together."""
        return self.sum_rows(self.rows)


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """What to sample: names or patterns of topics and channels, none for all.

    With channels named, topics themselves are not shown.
    """

    topics: Sequence[str] = ()
    channels: Sequence[str] = ()
    clients: bool = False
    memory: bool = False

    def covers(self, row: QueueRow) -> bool:
        """Tell whether the row is wanted."""
        if not matches(row.topic, self.topics):
            return False
        if not row.channel:
            return not self.channels
        return matches(row.channel, self.channels)

    def check(self, rows: Sequence[QueueRow]) -> None:
        """Raise `NotFoundError` for a name or pattern that no row has: an alarm must not be silent
        because its topic is gone or misspelt."""
        topics = {row.topic for row in rows}
        select("topic", self.topics, topics)
        channels = {row.channel for row in rows if matches(row.topic, self.topics)} - {""}
        select("channel", self.channels, channels)


def check_named(cluster: Cluster, wanted: SampleFilter, rows: Sequence[QueueRow]) -> None:
    """Check that what is named is there, as `SampleFilter.check` does.

    Topics that only nsqlookupd knows have an error of their own.
    """
    try:
        wanted.check(rows)
    except NotFoundError:
        listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
        registered = {name for names in listed.values() for name in names}
        present = {row.topic for row in rows}
        for topic in wanted.topics:
            if topic in registered and topic not in present:
                raise NotFoundError(on_no_nsqd(topic)) from None
        raise


class Sampler:
    """Samples a cluster, again and again, on one thread. `stop` it from any.

    With ``required`` the first sample fails where nobody answers.
    """

    def __init__(self, cluster: Cluster, wanted: SampleFilter, *, required: bool = True) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._required = required
        self._meter = RateMeter()
        self._totals = SumReader()
        self._readers: dict[str, StatsReader] = {}
        self._taken = 0
        self._stopped = threading.Event()

    def sample(self, *, clients: bool = False) -> Sample:
        """Take one sample; ``clients``: with the consumers, whatever the filter says.

        The first time it raises `NotFoundError`, and the first failure when nobody answers. Later
        that is a sample with nothing but failures: a long run outlives a bad moment.
        """
        wanted = self._wanted
        only = wanted.topics[0] if len(wanted.topics) == 1 else ""
        stats = self._cluster.stats(
            # nsqd leaves the rest out itself where one name is asked for
            "" if is_pattern(only) or not self._taken else only,
            clients=clients or wanted.clients,
            memory=wanted.memory,
            required=self._required and not self._taken,
            readers=self._readers,
        )
        rows = self._meter.measure(stats.nodes)
        if not self._taken:
            check_named(self._cluster, wanted, rows)
        self._taken += 1
        if wanted.topics or wanted.channels:
            rows = [row for row in rows if wanted.covers(row)]
        has_rates = self._taken > 1
        return Sample(
            time.time_ns(), rows, stats.nodes, stats.failures, has_rates, self._totals.totals
        )

    def samples(self, interval_s: float, count: int | None = None) -> Iterator[Sample]:
        """Sample every ``interval_s`` seconds, the first time after one interval, with rates.

        Samples keep to the schedule however long an answer takes. Ends after ``count``, and
        when `stop` is called.
        """
        next_s = time.monotonic()
        self.sample()
        taken = 0
        while count is None or taken < count:
            next_s = max(next_s + interval_s, time.monotonic())
            if self._stopped.wait(next_s - time.monotonic()):
                return
            yield self.sample()
            taken += 1

    def stop(self) -> None:
        """End `samples`."""
        self._stopped.set()
