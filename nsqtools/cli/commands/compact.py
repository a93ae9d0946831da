"""``nsq archive compact`` and ``nsq spark compact``: one compaction, in processes or in Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import SAFETY, SELECTION, Delimiter, DryRun, Json, Yes
from nsqtools.cli.options.spark_options import (
    SkipDamaged,
    SparkOptions,
    TableFormat,
    Topics,
    job_progress,
    open_spark,
    place,
    places,
)
from nsqtools.cli.options.tables import ColumnsChoice
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.compaction_output import (
    delete_needless,
    show_plan,
    show_results,
    tell_outcome,
)
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import ConfigurationError
from nsqtools.records.units import parse_size, parse_span

if TYPE_CHECKING:
    from nsqtools.archive.columns import BodyKind
    from nsqtools.archive.compaction import Compaction, RunJobs

OUTPUT = "Output"


def parse_day(text: str) -> date:
    """Read a day. Raises ``ValueError``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day; write 2026-11-21") from None


Places = Annotated[
    list[Any],  # of Location
    Argument(
        parser=places,
        metavar="PATH",
        help="Archives, Parquet or a Delta table: directories, files, s3://BUCKET/PREFIX.",
    ),
]
OutputDir = Annotated[
    Any,  # a Location or None
    opt(
        "--output -o DIR",
        "Directory or s3://BUCKET/PREFIX; without it a Delta table is compacted where it is.",
        OUTPUT,
        parser=place,
    ),
]
OutputFormat = Annotated[TableFormat, opt("--format", "What to write: parquet or delta.", OUTPUT)]
TargetSize = Annotated[
    int, opt("--target-size SIZE", "About how large files become.", OUTPUT, parser=parse_size)
]
Day = Annotated[
    date | None, opt("--day DATE", "Only this day (2026-11-21, UTC).", SELECTION, parser=parse_day)
]
UntilDay = Annotated[
    date | None, opt("--until-day DATE", "Only days up to this one.", SELECTION, parser=parse_day)
]
Grace = Annotated[
    float,
    opt(
        "--grace DURATION",
        "How long after midnight (UTC) a day stays open.",
        SELECTION,
        parser=parse_span,
    ),
]
OpenDays = Annotated[bool, opt("--open-days", "Take days that are not over too.", SELECTION)]
DeleteArchives = Annotated[
    bool,
    opt(
        "--delete-archives",
        "Afterwards delete archives whose messages are all in verified Parquet.",
        SAFETY,
    ),
]
Processes = Annotated[
    int | None,
    opt("--processes N", "How many files are made at a time.", min=1, show_default="one a core"),
]


@dataclass(frozen=True, slots=True)
class CompactionChoice:
    """What is compacted, and how, as the options say."""

    paths: list[Any]
    output: Any
    is_delta: bool
    target_bytes: int
    topics: frozenset[str]
    first: date | None
    last: date | None
    grace_s: float
    open_days: bool
    delimiter: bytes | None
    skips_damaged: bool
    deletes: bool
    dry_run: bool
    yes: bool
    json: bool
    body: BodyKind
    fields: dict[str, Any] | None

    def compaction(self, parallel: int) -> Compaction:
        """The compaction, not yet planned. Raises `NsqError`."""
        from nsqtools.archive.catalog import find_inputs
        from nsqtools.archive.compaction import Compaction, Selection, Settings

        selection = Selection(self.topics, self.first, self.last, self.open_days, self.grace_s)
        ending = b"\n" if self.delimiter is None else self.delimiter
        settings = Settings(
            self.target_bytes, parallel, ending, self.skips_damaged, self.body, self.fields
        )
        inputs = find_inputs(self.paths)
        return Compaction(inputs, self.output, selection, settings, is_delta=self.is_delta)


def choice(
    paths: Places,
    output: OutputDir = None,
    format: OutputFormat = TableFormat.parquet,
    target_size: TargetSize = "256MiB",  # type: ignore[assignment]
    topic: Topics = None,
    day: Day = None,
    until_day: UntilDay = None,
    grace: Grace = "1h",  # type: ignore[assignment]
    open_days: OpenDays = False,
    delimiter: Delimiter = None,
    skip_damaged: SkipDamaged = False,
    delete_archives: DeleteArchives = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    *,
    bodies: ColumnsChoice,
) -> CompactionChoice:
    """What the options say."""
    if day is not None and until_day is not None:
        raise ConfigurationError("--day and --until-day exclude each other")
    return CompactionChoice(
        paths,
        output,
        format is TableFormat.delta,
        target_size,
        frozenset(topic or ()),
        day,
        day or until_day,
        grace,
        open_days,
        delimiter,
        skip_damaged,
        delete_archives,
        dry_run,
        yes,
        json,
        bodies.kind,
        bodies.fields(needed=True),
    )


CompactionOptions = Annotated[CompactionChoice, From(choice)]


def archive_compact(
    processes: Processes = None, *, chosen: CompactionOptions, runtime: Session
) -> int:
    """Turn archives and tables into few Parquet files by topic and date, each message once.

    A day is taken once --grace has passed since its end; what comes later becomes a file of its own
    in the next run. What is written is read back and compared before it counts, so a run that was
    killed can simply be repeated. Messages are identified by topic, nsqd and id; bare bodies (raw
    files) have none of these and are all kept, without date. A Delta table alone has its small
    files replaced by large ones, each partition in one transaction.

    Examples:
        nsq archive compact /var/nsq --output /data/nsq --dry-run
        nsq archive compact /var/nsq -o s3://lake/nsq --format delta --day 2026-11-20
        nsq archive compact /data/table
    """
    from nsqtools.archive.compaction import in_processes

    count = processes or os.cpu_count() or 1

    @contextmanager
    def local() -> Iterator[RunJobs]:
        yield in_processes(count)

    return compact(runtime, chosen, count, local)


def spark_compact(*, chosen: CompactionOptions, spark: SparkOptions, runtime: Session) -> int:
    """Do what nsq archive compact does, in the tasks of Spark.

    For what is more than one machine reads in time. On a cluster paths are those of executors: a
    shared directory, or a place in an object store.

    Examples:
        nsq spark compact s3://logs/nsq --output s3://lake/nsq --master yarn
        nsq spark compact /var/nsq --output /data/nsq --delete-archives --yes
    """
    from nsqtools.spark.jobs.compaction import in_tasks, slots_of

    found = [*chosen.paths, *([chosen.output] if chosen.output is not None else [])]
    settings = spark.settings("nsq spark compact", python_places=found)

    @contextmanager
    def tasks() -> Iterator[RunJobs]:
        with open_spark(runtime, settings) as session, job_progress(runtime, session):
            yield in_tasks(session, settings)

    return compact(runtime, chosen, slots_of(settings), tasks)


def compact(
    runtime: Runtime,
    chosen: CompactionChoice,
    parallel: int,
    runner: Callable[[], AbstractContextManager[RunJobs]],
) -> int:
    """Compact with what runs jobs; return the exit status."""
    compaction = chosen.compaction(parallel)
    if chosen.dry_run:
        compaction.plan()
        return show_plan(runtime, compaction, json=chosen.json)
    if chosen.deletes and not chosen.yes:
        runtime.require_terminal()
    with compaction.locked():
        compaction.plan()
        if compaction.jobs:
            with runner() as run_jobs:
                compaction.run(run_jobs)
        else:
            compaction.run(lambda jobs: ())
        deleted = delete_needless(runtime, compaction, yes=chosen.yes) if chosen.deletes else []
    show_results(runtime, compaction, deleted, json=chosen.json)
    return tell_outcome(runtime, compaction)
