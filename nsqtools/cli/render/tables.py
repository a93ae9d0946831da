"""Listings as tables. Columns are dropped before a value is cut, and none ever is.

Only prose (cells with spaces) is wrapped. Where numbers and addresses do not fit even without the
optional columns, the terminal wraps the lines, and they are still whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsqtools.cli.render.output import ByteWriter, Cell, cell_text, rendered
from nsqtools.cli.running.runtime import Runtime

GAP = 2  # between the columns
PROSE = 24  # the least width of a column of prose


def write_table(
    runtime: Runtime,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    optional: Sequence[str],
    *,
    says_what_is_left_out: bool,
) -> None:
    """Write a table of rich, which is imported only here: a terminal can wait 40 ms."""
    from rich.table import Table
    from rich.text import Text

    texts = [[cell_text(cell) for cell in row] for row in rows]
    widths = _least_widths(columns, texts)
    shown = list(range(len(columns)))
    for name in optional:
        if _total(widths, shown) <= runtime.width:
            break
        shown = [at for at in shown if columns[at] != name]
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
        runtime.tell(f"nsq: left out on this narrow terminal: {', '.join(left_out)}; see -o wide")


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
