"""The list that `nsq top` shows: which lines, in which order, and which of them is selected. Pure.

The selection is a line's key and not its number, so it stays with its topic when lines change
places. While the view is frozen, samples are dropped: nothing of the screen changes but by keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nsqtools.cli.render.output import cell_text
from nsqtools.cli.top.columns import TREND, VIEWS, Column, Kind, chosen_columns
from nsqtools.cli.top.lines import (
    Line,
    LineFilter,
    Scope,
    lines_of,
    parse_line_filter,
    sort_lines,
)
from nsqtools.cli.top.text import cells_of
from nsqtools.cluster.sampling import Question, Sample

TREND_LENGTH = 40
PAUSED = " (paused)"


@dataclass(frozen=True, slots=True)
class Start:
    """How the view begins: as the command line says."""

    columns: Sequence[str] = ()
    sort: str = ""
    filter: str = ""


@dataclass(slots=True)
class Look:
    """What one chose for a kind of lines."""

    columns: tuple[str, ...]
    sort: str
    is_reversed: bool = False
    filter: str = ""
    parsed: LineFilter = field(default_factory=LineFilter)


class TopView:
    """The state of the list."""

    def __init__(self, start: Start | None = None) -> None:
        self.start = start or Start()
        self.sample: Sample | None = None
        self.kind = Kind.TOPICS
        self.scope = Scope()
        self.is_frozen = False
        self.selected = ""
        self._looks = {kind: self._look(kind) for kind in Kind}
        self._way: list[tuple[Kind, Scope, str]] = []
        self._trends: dict[tuple[str, str], deque[float]] = {}
        self._lines: list[Line] | None = None
        self._widths: dict[str, int] = {}
        self._last_position = 0

    def _look(self, kind: Kind) -> Look:
        view = VIEWS[kind]
        columns = chosen_columns(view, self.start.columns)
        sort = self.start.sort if self.start.sort in view.columns else columns[0]
        parsed = parse_line_filter(self.start.filter)
        return Look(columns, sort, filter=self.start.filter, parsed=parsed)

    # -- what is shown --------------------------------------------------------------------------

    @property
    def look(self) -> Look:
        return self._looks[self.kind]

    @property
    def columns(self) -> list[Column]:
        """The columns that one wants to see. What is the same in all lines is left out."""
        scope = self.scope
        known = {"node": scope.node, "topic": scope.topic, "channel": scope.channel}
        is_list = self.kind is Kind.CONSUMERS
        view = VIEWS[self.kind].columns
        return [view[name] for name in self.look.columns if not (is_list and known.get(name))]

    @property
    def sort_column(self) -> Column:
        return VIEWS[self.kind].columns[self.look.sort]

    @property
    def question(self) -> Question:
        """What is to be asked for this view."""
        if self.kind is Kind.CONSUMERS:
            return Question(consumers=True, topic=self.scope.topic, channel=self.scope.channel)
        return Question(memory=self.kind is Kind.NODES)

    @property
    def path(self) -> str:
        """Where one is: ``topics > clicks > archive``."""
        parts = [self.kind.value if not any(self.scope) else "", *self.scope]
        if any(self.scope) and self.kind is not Kind.CHANNELS:
            parts.append(f"[{self.kind.value}]")
        if any(self.scope):
            parts[0] = "nsqd" if self.scope.node else "topics"
        return " > ".join(filter(None, parts))

    def lines(self) -> list[Line]:
        """The lines that the filter lets through, sorted."""
        if self._lines is None:
            self._lines, self._widths = [], {}
            if self.sample is not None:
                found = lines_of(self.sample, self.kind, self.scope)
                kept = self.look.parsed.keep(found, self.kind)
                column, is_reversed = self.sort_column, self.look.is_reversed
                self._lines = sort_lines(kept, column, is_reversed=is_reversed)
        return self._lines

    def longest(self, column: Column) -> int:
        """How many cells the longest text in a column takes, of all lines and not of those on the
        screen: columns stay where they are while one scrolls."""
        lines = self.lines()
        if column.name not in self._widths:
            is_name = column.name == self.columns[0].name
            self._widths[column.name] = max(
                (
                    cells_of(cell_text(column.read(line.subject)))
                    + len(PAUSED) * (is_name and line.is_paused)
                    for line in lines
                ),
                default=0,
            )
        return self._widths[column.name]

    def trend(self, line: Line) -> tuple[float, ...]:
        """The ingress of a topic or channel at the last samples."""
        if self.scope.node:
            return ()
        topic = line.key if self.kind is Kind.TOPICS else self.scope.topic
        channel = line.key if self.kind is Kind.CHANNELS else ""
        return tuple(self._trends.get((topic, channel), ()))

    def position(self) -> int:
        """The number of the selected line; where it is gone, of the one in its place."""
        lines = self.lines()
        if not self.selected:
            return 0
        place = next((n for n, line in enumerate(lines) if line.key == self.selected), None)
        if place is None:
            place = max(0, min(self._last_position, len(lines) - 1))
        self._last_position = place
        return place

    def selected_line(self) -> Line | None:
        """The selected line; None where there are no lines."""
        lines = self.lines()
        return lines[self.position()] if lines else None

    # -- what changes it ------------------------------------------------------------------------

    def show(self, sample: Sample) -> None:
        """Show a new sample, unless the view is frozen."""
        if self.is_frozen and self.sample is not None:
            return
        self.sample = sample
        self._lines = None
        trends = self._trends
        self._trends = {}
        for row in sample.totals:
            key = (row.topic, row.channel)
            trend = trends.get(key)
            if trend is None:
                trend = deque(maxlen=TREND_LENGTH)
            self._trends[key] = trend  # those of queues that are gone are forgotten
            if row.rates is not None:
                trend.append(row.rates.ingress)

    def freeze(self) -> None:
        """Stop the screen, or let it go on."""
        self.is_frozen = not self.is_frozen

    def move(self, step: int) -> None:
        """Select the line so many lines down; up where negative."""
        self.select(self.position() + step)

    def select(self, number: int) -> None:
        """Select a line by its number, or the nearest."""
        lines = self.lines()
        if lines:
            self._last_position = min(max(number, 0), len(lines) - 1)
            self.selected = lines[self._last_position].key

    def sort_by(self, name: str) -> None:
        """Sort by a column; by the one that it is sorted by already: the other way round."""
        if name == TREND or name not in VIEWS[self.kind].columns:
            return
        if self.look.sort == name:
            self.reverse()
        else:
            self.look.sort, self.look.is_reversed = name, False
            self._lines = None

    def sort_next(self, step: int) -> None:
        """Sort by the next column of those that one wants to see, or by the one before."""
        names = [column.name for column in self.columns if column.name != TREND]
        here = names.index(self.look.sort) if self.look.sort in names else -step
        self.look.sort, self.look.is_reversed = names[(here + step) % len(names)], False
        self._lines = None

    def reverse(self) -> None:
        """Turn the order round."""
        self.look.is_reversed = not self.look.is_reversed
        self._lines = None

    def set_filter(self, text: str) -> None:
        """Filter the lines of this kind."""
        self.look.filter, self.look.parsed = text, parse_line_filter(text)
        self._lines = None

    def set_columns(self, names: Iterable[str]) -> None:
        """Choose the columns of this kind of lines; the first one, the name, stays."""
        first, *rest = VIEWS[self.kind].columns
        wanted = set(names)
        kept = [name for name in self.look.columns if name in wanted and name != first]
        added = [name for name in rest if name in wanted and name not in kept]
        self.look.columns = (first, *kept, *added)

    # -- where one is ---------------------------------------------------------------------------

    def go_to(self, kind: Kind) -> None:
        """Show all topics, nsqd or consumers."""
        self._way.clear()
        self._enter(kind, Scope(), "")

    def go_down(self) -> None:
        """Look into the selected line."""
        line = self.selected_line()
        if line is None or self.kind is Kind.CONSUMERS:
            return
        scope = self.scope
        if self.kind is Kind.NODES:
            kind, scope = _into_node(scope._replace(node=line.key))
        elif self.kind is Kind.TOPICS:
            kind, scope = Kind.CHANNELS, scope._replace(topic=line.key)
        else:
            kind, scope = Kind.CONSUMERS, scope._replace(channel=line.key)
        self._way.append((self.kind, self.scope, line.key))
        self._enter(kind, scope, "")

    def go_to_nodes(self) -> None:
        """Show the selected topic or channel on each nsqd."""
        line = self.selected_line()
        if line is None or self.kind not in (Kind.TOPICS, Kind.CHANNELS) or self.scope.node:
            return
        name = "topic" if self.kind is Kind.TOPICS else "channel"
        self._way.append((self.kind, self.scope, line.key))
        self._enter(Kind.NODES, self.scope._replace(**{name: line.key}), "")

    def go_up(self) -> None:
        """Go back to where one came from; at the beginning: clear the filter."""
        if self._way:
            self._enter(*self._way.pop())
        elif self.kind is not Kind.TOPICS:
            self._enter(Kind.TOPICS, Scope(), "")
        else:
            self.set_filter("")

    def _enter(self, kind: Kind, scope: Scope, selected: str) -> None:
        if scope != self.scope and len([*filter(None, scope)]) > len([*filter(None, self.scope)]):
            self._looks[kind].filter = self.start.filter
            self._looks[kind].parsed = parse_line_filter(self.start.filter)
        self.kind, self.scope, self.selected = kind, scope, selected
        self._lines, self._last_position = None, 0


def _into_node(scope: Scope) -> tuple[Kind, Scope]:
    """What one sees on an nsqd: its topics, or what of a topic or channel is there."""
    if scope.channel:
        return Kind.CONSUMERS, scope
    return (Kind.CHANNELS if scope.topic else Kind.TOPICS), scope
