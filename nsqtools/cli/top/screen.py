"""The view as lines of text that fill a screen of a given size exactly.

Text is put together by hand and not by a table of rich, which would wrap what does not fit. Nothing
that a daemon or a client said reaches the terminal raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from nsqtools.cli.render.output import cell_text
from nsqtools.cli.top.columns import TREND, Cell, Column, Line
from nsqtools.cli.top.view import TopView

if TYPE_CHECKING:
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-:=+*#"
CHROME = 4  # lines that are not the list: summary, path, headings, keys
LEAST_NAME = 10

KEYS = "↑↓ select  ⏎ open  ⌫ back  s/S sort  r reverse  / filter  space freeze  q quit"
PLAIN_KEYS = "j/k select  Enter open  Esc back  s/S sort  r reverse  / filter  q quit"
TYPING_KEYS = "type a part of the name  Enter keep  Esc clear"


def draw(view: TopView, width: int, height: int, *, unicode: bool) -> Text:
    """Return the whole screen."""
    from rich.text import Text

    lines = view.lines()
    room = max(1, height - CHROME)
    here = view.position(lines)
    first = max(0, min(here - room // 2, len(lines) - room))
    widths = column_widths(view.columns, width)
    screen = Text(no_wrap=True, overflow="crop", end="")
    screen.append(fit(summary(view), width) + "\n", "bold")
    screen.append(fit(status(view), width) + "\n", "red" if view.error else "")
    screen.append(headings(view, widths, unicode=unicode)[:width].ljust(width) + "\n", "reverse")
    for number in range(first, first + room):
        text, style = "", ""
        if number < len(lines):
            line = lines[number]
            trend = sparkline(view.trend(line), widths[-1], unicode=unicode)
            text = line_text(line, view.columns, widths, trend)
            style = "yellow" if line.is_paused else ""
            if number == here:
                style += " reverse"
        screen.append(fit(text, width) + "\n", style.strip())
    keys = TYPING_KEYS if view.is_typing else KEYS if unicode else PLAIN_KEYS
    screen.append(fit(keys, width), "dim")
    return screen


def summary(view: TopView) -> str:
    """The cluster in a line."""
    sample = view.sample
    if sample is None:
        return "nsq top"
    rows = sample.totals
    topics = [row for row in rows if not row.channel]
    channels = [row for row in rows if row.channel]
    ingress = sum(row.rates.ingress for row in topics if row.rates)
    finish = sum(row.rates.finish for row in channels if row.rates)
    dead = f", {len(sample.failures)} not answering" if sample.failures else ""
    clock = datetime.fromtimestamp(sample.time_ns / 1e9).strftime("%H:%M:%S")
    return (
        f"nsq top {clock}  {len(sample.reports)} nsqd{dead}  {len(topics)} topics  "
        f"depth {sum(row.depth for row in rows)}  in {ingress:.1f}/s  fin {finish:.1f}/s"
    )


def status(view: TopView) -> str:
    """Where one is, the filter, and what is wrong."""
    text = view.path
    if view.filter or view.is_typing:
        text += f"  filter: {view.filter}" + ("_" if view.is_typing else "")
    if view.is_frozen:
        text += "  [frozen]"
    if view.error:
        text += f"  {view.error}"
    return cell_text(text)


def headings(view: TopView, widths: Sequence[int], *, unicode: bool) -> str:
    """The names of the columns; the one that is sorted by is marked."""
    mark = ("▲" if view.is_reversed else "▼") if unicode else "*"
    names = [
        column.name + (mark if number == view.sort_column else "")
        for number, column in enumerate(view.columns)
    ]
    return _join(names, view.columns, widths)


def line_text(line: Line, columns: Sequence[Column], widths: Sequence[int], trend: str) -> str:
    """A line of the list."""
    cells = [short(cell) for cell in line.cells]
    if columns[-1].name == TREND:
        cells.append(trend)
    if line.is_paused:
        cells[0] += " (paused)"
    return _join(cells, columns, widths)


def _join(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    return " ".join(
        fit(cell, width)
        if not column.width or column.name in ("nsqd", TREND)
        else cell[:width].rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )


def column_widths(columns: Sequence[Column], width: int) -> list[int]:
    """How many characters each column gets; the name takes what is left."""
    rest = width - sum(column.width + 1 for column in columns if column.width)
    return [column.width or max(rest, LEAST_NAME) for column in columns]


def short(cell: Cell) -> str:
    """A value in at most nine characters: 12345678 as 12.3M."""
    if isinstance(cell, int | float) and abs(cell) >= 1e6:
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
            if abs(cell) >= size:
                return f"{cell / size:.1f}{unit}"
    return cell_text(cell)


def sparkline(values: Sequence[float], width: int, *, unicode: bool) -> str:
    """The last values as bars, the greatest as a full one."""
    bars = BARS if unicode else PLAIN_BARS
    shown = values[-width:]
    top = max(shown, default=0.0)
    if not top:
        return bars[0] * len(shown)
    return "".join(bars[round(value / top * (len(bars) - 1))] for value in shown)


def fit(text: str, width: int) -> str:
    """The text in exactly ``width`` characters."""
    return text[:width].ljust(width)
