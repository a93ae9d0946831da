"""Data to stdout: JSON documents, and listings in the form asked for.

A listing has rows under named columns. `Form` has the form and the columns. A command declares
``form: ListingForm``, prints its JSON document if ``form.is_document``, and passes its rows to
`write_listing` otherwise. The types of `documents` describe the output of ``--json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, NamedTuple

from nsqtools.cli.options.params import OUTPUT, Json
from nsqtools.cli.parsing.binding import Provided, opt
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import escape_json, escape_line, escape_text

Cell = str | int | float | bool | None


class FormKind(Enum):
    """The forms of a listing."""

    table = "table"
    wide = "wide"
    tsv = "tsv"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


class Form(NamedTuple):
    """The form of a listing: None is a table on a terminal, and TSV elsewhere.

    ``columns`` are the columns to show, in this order; none shows all. Without ``headed`` their
    names are not printed.
    """

    kind: FormKind | None = None
    columns: tuple[str, ...] = ()
    headed: bool = True

    @property
    def is_document(self) -> bool:
        """Whether the command prints the JSON document of its schema, in place of rows."""
        return self.kind is FormKind.json and not self.columns

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigurationError` for a column that the listing lacks."""
        for name in self.columns:
            if name not in columns:
                raise ConfigurationError(
                    f"unknown column {name!r}", hint=f"The columns are {', '.join(columns)}."
                )


PLAIN = Form()


def write_listing(
    runtime: Runtime,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    form: Form = PLAIN,
    *,
    headed: bool = True,
    optional: Sequence[str] = (),
) -> None:
    """Write rows in a form.

    Text on a pipe begins with the names of the columns, unless it continues earlier output (not
    ``headed``). No value of a table is cut: a narrow terminal drops ``optional`` columns, the first
    ones first, and a note names them. `FormKind.wide` drops none.
    """
    form.check(columns)
    headed = headed and form.headed
    if form.columns:
        places = [columns.index(name) for name in form.columns]
        columns, optional = form.columns, ()
        rows = [[row[place] for place in places] for row in rows]
    kind = form.kind or (FormKind.table if runtime.stdout_is_tty else FormKind.tsv)
    if kind is FormKind.json:
        write_json(runtime, [dict(zip(columns, row, strict=True)) for row in rows])
    elif kind in (FormKind.table, FormKind.wide):
        dropped = () if kind is FormKind.wide else optional
        write_table(runtime, columns, list(rows), dropped, headed=headed)
    elif kind is FormKind.jsonl:
        write_documents(runtime, (dict(zip(columns, row, strict=True)) for row in rows))
    else:
        write_text(runtime, "".join(_lines(kind, columns, rows, headed=headed)))


def write_records(
    runtime: Runtime,
    columns: Sequence[str],
    documents: Sequence[Mapping[str, Any]],
    form: Form = PLAIN,
    *,
    optional: Sequence[str] = (),
    headed: bool = True,
) -> None:
    """Write JSON documents, or some of their fields as rows.

    A row has the length of a list. Without a field ``state``, it is the ``error`` or ok.
    """
    if form.is_document:
        write_json(runtime, documents)
        return
    rows = [[_field(document, name) for name in columns] for document in documents]
    write_listing(runtime, columns, rows, form, headed=headed, optional=optional)


def _field(document: Mapping[str, Any], name: str) -> Cell:
    if name == "state" and name not in document:
        return document["error"] or "ok"
    value = document.get(name)
    if isinstance(value, list | tuple):
        return len(value)
    return None if value == "" else value


def _lines(
    kind: FormKind, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, headed: bool
) -> Iterable[str]:
    """Return lines of values separated by commas or tabs."""
    head = (columns,) if headed else ()
    if kind is FormKind.tsv:
        return ("\t".join(map(cell_text, row)) + "\n" for row in (*head, *rows))
    from nsqtools.cluster.stats_documents import csv_text

    cells = ([cell_text(cell) if isinstance(cell, bool) else cell for cell in row] for row in rows)
    return [csv_text([*head, *cells])]


def write_json(runtime: Runtime, document: Any, *, indent: int | None = 2) -> None:
    """Write one document; without ``indent`` it is one line, as in streams.

    With ``--jq`` its results are written instead: strings raw, other values on a line each. Raises
    `NsqError` if the program fails on the document.
    """
    text = json_text(document, indent)
    if runtime.json_filter is None:
        runtime.write(text.encode())
        return
    try:
        result = runtime.json_filter(text.encode())
    except ValueError as exc:
        raise NsqError(f"--jq cannot be applied: {exc}") from exc
    if result is not None:
        write_text(runtime, f"{result.decode()}\n")


def json_text(document: Any, indent: int | None = None) -> str:
    """Return a document as text that ends with a newline."""
    from json import dumps

    return escape_json(dumps(document, indent=indent, ensure_ascii=False)) + "\n"


def write_documents(runtime: Runtime, documents: Iterable[Any]) -> None:
    """Write documents as JSON, one a line."""
    for document in documents:
        write_json(runtime, document, indent=None)


def write_lines(runtime: Runtime, lines: Iterable[str]) -> None:
    """Write lines of text, with control characters escaped."""
    runtime.write("".join(f"{escape_line(line)}\n" for line in lines).encode())


def write_text(runtime: Runtime, text: str) -> None:
    """Write formatted text; on a terminal its control characters are escaped."""
    data = text.encode("utf-8", "backslashreplace")
    runtime.write(escape_text(data) if runtime.stdout_is_tty else data)


def cell_text(cell: Cell) -> str:
    """Return a value as tables show it, with control characters escaped."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return escape_line(str(cell))


def listing_form(
    output: FormKind | None = opt(
        "-o table|wide|tsv|csv|json|jsonl",
        "Form of the listing; wide has all columns, jsonl a row on each line.",
        OUTPUT,
        show_default="table on a terminal, tsv elsewhere",
    ),
    columns: str | None = opt(
        "NAME,...",
        "Columns to show, in this order; with json, rows instead of the document.",
        OUTPUT,
    ),
    no_header: bool = opt("", "Leave out the names of the columns.", OUTPUT),
    json: Json = False,
) -> Form:
    """Return the form. Raises `ConfigurationError` if ``--json`` and ``--output`` contradict."""
    if json and output is not None and output is not FormKind.json:
        raise ConfigurationError(f"--output {output.value} excludes --json and --jq")
    names = [name.strip() for name in (columns or "").split(",")]
    kind = FormKind.json if json else output
    return Form(kind, tuple(filter(None, names)), headed=not no_header)


ListingForm = Annotated[Form, Provided(listing_form)]


GAP = 2  # between the columns
PROSE = 24  # the least width of a column of prose, unless a word is longer


def write_table(
    runtime: Runtime,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    optional: Sequence[str],
    *,
    headed: bool,
) -> None:
    """Write a table with rich. The import takes 40 ms, which only terminals pay."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[cell_text(cell) for cell in row] for row in rows]
    widths = _least_widths(columns, texts)
    shown = list(range(len(columns)))
    for name in optional:
        if _total(widths, shown) <= runtime.width:
            break
        shown = [at for at in shown if columns[at] != name]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=headed)
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
    drawn = StringIO()
    Console(
        file=drawn,
        width=max(runtime.width, _total(widths, shown)),
        force_terminal=runtime.has_color,
        color_system="standard" if runtime.has_color else None,
        highlight=False,
        markup=False,
    ).print(table)
    runtime.write(drawn.getvalue().encode())
    left_out = [name for at, name in enumerate(columns) if at not in shown]
    if left_out and headed:
        runtime.info(f"nsq: left out on this narrow terminal: {', '.join(left_out)}; see -o wide")


def _least_widths(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    """Return the least width of each column: its widest cell, or less for prose, whose words rich
    would cut in a narrower column."""
    from rich.cells import cell_len

    widths = []
    for at, column in enumerate(columns):
        cells = [row[at] for row in texts]
        widest = max(map(cell_len, (column, *cells)))
        if any(" " in cell for cell in cells):
            words = (column, *(word for cell in cells for word in cell.split(" ")))
            widest = min(widest, max(PROSE, *map(cell_len, words)))
        widths.append(widest)
    return widths


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] + GAP for at in shown) - GAP
