"""The lines of a view, from a sample: what they are about, filtered and sorted. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cli.top.columns import (
    TEXTS,
    VIEWS,
    Column,
    Kind,
    NodeSum,
    TopicSum,
    check_column,
)
from nsqtools.cluster.queue_rows import QueueRow, totals
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_documents import Condition, parse_condition
from nsqtools.errors import ConfigurationError


class Scope(NamedTuple):
    """What one looks into; ``""`` is everything."""

    node: str = ""
    topic: str = ""
    channel: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: ``key`` stays the same from sample to sample, ``subject`` is what columns read."""

    key: str
    subject: Any
    is_paused: bool = False
    is_silent: bool = False


def lines_of(sample: Sample, kind: Kind, scope: Scope) -> list[Line]:
    """All lines of a view."""
    if kind is Kind.NODES:
        return _node_lines(sample, scope)
    if kind is Kind.CONSUMERS:
        return [
            Line(f"{row.node} {row.remote_address} {row.topic} {row.channel}", row)
            for node in sample.nodes
            if scope.node in ("", node.address)
            for row in node.consumers
            if scope.topic in ("", row.topic) and scope.channel in ("", row.channel)
        ]
    rows = sample.totals
    if scope.node:
        rows = totals(
            row for node in sample.nodes if node.address == scope.node for row in node.rows
        )
    if kind is Kind.CHANNELS:
        return [
            Line(row.channel, row, row.paused)
            for row in rows
            if row.topic == scope.topic and row.channel
        ]
    return [Line(each.topic, each, each.is_paused) for each in topic_sums(rows)]


def topic_sums(rows: Iterable[QueueRow]) -> list[TopicSum]:
    """The topics, each with its channels."""
    own: dict[str, QueueRow | None] = {}
    channels: dict[str, list[QueueRow]] = {}
    for row in rows:
        if row.channel:
            own.setdefault(row.topic, None)
            channels.setdefault(row.topic, []).append(row)
        else:
            own[row.topic] = row
    return [TopicSum(topic, row, channels.get(topic, [])) for topic, row in own.items()]


def _node_lines(sample: Sample, scope: Scope) -> list[Line]:
    lines = []
    for node in sample.nodes:
        rows = [
            row
            for row in node.rows
            if scope.topic in ("", row.topic) and scope.channel in ("", row.channel)
        ]
        if scope.topic and not rows and not node.is_silent:
            continue
        topics = [row for row in rows if not row.channel]
        channels = [row for row in rows if row.channel]
        paused = bool(scope.topic) and any(row.paused for row in rows)
        lines.append(Line(node.address, NodeSum(node, topics, channels), paused, node.is_silent))
    return lines


# -- filters ------------------------------------------------------------------------------------

_SPACES = re.compile(r"\s*(>=|<=|!=|==|=|>|<)\s*")


class LineFilter(NamedTuple):
    """Words that the line's texts hold, and conditions; ``problem`` is what was not understood."""

    words: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    problem: str = ""

    def keep(self, lines: Iterable[Line], kind: Kind) -> list[Line]:
        """The lines that meet all of it; a view without the column of a condition ignores that."""
        columns = VIEWS[kind].columns
        tests = [
            (columns[condition.column].read, condition.holds)
            for condition in self.conditions
            if condition.column in columns
        ]
        return [
            line
            for line in lines
            if all(
                word in line.key.casefold() or word in _texts(line, columns) for word in self.words
            )
            and all(holds(read(line.subject)) for read, holds in tests)
        ]


def _texts(line: Line, columns: dict[str, Column]) -> str:
    return " ".join(
        str(column.read(line.subject)) for column in columns.values() if column.is_text
    ).casefold()


def parse_line_filter(text: str) -> LineFilter:
    """Read a filter: words to find and conditions such as ``depth>1000``.

    A condition that is not finished or not understood is left out, and named as the problem.
    """
    words, conditions, problem = [], [], ""
    for word in _SPACES.sub(r"\1", text).split():
        if not _SPACES.search(word):
            words.append(word.casefold())
            continue
        try:
            conditions.append(parse_line_condition(word))
        except ConfigurationError as error:
            problem = str(error)
    return LineFilter(tuple(words), tuple(conditions), problem)


def parse_line_condition(text: str) -> Condition:
    """Read a condition on a column of any view. Raises `ConfigurationError`."""
    return parse_condition(text, check_column, TEXTS)


# -- order --------------------------------------------------------------------------------------


def sort_lines(lines: Iterable[Line], column: Column, *, is_reversed: bool) -> list[Line]:
    """Sort by a column: texts from A to Z, numbers from the greatest down, unknown ones last."""
    valued = [(column.read(line.subject), line) for line in lines]
    known = [(value, line) for value, line in valued if value is not None]
    key: Callable[[tuple[Any, Line]], tuple[Any, str]]
    if column.is_text:

        def key(entry: tuple[Any, Line]) -> tuple[Any, str]:
            return str(entry[0]), entry[1].key

    else:

        def key(entry: tuple[Any, Line]) -> tuple[Any, str]:
            return -entry[0], entry[1].key

    known.sort(key=key, reverse=is_reversed)
    unknown = sorted((line for value, line in valued if value is None), key=lambda line: line.key)
    return [*(line for _, line in known), *unknown]
