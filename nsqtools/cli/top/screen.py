"""The view as lines that fill a screen of a given size exactly. Pure.

Only the lines on the screen become text: textual's table contains all of them, and takes 0.2 s of a
core for a thousand topics that change places. Columns that do not fit are left out and named; a
name that is cut ends with an ellipsis. No text of a daemon or a client reaches the terminal raw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from nsqtools.cli.render.output import cell_text
from nsqtools.cli.top.view import TREND, TREND_LENGTH, Cell, Column, Line, TopView, ViewKind
from nsqtools.cluster.problems import Problem, Severity, group_by_kind, summarize_kind
from nsqtools.cluster.queue_rows import sums_of
from nsqtools.cluster.sampling import Sample
from nsqtools.protocol.text import counted

LEAST_WIDTH = 40
LEAST_HEIGHT = 6
LEAST_NAME = 12
BARS = "▁▂▃▄▅▆▇█"


class ScreenLine(NamedTuple):
    """A line of the screen, with a style of rich."""

    text: str
    style: str = ""


class Drawn(NamedTuple):
    """The whole screen, with the positions of the headings and the lines."""

    rows: list[ScreenLine]
    heading_row: int = -1
    headings: Sequence[tuple[str, int, int]] = ()  # name, begin, end
    first_line: int = 0
    room: int = 1


def draw(view: TopView, width: int, height: int, bottom: str) -> Drawn:
    """Return the list on a screen of this size, with ``bottom`` as the last line."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        drawn = Drawn([ScreenLine(f"nsq top needs {LEAST_WIDTH} columns and {LEAST_HEIGHT} lines")])
    else:
        drawn = _list(view, width, height - 1)
    rows = drawn.rows + [ScreenLine("")] * (height - 1 - len(drawn.rows))
    if len(rows) < height:
        rows.append(ScreenLine(bottom, "dim"))
    exact = [ScreenLine(fit(row.text, width), row.style) for row in rows[:height]]
    return drawn._replace(rows=exact)


def _list(view: TopView, width: int, height: int) -> Drawn:
    lines, here = view.lines(), view.position()
    table = ListTable(view, width)
    rows = [ScreenLine(cluster_line(view.sample, width), "bold"), problem_line(view.problems)]
    rows += [ScreenLine(status(view, table.columns)), ScreenLine(table.heading, "reverse")]
    heading_row = len(rows) - 1
    view.room = room = max(1, height - len(rows))
    first = max(0, min(here - room // 2, len(lines) - room))
    for number, line in enumerate(lines[first : first + room], first):
        is_critical = line.is_silent or view.note(line) not in ("", "paused")
        style = "red" if is_critical else "yellow" if line.is_paused else ""
        rows.append(ScreenLine(table.text(line), f"{style} reverse" if number == here else style))
    if not lines:
        rows += [ScreenLine(""), ScreenLine(f"  {why_empty(view)}")]
    return Drawn(rows[:height], heading_row, table.headings, first, room)


# -- the lines above the list ---------------------------------------------------------------------


def cluster_line(sample: Sample, width: int) -> str:
    """Return the cluster in one line. Parts that do not fit are left out, the last ones first."""
    sums = sums_of(sample.totals)
    silent = sum(node.is_silent for node in sample.nodes)
    clock = datetime.fromtimestamp(sample.time_s).strftime("%H:%M:%S")
    parts = (
        f"nsq top {clock}",
        f"{len(sample.nodes) - silent} of {len(sample.nodes)} nsqd respond"
        if silent
        else f"{len(sample.nodes)} nsqd",
        counted(sums.topics, "topic"),
        f"{sums.depth:,} waiting",
        f"ingress {short(sums.ingress)}/s",
        f"finish {short(sums.finish)}/s of {short(sums.copies)}/s",
    )
    return joined_to_fit(parts, width)


def problem_line(problems: Sequence[Problem]) -> ScreenLine:
    """Return the problems in one line. It is never left out, so that the list stays in place."""
    serious = [p for p in problems if p.severity is not Severity.NOTE]
    if not serious:
        return ScreenLine("no problems", "dim")
    counts = Counter(problem.severity for problem in serious)
    amounts = ", ".join(f"{count} {severity.word}" for severity, count in counts.items())
    fault, worst = next(iter(group_by_kind(serious).items()))
    text = cell_text(f"! {amounts}  {summarize_kind(fault, worst)}")
    return ScreenLine(text, "red" if fault.severity is Severity.CRITICAL else "yellow")


def problem_page(problems: Sequence[Problem]) -> list[str]:
    """Return all problems by kind, with their remedies."""
    lines = []
    for fault, members in group_by_kind(problems).items():
        remedies = dict.fromkeys(problem.remedy for problem in members)
        lines += [f"{fault.severity.word} {fault.word}: {' '.join(remedies)}"]
        lines += [f"    {problem.where} {problem.text}" for problem in members]
    return lines or ["nothing is wrong"]


def status(view: TopView, shown: Sequence[Column]) -> str:
    """Return the scope, whether it is frozen, the filter, and the columns that do not fit."""
    look, typed = view.look.filter, "_" * view.is_typing
    hidden = [column.name for column in view.columns if column not in shown]
    parts = (
        view.path,
        "[frozen]" if view.is_frozen else "",
        f"filter: {look.text}{typed}" if look.text or typed else "",
        f"({look.problem})" if look.problem and not typed else "",
        f"left out: {', '.join(hidden)}" if hidden else "",
    )
    return cell_text("  ".join(filter(None, parts)))


def why_empty(view: TopView) -> str:
    """Return the text in place of an empty list."""
    scope, sample = view.scope, view.sample
    if text := view.look.filter.text:
        return f"nothing meets the filter {cell_text(text)!r}; / changes it"
    if view.kind is ViewKind.CHANNELS:
        waiting = sum(
            row.depth for row in sample.totals if row.topic == scope.topic and not row.channel
        )
        kept = f"its {counted(waiting, 'message')} wait" if waiting else "what is published waits"
        return f"topic {cell_text(scope.topic)} has no channels: {kept} until one is created"
    if view.kind is ViewKind.CONSUMERS:
        if view.is_frozen:
            return "the consumers were not asked for before the screen was frozen"
        where = cell_text(f"{scope.topic}/{scope.channel}")
        return "no consumers" + (f" on {where}" if scope.channel else "")
    return f"no {view.kind.value}"


# -- the list -------------------------------------------------------------------------------------


class ListTable:
    """Lines in columns. The trend gets the width that the other columns leave.

    The last columns are left out if they do not fit. The width of a text column is that of its
    longest value in all lines, also off the screen, so that columns stay in place while scrolling.
    """

    def __init__(self, view: TopView, width: int) -> None:
        self._view = view
        columns = view.columns
        widths = [self._width(column) for column in columns]
        while len(widths) > 1 and sum(widths) + len(widths) - 1 > width:
            widths.pop()
        self.columns = columns = columns[: len(widths)]
        spare = width - sum(widths) - len(widths) + 1
        widths[0] += min(spare, 0)
        names = [column.name for column in columns]
        if TREND in names and spare > 0:
            trend = names.index(TREND)
            widths[trend] = min(widths[trend] + spare, TREND_LENGTH)
        self._widths = widths
        begins = [sum(widths[:number]) + number for number in range(len(widths))]
        self.headings = [
            (column.name, begin, begin + cells)
            for column, begin, cells in zip(columns, begins, widths, strict=True)
        ]

    def _width(self, column: Column) -> int:
        is_name = column.name == self._view.columns[0].name
        least = max(LEAST_NAME if is_name else column.width, len(column.name) + 1)
        if not column.is_text or column.name == TREND:
            return least
        measured = self._view.widths
        if column.name not in measured:
            widths = (
                cell_len(cell_text(column.read(line.subject)))
                + len(is_name * _suffix(self._view, line))
                for line in self._view.lines()
            )
            measured[column.name] = max(widths, default=0)
        return max(least, measured[column.name])

    @property
    def heading(self) -> str:
        """The names of the columns, with a mark at the column of the order."""
        look = self._view.look
        mark = "▲" if look.is_reversed else "▼"
        return self._join([c.name + mark * (c.name == look.sort) for c in self.columns])

    def text(self, line: Line) -> str:
        """Return the text of a line."""
        cells = []
        for column, width in zip(self.columns, self._widths, strict=True):
            if column.name == TREND:
                cells.append(sparkline(self._view.trend(line), width))
            else:
                cells.append(short(column.read(line.subject)))
        if suffix := _suffix(self._view, line):
            cells[0] = fit(cells[0], self._widths[0] - len(suffix)).rstrip() + suffix
        return self._join(cells)

    def _join(self, cells: Sequence[str]) -> str:
        return " ".join(
            fit(cell, width, is_right=not column.is_text)
            for cell, column, width in zip(cells, self.columns, self._widths, strict=True)
        )


def _suffix(view: TopView, line: Line) -> str:
    note = view.note(line)
    return f" ({note})" if note else ""


# -- text -----------------------------------------------------------------------------------------


def short(cell: Cell) -> str:
    """Return a value as text, a number in at most nine characters: 4,248, and 12345678 as 12.3M."""
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
            if abs(cell) >= size:
                return f"{cell / size:.1f}{unit}"
        if abs(cell) >= 1000:
            return f"{cell:,.0f}"
    return cell_text(cell)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as bars, scaled from the least to the greatest."""
    recent = values[-width:]
    low = min(recent, default=0.0)
    step = (max(recent, default=0.0) - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((value - low) / step)] for value in recent)


def fit(text: str, width: int, *, is_right: bool = False) -> str:
    """Return the text in exactly ``width`` cells; a cut text ends with an ellipsis."""
    blanks = width - cell_len(text)
    if blanks < 0:
        mark = "…"[: max(0, width)]
        return set_cell_size(text, width - len(mark)) + mark
    return " " * blanks + text if is_right else text + " " * blanks


def joined_to_fit(parts: Sequence[str], width: int) -> str:
    """Join the first parts that fit whole; the first one is always included."""
    text = parts[0]
    for part in parts[1:]:
        if cell_len(longer := f"{text}  {part}") > width:
            break
        text = longer
    return text
