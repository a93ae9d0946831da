"""``nsq spark ingest``: a live topic, or an archive that grows, into Parquet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from nsqtools.cli.options.tables import ColumnsChoice, TableFormat
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress, report_damages
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.consuming import Create, look_before
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, stopping
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.text import format_duration

if TYPE_CHECKING:
    from nsqtools.archive.location import Location
    from nsqtools.cli.render.documents import Ingested
    from nsqtools.spark.archives.damage import ArchiveDamage
    from nsqtools.spark.jobs.ingestion import IngestCounts, IngestSource

STREAM = "Stream"
CHANNEL = "spark-ingest"
TRIGGER_S = 10.0


def ingest(
    output: Annotated[
        Any, place_opt("--output -o DIR", "Directory or s3://BUCKET/PREFIX for Parquet or Delta.")
    ],
    checkpoint: Annotated[
        Any, place_opt("--checkpoint DIR", "Where the stream records its progress.")
    ],
    format: TableFormat = opt("", "What to write: parquet or delta.", None, TableFormat.parquet),
    archive_dir: Annotated[
        Any,  # a Location or None
        Argument(parser=place, help="An archive that nsq to-file writes, not a topic."),
    ] = None,
    topic: list[str] | None = opt("-t TOPIC", "Live topics, not an archive."),
    topic_pattern: str | None = opt("REGEX", "All live topics that match, also later ones."),
    channel: Channel = None,
    once: bool = opt("", "Take what is there and end.", LIMITS),
    for_: For = None,
    trigger: float | None = opt(
        "DURATION", "Time between batches; 0s for none.", STREAM, show_default="10s"
    ),
    max_rows_per_trigger: int = opt(
        "N", "At most about N messages in a batch.", STREAM, 1_000_000, min=1
    ),
    spool_dir: Path | None = opt(
        "DIR",
        "Where messages of a topic wait; default: in the checkpoint.",
        STREAM,
        parser=location,
    ),
    raw: bool = opt("", "Read files of bare bodies too (nsq_to_file).", STREAM),
    work_dir: Path | None = opt(
        "DIR", "Where nsq to-file has files in progress, if elsewhere.", ARCHIVES, parser=location
    ),
    skip_damaged: SkipDamaged = False,
    fail_on_data_loss: bool = opt(
        "--fail-on-data-loss/--no-fail-on-data-loss",
        "End when a file to read is gone or shorter; else go on and warn in Spark's log.",
        STREAM,
        True,
    ),
    create: Create = False,
    metrics_file: Path | None = opt(
        "FILE", "Write counts, rate and lag here, as Prometheus text.", MONITORING
    ),
    json: Json = False,
    *,
    bodies: ColumnsChoice,
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
    from nsqtools.archive.location import absolute, refuse_nested
    from nsqtools.spark.archives.damage import read_damage
    from nsqtools.spark.archives.read_settings import Bodies
    from nsqtools.spark.format_options import hand_on_secrets
    from nsqtools.spark.jobs.ingestion import (
        IngestPlaces,
        QueryFollower,
        held_directories,
        start_query,
    )
    from nsqtools.spark.jobs.inputs import damage_options

    if once and trigger is not None:
        raise ConfigurationError("--trigger has no effect with --once")
    common = {"maxRowsPerTrigger": str(max_rows_per_trigger)}
    common["failOnDataLoss"] = str(fail_on_data_loss).lower()
    chosen = Bodies(bodies.body, bodies.fields(needed=True))
    output, checkpoint = absolute(output), absolute(checkpoint)
    damage_path = checkpoint / "damage"
    if sum(map(bool, (archive_dir, topic, topic_pattern))) != 1:
        raise ConfigurationError(
            "give topics (-t TOPIC), or a --topic-pattern, or a directory of archives"
        )
    if archive_dir is not None:
        if channel is not None or spool_dir is not None or create:
            raise ConfigurationError(
                "--channel, --spool-dir and --create are for topics, not for archives"
            )
        for option, folder in (("--output", output), ("--checkpoint", checkpoint)):
            refuse_nested(option, folder, archive_dir)
        options = {
            **common,
            **({"format": "raw"} if raw else {}),
            **({"workDir": str(work_dir.absolute())} if work_dir else {}),
            **damage_options(damage_path if skip_damaged else None),
        }
        source = archive_source(archive_dir, options)
    else:
        if raw or work_dir is not None or skip_damaged:
            raise ConfigurationError(
                "--raw, --work-dir and --skip-damaged are for archives, not for topics"
            )
        channel = channel or CHANNEL
        if topic:
            look_before(topic, channel, connection, runtime, create=create, force=True)
        spool = spool_dir or checkpoint / "spool"
        if not isinstance(spool, Path):
            raise ConfigurationError(
                f"a spool cannot be in {checkpoint}: it is a log that is appended to and synced",
                hint="Give a local or shared directory with --spool-dir.",
            )
        hand_on_secrets(connection, os.environ)
        source = topic_source(topic or [], topic_pattern, channel, spool, connection, common)
    places = IngestPlaces(output, checkpoint, chosen, format is TableFormat.delta)
    settings = spark.settings(
        f"nsq spark ingest: {source.name}",
        (output, checkpoint),
        python_places=(archive_dir,) if archive_dir is not None else (),
    )
    reported = set(read_damage(damage_path))
    with (
        held_directories(source.name, places) as (held, made),
        naming_flags(),
        open_spark(runtime, replace(settings, inherited=held.descriptors)) as session,
        Progress(runtime) as progress,
    ):
        between_s = TRIGGER_S if trigger is None else trigger
        query = start_query(session, source, made, None if once else between_s)
        follower = QueryFollower(
            query,
            for_s=for_,
            tell=partial(keep_metrics, metrics_file),
            show=lambda counts: progress.show(partial(how_far, counts)),
            need=held.need,
        )
        with stopping(follower.stop) as signals:
            follower.run()
    found = [damage for damage in read_damage(damage_path) if damage not in reported]
    return signals.status(otherwise=tell_outcome(runtime, follower.counts, found, json=json))


def archive_source(directory: Location, options: Mapping[str, str]) -> IngestSource:
    """The source for an archive. Raises `NotFoundError`."""
    from nsqtools.archive.location import absolute
    from nsqtools.spark.archives.read_settings import archive_settings
    from nsqtools.spark.format_options import Options
    from nsqtools.spark.jobs.ingestion import IngestSource

    directory = absolute(directory)
    if isinstance(directory, Path) and not directory.exists():
        raise NotFoundError(f"there is no {directory}")
    options = {"path": str(directory), **options}
    archive_settings(Options("nsq-archive", options))  # refused before Spark is started
    return IngestSource(f"the archive {directory}", "nsq-archive", options)


def topic_source(
    topics: Sequence[str],
    pattern: str | None,
    channel: str,
    spool: Path,
    connection: ConnectionSettings,
    options: Mapping[str, str],
) -> IngestSource:
    """The source for live topics, or for those of a pattern. Raises `ConfigurationError`."""
    from nsqtools.spark.format_options import as_options
    from nsqtools.spark.jobs.ingestion import IngestSource
    from nsqtools.spark.topic_stream import topic_settings

    chosen = {"topic": ",".join(topics)} if pattern is None else {"topicPattern": pattern}
    place = {**chosen, "channel": channel, "spoolDir": str(spool.absolute())}
    known = sorted(set(topics))
    names = ", ".join(known) if pattern is None else f"pattern {pattern}"
    name = f"the topic{'s' if len(known) > 1 else ''} {names}, channel {channel}"
    options = {**as_options(connection), **place, **options}
    topic_settings(options, os.environ)  # refused before Spark is started
    return IngestSource(name, "nsq", options)


def keep_metrics(file: Path | None, counts: IngestCounts) -> None:
    """Replace the file, if there is one."""
    if file is not None:
        from nsqtools.cli.running.service import write_metrics

        write_metrics(file, counts.metrics())


def how_far(counts: IngestCounts) -> str:
    """The progress line."""
    text = f"{counts.rows:,} rows in {counts.batches:,} batches, {counts.rows_per_s:,.0f} rows/s"
    if counts.rows_behind:
        text += f", {counts.rows_behind:,} rows behind"
    if counts.lag_s is not None:
        text += f", newest was {format_duration(round(counts.lag_s, 1))} old"
    return text


def tell_outcome(
    runtime: Runtime, counts: IngestCounts, damages: list[ArchiveDamage], *, json: bool
) -> ExitStatus:
    """Tell the counts, and what could not be read; return the exit status."""
    status = report_damages(runtime, damages).status
    if json:
        document: Ingested = {
            "rows": counts.rows,
            "batches": counts.batches,
            "body_bytes": counts.body_bytes,
            "misfits": counts.misfits,
            "rows_behind": counts.rows_behind,
            "damages": len(damages),
        }
        write_json(runtime, document, indent=2)
    if counts.misfits:
        runtime.tell(f"nsq: {counts.misfits} bodies did not fit their columns: _error says why")
    runtime.tell(f"nsq: {counts.rows} rows ingested in {counts.batches} batches")
    return status
