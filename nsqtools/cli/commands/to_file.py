"""``nsq to-file``: topics into files, which can be trusted through any crash."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import (
    EMPTY_AFTER_S,
    LIMITS,
    ChannelName,
    Count,
    ExitIdle,
    For,
    Json,
    ListenHTTP,
    MetricsFile,
    OptionalTopics,
    Pattern,
    Refresh,
    UntilEmpty,
)
from nsqtools.cli.options.to_file_settings import FILES, ArchiveOptions, Upload
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.ends import ExitStatus, StopSignals, stopping
from nsqtools.cli.running.runtime import Session
from nsqtools.cli.running.service import Service, service
from nsqtools.cli.running.waiting import Create, look_before
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.archive.archiver import Archiver
    from nsqtools.archive.upload import Uploads
    from nsqtools.records.prometheus import Metric


def to_file(
    topic: OptionalTopics = None,
    topic_pattern: Pattern = None,
    topic_refresh: Refresh = "1m",  # type: ignore[assignment]
    channel: ChannelName = "nsq_to_file",
    on_file: str | None = opt(
        "COMMAND", "Run for each finished file; {path} becomes its path.", FILES
    ),
    metrics_file: MetricsFile = None,
    listen_http: ListenHTTP = None,
    count: Count = None,
    until_empty: UntilEmpty = False,
    exit_idle: ExitIdle = None,
    for_: For = None,
    exit_when_deleted: bool = opt(
        "", "Exit with status 3 when every --topic was deleted, instead of waiting.", LIMITS
    ),
    create: Create = False,
    json: Json = False,
    *,
    settings: ArchiveOptions,
    upload: Upload,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Archive topics to files, each message finished after it is on disk.

    Runs until it is stopped or a limit is reached. Files in progress are hidden (.NAME.part);
    finished ones appear whole. After a crash, the next run repairs and finishes what was left, and
    writes no message twice. When a disk is full the messages stay in the queue, and writing
    continues when there is room. A topic that is deleted is archived again when it is there again.
    SIGHUP finishes the files in progress.

    systemd is notified when it is ready, alive and stopping (Type=notify, WatchdogSec=).

    Examples:
        nsq to-file -t clicks --output-dir /var/nsq --gzip
        nsq to-file -t clicks --output-dir /var/nsq --gzip --rotate-interval 1h --utc
        nsq to-file --topic-pattern '^orders' --lookupd-http-address lookup:4161 --output-dir d
        nsq to-file -t clicks --output-dir d --gzip --rotate-interval 1h --upload s3://bucket/nsq
    """
    from nsqtools.archive.archiver import Archiver
    from nsqtools.archive.notify import FileHook, topic_metrics
    from nsqtools.archive.topic_writer import THROUGHPUT, ArchiveSource
    from nsqtools.cluster.topic_discovery import TopicDiscovery
    from nsqtools.files.opening import allow_many
    from nsqtools.tail.run_limits import RunLimits

    topics = tuple(dict.fromkeys(topic or ()))
    if not topics and topic_pattern is None:
        raise ConfigurationError("no topic given", hint="Give --topic or --topic-pattern.")
    discovery = None
    if topic_pattern is not None:
        discovery = TopicDiscovery(topic_pattern, connection)
    allow_many()
    hook = FileHook(on_file) if on_file is not None else None
    uploads = upload.open(settings)
    options = connection.client_options(**THROUGHPUT)
    look_before(topics, channel, connection, runtime, create=create, force=True)

    def finished(path: Path) -> None:
        if hook is not None:
            hook.put(path)
        if uploads is not None:
            uploads.put(path)

    def metrics() -> list[Metric]:
        own = uploads.metrics() if uploads is not None else ()
        return [*topic_metrics(archiver.states, time.time()), *own]

    with Progress(runtime) as progress:
        archiver = Archiver(
            topics,
            ArchiveSource(channel, connection, options),
            settings,
            discovery=discovery,
            refresh_s=topic_refresh,
            exits_when_deleted=exit_when_deleted,
            limits=RunLimits(count, EMPTY_AFTER_S if until_empty else exit_idle, for_),
            on_finished=finished,
            on_tick=lambda: tick(archiver, uploads, progress, supervised),
        )

        def stop() -> None:
            supervised.stopping()
            archiver.stop()

        with (
            service(
                listen_http,
                runtime.environ,
                metrics=metrics,
                health=lambda: health(archiver, uploads),
                metrics_file=metrics_file,
            ) as supervised,
            stopping(stop) as signals,
        ):
            before = signal.signal(signal.SIGHUP, lambda number, frame: archiver.rotate())
            try:
                archiver.run()
            finally:
                signal.signal(signal.SIGHUP, before)
                if hook is not None:
                    hook.close()
                left = finish_uploads(uploads, progress, supervised, signals)
                progress.clear()
                if json:
                    failed = hook.failures if hook is not None else 0
                    document = asdict(archiver.totals) | {"on_file_failures": failed}
                    if uploads is not None:
                        document |= {"uploaded": uploads.totals.files, "not_uploaded": left}
                    write_json(runtime, document, indent=2)
                runtime.tell(summary(archiver))
    if hook is not None and hook.failures:
        runtime.tell(f"nsq: the command for finished files failed {hook.failures} times")
        return signals.status(otherwise=ExitStatus.PARTLY_DONE)
    if left:
        runtime.tell(f"nsq: {counted(left, 'file')} not uploaded; the next run continues")
        return signals.status(otherwise=ExitStatus.PARTLY_DONE)
    if archiver.falls_short:
        return signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
    return signals.status()


def tick(
    archiver: Archiver, uploads: Uploads | None, progress: Progress, supervised: Service
) -> None:
    """Show how far it is, and let uploads hold consumption back."""
    supervised.ready()
    supervised.alive()
    if uploads is not None:
        uploads.start()
        uploads.regulate(archiver)
    progress.show(lambda: f"{archiver.totals.messages:,} messages archived")


def health(archiver: Archiver, uploads: Uploads | None) -> tuple[bool, str]:
    """Whether archiving and uploading work, and a line that says what does not."""
    is_well, text = archiver.health
    if uploads is None or not is_well:
        return is_well, text
    is_uploading, trouble = uploads.health
    return is_uploading, "; ".join(filter(None, (text, trouble)))


def finish_uploads(
    uploads: Uploads | None, progress: Progress, supervised: Service, signals: StopSignals
) -> int:
    """Upload what the archiver finished last; return how many files could not be uploaded."""
    if uploads is None:
        return 0

    def show() -> None:
        supervised.alive()
        progress.show(lambda: f"{counted(uploads.totals.waiting_files, 'file')} to upload")

    return uploads.close(is_hurried=lambda: signals.received is not None, show=show)


def summary(archiver: Archiver) -> str:
    """The counts in a line."""
    totals = archiver.totals
    again = f", {totals.already_written} were written already" if totals.already_written else ""
    what = f"{counted(totals.messages, 'message')}, {counted(totals.bytes, 'byte')}"
    return f"nsq: {what}, {counted(totals.files, 'file')} finished{again}"
