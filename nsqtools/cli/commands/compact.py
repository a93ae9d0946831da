"""``nsq archive compact`` and ``nsq spark compact``: one compaction, in processes or in Spark."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.params import OUTPUT, SAFETY, SELECTION, Delimiter, DryRun, Json, Yes
from nsqtools.cli.options.spark_options import (
    SkipDamaged,
    SparkChoice,
    Topics,
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
    from nsqtools.archive.compaction import Compaction, Partition, RunJobs

CLUSTER_SLOTS = 64  # tasks at a time that are assumed of a cluster: for less work files are smaller
PLANNED = ("topic", "date", "state", "files", "messages")
MADE = ("topic", "date", "state", "files", "read", "duplicates", "rows", "bytes")
MOST_NAMES = 20


def parse_day(text: str) -> date:
    """Read a day. Raises ``ValueError``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day; write 2026-11-21") from None


class CompactionOptions(OptionSet):
    """What is compacted, and how."""

    paths: Annotated[
        list[Any],  # of Location
        places_argument(
            "Archives, Parquet or a Delta table: directories, files, s3://BUCKET/PREFIX."
        ),
    ]
    output: Any = place_opt(
        "-o DIR",
        "Directory or s3://BUCKET/PREFIX; without it a Delta table is compacted where it is.",
        OUTPUT,
    )
    format: TableFormat = opt("", "What to write: parquet or delta.", OUTPUT, TableFormat.parquet)
    target_size: int = opt("SIZE", "About how large files become.", OUTPUT, "256MiB")
    topic: Topics = None
    day: date | None = opt("DATE", "Only this day (2026-11-21, UTC).", SELECTION, parser=parse_day)
    until_day: date | None = opt("DATE", "Only days up to this one.", SELECTION, parser=parse_day)
    grace: float = opt("DURATION", "How long after midnight (UTC) a day is open.", SELECTION, "1h")
    open_days: bool = opt("", "Take days that are not over too.", SELECTION)
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

    def compaction(self, parallel: int) -> Compaction:
        """The compaction, not yet planned. Raises `NsqError`."""
        from nsqtools.archive.compaction import Compaction, Selection
        from nsqtools.archive.finding import find_inputs
        from nsqtools.archive.slices import Settings

        last = self.day or self.until_day
        topics = frozenset(self.topic or ())
        selection = Selection(topics, self.day, last, self.open_days, self.grace)
        settings = Settings(
            self.target_size or sys.maxsize,  # 0 is without
            parallel,
            b"\n" if self.delimiter is None else self.delimiter,
            self.skip_damaged,
            self.bodies.body,
            self.bodies.fields(needed=True),
        )
        inputs = find_inputs(self.paths)
        is_delta = self.format is TableFormat.delta
        return Compaction(inputs, self.output, selection, settings, is_delta=is_delta)


def archive_compact(
    processes: int | None = opt(
        "N", "How many files are made at a time.", min=1, show_default="one a core"
    ),
    *,
    chosen: CompactionOptions,
    runtime: Session,
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
    return compact(runtime, chosen, count, lambda: nullcontext(in_processes(count)))


def spark_compact(*, chosen: CompactionOptions, spark: SparkChoice, runtime: Session) -> int:
    """Do what nsq archive compact does, in the tasks of Spark.

    For what is more than one machine reads in time. On a cluster paths are those of executors: a
    shared directory, or a place in an object store.

    Examples:
        nsq spark compact s3://logs/nsq --output s3://lake/nsq --master yarn
        nsq spark compact /var/nsq --output /data/nsq --delete-archives --yes
    """
    from nsqtools.spark.session import in_tasks

    found = [*chosen.paths, *([chosen.output] if chosen.output is not None else [])]
    settings = spark.settings("nsq spark compact", python_places=found)

    @contextmanager
    def tasks() -> Iterator[RunJobs]:
        with open_spark(runtime, settings) as session, job_progress(runtime, session):
            yield in_tasks(session, settings)

    return compact(runtime, chosen, settings.local_slots or CLUSTER_SLOTS, tasks)


def compact(
    runtime: Runtime,
    chosen: CompactionOptions,
    parallel: int,
    runner: Callable[[], AbstractContextManager[RunJobs]],
) -> int:
    """Compact with what runs jobs; return the exit status."""
    compaction = chosen.compaction(parallel)
    if chosen.dry_run:
        compaction.plan()
        return show_plan(runtime, compaction, json=chosen.json)
    if chosen.delete_archives and not chosen.yes:
        runtime.require_terminal()
    with compaction.locked():
        compaction.plan()
        with runner() if compaction.jobs else nullcontext(lambda jobs: ()) as run_jobs:
            compaction.run(run_jobs)
        deleted = (
            delete_needless(runtime, compaction, yes=chosen.yes) if chosen.delete_archives else []
        )
    show_results(runtime, compaction, deleted, json=chosen.json)
    return tell_outcome(runtime, compaction)


def show_plan(runtime: Runtime, compaction: Compaction, *, json: bool) -> ExitStatus:
    """Print what a run would do."""
    rows = [
        _document(each, files=len(each.sources), messages=each.messages)
        for each in compaction.partitions
        if each.state != "done"
    ]
    if json:
        write_json(runtime, {"partitions": rows})
    else:
        write_records(runtime, PLANNED, rows)
    return ExitStatus.DONE


def show_results(
    runtime: Runtime, compaction: Compaction, deleted: Sequence[str], *, json: bool
) -> None:
    """Print what was made."""
    rows = [
        _document(
            each,
            files=len(each.files),
            read=sum(done.read for done in each.results),
            duplicates=sum(done.duplicates for done in each.results),
            rows=sum(file.rows or 0 for file in each.files),
            bytes=sum(file.bytes for file in each.files),
        )
        for each in compaction.work
    ]
    if json:
        document = {
            "partitions": rows,
            "deleted": list(deleted),
            "misfits": sum(done.misfits for each in compaction.work for done in each.results),
        }
        write_json(runtime, document)
    elif rows:
        write_records(runtime, MADE, rows)


def delete_needless(runtime: Runtime, compaction: Compaction, *, yes: bool) -> list[str]:
    """Show which archives can go, ask, and delete them; return those that are gone."""
    from nsqtools.archive.compaction import delete_archive

    sources, kept = compaction.deletable()
    for path, reason in kept.items():
        runtime.info(f"nsq: {path} stays: {reason}")
    if not sources:
        runtime.info("nsq: no archive can be deleted")
        return []
    plan = [f"delete {each.shown} ({each.messages} messages)" for each in sources[:MOST_NAMES]]
    if (more := len(sources) - MOST_NAMES) > 0:
        plan.append(f"and {more} more")
    plan.append(
        f"{len(sources)} archives with {sum(each.messages for each in sources)} messages, "
        f"{sum(each.size for each in sources)} bytes: all of it is in verified Parquet"
    )
    if not runtime.confirm(plan, "Delete them?", yes=yes):
        return []
    gone = []
    for source in sources:
        if delete_archive(source):
            gone.append(source.shown)
        else:
            runtime.info(f"nsq: {source.shown} stays: it changed meanwhile")
    runtime.info(f"nsq: {len(gone)} archives deleted")
    return gone


def tell_outcome(runtime: Runtime, compaction: Compaction) -> ExitStatus:
    """Tell what was done and what was not; return the exit status."""
    done = [each for partition in compaction.work for each in partition.results]
    damages = sorted({damage for each in done for damage in each.damages})
    for shown, problem in damages:
        runtime.print_error(f"nsq: {shown}: {problem}")
    for each in compaction.grown:
        runtime.print_error(
            f"nsq: {each.shown}: left out, as it has changed since it was compacted"
        )
    opened = Counter(each.key.day for each in compaction.partitions if each.state == "open")
    for day, count in opened.items():
        topics = counted(count, "topic")
        runtime.info(f"nsq: {day} ({topics}) is left out: it is not over, see --grace")
    if bare := sum(each.read for each in done if each.key.day is None):
        runtime.info(
            f"nsq: {bare} bare bodies have no id and no time: all were kept, without a date"
        )
    read, removed = sum(each.read for each in done), sum(each.duplicates for each in done)
    files = sum(each.file is not None for each in done)
    if misfits := sum(each.misfits for each in done):
        runtime.info(f"nsq: {misfits} bodies did not fit their columns: _error says why")
    if keys := compaction.without_columns:
        runtime.print_error(
            f"nsq: {counted(len(keys), 'partition')} without columns of --schema: rows that are "
            "Parquet already get none"
        )
        runtime.print_error("hint: compact the archives to another --output")
    runtime.info(
        f"nsq: {read} messages read, {removed} duplicates removed, {files} files written and "
        "verified"
    )
    is_whole = not (damages or compaction.grown or compaction.without_columns)
    return ExitStatus.DONE if is_whole else ExitStatus.PARTLY_DONE


def _document(partition: Partition, **figures: int) -> dict[str, Any]:
    key = partition.key
    day = key.day.isoformat() if key.day else None
    return {"topic": key.topic, "date": day, "state": partition.state, **figures}
