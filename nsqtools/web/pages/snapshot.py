"""A sample as the pages read it: by topic, by nsqd, summed up, with what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.web.pages.problems import Problem, problems_of


@dataclass(frozen=True, slots=True)
class Sums:
    """Several queues together. What came in is counted at topics, the rest at channels."""

    topics: int
    channels: int
    depth: int
    in_flight: int
    deferred: int
    clients: int
    ingress: float | None
    finish: float | None
    requeue: float | None
    timed_out: float | None


class Snapshot:
    """One sample, taken apart once for all who look at it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.totals = sample.totals
        self.sums = sums_of(self.totals)
        self.problems: list[Problem] = problems_of(sample, self.totals)
        self.reports: dict[str, NodeReport] = {each.address: each for each in sample.reports}
        self._by_topic: dict[str, list[QueueRow]] = {}
        self._by_name: dict[tuple[str, str], list[QueueRow]] = {}
        self._by_node: dict[str, list[QueueRow]] = {}
        for row in self.totals:
            self._by_topic.setdefault(row.topic, []).append(row)
        for row in sample.rows:
            self._by_name.setdefault((row.topic, row.channel), []).append(row)
            self._by_node.setdefault(row.node, []).append(row)

    @property
    def sampled_s(self) -> float:
        return self.sample.time_ns / 1e9

    def topic(self, topic: str) -> QueueRow | None:
        """Return the total of a topic."""
        return self.queue(topic, "")

    def queue(self, topic: str, channel: str) -> QueueRow | None:
        """Return the total of a channel, or of a topic."""
        return next((row for row in self._by_topic.get(topic, ()) if row.channel == channel), None)

    def channels(self, topic: str) -> list[QueueRow]:
        """Return the totals of a topic's channels, the deepest first."""
        rows = [row for row in self._by_topic.get(topic, ()) if row.channel]
        return sorted(rows, key=lambda row: -row.depth)

    def on_nodes(self, topic: str, channel: str = "") -> list[QueueRow]:
        """Return a queue on each nsqd that has it."""
        return sorted(self._by_name.get((topic, channel), ()), key=lambda row: row.node)

    def of_node(self, node: str) -> list[QueueRow]:
        """Return the queues of an nsqd."""
        return self._by_node.get(node, [])

    def problems_of_queue(self, topic: str, channel: str = "") -> list[Problem]:
        """Return what is wrong with a topic and its channels, or with one channel."""
        return [
            problem
            for problem in self.problems
            if problem.topic == topic and (not channel or problem.channel == channel)
        ]


def sums_of(rows: Sequence[QueueRow]) -> Sums:
    """Add rows up."""
    topics = [row for row in rows if not row.channel]
    channels = [row for row in rows if row.channel]
    of_topics = [row.rates for row in topics if row.rates]
    of_channels = [row.rates for row in channels if row.rates]
    is_known = bool(of_topics)
    return Sums(
        topics=len({row.topic for row in rows}),
        channels=len(channels),
        depth=sum(row.depth for row in rows),
        in_flight=sum(row.in_flight for row in channels),
        deferred=sum(row.deferred for row in channels),
        clients=sum(row.clients for row in channels),
        ingress=sum(rates.ingress for rates in of_topics) if is_known else None,
        finish=sum(rates.finish for rates in of_channels) if is_known else None,
        requeue=sum(rates.requeue for rates in of_channels) if is_known else None,
        timed_out=sum(rates.timed_out for rates in of_channels) if is_known else None,
    )
