"""``nsq archive compact`` and ``nsq spark compact``: one compaction, in processes or in Spark."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.params import OUTPUT, SAFETY, SELECTION, Delimiter, DryRun, Json, Yes
from nsqtools.cli.options.spark_options import (
    OnlyTopics,
    SkipDamaged,
    SparkChoice,
    job_progress,
    open_spark,
    place_opt,
    places_argument,
)
from nsqtools.cli.options.tables import ColumnsChoice, TableFormat
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.output import write_json, write_records
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.archive.catalog import Source
    from nsqtools.archive.compaction import Compaction
    from nsqtools.archive.compaction_jobs import RunJobs
    from nsqtools.archive.compaction_plan import Partition
    from nsqtools.archive.slices import JobResult

CLUSTER_SLOTS = 64  # tasks at a time that are assumed of a cluster: for less work files are smaller
PLANNED = ("topic", "date", "state", "files", "messages")
MADE = ("topic", "date", "state", "files", "read", "duplicates", "rows", "bytes")
MOST_NAMES = 20
LOCKED_TABLES = 32  # at a time: a lock in a bucket is a thread that renews it


def parse_day(text: str) -> date:
    """Parse a day. Raises ``ValueError``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day; write 2026-11-21") from None


class CompactionOptions(OptionSet):
    """The input, output and limits of a compaction."""

    paths: Annotated[
        list[Any],  # of Location
        places_argument(
            "Archives, Parquet or a Delta table: directories, files, s3://BUCKET/PREFIX."
        ),
    ]
    output: Any = place_opt(
        "-o DIR",
        "Directory or s3://BUCKET/PREFIX; without it a table is compacted in place.",
        OUTPUT,
    )
    format: TableFormat = opt("", "Write parquet or delta.", OUTPUT, TableFormat.parquet)
    target_size: int = opt("SIZE", "Approximate size of files.", OUTPUT, "256MiB")
    topic: OnlyTopics = None
    day: date | None = opt("DATE", "Only this day (2026-11-21, UTC).", SELECTION, parser=parse_day)
    until_day: date | None = opt("DATE", "Only days up to this one.", SELECTION, parser=parse_day)
    grace: float = opt("DURATION", "How long after midnight (UTC) a day is open.", SELECTION, "1h")
    open_days: bool = opt("", "Compact open days too.", SELECTION)
    delimiter: Delimiter = None
    skip_damaged: SkipDamaged = False
    delete_archives: bool = opt(
        "", "Afterwards delete archives whose messages are all in verified Parquet.", SAFETY
    )
    dry_run: DryRun = False
    yes: Yes = False
    json: Json = False
    bodies: ColumnsChoice

    def check(self) -> None:
        if self.day is not None and self.until_day is not None:
            raise ConfigurationError("--day and --until-day exclude each other")

    def compactions(self, parallel: int, info: Callable[[str], None]) -> list[Compaction]:
        """Return the compactions before their planning, one for each table. Raises `NsqError`."""
        from nsqtools.archive.compaction import Compaction, compactions_by_topic
        from nsqtools.archive.compaction_plan import Selection
        from nsqtools.archive.finding import Inputs, find_inputs
        from nsqtools.archive.slices import Settings
        from nsqtools.archive.table_places import TOPIC

        last_day = self.day or self.until_day
        topics = frozenset(self.topic or ())
        selection = Selection(topics, self.day, last_day, self.open_days, self.grace)
        settings = Settings(
            # 0 means no limit.
            self.target_size or sys.maxsize,
            parallel,
            b"\n" if self.delimiter is None else self.delimiter,
            self.skip_damaged,
            self.bodies.body,
            self.bodies.fields(needed=True),
        )
        inputs = find_inputs(self.paths)
        is_delta = self.format is TableFormat.delta
        if self.output is None and not inputs.archives and len(inputs.places) > 1:
            tables = [place for place in inputs.places if place.name in topics] or inputs.places
            by_table = (
                Inputs(delta=(table,)) if table in inputs.delta else Inputs(parquet=(table,))
                for table in tables
            )
            return [Compaction(inputs, None, selection, settings) for inputs in by_table]
        url = "" if self.output is None else str(self.output)
        if url:
            url = self.bodies.choose_url(
                url, {}, has_many_topics=lambda: selection.has_many_topics(inputs), info=info
            )
        if TOPIC in url:
            return compactions_by_topic(inputs, url, selection, settings, is_delta=is_delta)
        return [Compaction(inputs, self.output, selection, settings, is_delta=is_delta)]


def archive_compact(
    processes: int | None = opt(
        "N", "Write N files in parallel.", min=1, show_default="one per core"
    ),
    *,
    options: CompactionOptions,
    runtime: Session,
) -> int:
    """Turn archives and tables into few Parquet files by topic and date, each message once.

    A day is compacted once --grace has passed since its end. Later messages become a separate file
    in the next run. Files are read back and compared before they count, so a killed run can simply
    be repeated. Messages are identified by topic, nsqd and id. Bare bodies (raw files) have no
    identity and are all kept, without a date. In a table as the only input, small files are
    replaced by large ones: in a Delta table each partition in one transaction, in a folder of
    Parquet safely for nsq, while other programs may see a day twice for a moment.

    Examples:
        nsq archive compact /var/nsq --output /data/nsq --dry-run
        nsq archive compact /var/nsq -o s3://lake/nsq --format delta --day 2026-11-20
        nsq archive compact /data/table
    """
    from nsqtools.archive.compaction_jobs import in_parallel

    count = processes or os.cpu_count() or 1
    return compact(runtime, options, count, lambda: nullcontext(in_parallel(count)))


def spark_compact(*, options: CompactionOptions, spark: SparkChoice, runtime: Session) -> int:
    """Do what nsq archive compact does, in the tasks of Spark.

    For archives that are too large for one machine. On a cluster paths are those of the executors:
    a shared directory, or a place in an object store.

    Examples:
        nsq spark compact s3://logs/nsq --output s3://lake/nsq --master yarn
        nsq spark compact /var/nsq --output /data/nsq --delete-archives --yes
    """
    from nsqtools.spark.session import in_tasks

    places = [*options.paths, *([options.output] if options.output is not None else [])]
    settings = spark.settings("nsq spark compact", python_places=places)

    @contextmanager
    def tasks() -> Iterator[RunJobs]:
        with open_spark(runtime, settings) as session, job_progress(runtime, session):
            yield in_tasks(session, settings)

    return compact(runtime, options, settings.local_slots or CLUSTER_SLOTS, tasks)


def compact(
    runtime: Runtime,
    options: CompactionOptions,
    parallel: int,
    runner: Callable[[], AbstractContextManager[RunJobs]],
) -> int:
    """Compact with the runner of jobs; return the exit status."""
    from nsqtools.archive.compaction import run_together

    compactions = options.compactions(parallel, runtime.info)
    if options.dry_run:
        for compaction in compactions:
            compaction.plan()
        return show_plan(runtime, compactions, json=options.json)
    if options.delete_archives and not options.yes:
        runtime.require_terminal()
    deleted: list[str] = []
    run_jobs: RunJobs | None = None
    with ExitStack() as running:
        for first in range(0, len(compactions), LOCKED_TABLES):
            group = compactions[first : first + LOCKED_TABLES]
            with ExitStack() as locks:
                for compaction in group:
                    locks.enter_context(compaction.locked())
                    compaction.plan()
                if run_jobs is None and any(compaction.jobs for compaction in group):
                    run_jobs = running.enter_context(runner())
                run_together(group, run_jobs or (lambda jobs: ()))
                if options.delete_archives:
                    deleted += delete_compacted(runtime, group, yes=options.yes)
    show_results(runtime, compactions, deleted, json=options.json)
    return report_outcome(runtime, compactions)


def show_plan(runtime: Runtime, compactions: Sequence[Compaction], *, json: bool) -> ExitStatus:
    """Print the planned partitions."""
    rows = [
        _document(partition, files=len(partition.sources), messages=partition.messages)
        for compaction in compactions
        for partition in compaction.partitions
        if partition.state != "done"
    ]
    if json:
        write_json(runtime, {"partitions": rows})
    else:
        write_records(runtime, PLANNED, rows)
    return ExitStatus.DONE


def show_results(
    runtime: Runtime, compactions: Sequence[Compaction], deleted: Sequence[str], *, json: bool
) -> None:
    """Print the compacted partitions and the deleted archives."""
    rows = [
        _document(
            partition,
            files=len(partition.files),
            read=sum(result.read for result in partition.results),
            duplicates=sum(result.duplicates for result in partition.results),
            rows=sum(file.rows or 0 for file in partition.files),
            bytes=sum(file.bytes for file in partition.files),
        )
        for compaction in compactions
        for partition in compaction.work
    ]
    if json:
        misfits = sum(result.misfits for result in _results(compactions))
        write_json(runtime, {"partitions": rows, "deleted": list(deleted), "misfits": misfits})
    elif rows:
        write_records(runtime, MADE, rows)


def _results(compactions: Sequence[Compaction]) -> list[JobResult]:
    return [
        result
        for compaction in compactions
        for partition in compaction.work
        for result in partition.results
    ]


def delete_compacted(
    runtime: Runtime, compactions: Sequence[Compaction], *, yes: bool
) -> list[str]:
    """Show the archives that can be deleted, ask, and delete them; return the deleted ones."""
    from nsqtools.archive.compaction_notes import delete_archive

    sources: list[Source] = []
    kept: dict[str, str] = {}
    for compaction in compactions:
        deletable, reasons = compaction.deletable()
        sources += deletable
        kept |= reasons
    for path, reason in kept.items():
        runtime.info(f"nsq: {path} stays: {reason}")
    if not sources:
        runtime.info("nsq: no archive can be deleted")
        return []
    plan = [
        f"delete {source.shown} ({counted(source.messages, 'message')})"
        for source in sources[:MOST_NAMES]
    ]
    if (unlisted := len(sources) - MOST_NAMES) > 0:
        plan.append(f"and {unlisted} more")
    messages = counted(sum(source.messages for source in sources), "message")
    size = counted(sum(source.size for source in sources), "byte")
    archives = counted(len(sources), "archive")
    plan.append(f"{archives} with {messages}, {size}, all of them in verified Parquet")
    if not runtime.confirm(plan, "Delete them?", yes=yes):
        return []
    deleted = []
    for source in sources:
        if delete_archive(source):
            deleted.append(source.shown)
        else:
            runtime.info(f"nsq: {source.shown} stays: it changed meanwhile")
    runtime.info(f"nsq: {counted(len(deleted), 'archive')} deleted")
    return deleted


def report_outcome(runtime: Runtime, compactions: Sequence[Compaction]) -> ExitStatus:
    """Report the result, damage, and skipped input; return the exit status."""
    results = _results(compactions)
    grown = [source for compaction in compactions for source in compaction.grown]
    damages = sorted({damage for result in results for damage in result.damages})
    for path, problem in damages:
        runtime.print_error(f"nsq: {path}: {problem}")
    for archive in grown:
        runtime.print_error(
            f"nsq: {archive.shown}: left out, as it has changed since it was compacted"
        )
    open_days = Counter(
        partition.key.day
        for compaction in compactions
        for partition in compaction.partitions
        if partition.state == "open"
    )
    for day, count in open_days.items():
        topics = counted(count, "topic")
        runtime.info(f"nsq: {day} ({topics}) is left out: it has not ended, see --open-days")
    if bare := sum(result.read for result in results if result.key.day is None):
        runtime.info(
            f"nsq: {bare} bare bodies have no id and no time: all were kept, without a date"
        )
    read = sum(result.read for result in results)
    removed = sum(result.duplicates for result in results)
    files = sum(result.file is not None for result in results)
    if misfits := sum(result.misfits for result in results):
        runtime.info(f"nsq: {misfits} bodies did not fit their columns: _error has the reason")
    if keys := [key for compaction in compactions for key in compaction.without_columns]:
        runtime.print_error(
            f"nsq: {counted(len(keys), 'partition')} without columns of --schema: rows that are "
            "Parquet already get none"
        )
        runtime.print_error("hint: compact the archives to another --output")
    runtime.info(
        f"nsq: {counted(read, 'message')} read, {counted(removed, 'duplicate')} removed, "
        f"{counted(files, 'file')} written and verified"
    )
    is_whole = not (damages or grown or keys)
    return ExitStatus.DONE if is_whole else ExitStatus.PARTLY_DONE


def _document(partition: Partition, **figures: int) -> dict[str, Any]:
    key = partition.key
    day = key.day.isoformat() if key.day else None
    return {"topic": key.topic, "date": day, "state": partition.state, **figures}
