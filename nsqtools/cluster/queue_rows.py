"""Queues in numbers: a row for every topic and channel, of one nsqd or of all together. Pure.

Rates are differences of nsqd's counters over the time that really passed between two answers of
that nsqd. With the counters of a channel (a message is queued, deferred, in flight or done):

    ingress     received:        messages
    egress      sent:            messages + requeued + timed out - depth - deferred
    finish      finished:        messages - depth - deferred - in flight
    requeue     requeued or timed out
    timed_out   those of them that timed out

nsq_stat takes messages - depth for egress, which is negative when messages return to the queue.
Emptying a channel looks like finishing, for nsqd does not count it. Counters that went back, or an
restarted nsqd, give no rate rather than a wrong one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from nsqtools.cluster.directory import NodeReport
from nsqtools.protocol.stats import ChannelStats, LatencyStats, TopicStats

Key = tuple[str, str, str]


# Not frozen, though nobody changes one: thousands are made at a time, and a frozen one takes three
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
    def memory(self) -> int:
        """Messages queued in memory."""
        return self.depth - self.disk


def rows_of(reports: Iterable[NodeReport]) -> list[QueueRow]:
    """A row for every topic and channel of every nsqd."""
    return [
        row
        for report in reports
        for topic in report.stats.topics or ()
        for row in rows_of_topic(report.address, topic)
    ]


def rows_of_topic(node: str, topic: TopicStats) -> Iterator[QueueRow]:
    """The row of a topic, then those of its channels."""
    yield QueueRow(
        node=node,
        topic=topic.topic_name,
        channel="",
        depth=topic.depth,
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
        depth=channel.depth,
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


SUMMED = (
    "depth",
    "disk",
    "in_flight",
    "deferred",
    "requeued",
    "timed_out",
    "messages",
    "clients",
)


def totals(rows: Iterable[QueueRow]) -> list[QueueRow]:
    """One row for each topic and channel: the sum of its rows on all nsqd.

    A queue counts as paused when it is paused anywhere. Percentiles cannot be added up: the worst
    of the nsqd stands for all. Rates are the sum of those that are known.
    """
    groups: dict[tuple[str, str], list[QueueRow]] = {}
    for row in rows:
        groups.setdefault((row.topic, row.channel), []).append(row)
    return [total(group) for _, group in sorted(groups.items(), key=operator.itemgetter(0))]


def total(rows: Sequence[QueueRow]) -> QueueRow:
    """The sum of the rows of one queue, as `totals` has it."""
    if len(rows) == 1:
        return replace(rows[0], node="")
    sums = {name: sum(getattr(row, name) for row in rows) for name in SUMMED}
    worst: dict[float, float] = {}
    for quantile, seconds in (pair for row in rows for pair in row.latency):
        worst[quantile] = max(seconds, worst.get(quantile, 0.0))
    known = [row.rates for row in rows if row.rates is not None]
    return replace(
        rows[0],
        node="",
        **sums,
        paused=any(row.paused for row in rows),
        latency=tuple(sorted(worst.items(), reverse=True)),
        rates=Rates(
            **{
                rate.name: sum(getattr(rates, rate.name) for rates in known)
                for rate in fields(Rates)
            }
        )
        if known
        else None,
    )


class _NodeBefore(NamedTuple):
    """The last answer of an nsqd: when, since when it runs, and each topic with its rows."""

    at_s: float
    start_time: int
    topics: dict[str, tuple[TopicStats, list[QueueRow]]]


class RateMeter:
    """Turns successive statistics into rows with rates.

    A topic that did not change, which is the same object (`StatsReader`), has the rows of the last
    time again once their rates are 0: most queues of a large cluster rest at any moment.
    """

    def __init__(self) -> None:
        self._before: dict[str, _NodeBefore] = {}

    def measure(self, reports: Sequence[NodeReport]) -> list[QueueRow]:
        """Return the rows of all nsqd; those that were there before have rates."""
        rows: list[QueueRow] = []
        for report in reports:
            rows += self._measure(report)
        return rows

    def _measure(self, report: NodeReport) -> list[QueueRow]:
        stats, before = report.stats, self._before.get(report.address)
        if before is None or before.start_time != stats.start_time:
            before = _NodeBefore(report.at_s, stats.start_time, {})
        elapsed_s = report.at_s - before.at_s
        rows: list[QueueRow] = []
        topics: dict[str, tuple[TopicStats, list[QueueRow]]] = {}
        for topic in stats.topics or ():
            seen = before.topics.get(topic.topic_name)
            if seen is not None and seen[0] is topic and seen[1][0].rates is RESTING:
                found = seen[1]
            else:
                found = _with_rates(report.address, topic, seen, elapsed_s)
            topics[topic.topic_name] = topic, found
            rows += found
        self._before[report.address] = _NodeBefore(report.at_s, stats.start_time, topics)
        return rows


RESTING = Rates(ingress=0.0, egress=0.0, finish=0.0, requeue=0.0, timed_out=0.0)


def _with_rates(
    node: str, topic: TopicStats, seen: tuple[TopicStats, list[QueueRow]] | None, elapsed_s: float
) -> list[QueueRow]:
    if seen is None:
        return list(rows_of_topic(node, topic))
    if seen[0] is topic and elapsed_s > 0:
        return [replace(row, rates=RESTING) for row in seen[1]]
    before = {row.channel: row for row in seen[1]}
    found = []
    for row in rows_of_topic(node, topic):
        last = before.get(row.channel)
        rates = None if last is None else rates_between(last, row, elapsed_s)
        row.rates = rates  # it is new: nobody else has it yet
        found.append(row)
    return found


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
