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
    chosen = Bodies(bodies.body, bodies.fields(needed=True))
    # Spark reads these itself, and archives are read in Python
    tables = [path for view in views if view.kind != ARCHIVE for path in view.paths]
    archives = [path for view in views if view.kind == ARCHIVE for path in view.paths]
    settings = spark.settings("nsq spark sql", tables, python_places=archives)
    with reading.session(runtime, settings) as opened:
        with job_progress(runtime, opened.spark):
            plan = plan_query(opened.spark, settings, views, text, opened.damage, chosen)
            found = QueryRows(plan)
            if found.twins and form.kind in (FormKind.json, FormKind.jsonl):
                raise ConfigurationError(
                    f"two columns are called {found.twins[0]}, and an object of JSON has one",
                    hint=f"Give one another name in the query: {found.twins[0]} AS other.",
                )
            rows: Iterable[Any] = found.rows(count and count + 1)
            if runtime.stdout_is_tty:  # which the progress line is on, too
                rows = list(rows)
            else:
                write_rows(runtime, found, rows, count, form)
        if runtime.stdout_is_tty:
            write_rows(runtime, found, rows, count, form)
    return opened.status


def read_query(file: Path, runtime: Runtime) -> str:
    """The text of a file. Raises `NotFoundError`, and `ConfigurationError` for what is not text."""
    try:
        return runtime.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no {file}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8") from error


def write_rows(
    runtime: Runtime, reading: QueryRows, rows: Iterable[Any], count: int, form: Form
) -> None:
    """Print ``count`` rows (0: all), and say so when there are more."""
    left = iter(rows)
    wanted = islice(left, count) if count else left
    headed = bool(reading.columns)  # a statement such as CREATE VIEW has none
    if form.kind is FormKind.json:  # whose end may be far away: one object a line
        form = form._replace(kind=FormKind.jsonl)
    in_full = form.kind is FormKind.jsonl and not form.columns
    at_a_time = None if runtime.stdout_is_tty else ROWS_AT_A_TIME  # one table, many lines
    while batch := list(islice(wanted, at_a_time)):
        if in_full:
            write_documents(runtime, map(reading.document, batch))
        else:
            cells = map(reading.cells, batch)
            write_listing(runtime, reading.columns, cells, form, headed=headed)
        headed = False
    if headed and not in_full:
        write_listing(runtime, reading.columns, (), form)
    if next(left, None) is not None:
        runtime.info(f"nsq: these are the first {count} rows; --count 0 prints all")
