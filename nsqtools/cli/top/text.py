"""Values as short text, and text in exactly so many cells of a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from nsqtools.cli.render.output import Cell, cell_text

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-:=+*#"


def short(cell: Cell) -> str:
    """A value in at most nine characters, if it is a number: 12345678 as 12.3M."""
    if isinstance(cell, int | float) and not isinstance(cell, bool) and abs(cell) >= 1e6:
        for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
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


def cells_of(text: str) -> int:
    """How many cells of a terminal the text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, unicode: bool, is_right: bool = False) -> str:
    """The text in exactly ``width`` cells; what is cut ends with an ellipsis."""
    length = cells_of(text)
    if length > width:
        mark = "…" if unicode else "..."
        text = _begin(text, width - len(mark)) + mark if width > len(mark) else mark[:width]
        length = cells_of(text)
    blanks = " " * (width - length)
    return blanks + text if is_right else text + blanks


def _begin(text: str, width: int) -> str:
    """As much of the text as fits."""
    if text.isascii():
        return text[:width]
    taken = 0
    for number, character in enumerate(text):
        taken += _cells(character)
        if taken > width:
            return text[:number]
    return text


def joined_to_fit(parts: Sequence[str], width: int, separator: str = "  ") -> str:
    """The first parts that fit whole; the very first one in any case."""
    text = parts[0] if parts else ""
    for part in parts[1:]:
        if part and cells_of(text) + len(separator) + cells_of(part) > width:
            break
        text += separator + part if part else ""
    return text
