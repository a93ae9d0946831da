"""Data to stdout: bytes for message streams, and listings as table, TSV or JSON.

Nothing is kept back: `ByteWriter.write` returns when the bytes are with the system, so a message
may be FINished right after it. A reader that went away is `ReaderGone`, which ends the program
quietly with status 141.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from nsqtools.cli.runtime import Runtime
from nsqtools.errors import OutputError


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
    runtime: Runtime, columns: Sequence[str], rows: Iterable[Sequence[str]], *, json: bool
) -> None:
    """Write rows: a table on a terminal, tab-separated text on a pipe, objects with ``--json``."""
    if json:
        from json import dumps

        document = [dict(zip(columns, row, strict=True)) for row in rows]
        text = dumps(document, indent=2, ensure_ascii=False) + "\n"
    elif runtime.stdout_is_tty:
        text = _table(runtime, columns, rows)
    else:
        text = "".join("\t".join(row) + "\n" for row in (columns, *rows))
    ByteWriter(runtime.stdout.fileno()).write(text.encode())


def _table(runtime: Runtime, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The rows as a table of rich, which is imported only here: a terminal can wait 40 ms."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))  # not str: rich would read "[red]" in it as markup
    text = StringIO()
    console = Console(
        file=text,
        width=runtime.width,
        force_terminal=runtime.colour,
        color_system="standard" if runtime.colour else None,
    )
    console.print(table)
    return text.getvalue()
