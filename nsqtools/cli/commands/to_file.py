"""``nsq to-file``: topics into files, which can be trusted through any crash."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import (
    LIMITS,
    ChannelName,
    Count,
    ExitIdle,
    For,
    Json,
    OptionalTopics,
    duration_option,
)
from nsqtools.cli.options.subscribing import Create, look_before
from nsqtools.cli.options.to_file_settings import FILES, ArchiveOptions
from nsqtools.cli.render.output import counted, write_json
from nsqtools.cli.render.progress import Progress
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.archive.archiver import Archiver


EMPTY_AFTER_S = 2.0  # a connected channel that is silent for this long is empty
METRICS_EVERY_S = 5.0

Pattern = Annotated[
    str | None,
    Option(
        "--topic-pattern",
        metavar="REGEX",
        help="Also every topic, now and later, whose name matches.",
    ),
]
Refresh = Annotated[
    float,
    duration_option("--topic-refresh", "How often to look for topics of the pattern.", panel=None),
]
UntilEmpty = Annotated[
    bool,
    Option("--until-empty", help="Stop when the channel is empty.", rich_help_panel=LIMITS),
]
OnFile = Annotated[
    str | None,
    Option(
        "--on-file",
        metavar="COMMAND",
        help="Run for each finished file; {path} stands for the file.",
        rich_help_panel=FILES,
    ),
]
ExitWhenDeleted = Annotated[
    bool,
    Option(
        "--exit-when-deleted",
        help="Exit, with status 3, when every --topic was deleted; default: wait for it.",
        rich_help_panel=LIMITS,
    ),
]
MetricsFile = Annotated[
    Path | None,
    Option("--metrics-file", metavar="FILE", help="Write counts to this file, as Prometheus text."),
]


def to_file(
    topic: OptionalTopics = None,
    topic_pattern: Pattern = None,
    topic_refresh: Refresh = "1m",  # type: ignore[assignment]
    channel: ChannelName = "nsq_to_file",
    on_file: OnFile = None,
    metrics_file: MetricsFile = None,
    count: Count = None,
    until_empty: UntilEmpty = False,
    exit_idle: ExitIdle = None,
    for_: For = None,
    exit_when_deleted: ExitWhenDeleted = False,
    create: Create = False,
    json: Json = False,
    *,
    settings: ArchiveOptions,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Archive topics to files, each message finished once it is on disk.

    Runs until it is stopped or a limit is reached. Files in progress are hidden (.NAME.part);
    finished ones appear whole. After a crash, the next run repairs and finishes what was left, and
    writes no message twice. When a disk is full the messages stay in the queue, and writing
    continues when there is room. A topic that is deleted is archived again once it is there again.
    SIGHUP finishes the files in progress.

    Examples:
        nsq to-file -t clicks --output-dir /var/nsq --gzip
        nsq to-file -t clicks --output-dir /var/nsq --gzip --rotate-interval 1h --utc
        nsq to-file --topic-pattern '^orders' --lookupd-http-address lookup:4161 --output-dir d
        nsq to-file -t clicks --output-dir d --until-empty --on-file 'aws s3 cp {path} s3://b/'
    """
    from nsqtools.archive.archive_settings import THROUGHPUT
    from nsqtools.archive.archiver import Archiver, ArchiveSource
    from nsqtools.archive.discovery import TopicDiscovery
    from nsqtools.archive.notify import FileHook
    from nsqtools.tail.run_limits import RunLimits

    topics = tuple(dict.fromkeys(topic or ()))
    if not topics and topic_pattern is None:
        raise ConfigurationError("no topic given", hint="Give --topic or --topic-pattern.")
    discovery = None
    if topic_pattern is not None:
        discovery = TopicDiscovery(topic_pattern, connection)
    allow_descriptors()
    hook = FileHook(on_file) if on_file is not None else None
    options = connection.client_options(**THROUGHPUT)
    look_before(topics, channel, connection, runtime, create=create, force=True)

    def finished(path: Path) -> None:
        if hook is not None:
            hook.put(path)

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
            on_tick=lambda: tick(archiver, progress, metrics_file),
        )
        with stopping(archiver.stop) as signals:
            before = signal.signal(signal.SIGHUP, lambda number, frame: archiver.rotate())
            try:
                archiver.run()
            finally:
                signal.signal(signal.SIGHUP, before)
                if hook is not None:
                    hook.close()
                progress.clear()
                if json:
                    failed = hook.failures if hook is not None else 0
                    document = asdict(archiver.totals) | {"on_file_failures": failed}
                    write_json(runtime, document, indent=2)
                runtime.tell(summary(archiver))
    if hook is not None and hook.failures:
        runtime.tell(f"nsq: the command for finished files failed {hook.failures} times")
        return signals.status(otherwise=ExitStatus.PARTLY_DONE)
    if archiver.falls_short:
        return signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
    return signals.status()


def allow_descriptors() -> None:
    """Raise the soft limit of open files to the hard one, as Go does: a topic takes several."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system may refuse what it says that it allows
            pass


def tick(archiver: Archiver, progress: Progress, metrics_file: Path | None) -> None:
    """Show how far it is, and keep the metrics file."""
    progress.show(lambda: f"{archiver.totals.messages:,} messages archived")
    if metrics_file is None:
        return
    import time

    from nsqtools.archive.notify import render_metrics, write_metrics

    write_metrics(metrics_file, render_metrics(archiver.states, time.time()))


def summary(archiver: Archiver) -> str:
    """The counts in a line."""
    totals = archiver.totals
    again = f", {totals.already_written} were written already" if totals.already_written else ""
    files = counted(totals.files, "file")
    return f"nsq: {totals.messages} messages, {totals.bytes} bytes, {files} finished{again}"
