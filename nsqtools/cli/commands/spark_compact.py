"""``nsq spark compact``: archives to Parquet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import SAFETY, SELECTION, Delimiter, DryRun, Json, Yes
from nsqtools.cli.options.spark_options import (
    OutputDir,
    OutputFormat,
    SkipDamaged,
    TableFormat,
    Topics,
    WorkDir,
    naming_flags,
    place,
)
from nsqtools.cli.options.spark_session import SparkOptions, job_progress, open_spark
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.compaction_output import (
    delete_needless,
    show_plan,
    show_results,
    tell_outcome,
)
from nsqtools.cli.running.runtime import Runtime, Session, stopping
from nsqtools.errors import ConfigurationError
from nsqtools.records.units import parse_span

if TYPE_CHECKING:
    from nsqtools.spark.jobs.compaction.compaction_job import Compaction
    from nsqtools.spark.jobs.compaction.inventory import CountedFile
    from nsqtools.spark.jobs.compaction.partition_job import ArchiveReading
    from nsqtools.spark.spark_settings import SparkSettings


def parse_day(text: str) -> date:
    """Read a day. Raises ``ValueError``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day; write 2026-11-21") from None


ArchiveDir = Annotated[
    Any,  # a Location
    Argument(
        parser=place, metavar="ARCHIVE_DIR", help="Where nsq to-file writes; all below is read."
    ),
]
Day = Annotated[
    date | None,
    opt("--day DATE", "Only this closed day (2026-11-21, UTC).", SELECTION, parser=parse_day),
]
UntilDay = Annotated[
    date | None,
    opt("--until-day DATE", "Only closed days up to this one.", SELECTION, parser=parse_day),
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
OpenDays = Annotated[bool, opt("--open-days", "Take days that are not closed too.", SELECTION)]
DeleteArchives = Annotated[
    bool,
    opt(
        "--delete-archives",
        "Afterwards delete archives whose messages are all in verified Parquet.",
        SAFETY,
    ),
]


def compact(
    archive_dir: ArchiveDir,
    output: OutputDir,
    format: OutputFormat = TableFormat.parquet,
    topic: Topics = None,
    day: Day = None,
    until_day: UntilDay = None,
    grace: Grace = "1h",  # type: ignore[assignment]
    open_days: OpenDays = False,
    work_dir: WorkDir = None,
    skip_damaged: SkipDamaged = False,
    delete_archives: DeleteArchives = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    delimiter: Delimiter = None,
    json: Json = False,
    *,
    spark: SparkOptions,
    runtime: Session,
) -> int:
    """Turn archives into Parquet by topic and date, with each message once.

    A day is compacted once it is closed: --grace has passed since its end, and no file in progress
    can still hold messages of it. Later messages are merged in by the next run. What is written is
    read back and compared with what was read before it takes its place, so a run that was killed
    can simply be repeated. Messages are identified by topic, nsqd and id; bare bodies (raw files)
    have none of these and are all kept, without topic and date.

    Examples:
        nsq spark compact /var/nsq --output /data/nsq --dry-run
        nsq spark compact /var/nsq --output /data/nsq --day 2026-11-20 -t clicks
        nsq spark compact /var/nsq --output /data/nsq --delete-archives --yes
    """
    from nsqtools.spark.jobs.compaction.compaction_job import prepare_compaction, refuse_open
    from nsqtools.spark.jobs.compaction.compaction_plan import DaySelection
    from nsqtools.spark.jobs.compaction.partition_job import ArchiveReading
    from nsqtools.spark.jobs.compaction.stored_output import open_output

    if day is not None and until_day is not None:
        raise ConfigurationError("--day and --until-day exclude each other")
    target = open_output(output, is_delta=format is TableFormat.delta)
    target.check()
    selection = DaySelection(tuple(topic or ()), day, day or until_day, open_days)

    def planned() -> Compaction:
        return prepare_compaction(
            archive_dir, target, selection, grace_s=grace, now_s=time.time(), work_dir=work_dir
        )

    if dry_run:
        return show_plan(runtime, planned(), delete_archives=delete_archives, json=json)
    if delete_archives and not yes:
        runtime.require_terminal()
    before = planned()  # whatever cannot work is refused before anything is made
    if day is not None:
        refuse_open(before.partitions)
    reading = ArchiveReading(delimiter, skip_damaged)
    status = 0
    with target.locked():
        target.recover()
        compaction = planned()
        if compaction.work:
            settings = spark.settings(
                "nsq spark compact", (archive_dir, output), delta=format is TableFormat.delta
            )
            status = run(compaction, reading, settings, runtime)
        deleted: Sequence[CountedFile] = ()
        if delete_archives and not status:
            deleted = delete_needless(runtime, compaction.deletable(), yes=yes)
    show_results(runtime, compaction, deleted, json=json)
    outcome = tell_outcome(runtime, compaction)
    return status or outcome


def run(
    compaction: Compaction, reading: ArchiveReading, settings: SparkSettings, runtime: Runtime
) -> int:
    """Do the work in Spark; return 128 and a signal's number if one ended it early."""
    with (
        naming_flags(),
        open_spark(runtime, settings) as session,
        job_progress(runtime, session),
        stopping(compaction.stop) as signals,
    ):
        compaction.run(session, reading)
    return signals.status()
