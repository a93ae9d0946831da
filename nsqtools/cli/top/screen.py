"""The console as lines that fill a screen of a given size exactly. Pure.

Only the lines on the screen are made into text. Columns that do not fit are left out and named;
what is cut all the same (a name, on a narrow screen) ends with an ellipsis. Nothing that a daemon
or a client said reaches the terminal raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from nsqtools.cli.render.output import cell_text
from nsqtools.cli.top.columns import TREND, VIEWS, Column, Kind, duration_text
from nsqtools.cli.top.console import Console, Heading, Layout
from nsqtools.cli.top.lines import Line
from nsqtools.cli.top.overlays import Page
from nsqtools.cli.top.text import fit, joined_to_fit, short, sparkline
from nsqtools.cli.top.view import PAUSED, TopView
from nsqtools.cluster.sampling import Sample
from nsqtools.protocol.text import counted

LEAST_WIDTH = 40
LEAST_HEIGHT = 6
LEAST_NAME = 12
MOST_PROBLEMS = 3

KEYS = (
    "? help",
    "q quit",
    "↑↓ select",
    "⏎ open",
    "Esc back",
    "s sort",
    "r reverse",
    "/ filter",
    "space freeze",
    "Tab nsqd, consumers",
)
CHANGE_KEYS = ("p u pause", "e empty", "d delete", "t tail", "v view")
PLAIN = str.maketrans({"↑": "k", "↓": "j", "⏎": "Enter", "→": "l", "←": "h"})
TYPING_KEYS = "words or depth>1000  Enter keep  Esc clear"


class Row(NamedTuple):
    """A line of the screen. ``style`` is of `terminal.STYLES`, several joined by blanks."""

    text: str
    style: str = ""


def draw(console: Console, width: int, height: int, *, unicode: bool) -> list[Row]:
    """Return the whole screen, and note in the console where things are on it."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        console.layout = Layout()
        text = f"nsq top needs {LEAST_WIDTH} columns and {LEAST_HEIGHT} lines"
        rows = [Row(text)]
    elif console.overlay is not None:
        rows = _overlay(console, console.overlay, width, height)
    else:
        rows = _list(console, width, height, unicode=unicode)
    rows += [Row("")] * (height - len(rows))
    return [
        Row(fit(row.text if unicode else plain(row.text), width, unicode=unicode), row.style)
        for row in rows[:height]
    ]


def plain(text: str) -> str:
    """The text in ASCII, for a terminal that shows no more."""
    return text.translate(PLAIN).encode("ascii", "backslashreplace").decode()


def _overlay(console: Console, page: Page, width: int, height: int) -> list[Row]:
    room = height - 3
    console.layout = Layout(room=room)
    body = page.body(width, room)
    rows = [Row(summary(console.view.sample, width), "bold"), Row(page.title, "reverse")]
    marked = page.marked
    rows += [Row(text, "reverse" if n == marked else "") for n, text in enumerate(body)]
    rows += [Row("")] * (height - 1 - len(rows))
    return [*rows, Row(page.hint, "bold")]


def _list(console: Console, width: int, height: int, *, unicode: bool) -> list[Row]:
    view = console.view
    lines = view.lines()
    columns = _fitting(view, width)
    rows = [Row(summary(view.sample, width), "bold")]
    problems = problem_lines(view.sample)
    rows += [Row(problem, "red") for problem in problems]
    rows.append(Row(status(console, [column.name for column in columns])))
    room = max(1, height - len(rows) - 2)
    here = view.position()
    first = max(0, min(here - room // 2, len(lines) - room))
    shown = lines[first : first + room]
    table = Table(view, columns, width, unicode=unicode)
    console.layout = Layout(len(rows), len(rows) + 1, first, room, table.headings)
    rows.append(Row(table.heading_text, "reverse"))
    for number, line in enumerate(shown, first):
        style = "red" if line.is_silent else "yellow" if line.is_paused else ""
        rows.append(Row(table.text(line), f"{style} reverse" if number == here else style))
    if not lines:
        rows += [Row(""), Row(f"  {why_empty(view)}")]
    rows += [Row("")] * (height - 1 - len(rows))
    return [*rows[: height - 1], Row(_bottom(console, width, unicode=unicode), "dim")]


# -- the lines above and below the list -----------------------------------------------------------


def summary(sample: Sample | None, width: int) -> str:
    """The cluster in a line; what does not fit is left out whole, the least important first."""
    if sample is None:
        return "nsq top"
    rows = sample.totals
    topics = [row.rates for row in rows if not row.channel and row.rates]
    channels = [row.rates for row in rows if row.channel and row.rates]
    ingress = sum(rates.ingress for rates in topics) if topics else None
    finish = sum(rates.finish for rates in channels) if channels else None
    silent = sum(node.is_silent for node in sample.nodes)
    clock = datetime.fromtimestamp(sample.time_ns / 1e9).strftime("%H:%M:%S")
    return joined_to_fit(
        (
            f"nsq top {clock}",
            f"{len(sample.nodes)} nsqd" + (f", {silent} silent" if silent else ""),
            counted(sum(not row.channel for row in rows), "topic"),
            f"waiting {sum(row.depth for row in rows)}",
            f"ingress {short(ingress)}/s",
            f"finish {short(finish)}/s",
        ),
        width,
    )


def problem_lines(sample: Sample | None) -> list[str]:
    """Who does not answer, since when, and why."""
    if sample is None:
        return []
    problems = []
    for node in sample.nodes:
        if node.is_silent:
            why = f": {node.error}" if node.error else ""
            since = duration_text(node.silent_s)
            problems.append(cell_text(f"{node.address} does not answer for {since}{why}"))
    known = {node.address for node in sample.nodes if node.is_silent}
    problems += [
        cell_text(str(each.error)) for each in sample.failures if each.address not in known
    ]
    if len(problems) > MOST_PROBLEMS:
        more = len(problems) - MOST_PROBLEMS + 1
        problems[MOST_PROBLEMS - 1 :] = [f"... and {more} more: 2 shows every nsqd"]
    return problems


def status(console: Console, shown: Sequence[str]) -> str:
    """Where one is, whether it is frozen, the filter, and which columns do not fit."""
    view = console.view
    parts = [view.path]
    if view.is_frozen:
        parts.append("[frozen]")
    look = view.look
    if look.filter or console.is_typing:
        parts.append(f"filter: {look.filter}" + ("_" if console.is_typing else ""))
    if look.parsed.problem and not console.is_typing:
        parts.append(f"({look.parsed.problem})")
    hidden = [column.name for column in view.columns if column.name not in shown]
    if hidden:
        parts.append(f"left out: {', '.join(hidden)}")
    return cell_text("  ".join(parts))


def why_empty(view: TopView) -> str:
    """What to say in place of lines."""
    look, scope, sample = view.look, view.scope, view.sample
    if look.filter:
        return f"nothing meets the filter {cell_text(look.filter)!r}; / changes it"
    if view.kind is Kind.CHANNELS and sample is not None:
        waiting = sum(
            row.depth for row in sample.totals if row.topic == scope.topic and not row.channel
        )
        kept = f"its {counted(waiting, 'message')} wait" if waiting else "what is published waits"
        return f"topic {cell_text(scope.topic)} has no channels: {kept} until one is created"
    if view.kind is Kind.CONSUMERS:
        if view.is_frozen:
            return "the consumers were not asked for before the screen was frozen"
        return "no consumers" + (f" on {scope.topic}/{scope.channel}" if scope.channel else "")
    return {Kind.TOPICS: "no topics", Kind.NODES: "no nsqd"}.get(view.kind, "")


def _bottom(console: Console, width: int, *, unicode: bool) -> str:
    if console.notice:
        return cell_text(console.notice)
    if console.is_typing:
        return TYPING_KEYS
    keys = (*KEYS[:2], *CHANGE_KEYS, *KEYS[2:]) if console.allows_changes else KEYS
    return joined_to_fit(keys if unicode else [plain(key) for key in keys], width)


# -- the list -------------------------------------------------------------------------------------


def _fitting(view: TopView, width: int) -> list[Column]:
    """The columns that fit beside the longest name: optional ones are left out, in their order."""
    columns = view.columns
    name = max(view.longest(columns[0]), LEAST_NAME, len(columns[0].name) + 1)
    for optional in ("", *VIEWS[view.kind].optional):
        columns = [column for column in columns if column.name != optional]
        if name + sum(_width(view, column) + 1 for column in columns[1:]) <= width:
            break
    return columns


def _width(view: TopView, column: Column) -> int:
    """What a column takes: texts as much as the longest one, numbers always the same."""
    least = max(column.width, len(column.name) + 1)
    is_as_long_as_texts = column.is_text and column.name != TREND
    return max(least, view.longest(column)) if is_as_long_as_texts else least


class Table:
    """The lines on the screen in columns; the name takes what the others leave."""

    def __init__(
        self,
        view: TopView,
        columns: Sequence[Column],
        width: int,
        *,
        unicode: bool,
    ) -> None:
        self._view = view
        self._columns = columns
        self._unicode = unicode
        widths = [_width(view, column) for column in columns]
        widths[0] = max(LEAST_NAME, width - sum(widths[1:]) - len(widths) + 1)
        self._widths = widths
        begin, headings = 0, []
        for column, cells in zip(columns, widths, strict=True):
            headings.append(Heading(column.name, begin, begin + cells))
            begin += cells + 1
        self.headings = tuple(headings)

    @property
    def heading_text(self) -> str:
        """The names of the columns; the one that is sorted by is marked."""
        look = self._view.look
        mark = ("▲" if look.is_reversed else "▼") if self._unicode else "*"
        names = [each.name + (mark if each.name == look.sort else "") for each in self._columns]
        return self._join(names)

    def text(self, line: Line) -> str:
        """A line."""
        cells = []
        for column, width in zip(self._columns, self._widths, strict=True):
            if column.name == TREND:
                cells.append(sparkline(self._view.trend(line), width, unicode=self._unicode))
            else:
                cells.append(short(column.read(line.subject)))
        if line.is_paused:
            room = self._widths[0] - len(PAUSED)
            cells[0] = fit(cells[0], room, unicode=self._unicode).rstrip() + PAUSED
        return self._join(cells)

    def _join(self, cells: Sequence[str]) -> str:
        return " ".join(
            fit(cell, width, unicode=self._unicode, is_right=not column.is_text)
            for cell, column, width in zip(cells, self._columns, self._widths, strict=True)
        )
