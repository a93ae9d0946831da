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
) -> None:
    """Write rows: a table on a terminal, tab-separated text on a pipe, objects with ``--json``.

    The tab-separated text begins with the columns' names, unless it continues earlier output (not
    ``headed``).
    """
    if json:
        write_json(runtime, [dict(zip(columns, row, strict=True)) for row in rows], indent=2)
        return
    if runtime.stdout_is_tty:
        text = _table(runtime, columns, list(rows))
    else:
        head = (columns,) if headed else ()
        text = "".join("\t".join(map(cell_text, row)) + "\n" for row in (*head, *rows))
    ByteWriter(runtime.stdout.fileno()).write(text.encode())


def write_json(runtime: Runtime, document: Any, *, indent: int | None = None) -> None:
    """Write one document; without ``indent`` on one line, as streams have it."""
    from json import dumps

    text = dumps(document, indent=indent, ensure_ascii=False) + "\n"
    ByteWriter(runtime.stdout.fileno()).write(text.encode())


def cell_text(cell: Cell) -> str:
    """A value as tables show it. Nothing of it steers a terminal, or breaks a line in two."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(cell))


def _table(runtime: Runtime, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The rows as a table of rich, which is imported only here: a terminal can wait 40 ms."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_number = any(type(row[number]) in (int, float) for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        # not str: rich would read "[red]" in it as markup
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    return rendered(runtime, table)


def rendered(runtime: Runtime, *things: Any) -> str:
    """Text and what rich can draw, each on lines of its own, for a terminal."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    console = Console(
        file=text,
        width=runtime.width,
        force_terminal=runtime.colour,
        color_system="standard" if runtime.colour else None,
        highlight=False,
        markup=False,
    )
    for thing in things:
        console.print(thing)
    return text.getvalue()
