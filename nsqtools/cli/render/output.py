"""Data to stdout: bytes for message streams, and listings as table, TSV or JSON.

Nothing is kept back: `ByteWriter.write` returns when the bytes are with the system, so a message
may be FINished right after it. A reader that went away is `ReaderGone`, which ends the program
quietly with status 141.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import OutputError

Cell = str | int | float | bool | None

GAP = 2  # between the columns of a table
PROSE = 24  # the least width of a column of prose


class ReaderGone(OutputError, BrokenPipeError):
    """The program that read our output closed it; what was not written is not handled."""


class ByteWriter:
    """Writes whole byte strings to a file descriptor, without a buffer."""

    def __init__(self, fileno: int, name: str = "stdout"):
        self._fileno = fileno
        self._name = name

    def write(self, data: bytes) -> None:
        """Write all of ``data``; it is with the system when this returns.

        Raises `ReaderGone` when the reader closed its end, else `OutputError`.
        """
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fileno, rest) :]
            except BlockingIOError:
                self._wait()
            except BrokenPipeError as error:
                raise ReaderGone(f"{self._name} was closed by its reader") from error
            except OSError as error:
                raise OutputError(f"cannot write to {self._name} ({error.strerror})") from error

    def _wait(self) -> None:
        """Another program made the pipe or terminal that we share non-blocking."""
        from select import select

        select([], [self._fileno], [])


def write_listing(
    runtime: Runtime,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    json: bool,
    headed: bool = True,
    optional: Sequence[str] = (),
) -> None:
    """Write rows: a table on a terminal, tab-separated text on a pipe, objects with ``--json``.

    The tab-separated text begins with the columns' names, unless it continues earlier output (not
    ``headed``). No value of a table is cut: on a terminal that is too narrow ``optional`` columns
    are left out, the first ones first, and it is said which.
    """
    if json:
        write_json(runtime, [dict(zip(columns, row, strict=True)) for row in rows], indent=2)
        return
    if runtime.stdout_is_tty:
        _write_table(runtime, columns, list(rows), optional, says_what_is_left_out=headed)
        return
    head = (columns,) if headed else ()
    text = "".join("\t".join(map(cell_text, row)) + "\n" for row in (*head, *rows))
    ByteWriter(runtime.stdout.fileno()).write(text.encode())


def write_json(runtime: Runtime, document: Any, *, indent: int | None = None) -> None:
    """Write one document; without ``indent`` on one line, as streams have it."""
    from json import dumps

    text = dumps(document, indent=indent, ensure_ascii=False) + "\n"
    ByteWriter(runtime.stdout.fileno()).write(text.encode())


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def cell_text(cell: Cell) -> str:
    """A value as tables show it. Nothing of it steers a terminal, or breaks a line in two."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(cell))


def _write_table(
    runtime: Runtime,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    optional: Sequence[str],
    *,
    says_what_is_left_out: bool,
) -> None:
    """Write a table of rich, which is imported only here: a terminal can wait 40 ms.

    Only prose is wrapped (cells with spaces). Where numbers and addresses do not fit, the terminal
    wraps the lines, and they are still whole.
    """
    from rich.table import Table
    from rich.text import Text

    texts = [[cell_text(cell) for cell in row] for row in rows]
    widths = _least_widths(columns, texts)
    shown = list(range(len(columns)))
    for name in optional:
        if _total(widths, shown) <= runtime.width:
            break
        if name in columns:
            shown.remove(columns.index(name))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at in shown:
        is_number = any(type(row[at]) in (int, float) for row in rows)
        is_prose = any(" " in row[at] for row in texts)
        table.add_column(
            columns[at],
            justify="right" if is_number else "left",
            no_wrap=not is_prose,
            min_width=widths[at],
        )
    for row in texts:
        # not str: rich would read "[red]" in it as markup
        table.add_row(*(Text(row[at]) for at in shown))
    text = rendered(runtime, table, width=max(runtime.width, _total(widths, shown)))
    ByteWriter(runtime.stdout.fileno()).write(text.encode())
    left_out = [name for at, name in enumerate(columns) if at not in shown]
    if left_out and says_what_is_left_out:
        runtime.tell(f"nsq: left out on this narrow terminal: {', '.join(left_out)}")


def _least_widths(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column has to be: as its widest cell, or less where that is prose."""
    from rich.cells import cell_len

    widths = []
    for at, column in enumerate(columns):
        cells = [row[at] for row in texts]
        widest = max(map(cell_len, (column, *cells)))
        widths.append(min(widest, PROSE) if any(" " in cell for cell in cells) else widest)
    return widths


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] + GAP for at in shown) - GAP


def rendered(runtime: Runtime, *things: Any, width: int | None = None) -> str:
    """Text and what rich can draw, each on lines of its own, for a terminal."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    console = Console(
        file=text,
        width=width or runtime.width,
        force_terminal=runtime.colour,
        color_system="standard" if runtime.colour else None,
        highlight=False,
        markup=False,
    )
    for thing in things:
        console.print(thing)
    return text.getvalue()
