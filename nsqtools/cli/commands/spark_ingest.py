"""``nsq spark ingest``: a live topic, or an archive that grows, into Parquet or Delta."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import LIMITS, MONITORING, Channel, For, Json
from nsqtools.cli.options.spark_options import (
    ARCHIVES,
    SkipDamaged,
    SparkChoice,
    location,
    naming_flags,
    open_spark,
    place,
    place_opt,
)
from nsqtools.cli.options.tables import (
    BodyOptions,
    TableFormat,
)
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import Progress, report_damages, report_unfit
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.cli.running.consuming import Create
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, stop_on_signals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.text import counted, format_duration

if TYPE_CHECKING:
    from nsqtools.archive.place import Place
    from nsqtools.archive.table_writer import TablePlan
    from nsqtools.cli.render.documents import Ingested
    from nsqtools.spark.jobs.ingestion import IngestCounts, IngestPlaces, IngestRun, IngestSource

STREAM = "Stream"
CHANNEL = "spark-ingest"
# Each batch writes a file for each topic and date, so a short interval makes many small files.
TRIGGER_S = 10.0


class TopicInput(OptionSet):
    """Live topics, or those that match a pattern, and the spool of their messages."""

    topic: list[str] | None = opt("-t TOPIC", "Live topics, not an archive.")
    topic_pattern: str | None = opt("REGEX", "All live topics that match, also later ones.")
    channel: Channel = None
    spool_dir: Path | None = opt(
        "DIR",
        "Where messages of a topic wait; default: in the checkpoint.",
        STREAM,
        parser=location,
    )
    create: Create = False

    def source(
        self,
        places: IngestPlaces,
        options: dict[str, str],
        connection: ConnectionSettings,
        runtime: Runtime,
    ) -> IngestSource:
        """Return the source. Raises `ConfigurationError`, and what checking the topics raises."""
        from nsqtools.spark.format_options import as_options, export_secrets
        from nsqtools.spark.jobs.ingestion import IngestSource
        from nsqtools.spark.topic_stream import topic_settings

        topics, channel = self.topic or [], self.channel or CHANNEL
        if topics:
            watch = ChannelWatch(topics, channel, connection, runtime, force=True)
            watch.check_topics(create=self.create)
        if self.spool_dir is None and places.checkpoint.is_remote:
            raise ConfigurationError(
                f"a spool cannot be in {places.checkpoint}: it is appended to and synced",
                hint="Give a local or shared directory with --spool-dir.",
            )
        spool = self.spool_dir or places.checkpoint.path / "spool"
        export_secrets(connection, os.environ)
        options = {**as_options(connection), "channel": channel, **options}
        options["spoolDir"] = str(spool.absolute())
        if self.topic_pattern is None:
            options["topic"] = ",".join(topics)
            names = ", ".join(sorted(set(topics)))
        else:
            options["topicPattern"] = self.topic_pattern
            names = f"pattern {self.topic_pattern}"
        topic_settings(options, os.environ)  # Raises for wrong options before Spark is started.
        plural = "s" if len(set(topics)) > 1 else ""
        return IngestSource(f"the topic{plural} {names}, channel {channel}", "nsq", options)


class ArchiveInput(OptionSet):
    """An archive, which may still grow."""

    archive_dir: Annotated[
        Any,  # a Place or None
        Argument(parser=place, help="An archive that nsq to-file writes, not a topic."),
    ] = None
    raw: bool = opt("", "Read files of bare bodies too (nsq_to_file).", STREAM)
    work_dir: Path | None = opt(
        "DIR", "Where nsq to-file has files in progress, if elsewhere.", ARCHIVES, parser=location
    )
    skip_damaged: SkipDamaged = False

    def source(self, places: IngestPlaces, options: dict[str, str]) -> IngestSource:
        """Return the source. Raises `ConfigurationError` and `NotFoundError`."""
        from nsqtools.archive.place import refuse_nested
        from nsqtools.spark.archives.read_settings import archive_settings
        from nsqtools.spark.format_options import Options
        from nsqtools.spark.jobs.ingestion import IngestSource
        from nsqtools.spark.jobs.inputs import damage_options

        for option, folder in (("--output", places.output), ("--checkpoint", places.checkpoint)):
            refuse_nested(option, folder, self.archive_dir)
        directory = self.archive_dir.absolute()
        if not directory.is_remote and not directory.path.exists():
            raise NotFoundError(f"there is no {directory}")
        options = {"path": str(directory), **options}
        options |= damage_options(places.damage if self.skip_damaged else None)
        if self.raw:
            options["format"] = "raw"
        if self.work_dir:
            options["workDir"] = str(self.work_dir.absolute())
        archive_settings(Options("nsq-archive", options))  # Raises before Spark is started.
        return IngestSource(f"the archive {directory}", "nsq-archive", options, (directory,))


def check_input(archive: ArchiveInput, topics: TopicInput) -> None:
    """Raise `ConfigurationError` unless one input is given, with its own options only."""
    if sum(map(bool, (archive.archive_dir, topics.topic, topics.topic_pattern))) != 1:
        raise ConfigurationError(
            "give topics (-t TOPIC), or a --topic-pattern, or a directory of archives"
        )
    if archive.archive_dir is None:
        if archive.raw or archive.work_dir is not None or archive.skip_damaged:
            raise ConfigurationError(
                "--raw, --work-dir and --skip-damaged are for archives, not for topics"
            )
    elif topics.channel is not None or topics.spool_dir is not None or topics.create:
        raise ConfigurationError(
            "--channel, --spool-dir and --create are for topics, not for archives"
        )


def ingest(
    output: Annotated[
        Any,
        place_opt(
            "--output -o DIR",
            "Directory or s3://BUCKET/PREFIX for Parquet or Delta; with {topic}, a table for each "
            "topic.",
        ),
    ],
    checkpoint: Annotated[
        Any, place_opt("--checkpoint DIR", "Where the stream records its progress.")
    ],
    format: TableFormat = opt("", "What to write: parquet or delta.", None, TableFormat.parquet),
    *,
    archive: ArchiveInput,
    topics: TopicInput,
    once: bool = opt("", "Take what is there and end.", LIMITS),
    for_: For = None,
    trigger: float | None = opt(
        "DURATION", "Time between batches; 0s for none.", STREAM, show_default="10s"
    ),
    max_rows_per_trigger: int = opt(
        "N", "At most about N messages in a batch.", STREAM, 1_000_000, min=1
    ),
    fail_on_data_loss: bool = opt(
        "--fail-on-data-loss/--no-fail-on-data-loss",
        "End when a file to read is gone or shorter; else go on and warn in Spark's log.",
        STREAM,
        True,
    ),
    metrics_file: Path | None = opt(
        "FILE", "Write counts, rate and lag here, as Prometheus text.", MONITORING
    ),
    json: Json = False,
    bodies: BodyOptions,
    connection: ConsumerConnection,
    spark: SparkChoice,
    runtime: Session,
) -> int:
    """Stream topics or an archive into Parquet by topic and date, each message once.

    Runs until it is interrupted, and ends after the batch that is being written; or, with --once,
    takes what is there and ends, for cron. Run again with the same checkpoint it continues where it
    was, however it ended. A topic's messages are finished when they are safe in the spool: that,
    the checkpoint and the output belong together. The default channel is spark-ingest.

    Examples:
        nsq spark ingest -t clicks --output /data/clicks --checkpoint /data/clicks.checkpoint
        nsq spark ingest --topic-pattern 'web_.*' -o /data/web --checkpoint /data/web.checkpoint
        nsq spark ingest /var/nsq -o /data/nsq --checkpoint /data/nsq.checkpoint --once
    """
    from nsqtools.spark.jobs.ingestion import IngestPlaces, IngestRun

    if once and trigger is not None:
        runtime.info("nsq: --trigger has no effect with --once")
    check_input(archive, topics)
    plan = _plan_tables(output, format, bodies, archive, topics, runtime)
    places = IngestPlaces(place(plan.base).absolute(), checkpoint.absolute(), plan)
    options = {"maxRowsPerTrigger": str(max_rows_per_trigger)}
    options["failOnDataLoss"] = str(fail_on_data_loss).lower()
    if archive.archive_dir is None:
        source = topics.source(places, options, connection, runtime)
    else:
        source = archive.source(places, options)
    trigger_s = None if once else TRIGGER_S if trigger is None else trigger
    run = IngestRun(source, places, trigger_s, for_, partial(write_ingest_metrics, metrics_file))
    settings = spark.settings(
        f"nsq spark ingest: {source.name}", places[:2], python_places=source.places
    )
    with (
        naming_flags(),
        run.locked() as descriptors,
        open_spark(runtime, replace(settings, inherited=descriptors)) as session,
        Progress(runtime) as progress,
    ):
        run.on_poll = lambda counts: progress.show(partial(progress_text, counts))
        query = run.start(session)
        with stop_on_signals(run.stop) as signals:
            run.follow(query)
    return signals.status(
        otherwise=report_ingestion(runtime, run, json=json, fails=bodies.fail_on_misfit)
    )


def _plan_tables(
    output: Place,
    format: TableFormat,
    bodies: BodyOptions,
    archive: ArchiveInput,
    topics: TopicInput,
    runtime: Runtime,
) -> TablePlan:
    """Return the plan of the tables. Raises `NsqError`."""

    def have_many_topics() -> bool:
        from nsqtools.archive.finding import find_archives
        from nsqtools.archive.table import have_many_topics

        if archive.archive_dir is None:
            return topics.topic_pattern is not None or len(set(topics.topic or ())) > 1
        return have_many_topics(find_archives([str(archive.archive_dir)]), lambda file: None)

    return bodies.plan(
        str(output.absolute()),
        "",
        {},
        is_delta=format is TableFormat.delta,
        has_many_topics=have_many_topics,
        info=runtime.info,
        option="--format",
    )


def write_ingest_metrics(file: Path | None, counts: IngestCounts) -> None:
    """Replace the metrics file, if there is one."""
    if file is not None:
        from nsqtools.http.service import write_metrics

        write_metrics(file, counts.metrics())


def progress_text(counts: IngestCounts) -> str:
    """Return the progress line."""
    batches = counted(counts.batches, "batch", ",")
    text = f"{counted(counts.rows, 'row', ',')} in {batches}, {counts.rows_per_s:,.0f} rows/s"
    if counts.rows_behind:
        text += f", {counted(counts.rows_behind, 'row', ',')} behind"
    if counts.lag_s is not None:
        text += f", newest was {format_duration(round(counts.lag_s, 1))} old"
    return text


def report_ingestion(runtime: Runtime, run: IngestRun, *, json: bool, fails: bool) -> ExitStatus:
    """Print the counts and the damage of a run; return the exit status."""
    counts, damages = run.counts, run.new_damages()
    status = report_damages(runtime, damages).status
    if json:
        document: Ingested = {
            "rows": counts.rows,
            "batches": counts.batches,
            "body_bytes": counts.body_bytes,
            "misfits": counts.misfits,
            "fields_without_column": len(counts.without_column),
            "rows_behind": counts.rows_behind,
            "damages": len(damages),
        }
        write_json(runtime, document, indent=2)
    unfit = report_unfit(runtime, counts.misfits, counts.without_column, fails=fails)
    batches = counted(counts.batches, "batch")
    runtime.info(f"nsq: {counted(counts.rows, 'row')} ingested in {batches}")
    return status or unfit
