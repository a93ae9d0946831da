"""``nsq spark sql``: a query over archives and Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import LIMITS
from nsqtools.cli.options.spark_options import (
    ArchiveReading,
    SparkChoice,
    job_progress,
    places_argument,
)
from nsqtools.cli.options.tables import ColumnsOfArchives
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import Form, FormKind, ListingForm, write_documents, write_listing
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from nsqtools.spark.jobs.sql import QueryRows

ROWS_ON_A_TERMINAL = 100
ROWS_AT_A_TIME = 1000

Paths = Annotated[
    list[Any] | None,  # of Location
    places_argument("Archives, called archive in the query, Parquet (parquet), or Delta (delta)."),
]


def sql(
    query: Annotated[
        str | None,
        Argument(metavar="SQL", help="The query, unless --file has it.", show_default=False),
    ] = None,
    paths: Paths = None,
    archive: list[str] | None = opt("NAME=PATH", "Archives under a name of their own."),
    parquet: list[str] | None = opt("NAME=PATH", "Parquet under a name of its own."),
    file: Path | None = opt("-f FILE", "Read the query from here; - is stdin."),
    count: int | None = opt(
        "-n N",
        "Print at most N rows; 0 prints all.",
        LIMITS,
        min=0,
        show_default="100 on a terminal, else all",
    ),
    *,
    reading: ArchiveReading,
    bodies: ColumnsOfArchives,
    form: ListingForm,
    spark: SparkChoice,
    runtime: Session,
) -> int:
    """Query archives and Parquet in SQL.

    Archives have the columns topic, nsqd, id, timestamp, ts_ns, attempts, body (binary), file and
    pos; with --body json also those of --schema, and _error. Times are UTC. On a terminal the
    result is a table, on a pipe tab-separated text; with --json bytes that are not UTF-8 are in
    base64, under the name of their column followed by 64.

    Examples:
        nsq spark sql 'SELECT topic, count(*) FROM archive GROUP BY 1' /var/nsq
        nsq spark sql --archive old=/mnt/nsq -f report.sql /var/nsq > report.tsv
        nsq spark sql 'SELECT max(n) FROM archive' /var/nsq --body json --schema clicks.json
        nsq spark sql 'SELECT body FROM parquet WHERE date = "2026-11-21"' /data --json
    """
    from nsqtools.spark.archives.read_settings import Bodies
    from nsqtools.spark.format_options import read_place
    from nsqtools.spark.jobs.sql import ARCHIVE, QueryRows, named_views, plan_query

    bare = list(paths or ())
    if file is not None and query is not None:
        bare.insert(0, read_place("PATH", query))
    text = query if file is None else read_query(file, runtime)
    if not text:
        raise ConfigurationError(
            "missing query", hint="Give it as the first argument, or a file with --file."
        )
    views = named_views(archive or (), parquet or (), bare)
    if count is None:
        count = ROWS_ON_A_TERMINAL if runtime.stdout_is_tty else 0
    columns = Bodies(bodies.body, bodies.fields(needed=True))
    # Spark itself reads tables and needs jars for them; archives are read in Python.
    tables = [path for view in views if view.kind != ARCHIVE for path in view.paths]
    archives = [path for view in views if view.kind == ARCHIVE for path in view.paths]
    settings = spark.settings("nsq spark sql", tables, python_places=archives)
    with reading.session(runtime, settings) as opened:
        with job_progress(runtime, opened.spark):
            plan = plan_query(opened.spark, settings, views, text, opened.damage, columns)
            result = QueryRows(plan)
            if result.duplicates and form.kind in (FormKind.json, FormKind.jsonl):
                name = result.duplicates[0]
                raise ConfigurationError(
                    f"two columns are called {name}, and an object of JSON has one",
                    hint=f"Give one another name in the query: {name} AS other.",
                )
            rows: Iterable[Any] = result.rows(count and count + 1)
            if runtime.stdout_is_tty:
                # The progress line is on the same terminal, so rows are printed after it.
                rows = list(rows)
            else:
                write_rows(runtime, result, rows, count, form)
        if runtime.stdout_is_tty:
            write_rows(runtime, result, rows, count, form)
    return opened.status


def read_query(file: Path, runtime: Runtime) -> str:
    """Read the query. Raises `NotFoundError`, and `ConfigurationError` for invalid UTF-8."""
    try:
        return runtime.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no {file}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8") from error


def write_rows(
    runtime: Runtime, result: QueryRows, rows: Iterable[Any], count: int, form: Form
) -> None:
    """Print ``count`` rows (0: all), and report when there are more."""
    rows = iter(rows)
    head = islice(rows, count) if count else rows
    has_header = bool(result.columns)  # A statement such as CREATE VIEW has no columns.
    if form.kind is FormKind.json:
        # An array would end only with the query, so each row is an object on a line.
        form = form._replace(kind=FormKind.jsonl)
    is_jsonl = form.kind is FormKind.jsonl and not form.columns
    # A terminal shows one table, with column widths of all rows; a pipe gets rows as they come.
    batch_size = None if runtime.stdout_is_tty else ROWS_AT_A_TIME
    while batch := list(islice(head, batch_size)):
        if is_jsonl:
            write_documents(runtime, map(result.document, batch))
        else:
            cells = map(result.cells, batch)
            write_listing(runtime, result.columns, cells, form, headed=has_header)
        has_header = False
    if has_header and not is_jsonl:
        write_listing(runtime, result.columns, (), form)
    if next(rows, None) is not None:
        runtime.info(f"nsq: these are the first {count} rows; --count 0 prints all")
