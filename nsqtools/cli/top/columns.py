"""What the lines of each view can show, by the names that the whole package uses. Pure.

A column reads a value from the subject of a line: a `TopicSum`, the `QueueRow` of a channel, a
`ConsumerRow` or a `NodeSum`. Nothing is read but what is on the screen, and what is sorted by.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import NodeState
from nsqtools.cluster.stats_documents import COLUMNS
from nsqtools.errors import ConfigurationError

Cell = str | int | float | bool | None


class Kind(enum.Enum):
    """What a line is."""

    TOPICS = "topics"
    CHANNELS = "channels"
    CONSUMERS = "consumers"
    NODES = "nsqd"


class Column(NamedTuple):
    """``width`` is what it takes at least; texts stand on the left."""

    name: str
    read: Callable[[Any], Cell]
    width: int = 7
    is_text: bool = False


class View(NamedTuple):
    """The columns of a kind of line: the first one is its name.

    ``shown`` are those to begin with. ``optional`` are left out first, in this order, where the
    screen is narrow.
    """

    columns: dict[str, Column]
    shown: tuple[str, ...]
    optional: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicSum:
    """A topic and its channels: ``own`` is the row of the topic itself."""

    topic: str
    own: QueueRow | None
    channels: list[QueueRow]

    @property
    def is_paused(self) -> bool:
        """Whether the topic or one of its channels is paused, on any nsqd."""
        return bool(self.own and self.own.paused) or any(row.paused for row in self.channels)

    def total(self, name: str) -> int:
        """The sum of a number over the channels."""
        return sum(getattr(row, name) for row in self.channels)

    def rate(self, name: str) -> float | None:
        """The sum of a rate over the channels, of those that are known."""
        return _sum(getattr(row.rates, name) if row.rates else None for row in self.channels)


@dataclass(frozen=True, slots=True)
class NodeSum:
    """An nsqd and its queues, of those that one looks at."""

    state: NodeState
    topics: list[QueueRow]
    channels: list[QueueRow]

    def total(self, name: str) -> int | None:
        """The sum of a number over the channels; None while it does not count."""
        return None if self.state.is_silent else sum(getattr(row, name) for row in self.channels)

    def rate(self, name: str, rows: Iterable[QueueRow]) -> float | None:
        """The sum of a rate."""
        return _sum(getattr(row.rates, name) if row.rates else None for row in rows)


TREND = "trend"


def _queue(name: str, width: int = 7) -> Column:
    return Column(name, COLUMNS[name], width)


def _own(name: str) -> Callable[[TopicSum], Cell]:
    read = COLUMNS[name]
    return lambda topic: None if topic.own is None else read(topic.own)


def _latency(rows: Iterable[QueueRow]) -> float | None:
    read = COLUMNS["e2e_ms"]
    return max((value for row in rows if isinstance(value := read(row), float)), default=None)


def _by_name(columns: Iterable[Column]) -> dict[str, Column]:
    return {column.name: column for column in columns}


_SUMMED = ("in_flight", "deferred", "requeued", "timed_out", "clients")

TOPICS = View(
    _by_name(
        [
            Column("topic", operator.attrgetter("topic"), 10, is_text=True),
            Column("depth", _own("depth"), 9),
            Column("waiting", lambda topic: (_own("depth")(topic) or 0) + topic.total("depth")),
            Column("disk", lambda topic: (_own("disk")(topic) or 0) + topic.total("disk")),
            Column("ingress", _own("ingress"), 8),
            Column("finish", lambda topic: topic.rate("finish"), 8),
            Column("requeue", lambda topic: topic.rate("requeue")),
            *(
                Column(name, lambda topic, name=name: topic.total(name))  # type: ignore[misc]
                for name in _SUMMED
            ),
            Column("channels", lambda topic: len(topic.channels)),
            Column("messages", _own("messages"), 8),
            Column("e2e_ms", lambda topic: _latency(topic.channels)),
            Column("paused", _own("paused"), 6),
            Column(TREND, lambda topic: None, 12, is_text=True),
        ]
    ),
    (
        "topic",
        "depth",
        "waiting",
        "ingress",
        "finish",
        "requeue",
        "in_flight",
        "clients",
        "channels",
        "timed_out",
        "e2e_ms",
        TREND,
    ),
    (
        "timed_out",
        "e2e_ms",
        "in_flight",
        TREND,
        "channels",
        "requeue",
        "clients",
        "finish",
        "ingress",
        "waiting",
    ),
)

CHANNELS = View(
    _by_name(
        [
            Column("channel", operator.attrgetter("channel"), 10, is_text=True),
            *(_queue(name) for name in ("depth", "memory", "disk", "in_flight", "deferred")),
            *(_queue(name, 8) for name in ("ingress", "egress", "finish")),
            *(_queue(name) for name in ("requeue", "requeued", "timed_out", "clients", "e2e_ms")),
            _queue("messages", 8),
            _queue("paused", 6),
            Column(TREND, lambda row: None, 12, is_text=True),
        ]
    ),
    (
        "channel",
        "depth",
        "in_flight",
        "deferred",
        "ingress",
        "finish",
        "requeue",
        "requeued",
        "timed_out",
        "clients",
        "e2e_ms",
        TREND,
    ),
    (
        "e2e_ms",
        "requeued",
        "timed_out",
        TREND,
        "deferred",
        "requeue",
        "ingress",
        "finish",
        "in_flight",
        "clients",
    ),
)

_get = operator.attrgetter

CONSUMERS = View(
    _by_name(
        [
            Column("client_id", _get("client_id"), 9, is_text=True),
            *(
                Column(name, _get(name), len(name), is_text=True)
                for name in ("hostname", "remote_address", "topic", "channel", "node")
            ),
            *(Column(name, _get(name), 6) for name in ("ready", "in_flight", "finish", "requeue")),
            *(Column(name, _get(name)) for name in ("finished", "requeued", "messages")),
            Column("user_agent", _get("user_agent"), 10, is_text=True),
        ]
    ),
    (
        "client_id",
        "hostname",
        "remote_address",
        "topic",
        "channel",
        "node",
        "ready",
        "in_flight",
        "finish",
        "requeue",
        "finished",
        "requeued",
        "user_agent",
    ),
    (
        "user_agent",
        "finished",
        "requeue",
        "requeued",
        "hostname",
        "ready",
        "node",
        "finish",
        "topic",
        "channel",
    ),
)


def _heap_mib(node: NodeSum) -> float | None:
    return None if node.state.heap is None else node.state.heap / (1 << 20)


NODES = View(
    _by_name(
        [
            Column("node", lambda node: node.state.address, 10, is_text=True),
            Column("state", lambda node: state_text(node.state), 6, is_text=True),
            Column("version", lambda node: node.state.version or None, 7, is_text=True),
            Column("topics", lambda node: _unless_silent(node, len(node.topics)), 6),
            Column("waiting", lambda node: _unless_silent(node, node_waiting(node))),
            Column("ingress", lambda node: node.rate("ingress", node.topics), 8),
            Column("finish", lambda node: node.rate("finish", node.channels), 8),
            Column("requeue", lambda node: node.rate("requeue", node.channels)),
            *(
                Column(name, lambda node, name=name: node.total(name))  # type: ignore[misc]
                for name in _SUMMED
            ),
            Column("e2e_ms", lambda node: _latency(node.channels)),
            Column("heap_mib", _heap_mib),
        ]
    ),
    (
        "node",
        "state",
        "waiting",
        "ingress",
        "finish",
        "requeue",
        "in_flight",
        "clients",
        "topics",
        "timed_out",
        "heap_mib",
        "version",
    ),
    (
        "version",
        "timed_out",
        "topics",
        "requeue",
        "in_flight",
        "heap_mib",
        "finish",
        "ingress",
        "clients",
    ),
)

VIEWS = {
    Kind.TOPICS: TOPICS,
    Kind.CHANNELS: CHANNELS,
    Kind.CONSUMERS: CONSUMERS,
    Kind.NODES: NODES,
}

ALL_NAMES = tuple(dict.fromkeys(name for view in VIEWS.values() for name in view.columns))
TEXTS = frozenset(
    name for view in VIEWS.values() for name, column in view.columns.items() if column.is_text
)


def check_column(name: str) -> str:
    """Return the name. Raises `ConfigurationError` when no view has such a column."""
    if name not in ALL_NAMES:
        raise ConfigurationError(
            f"unknown column {name!r}", hint=f"The columns are {', '.join(ALL_NAMES)}."
        )
    return name


def chosen_columns(view: View, names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a view among ``names``, after its first; those it begins with for none."""
    first = next(iter(view.columns))
    chosen = [name for name in names if name in view.columns and name != first]
    return (first, *chosen) if chosen else view.shown


def node_waiting(node: NodeSum) -> int:
    """The messages that wait in the topics and channels of an nsqd."""
    return sum(row.depth for row in node.topics) + sum(row.depth for row in node.channels)


def state_text(state: NodeState) -> str:
    """How an nsqd is: what it says of its health, or since when it does not answer."""
    return f"silent {duration_text(state.silent_s)}" if state.is_silent else state.health or "OK"


def duration_text(seconds: float) -> str:
    """``8s``, ``12m``, ``3h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(1, seconds):.0f}s"


def _unless_silent(node: NodeSum, value: int) -> int | None:
    return None if node.state.is_silent else value


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
