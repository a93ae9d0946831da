"""Queues and consumers in numbers, of one nsqd or of all together. Pure.

There is a row for every topic, channel and connection to a channel.

Rates are differences of nsqd's counters over the time that really passed between two answers of
that nsqd. With the counters of a channel (a message is queued, deferred, in flight or done):

    ingress     received:        messages
    egress      sent:            messages + requeued + timed out - depth - deferred
    finish      finished:        messages - depth - deferred - in flight
    requeue     requeued or timed out
    timed_out   timed out

nsq_stat takes messages - depth for egress, which is negative when messages return to the queue.
nsqd does not count emptied messages: they count as finished if the channel has consumers, and not
at all if it has none. After a restart of nsqd, or when a counter has gone back, there is no rate
rather than a wrong one. nsqd counts the sent, finished and requeued messages of each connection. A
later connection from the same address has another time of connecting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats

QueueKey = tuple[str, str, str]
ConsumerKey = tuple[str, str, str, str]


class NodeReport(NamedTuple):
    """The statistics of one nsqd. ``at_s`` is the time of the answer on the monotonic clock."""

    address: str
    at_s: float
    stats: NsqdStats


# Not frozen, although no object changes: a sample creates thousands, and a frozen dataclass takes
# three times as long to create.
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
    """A channel, or with ``channel == ""`` a topic; ``node == ""`` means all nsqd together.

    ``latency`` has (quantile, seconds) pairs. ``rates`` is None until a second sample.
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
    def key(self) -> QueueKey:
        return self.node, self.topic, self.channel

    @property
    def kept(self) -> int:
        """Messages in the queue, in flight and deferred."""
        return self.depth + self.in_flight + self.deferred

    @property
    def memory(self) -> int:
        """Messages queued in memory, at least 0: nsqd reads the two counts one after the other."""
        return max(0, self.depth - self.disk)


def rows_of_topic(node: str, topic: TopicStats) -> Iterator[QueueRow]:
    """Yield the row of a topic, then the rows of its channels."""
    yield QueueRow(
        node=node,
        topic=topic.topic_name,
        channel="",
        # nsqd reports a negative depth if files of its disk queue were lost.
        depth=max(0, topic.depth),
        disk=topic.backend_depth,
        messages=topic.message_count,
        paused=topic.paused,
        latency=_seconds(topic.e2e_processing_latency),
    )
    for channel in topic.channels:
        yield channel_row(node, topic.topic_name, channel)


def channel_row(node: str, topic: str, channel: ChannelStats) -> QueueRow:
    """Return the row of a channel."""
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
    """Return the sum of the rows of one queue.

    It is paused if any nsqd has paused it. Percentiles cannot be added, so the worst one counts.
    Rates are the sum of the known rates.
    """
    if len(rows) == 1:
        return replace(rows[0], node="")
    sums = {name: sum(getattr(row, name) for row in rows) for name in SUMMED}
    worst: dict[float, float] = {}
    for quantile, seconds in (pair for row in rows for pair in row.latency):
        worst[quantile] = max(seconds, worst.get(quantile, 0.0))
    known_rates = [row.rates for row in rows if row.rates is not None]
    rates = {name: sum(getattr(r, name) for r in known_rates) for name in RATES}
    return replace(
        rows[0],
        node="",
        **sums,
        paused=any(row.paused for row in rows),
        latency=tuple(sorted(worst.items(), reverse=True)),
        rates=Rates(**rates) if known_rates else None,
    )


class Sums(NamedTuple):
    """The sum of several queues. ``ingress`` counts messages published to topics, ``copies`` the
    copies that channels got, to compare with ``finish``. The rest is counted at channels."""

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
    """Return the sums of rows."""
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
    """A measured topic. The next rates count from the rows ``base`` at the time ``base_s``."""

    topic: TopicStats
    rows: list[QueueRow]
    base: list[QueueRow]
    base_s: float


class RateMeter:
    """Turns the successive statistics of one nsqd into rows with rates.

    Statistics less than ``least_s`` apart keep the previous rates, because the time of an answer is
    not exact enough. An unchanged topic, usually the same object (`StatsReader`), returns the
    previous rows once their rates are 0: most queues of a large cluster are idle.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._start_time: int | None = None
        self._topics: dict[str, _Measured] = {}

    def measure(self, report: NodeReport) -> list[QueueRow]:
        """Return the rows; they have rates if the same run of nsqd had the queue before."""
        stats = report.stats
        previous = self._topics if stats.start_time == self._start_time else {}
        self._start_time, self._topics = stats.start_time, {}
        rows: list[QueueRow] = []
        for topic in stats.topics or ():
            measured = self._measure(report, topic, previous.get(topic.topic_name))
            self._topics[topic.topic_name] = measured
            rows += measured.rows
        return rows

    def _measure(
        self, report: NodeReport, topic: TopicStats, previous: _Measured | None
    ) -> _Measured:
        at_s = report.at_s
        if previous is None:
            rows = [*rows_of_topic(report.address, topic)]
            return _Measured(topic, rows, rows, at_s)
        elapsed_s = at_s - previous.base_s
        is_same = previous.topic is topic or previous.topic == topic
        if is_same and previous.base is previous.rows and elapsed_s > self._least_s:
            if previous.rows[0].rates is not RESTING:
                previous.rows = previous.base = [
                    replace(row, rates=RESTING) for row in previous.rows
                ]
            previous.base_s = at_s
            return previous
        # These rows are new, so changing them affects nobody.
        rows = [*rows_of_topic(report.address, topic)]
        if elapsed_s < self._least_s:
            last_rates = {row.channel: row.rates for row in previous.rows}
            for row in rows:
                row.rates = last_rates.get(row.channel)
            return _Measured(topic, rows, previous.base, previous.base_s)
        then = {row.channel: row for row in previous.base}
        for row in rows:
            last = then.get(row.channel)
            row.rates = None if last is None else rates_between(last, row, elapsed_s)
        return _Measured(topic, rows, rows, at_s)


def rates_between(previous: QueueRow, now: QueueRow, elapsed_s: float) -> Rates | None:
    """Return the rates between two rows of one queue.

    None if no time passed, or if a counter went back because the queue was created again.
    """
    returned = now.requeued + now.timed_out - previous.requeued - previous.timed_out
    if elapsed_s <= 0 or now.messages < previous.messages or returned < 0:
        return None
    came = now.messages - previous.messages
    waiting = now.depth + now.deferred - previous.depth - previous.deferred
    in_flight = now.in_flight - previous.in_flight
    if now.channel and not (previous.clients or now.clients or previous.in_flight or now.in_flight):
        # Without a consumer no message was finished, so missing messages were emptied.
        waiting = came + returned

    def rate(count: int) -> float:
        # nsqd reads its counters one after the other while messages move, so a rate of 0 may come
        # out below 0.
        return max(0.0, count / elapsed_s)

    return Rates(
        ingress=rate(came),
        egress=rate(came + returned - waiting),
        finish=rate(came - waiting - in_flight),
        requeue=rate(returned),
        timed_out=rate(now.timed_out - previous.timed_out),
    )


class SumReader:
    """Sums the rows of successive samples over all nsqd."""

    def __init__(self) -> None:
        self._previous: dict[tuple[str, str], tuple[list[QueueRow], QueueRow]] = {}

    def totals(self, rows: Iterable[QueueRow]) -> list[QueueRow]:
        """Return one row for each topic and channel, in order."""
        groups: dict[tuple[str, str], list[QueueRow]] = {}
        for row in rows:
            groups.setdefault((row.topic, row.channel), []).append(row)
        sums = {}
        for key in sorted(groups):
            group, previous = groups[key], self._previous.get(key)
            # Rows of an unchanged topic are the same objects, which are compared by identity.
            sums[key] = previous if previous and previous[0] == group else (group, total(group))
        self._previous = sums
        return [row for _, row in sums.values()]


@dataclass(slots=True)
class ConsumerRow:
    """A connection to a channel on one nsqd. Rates are messages a second, None if unknown."""

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
        """The negotiated features: ``tls``, ``snappy``, ``auth`` ..."""
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
    """Yield every consumer of every channel, if the statistics contain consumers."""
    for topic in report.stats.topics or ():
        for channel in topic.channels:
            for client in channel.clients or ():
                yield ConsumerRow(report.address, topic.topic_name, channel.channel_name, client)


class ConsumerMeter:
    """Turns successive statistics of the same nsqd into consumers with rates.

    Answers less than ``least_s`` apart keep the previous rates, as in `RateMeter`.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._previous: dict[ConsumerKey, tuple[float, ConsumerRow]] = {}

    def measure(self, *reports: NodeReport) -> list[ConsumerRow]:
        """Return the consumers; known connections have rates."""
        rows = [(report.at_s, row) for report in reports for row in consumers_of(report)]
        seen = {}
        for at_s, row in rows:
            seen[row.id] = at_s, row
            previous_s, previous = self._previous.get(row.id, (0.0, row))
            if previous is row or previous.client.connect_ts != row.client.connect_ts:
                continue
            elapsed_s = at_s - previous_s
            if elapsed_s <= self._least_s:
                row.finish, row.requeue = previous.finish, previous.requeue
                seen[row.id] = previous_s, previous
            else:
                finished = row.client.finish_count - previous.client.finish_count
                requeued = row.client.requeue_count - previous.client.requeue_count
                row.finish = max(0, finished) / elapsed_s
                row.requeue = max(0, requeued) / elapsed_s
        self._previous = seen
        return [row for _, row in rows]
