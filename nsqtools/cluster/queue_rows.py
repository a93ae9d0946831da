"""Queues and consumers in numbers, of one nsqd or of all together. Pure.

There is a row for every topic, channel and connection to a channel.

Rates are differences of nsqd's counters over the time that really passed between two answers of
that nsqd. With the counters of a channel (a message is queued, deferred, in flight or done):

    ingress     received:        messages
    egress      sent:            messages + requeued + timed out - depth - deferred
    finish      finished:        messages - depth - deferred - in flight
    requeue     requeued or timed out
    timed_out   those of them that timed out

nsq_stat takes messages - depth for egress, which is negative when messages return to the queue.
nsqd does not count what is emptied: without consumers that is not taken for finished, with them it
is. Counters that went back, or an nsqd that restarted, give no rate rather than a wrong one. For
each connection nsqd counts what it sent, and what was finished and requeued. A connection and a
later one of the same address differ in the moment they connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats

Key = tuple[str, str, str]
ConsumerKey = tuple[str, str, str, str]


class NodeReport(NamedTuple):
    """What one nsqd says. ``at_s`` is the moment of its answer on the monotonic clock."""

    address: str
    at_s: float
    stats: NsqdStats


# Not frozen, though none is changed: thousands are made at a time, and a frozen one takes three
# times as long to make.
@dataclass(slots=True, kw_only=True)
class Rates:
    """Messages a second."""

    ingress: float
    egress: float
    finish: float
    requeue: float
    timed_out: float


@dataclass(slots=True, kw_only=True)
class QueueRow:
    """A channel, or with ``channel == ""`` the topic itself; ``node == ""`` is all nsqd together.

    ``latency`` has (quantile, seconds) pairs. ``rates`` is None while they cannot be known.
    """

    node: str
    topic: str
    channel: str
    depth: int
    disk: int
    in_flight: int = 0
    deferred: int = 0
    requeued: int = 0
    timed_out: int = 0
    messages: int
    clients: int = 0
    paused: bool
    latency: tuple[tuple[float, float], ...] = ()
    rates: Rates | None = None

    @property
    def key(self) -> Key:
        return self.node, self.topic, self.channel

    @property
    def kept(self) -> int:
        """Messages that nsqd has for it: queued, in flight and deferred."""
        return self.depth + self.in_flight + self.deferred

    @property
    def memory(self) -> int:
        """Messages queued in memory; nsqd reads both counts one after the other."""
        return max(0, self.depth - self.disk)


def rows_of_topic(node: str, topic: TopicStats) -> Iterator[QueueRow]:
    """The row of a topic, then those of its channels."""
    yield QueueRow(
        node=node,
        topic=topic.topic_name,
        channel="",
        depth=max(0, topic.depth),  # that of nsqd is negative where files of its disk were lost
        disk=topic.backend_depth,
        messages=topic.message_count,
        paused=topic.paused,
        latency=_seconds(topic.e2e_processing_latency),
    )
    for channel in topic.channels:
        yield channel_row(node, topic.topic_name, channel)


def channel_row(node: str, topic: str, channel: ChannelStats) -> QueueRow:
    """The row of a channel."""
    return QueueRow(
        node=node,
        topic=topic,
        channel=channel.channel_name,
        depth=max(0, channel.depth),
        disk=channel.backend_depth,
        in_flight=channel.in_flight_count,
        deferred=channel.deferred_count,
        requeued=channel.requeue_count,
        timed_out=channel.timeout_count,
        messages=channel.message_count,
        clients=channel.client_count,
        paused=channel.paused,
        latency=_seconds(channel.e2e_processing_latency),
    )


def _seconds(latency: LatencyStats) -> tuple[tuple[float, float], ...]:
    return tuple((quantile, ns / 1e9) for quantile, ns in latency.percentiles or ())


RATES = tuple(field.name for field in fields(Rates))
SUMMED = ("depth", "disk", "in_flight", "deferred", "requeued", "timed_out", "messages", "clients")


def totals(rows: Iterable[QueueRow]) -> list[QueueRow]:
    """Return one row for each topic and channel, in order: the sum of its rows on all nsqd."""
    return SumReader().totals(rows)


def total(rows: Sequence[QueueRow]) -> QueueRow:
    """The sum of the rows of one queue.

    It counts as paused when it is paused anywhere. Percentiles cannot be added up: the worst of the
    nsqd counts for all. Rates are the sum of those that are known.
    """
    if len(rows) == 1:
        return replace(rows[0], node="")
    sums = {name: sum(getattr(row, name) for row in rows) for name in SUMMED}
    worst: dict[float, float] = {}
    for quantile, seconds in (pair for row in rows for pair in row.latency):
        worst[quantile] = max(seconds, worst.get(quantile, 0.0))
    known = [row.rates for row in rows if row.rates is not None]
    rates = {name: sum(getattr(each, name) for each in known) for name in RATES}
    return replace(
        rows[0],
        node="",
        **sums,
        paused=any(row.paused for row in rows),
        latency=tuple(sorted(worst.items(), reverse=True)),
        rates=Rates(**rates) if known else None,
    )


class Sums(NamedTuple):
    """Several queues together. ``ingress`` is what was published to topics, ``copies`` what the
    channels got of it: that compares with what was finished. The rest is counted at channels."""

    topics: int
    channels: int
    depth: int
    in_flight: int
    clients: int
    ingress: float | None
    copies: float | None
    finish: float | None
    requeue: float | None
    timed_out: float | None


def sums_of(rows: Sequence[QueueRow]) -> Sums:
    """Add rows up."""
    channels = [row for row in rows if row.channel]
    of_topics = [row.rates for row in rows if row.rates and not row.channel]
    of_channels = [row.rates for row in channels if row.rates]
    is_known = of_topics or of_channels

    def rate(all_rates: list[Rates], name: str) -> float | None:
        return sum(getattr(rates, name) for rates in all_rates) if is_known else None

    return Sums(
        topics=len({row.topic for row in rows}),
        channels=len(channels),
        depth=sum(row.depth for row in rows),
        in_flight=sum(row.in_flight for row in channels),
        clients=sum(row.clients for row in channels),
        ingress=rate(of_topics, "ingress"),
        copies=rate(of_channels, "ingress"),
        finish=rate(of_channels, "finish"),
        requeue=rate(of_channels, "requeue"),
        timed_out=rate(of_channels, "timed_out"),
    )


RESTING = Rates(ingress=0.0, egress=0.0, finish=0.0, requeue=0.0, timed_out=0.0)


@dataclass(slots=True)
class _Measured:
    """A topic as it was measured: ``base`` are the rows, and ``base_s`` the moment, from which the
    next rates are counted."""

    topic: TopicStats
    rows: list[QueueRow]
    base: list[QueueRow]
    base_s: float


class RateMeter:
    """Turns the successive statistics of one nsqd into rows with rates.

    Between statistics less than ``least_s`` apart the rates stay as they were: the moment of an
    answer is not known exactly enough. A topic that did not change, mostly the same object
    (`StatsReader`), has the rows of the last time again once their rates are 0: most queues of a
    large cluster rest at any moment.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._start_time: int | None = None
        self._topics: dict[str, _Measured] = {}

    def measure(self, report: NodeReport) -> list[QueueRow]:
        """Return the rows; those that were there before, in the same run of nsqd, have rates."""
        stats = report.stats
        before = self._topics if stats.start_time == self._start_time else {}
        self._start_time, self._topics = stats.start_time, {}
        rows: list[QueueRow] = []
        for topic in stats.topics or ():
            measured = self._measure(report, topic, before.get(topic.topic_name))
            self._topics[topic.topic_name] = measured
            rows += measured.rows
        return rows

    def _measure(
        self, report: NodeReport, topic: TopicStats, before: _Measured | None
    ) -> _Measured:
        at_s = report.at_s
        if before is None:
            rows = [*rows_of_topic(report.address, topic)]
            return _Measured(topic, rows, rows, at_s)
        elapsed_s = at_s - before.base_s
        is_same = before.topic is topic or before.topic == topic
        if is_same and before.base is before.rows and elapsed_s > self._least_s:
            if before.rows[0].rates is not RESTING:
                before.rows = before.base = [replace(row, rates=RESTING) for row in before.rows]
            before.base_s = at_s
            return before
        # they are new: nothing else has them yet
        rows = [*rows_of_topic(report.address, topic)]
        if elapsed_s < self._least_s:
            shown = {row.channel: row.rates for row in before.rows}
            for row in rows:
                row.rates = shown.get(row.channel)
            return _Measured(topic, rows, before.base, before.base_s)
        then = {row.channel: row for row in before.base}
        for row in rows:
            last = then.get(row.channel)
            row.rates = None if last is None else rates_between(last, row, elapsed_s)
        return _Measured(topic, rows, rows, at_s)


def rates_between(before: QueueRow, now: QueueRow, elapsed_s: float) -> Rates | None:
    """Return the rates between two rows of one queue.

    None when no time passed, or when a counter went back: the queue is a new one of the same name.
    """
    returned = now.requeued + now.timed_out - before.requeued - before.timed_out
    if elapsed_s <= 0 or now.messages < before.messages or returned < 0:
        return None
    came = now.messages - before.messages
    waiting = now.depth + now.deferred - before.depth - before.deferred
    in_flight = now.in_flight - before.in_flight
    if now.channel and not (before.clients or now.clients or before.in_flight or now.in_flight):
        waiting = came + returned  # no consumer took any: what is less was emptied

    def rate(count: int) -> float:
        # nsqd reads its counters one after the other, while messages move
        return max(0.0, count / elapsed_s)

    return Rates(
        ingress=rate(came),
        egress=rate(came + returned - waiting),
        finish=rate(came - waiting - in_flight),
        requeue=rate(returned),
        timed_out=rate(now.timed_out - before.timed_out),
    )


class SumReader:
    """Sums rows over all nsqd, again and again."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[list[QueueRow], QueueRow]] = {}

    def totals(self, rows: Iterable[QueueRow]) -> list[QueueRow]:
        """Return one row for each topic and channel, in order."""
        groups: dict[tuple[str, str], list[QueueRow]] = {}
        for row in rows:
            groups.setdefault((row.topic, row.channel), []).append(row)
        sums = {}
        for key in sorted(groups):
            group, before = groups[key], self._before.get(key)
            # rows that were not read again are the same objects, which compare at once
            sums[key] = before if before and before[0] == group else (group, total(group))
        self._before = sums
        return [row for _, row in sums.values()]


@dataclass(slots=True)
class ConsumerRow:
    """A connection to a channel on one nsqd. Rates are messages a second, None while unknown."""

    node: str
    topic: str
    channel: str
    client: ClientStats
    finish: float | None = None
    requeue: float | None = None

    @property
    def id(self) -> ConsumerKey:
        return self.node, self.topic, self.channel, self.client.remote_address

    @property
    def flags(self) -> list[str]:
        """What was agreed on: ``tls``, ``snappy``, ``auth`` ..."""
        client = self.client
        named = {
            "tls": client.tls,
            "snappy": client.snappy,
            "deflate": client.deflate,
            "auth": client.authed,
            f"{client.sample_rate} % sample": client.sample_rate > 0,
        }
        return [name for name, is_set in named.items() if is_set]


def consumers_of(report: NodeReport) -> Iterator[ConsumerRow]:
    """Every consumer of every channel of an nsqd, where they were asked for."""
    for topic in report.stats.topics or ():
        for channel in topic.channels:
            for client in channel.clients or ():
                yield ConsumerRow(report.address, topic.topic_name, channel.channel_name, client)


class ConsumerMeter:
    """Turns successive statistics of one nsqd, or of the same ones, into consumers with rates.

    Between answers less than ``least_s`` apart the rates stay as they were: the moment of an answer
    is not known exactly enough.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._before: dict[ConsumerKey, tuple[float, ConsumerRow]] = {}

    def measure(self, *reports: NodeReport) -> list[ConsumerRow]:
        """Return the consumers; those that were there before have rates."""
        rows = [(each.at_s, row) for each in reports for row in consumers_of(each)]
        seen = {}
        for at_s, row in rows:
            seen[row.id] = at_s, row
            before_s, before = self._before.get(row.id, (0.0, row))
            if before is row or before.client.connect_ts != row.client.connect_ts:
                continue
            elapsed_s = at_s - before_s
            if elapsed_s <= self._least_s:
                row.finish, row.requeue = before.finish, before.requeue
                seen[row.id] = before_s, before
            else:
                finished = row.client.finish_count - before.client.finish_count
                requeued = row.client.requeue_count - before.client.requeue_count
                row.finish = max(0, finished) / elapsed_s
                row.requeue = max(0, requeued) / elapsed_s
        self._before = seen
        return [row for _, row in rows]
