"""``nsq spark report``, ``sql`` and ``doctor``: the commands that read and print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import (
    LIMITS,
    Delimiter,
    Since,
    Until,
    parse_positive_duration,
    time_range,
)
from nsqtools.cli.options.spark_options import (
    ArchiveReading,
    OnlyTopics,
    SparkChoice,
    job_progress,
    open_spark,
    places_argument,
)
from nsqtools.cli.options.tables import ColumnsOfArchives
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import (
    Form,
    FormKind,
    ListingForm,
    write_documents,
    write_json,
    write_listing,
    write_records,
)
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, message_and_hint
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.text import NS, counted, format_duration
from nsqtools.records.units import parse_span

if TYPE_CHECKING:
    from nsqtools.spark.doctor import Finding
    from nsqtools.spark.jobs.sql import QueryRows

STEPS = {"hour": 3600.0, "day": 86_400.0}


def parse_step(text: str) -> float:
    """Read ``hour``, ``day`` or a duration, in seconds. Raises ``ValueError``."""
    seconds = STEPS[text] if text in STEPS else parse_span(text)
    if seconds < 1:
        raise ValueError(f"{text!r} is too short; write hour, day or 10m")
    return seconds


def report(
    paths: Annotated[
        list[Any],  # of Location
        places_argument(
            "Archives, Parquet or Delta: files, directories with all below, or s3://... places."
        ),
    ],
    by: float = opt("hour|day|DURATION", "Length of an interval.", None, "hour", parser=parse_step),
    topic: OnlyTopics = None,
    since: Since = None,
    until: Until = None,
    gap: float = opt(
        "DURATION",
        "A topic that is silent for longer has a gap.",
        None,
        "5m",
        parser=parse_positive_duration,
    ),
    delimiter: Delimiter = None,
    *,
    reading: ArchiveReading,
    form: ListingForm,
    spark: SparkChoice,
    runtime: Session,
) -> int:
    """Report on topics: messages, bytes, sizes, attempts, duplicates and gaps.

    Reads archives, and the Parquet of nsq spark compact and ingest, which are recognized by their
    content. Every copy of a message counts. A further copy (the same topic, nsqd and id) is also a
    duplicate, and a message with more than one attempt is a redelivery. Times are in UTC.

    Examples:
        nsq spark report /var/nsq --since -24h
        nsq spark report /data/nsq -t clicks --by day --json
        nsq spark report /data/nsq --by 10m --gap 1m
    """
    from nsqtools.archive.finding import find_inputs
    from nsqtools.spark.jobs.inputs import Choice
    from nsqtools.spark.jobs.reporting import make_report

    form.check(tuple(KEYS))
    within = time_range(since, until)
    inputs = find_inputs(paths)
    tables = (*inputs.parquet, *inputs.delta)
    settings = spark.settings("nsq spark report", tables, python_places=inputs.archives)
    with reading.session(runtime, settings) as opened:
        choice = Choice(tuple(topic or ()), within, delimiter, opened.damage)
        with job_progress(runtime, opened.spark):
            document = make_report(
                opened.spark, inputs, choice, step_ns=round(by * NS), gap_ns=round(gap * NS)
            )
        show_report(runtime, document, form)
    return opened.status


GAPS_SHOWN = 20

KEYS = {"time": "begin", "topic": "topic", "messages": "messages", "bytes": "bytes"}
KEYS |= {name: f"size_{name}" for name in ("p50", "p95", "p99", "max")}
KEYS |= {f"att_{name}": f"attempts_{name}" for name in ("p50", "p95", "max")}
KEYS |= {"redelivered": "redeliveries", "duplicates": "duplicates", "nsqd": "nsqd"}
"""The columns of the table, each with its key in the document."""
OPTIONAL = ("nsqd", "att_p50", "att_p95", "p99", "att_max", "max", "redelivered", "p50", "bytes")
"""The columns that are omitted on a narrow terminal, in this order."""


def short_moment(moment: str | None) -> str | None:
    """Shorten a time on a full minute to the minute."""
    return moment.removesuffix(":00Z") + "Z" if moment and moment.endswith(":00Z") else moment


def show_report(runtime: Runtime, report: Mapping[str, Any], form: Form) -> None:
    """Print the intervals, the sum and the longest gaps."""
    if form.is_document:
        write_json(runtime, report, indent=2)
        return
    rows = []
    for interval in report["intervals"]:
        nsqd = ",".join(interval["nsqd"]) or None
        cells = {**interval, "begin": short_moment(interval["begin"]), "nsqd": nsqd}
        rows.append([cells[key] for key in KEYS.values()])
    write_listing(runtime, tuple(KEYS), rows, form, optional=OPTIONAL)
    messages = sum(topic["messages"] for topic in report["topics"])
    topics = counted(len(report["topics"]), "topic")
    runtime.info(f"nsq: {counted(messages, 'message')} of {topics}")
    longest = nlargest(GAPS_SHOWN, report["gaps"], key=lambda gap: gap["seconds"])
    for gap in filter(longest.__contains__, report["gaps"]):
        length = format_duration(round(gap["seconds"], 0 if gap["seconds"] >= 1 else 3))
        runtime.info(f"nsq: gap in {gap['topic']}: {length} from {short_moment(gap['begin'])}")
    if (hidden := report["gaps_in_all"] - len(longest)) > 0:
        runtime.info(f"nsq: and {hidden} shorter gaps; --json lists the longest 1000")


# -- sql ------------------------------------------------------------------------------------------


ROWS_ON_A_TERMINAL = 100
ROWS_AT_A_TIME = 1000

QueriedPlaces = Annotated[
    list[Any] | None,  # of Location
    places_argument("Archives, called archive in the query, Parquet (parquet), or Delta (delta)."),
]


def sql(
    query: Annotated[
        str | None,
        Argument(metavar="SQL", help="The query, unless --file has it.", show_default=False),
    ] = None,
    paths: QueriedPlaces = None,
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
        # The text of stdin depends on the locale, and some locales accept any bytes.
        data = runtime.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig")
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


# -- doctor ---------------------------------------------------------------------------------------


COLUMNS = ("check", "state", "found")


def doctor(*, form: ListingForm, spark: SparkChoice, runtime: Session) -> int:
    """Check Java, the versions of packages, a session of Spark and its executors.

    On a cluster (--master) this runs a small job on its executors. They need Java 17 or newer and
    the same Python with nsqtools[spark] under the path in PYSPARK_PYTHON. The exit status is 1 when
    a check failed.

    Examples:
        nsq spark doctor
        nsq spark doctor --master spark://master:7077
    """
    from nsqtools.spark.doctor import FAILED

    form.check(COLUMNS)
    findings = list(examine(runtime, spark))
    write_records(runtime, COLUMNS, list(map(asdict, findings)), form)
    if not form.is_document:
        for hint in dict.fromkeys(finding.hint for finding in findings if finding.hint):
            runtime.info(f"hint: {hint}")
    has_failed = any(finding.state == FAILED for finding in findings)
    return ExitStatus.FAILED if has_failed else ExitStatus.DONE


def examine(runtime: Runtime, spark: SparkChoice) -> Iterator[Finding]:
    """Check this machine and, if a session starts, the executors."""
    from nsqtools.spark.doctor import FAILED, OK, Finding, check_driver, check_executors

    driver = list(check_driver())
    yield from driver
    if any(finding.state == FAILED for finding in driver):
        return
    settings = spark.settings("nsq spark doctor")
    began_s = runtime.monotonic()
    try:
        with open_spark(runtime, settings) as session:
            started_s = runtime.monotonic() - began_s
            yield Finding("session", OK, f"{settings.master}, started in {started_s:.1f} s")
            yield from check_executors(session)
    except NsqError as error:
        yield Finding("session", FAILED, *message_and_hint(error))
