"""Consumers in numbers: a row for every connection to a channel, with rates. Pure.

nsqd counts for each connection what it sent, and what was finished and requeued; the rates are
differences of these counters. A connection and a later one of the same address differ
in the moment they connected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nsqtools.protocol.stats import ClientStats, NsqdStats

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRow:
    """A consumer of a channel on one nsqd. Rates are messages a second, None while unknown."""

    node: str
    topic: str
    channel: str
    client_id: str
    hostname: str
    remote_address: str
    user_agent: str
    ready: int
    in_flight: int
    messages: int
    finished: int
    requeued: int
    connect_ts: int
    finish: float | None = None
    requeue: float | None = None

    @property
    def key(self) -> Key:
        return self.topic, self.channel, self.remote_address, self.connect_ts


def consumers_of(node: str, stats: NsqdStats) -> Iterator[ConsumerRow]:
    """Every consumer of every channel of an nsqd, where they were asked for."""
    for topic in stats.topics or ():
        for channel in topic.channels:
            for client in channel.clients or ():
                yield _row(node, topic.topic_name, channel.channel_name, client)


def _row(node: str, topic: str, channel: str, client: ClientStats) -> ConsumerRow:
    return ConsumerRow(
        node=node,
        topic=topic,
        channel=channel,
        client_id=client.client_id,
        hostname=client.hostname,
        remote_address=client.remote_address,
        user_agent=client.user_agent,
        ready=client.ready_count,
        in_flight=client.in_flight_count,
        messages=client.message_count,
        finished=client.finish_count,
        requeued=client.requeue_count,
        connect_ts=client.connect_ts,
    )


class ConsumerMeter:
    """Turns successive statistics of one nsqd into consumers with rates.

    Between answers less than ``least_s`` apart the rates stay as they were: the moment of an answer
    is not known exactly enough.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._before: dict[Key, tuple[float, ConsumerRow]] = {}

    def measure(self, node: str, at_s: float, stats: NsqdStats) -> list[ConsumerRow]:
        """Return the consumers; those that were there before have rates."""
        rows, seen = [], {}
        for row in consumers_of(node, stats):
            before = self._before.get(row.key)
            if before is None:
                seen[row.key] = at_s, row
            elif (elapsed_s := at_s - before[0]) < self._least_s:
                row = replace(row, finish=before[1].finish, requeue=before[1].requeue)
                seen[row.key] = before
            else:
                row = replace(
                    row,
                    finish=max(0, row.finished - before[1].finished) / elapsed_s,
                    requeue=max(0, row.requeued - before[1].requeued) / elapsed_s,
                )
                seen[row.key] = at_s, row
            rows.append(row)
        self._before = seen
        return rows
