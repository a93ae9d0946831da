"""The lines of each level: topics, the channels of a topic, the consumers of a channel. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample

Cell = str | int | float | None


class Column(NamedTuple):
    """A heading, and how many characters the values get; 0 is what is left over."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Line:
    """One line: ``key`` stays the same from look to look."""

    key: str
    cells: tuple[Cell, ...]
    is_paused: bool = False


TREND = "trend"

TOPICS = (
    *(Column("topic", 0), Column("depth", 9), Column("in/s", 8), Column("fin/s", 8)),
    *(Column("clients", 7), Column("channels", 8), Column(TREND, 12)),
)
CHANNELS = (
    *(Column("channel", 0), Column("depth", 9), Column("in-fl", 6), Column("defer", 6)),
    *(Column("in/s", 8), Column("fin/s", 8), Column("req/s", 6), Column("clients", 7)),
    Column(TREND, 8),
)
CLIENTS = (
    *(Column("client", 0), Column("nsqd", 21), Column("ready", 6), Column("in-fl", 6)),
    *(Column("done", 9), Column("requeued", 8)),
)


def topic_lines(rows: Iterable[QueueRow]) -> list[Line]:
    """A line for each topic, with what its channels come to."""
    groups: dict[str, list[QueueRow]] = {}
    for row in rows:
        groups.setdefault(row.topic, []).append(row)
    return [_topic_line(topic, group) for topic, group in groups.items()]


def _topic_line(topic: str, rows: Sequence[QueueRow]) -> Line:
    channels = [row for row in rows if row.channel]
    ingress = next((row.rates.ingress for row in rows if not row.channel and row.rates), None)
    return Line(
        topic,
        (
            topic,
            sum(row.depth for row in rows),
            ingress,
            _sum(row.rates.finish if row.rates else None for row in channels),
            sum(row.clients for row in channels),
            len(channels),
        ),
        any(row.paused for row in rows),
    )


def channel_lines(rows: Iterable[QueueRow], topic: str) -> list[Line]:
    """A line for each channel of a topic."""
    return [
        Line(
            row.channel,
            (
                *(row.channel, row.depth, row.in_flight, row.deferred),
                *(
                    (row.rates.ingress, row.rates.finish, row.rates.requeue)
                    if row.rates
                    else UNKNOWN
                ),
                row.clients,
            ),
            row.paused,
        )
        for row in rows
        if row.topic == topic and row.channel
    ]


UNKNOWN = (None, None, None)


def client_lines(sample: Sample, topic: str, channel: str) -> list[Line]:
    """A line for each consumer of a channel."""
    return [
        Line(
            f"{report.address} {client.remote_address}",
            (
                f"{client.hostname} {client.user_agent} {client.remote_address}",
                report.address,
                client.ready_count,
                client.in_flight_count,
                client.finish_count,
                client.requeue_count,
            ),
        )
        for report in sample.reports
        for each in report.stats.topics or ()
        if each.topic_name == topic
        for queue in each.channels
        if queue.channel_name == channel
        for client in queue.clients or ()
    ]


def sort_lines(lines: Iterable[Line], column: int, *, is_reversed: bool) -> list[Line]:
    """Sort by a column: names from A to Z, numbers from the greatest down, unknown ones last."""
    ordered = sorted(lines, key=lambda line: line.key)
    key: Callable[[Line], tuple[float, str]]
    if column:

        def key(line: Line) -> tuple[float, str]:
            value = line.cells[column]
            return (-value if isinstance(value, int | float) else float("inf"), line.key)

    else:

        def key(line: Line) -> tuple[float, str]:
            return (0.0, str(line.cells[0]))

    return sorted(ordered, key=key, reverse=is_reversed)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
