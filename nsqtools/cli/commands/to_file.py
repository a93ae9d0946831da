"""``nsq to-file``: topics into files, which can be trusted through any crash."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import LIMITS, ChannelName
from nsqtools.cli.options.to_file_settings import FILES, ArchiveOptions, Upload
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.consuming import Consuming, Watched, look_before
from nsqtools.cli.running.ends import ExitStatus
from nsqtools.cli.running.runtime import Session
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.archive.archiver import Archiver
    from nsqtools.archive.upload import Uploads
    from nsqtools.records.prometheus import Metric


def to_file(
    channel: ChannelName = "nsq_to_file",
    on_file: str | None = opt("COMMAND", "Run for each finished file; {path} is its path.", FILES),
    exit_when_deleted: bool = opt(
        "", "Exit with status 3 when every --topic was deleted, instead of waiting.", LIMITS
    ),
    *,
    consuming: Annotated[Consuming, From(Consuming)],
    settings: ArchiveOptions,
    upload: Upload,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Archive topics to files, each message finished after it is on disk.

    Runs until it is stopped or a limit is reached. Files in progress are hidden (.NAME.part);
    finished ones appear whole. After a crash, the next run repairs and finishes what was left, and
    writes no message twice. When a disk is full the messages stay in the queue, and writing
    continues when there is room. Archiving resumes if a deleted topic is recreated.
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

    topics, pattern = consuming.topics, consuming.topic_pattern
    discovery = TopicDiscovery(pattern, connection) if pattern is not None else None
    allow_many()
    hook = FileHook(on_file) if on_file is not None else None
    uploads = upload.open(settings)
    options = connection.client_options(**THROUGHPUT)
    look_before(topics, channel, connection, runtime, create=consuming.create, force=True)

    def finished(path: Path) -> None:
        if hook is not None:
            hook.put(path)
        if uploads is not None:
            uploads.put(path)

    def metrics() -> list[Metric]:
        own = uploads.metrics() if uploads is not None else ()
        return [*topic_metrics(archiver.states, time.time()), *own]

    def tick() -> None:
        if uploads is not None:  # they may hold consumption back
            uploads.start()
            uploads.regulate(archiver)
        watched.tick(lambda: f"{archiver.totals.messages:,} messages archived")

    archiver = Archiver(
        topics,
        ArchiveSource(channel, connection, options),
        settings,
        discovery=discovery,
        refresh_s=consuming.topic_refresh,
        exits_when_deleted=exit_when_deleted,
        limits=consuming.limits.run_limits(),
        on_finished=finished,
        on_tick=tick,
    )
    with consuming.watched(
        runtime, archiver.stop, metrics=metrics, health=lambda: health(archiver, uploads)
    ) as watched:
        before = signal.signal(signal.SIGHUP, lambda number, frame: archiver.rotate())
        try:
            archiver.run()
        finally:
            signal.signal(signal.SIGHUP, before)
            if hook is not None:
                hook.close()
            failed = hook.failures if hook is not None else 0
            left = finish_uploads(uploads, watched)
            watched.progress.clear()
            if consuming.json:
                document = asdict(archiver.totals) | {"on_file_failures": failed}
                if uploads is not None:
                    document |= {"uploaded": uploads.totals.files, "not_uploaded": left}
                write_json(runtime, document, indent=2)
            runtime.tell(summary(archiver))
    status = ExitStatus.LIMIT_NOT_REACHED if archiver.falls_short else ExitStatus.DONE
    if failed:
        runtime.tell(f"nsq: the command for finished files failed {failed} times")
        status = ExitStatus.PARTLY_DONE
    elif left:
        runtime.tell(f"nsq: {counted(left, 'file')} not uploaded; the next run continues")
        status = ExitStatus.PARTLY_DONE
    return watched.signals.status(otherwise=status)


def health(archiver: Archiver, uploads: Uploads | None) -> tuple[bool, str]:
    """Whether archiving and uploading work, and a line that says what does not."""
    is_well, text = archiver.health
    if uploads is None or not is_well:
        return is_well, text
    is_uploading, trouble = uploads.health
    return is_uploading, "; ".join(filter(None, (text, trouble)))


def finish_uploads(uploads: Uploads | None, watched: Watched) -> int:
    """Upload what the archiver finished last; return how many files could not be uploaded."""
    if uploads is None:
        return 0

    def show() -> None:
        watched.service.alive()
        watched.progress.show(lambda: f"{counted(uploads.totals.waiting_files, 'file')} to upload")

    return uploads.close(is_hurried=lambda: watched.signals.received is not None, show=show)


def summary(archiver: Archiver) -> str:
    """The counts in a line."""
    totals = archiver.totals
    again = f", {totals.already_written} were written already" if totals.already_written else ""
    what = f"{counted(totals.messages, 'message')}, {counted(totals.bytes, 'byte')}"
    return f"nsq: {what}, {counted(totals.files, 'file')} finished{again}"
