"""The columns of the statistics by name: to show, to sort by, to filter with, to watch. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cluster.queue_rows import QueueRow, Rates
from nsqtools.errors import ConfigurationError

Value = str | int | float | bool | None

Test = Callable[[QueueRow], bool]


def _rate(name: str) -> Callable[[QueueRow], float | None]:
    def read(row: QueueRow) -> float | None:
        rates: Rates | None = row.rates
        if rates is None or (name == "finish" and not row.channel):
            return None  # a topic hands its messages on, and finishes none
        value: float = getattr(rates, name)
        return value

    return read


def _slowest(row: QueueRow) -> float | None:
    """The highest percentile that nsqd keeps, in milliseconds."""
    return max(row.latency)[1] * 1000 if row.latency else None


COLUMNS: dict[str, Callable[[QueueRow], Value]] = {
    "topic": operator.attrgetter("topic"),
    "channel": operator.attrgetter("channel"),
    "node": operator.attrgetter("node"),
    "depth": operator.attrgetter("depth"),
    "memory": operator.attrgetter("memory"),
    "disk": operator.attrgetter("disk"),
    "in_flight": operator.attrgetter("in_flight"),
    "deferred": operator.attrgetter("deferred"),
    "ingress": _rate("ingress"),
    "egress": _rate("egress"),
    "finish": _rate("finish"),
    "requeue": _rate("requeue"),
    "requeued": operator.attrgetter("requeued"),
    "timed_out": operator.attrgetter("timed_out"),
    "messages": operator.attrgetter("messages"),
    "clients": operator.attrgetter("clients"),
    "paused": operator.attrgetter("paused"),
    "e2e_ms": _slowest,
}
TEXTS = ("topic", "channel", "node")

OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FILTER = re.compile(r"\s*(\w+)\s*(>=|<=|!=|==|=|>|<)\s*(\S+)\s*")


def check_column(name: str) -> str:
    """Return the name. Raises `ConfigurationError` when there is no such column."""
    if name not in COLUMNS:
        raise ConfigurationError(f"unknown column {name!r}; the columns are {', '.join(COLUMNS)}")
    return name


class Condition(NamedTuple):
    """A condition on a column, of whatever kind of rows."""

    column: str
    holds: Callable[[Value], bool]


def parse_condition(
    text: str, check: Callable[[str], str] = check_column, texts: Collection[str] = TEXTS
) -> Condition:
    """Read a condition: ``depth>1000``, ``paused=yes``, ``channel!=archive``.

    ``check`` raises `ConfigurationError` for an unknown column; ``texts`` are the columns that are
    no numbers. An unknown value meets no condition. Raises `ConfigurationError`.
    """
    match = _FILTER.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a condition", hint="Write depth>1000 or paused=yes."
        )
    name, sign, right = match.groups()
    compare, limit = OPERATORS[sign], _limit(check(name), right, texts)
    return Condition(name, lambda value: value is not None and bool(compare(value, limit)))


def parse_filter(text: str) -> Test:
    """Read a condition on the rows of queues, with the same errors."""
    column, holds = parse_condition(text)
    read = COLUMNS[column]
    return lambda row: holds(read(row))


def _limit(name: str, text: str, texts: Collection[str]) -> Any:
    if name in texts:
        return text
    if name == "paused":
        if text not in ("yes", "no", "true", "false"):
            raise ConfigurationError(f"paused is yes or no, not {text!r}")
        return text in ("yes", "true")
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is a number, not {text!r}") from None


def sort_rows(rows: Iterable[QueueRow], column: str) -> list[QueueRow]:
    """Sort by a column: texts from A to Z, numbers from the greatest down, unknown ones last."""
    ordered = sorted(rows, key=lambda row: (row.topic, row.channel, row.node))
    if column in TEXTS:
        return sorted(ordered, key=lambda row: str(COLUMNS[column](row)))

    def size(row: QueueRow) -> float:
        value = COLUMNS[column](row)
        return -float(value) if isinstance(value, int | float) else float("inf")

    return sorted(ordered, key=size)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Alert thresholds; None is not watched. ``max_requeue_rate`` is messages a second."""

    max_depth: int | None = None
    max_requeue_rate: float | None = None
    min_clients: int | None = None

    def complaints(self, rows: Iterable[QueueRow]) -> list[str]:
        """Return a line for each threshold passed; clients and requeues are those of channels."""
        return [line for row in rows for line in self._complaints(row)]

    def _complaints(self, row: QueueRow) -> Iterable[str]:
        queue = f"{row.topic}/{row.channel}" if row.channel else row.topic
        where = f"{queue} on {row.node}" if row.node else queue
        if self.max_depth is not None and row.depth > self.max_depth:
            yield f"{where}: depth {row.depth} is above {self.max_depth}"
        rate = row.rates.requeue if row.rates is not None else None
        if self.max_requeue_rate is not None and rate is not None and rate > self.max_requeue_rate:
            yield f"{where}: {rate:.1f} requeues a second are above {self.max_requeue_rate:g}"
        if self.min_clients is not None and row.channel and row.clients < self.min_clients:
            yield f"{where}: {row.clients} clients are fewer than {self.min_clients}"
