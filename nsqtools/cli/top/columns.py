"""What the lines of each view can show, by the names that the whole package uses. Pure.

A column reads a value from the subject of a line: a `Sum` (of a topic, of an nsqd), the `QueueRow`
of a channel or a `ConsumerRow`. Nothing is read but what is on the screen, and what is sorted by.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import NodeState
from nsqtools.cluster.stats_documents import COLUMNS, CONSUMER_NUMBERS
from nsqtools.errors import ConfigurationError

Cell = str | int | float | bool | None
Read = Callable[[Any], Cell]
TREND = "trend"


class ViewKind(enum.Enum):
    """What a line is."""

    TOPICS = "topics"
    CHANNELS = "channels"
    CONSUMERS = "consumers"
    NODES = "nsqd"


class Column(NamedTuple):
    """``width`` is what it takes at least; texts are aligned on the left."""

    name: str
    read: Read
    width: int = 7
    is_text: bool = False


class View(NamedTuple):
    """The columns of a kind of line: the first one is its name.

    ``shown`` are those to begin with; the last ones are left out where the screen is narrow.
    """

    columns: dict[str, Column]
    shown: Sequence[str]


@dataclass(frozen=True, slots=True)
class Sum:
    """A topic on all nsqd, or an nsqd (``state``): its topics, and their channels."""

    name: str
    topics: list[QueueRow]
    channels: list[QueueRow]
    state: NodeState | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it is an nsqd that does not answer."""
        return self.state is not None and self.state.is_silent


def _total(name: str, *, with_topics: bool = False) -> Read:
    """The sum of a number over the channels; None for an nsqd that does not answer."""

    def read(each: Sum) -> int | None:
        if each.is_silent:
            return None
        rows = [*each.topics, *each.channels] if with_topics else each.channels
        numbers: Iterable[int] = (getattr(row, name) for row in rows)
        return sum(numbers)

    return read


def _rate(name: str) -> Read:
    """The sum of a rate, of those that are known: ingress of topics, others of channels."""

    def read(each: Sum) -> float | None:
        rows = each.topics if name == "ingress" else each.channels
        known = [getattr(row.rates, name) for row in rows if row.rates]
        return sum(known) if known else None

    return read


def _own(name: str) -> Read:
    """A value of the topic itself."""
    return lambda each: COLUMNS[name](each.topics[0]) if each.topics else None


def _latency(each: Sum) -> float | None:
    values = (COLUMNS["e2e_ms"](row) for row in each.channels)
    return max((value for value in values if isinstance(value, float)), default=None)


def _count(name: str) -> Read:
    return lambda each: None if each.is_silent else len(getattr(each, name))


def _heap_mib(each: Sum) -> float | None:
    heap = each.state.heap if each.state else None
    return None if heap is None else heap / (1 << 20)


def _view(columns: Iterable[Column], shown: str) -> View:
    return View({column.name: column for column in columns}, shown.split())


_get = operator.attrgetter
_trend = Column(TREND, lambda _: None, 12, is_text=True)
_waiting = Column("waiting", _total("depth", with_topics=True))
_rates = [Column("ingress", _rate("ingress"), 8), Column("finish", _rate("finish"), 8)]
_rates += [Column("requeue", _rate("requeue"))]
_summed = ["in_flight", "deferred", "requeued", "timed_out", "clients"]
_sums = [*(Column(name, _total(name)) for name in _summed), Column("e2e_ms", _latency)]
_queue = "depth memory disk in_flight deferred ingress egress finish requeue requeued timed_out"
_wide = {"ingress": 8, "egress": 8, "finish": 8, "messages": 8, "paused": 6}

VIEWS = {
    ViewKind.TOPICS: _view(
        [
            Column("topic", _get("name"), 10, is_text=True),
            Column("depth", _own("depth"), 9),
            _waiting,
            Column("disk", _total("disk", with_topics=True)),
            *_rates,
            *_sums,
            Column("channels", _count("channels")),
            Column("messages", _own("messages"), 8),
            Column("paused", _own("paused"), 6),
            _trend,
        ],
        "topic depth waiting ingress finish requeue clients channels in_flight trend e2e_ms "
        "timed_out",
    ),
    ViewKind.CHANNELS: _view(
        [
            Column("channel", _get("channel"), 10, is_text=True),
            *(
                Column(name, COLUMNS[name], _wide.get(name, 7))
                for name in f"{_queue} clients e2e_ms messages paused".split()
            ),
            _trend,
        ],
        "channel depth clients in_flight finish ingress requeue deferred trend timed_out requeued "
        "e2e_ms",
    ),
    ViewKind.CONSUMERS: _view(
        [
            Column("client_id", _get("client.client_id"), 9, is_text=True),
            *(
                Column(name, _get(f"client.{name}"), len(name), is_text=True)
                for name in ["hostname", "remote_address"]
            ),
            *(
                Column(name, _get(name), len(name), is_text=True)
                for name in ["topic", "channel", "node"]
            ),
            *(Column(name, _get(f"client.{theirs}")) for name, theirs in CONSUMER_NUMBERS.items()),
            *(Column(name, _get(name), 6) for name in ["finish", "requeue"]),
            Column("user_agent", _get("client.user_agent"), 10, is_text=True),
        ],
        "client_id remote_address channel topic in_flight finish node ready hostname requeued "
        "requeue finished user_agent",
    ),
    ViewKind.NODES: _view(
        [
            Column("node", _get("name"), 10, is_text=True),
            Column("state", lambda each: state_text(each.state), 6, is_text=True),
            Column("version", lambda each: each.state.version or None, 7, is_text=True),
            Column("topics", _count("topics"), 6),
            _waiting,
            *_rates,
            *_sums,
            Column("heap_mib", _heap_mib),
        ],
        "node state waiting clients ingress finish heap_mib in_flight requeue topics timed_out "
        "version",
    ),
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


def state_text(state: NodeState) -> str:
    """How an nsqd is: what it says of its health, or since when it does not answer."""
    return f"silent {duration_text(state.silent_s)}" if state.is_silent else state.health or "OK"


def duration_text(seconds: float) -> str:
    """``8s``, ``12m``, ``3h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(1, seconds):.0f}s"
