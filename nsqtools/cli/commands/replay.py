"""``nsq replay`` publishes archived messages again, and ``nsq redrive`` dead letters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.params import (
    SELECTION,
    ArchivePaths,
    Count,
    Delimiter,
    Json,
    Since,
    Until,
    Yes,
    time_range,
)
from nsqtools.cli.options.printing import KEEP_TOPICS, MessageFilter, TopicFilter
from nsqtools.cli.options.publishing import (
    DELIVERY,
    CheckpointFile,
    ModeOption,
    PublishDryRun,
    Publishing,
    PublishRun,
    TopicMap,
    topic_map,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import (
    DamageReporter,
    Progress,
    report_counts,
    report_timeless,
    suggest_limit,
)
from nsqtools.cli.render.output import write_json, write_lines, write_text
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, status_of_work
from nsqtools.client.connection_settings import PublishMode
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted, escape_line
from nsqtools.records.filters import every

if TYPE_CHECKING:
    from nsqtools.client.connection_settings import ConnectionSettings
    from nsqtools.replay import Replay, ReplayInputs


def parse_speed(text: str) -> float:
    """Read ``2x`` or ``0.5``. Raises ``ValueError``."""
    try:
        speed = float(text.strip().removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ValueError(f"{text!r} is not a speed; write 1x, 2x or 0.5x")
    return speed


class ReplayOptions(Publishing):
    """Each message is published to one nsqd, because each was on one nsqd."""

    mode: ModeOption = PublishMode.ROUND_ROBIN


def replay(
    paths: ArchivePaths,
    topic: TopicMap = None,
    since: Since = None,
    until: Until = None,
    from_topic: list[str] | None = opt("GLOB", KEEP_TOPICS, SELECTION),
    count: Count = None,
    dedupe: bool = opt(
        "", "Publish each message once, by topic, nsqd and id; remembers every id.", SELECTION
    ),
    delimiter: Delimiter = None,
    speed: float | None = opt(
        "FACTOR", "Pace of the original (1x, 10x); else full speed.", DELIVERY, parser=parse_speed
    ),
    checkpoint: CheckpointFile = None,
    yes: Yes = False,
    dry_run: PublishDryRun = False,
    json: Json = False,
    *,
    keep: MessageFilter,
    publishing: ReplayOptions,
    runtime: Session,
) -> int:
    """Publish archived messages again, in order of time.

    Without --topic and --channel, every consumer of the topics gets the messages again: the command
    counts them, shows the number for each topic, and asks for confirmation; in a script, give
    --yes. Several nsqd share the messages by default, whereas nsq pub publishes to all of them, as
    to_nsq does.

    Reads the files of nsq to-file and nsq_to_file, compressed or not, also files in progress and
    damaged files (damage is skipped and reported). With --checkpoint an interrupted replay
    continues where it stopped; at most the last batch of 1000 messages is published twice.

    With --channel the messages reach one channel, with their ids and times, and no other channel
    of the topic: a temporary nsqd in this process registers at nsqlookupd, and ends when they are
    consumed. After an interruption the same command continues. The exit status is 7 if no consumer
    connects.

    Examples:
        nsq replay /var/nsq --topic clicks=clicks-again --dry-run
        nsq replay clicks.*.log.gz --since -2h --speed 10x
        nsq replay /var/nsq --from-topic clicks --where '.status >= 500' -n 100 --topic retries
        nsq replay /var/nsq --checkpoint replay.json --rate 5000 --yes
        nsq replay /var/nsq --from-topic orders --channel billing --lookupd-http-address lookup:4161
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.files.opening import raise_open_file_limit
    from nsqtools.replay import MessageSelection, Replay, ReplayInputs

    topics = TopicFilter(from_topic or ())
    selection = MessageSelection(
        time_range(since, until),
        every([topics, keep] if keep else [topics]),
        dedupe,
        topic_map(topic or ()),
        b"\n" if delimiter is None else delimiter,
    )
    channel = publishing.channel
    if channel.name and checkpoint is not None:
        raise ConfigurationError("--channel keeps its own checkpoint, in --data-path")
    raise_open_file_limit()  # The merge has a file of each topic open.
    inputs = ReplayInputs(find_archives(paths), selection, count, checkpoint)
    if not (yes or topic or channel.name or dry_run):
        runtime.require_terminal()  # Counting may take long, so this comes first.
        if not runtime.confirm(plan(inputs, publishing, runtime), "Go on?", yes=False):
            return ExitStatus.FAILED
    with (
        nullcontext() if dry_run else inputs.locked(),
        publishing.open(runtime, b"", dry_run=dry_run, inputs=inputs.local_files) as output,
    ):
        publisher, damage = output.publisher, DamageReporter(runtime, output.progress)
        job = Replay(
            inputs,
            publisher,
            speed=None if dry_run else speed,
            dry_run=dry_run,
            on_damage=damage,
            unsent=output.unsent,
            warn=output.progress.tell,
            on_progress=partial(show_progress, output),
        )
        signals = output.finish(job.run)
    report_timeless(runtime, job.timeless)
    if dry_run:
        status = show_planned(runtime, job, damage, json=json)
    else:
        status = report_counts(runtime, publisher, json=json, repeated=job.repeated, damage=damage)
    suggest_limit(runtime, job.largest_rejected)
    if checkpoint is not None and (publisher.counts.unknown or publisher.counts.unsent):
        runtime.info(
            "nsq: run it again to continue; up to 1000 messages of the last batch may be published "
            "twice"
        )
    exit_status = signals.status(otherwise=channel.status(runtime, status))
    if not (count or job.resumes or signals.received or publisher.last_error):
        topics.check()
    return exit_status


def show_progress(output: PublishRun, job: Replay) -> None:
    """Update the progress line."""
    read, total = job.read, job.total or 0
    output.progress.show(lambda: output.progress_text(read, total, f"{read:,} of {total:,}"))


def plan(inputs: ReplayInputs, publishing: Publishing, runtime: Runtime) -> Iterator[str]:
    """Count the messages to publish, and yield a line for each topic."""
    with Progress(runtime) as progress:
        planned = inputs.count_messages(
            publishing.publisher(),
            lambda job: progress.show(lambda: f"{counted(job.read, 'message', ',')} counted"),
        )
    addresses = " and ".join(publishing.connection.nsqd_tcp_addresses)
    for topic, count in sorted(planned.items()):
        messages = counted(count, "message")
        yield f"publish {messages} to topic {topic} on {addresses}, for all of its channels"


def show_planned(
    runtime: Runtime, job: Replay, damage: DamageReporter, *, json: bool
) -> ExitStatus:
    """Print the number of messages for each topic; return the exit status."""
    if json:
        write_json(runtime, {"topics": job.planned})
    else:
        planned = sorted(job.planned.items())
        write_text(runtime, "".join(f"{escape_line(topic)}\t{count}\n" for topic, count in planned))
    runtime.info(_would_be_published(job.planned))
    return damage.status


def _would_be_published(planned: Mapping[str, int]) -> str:
    return f"nsq: {counted(sum(planned.values()), 'message')} would be published"


def topic_hint(topic: str, connection: ConnectionSettings) -> str:
    """Return the command that redrives a topic of dead letters, which has only bodies."""
    addresses = " ".join(
        f"--{side}nsqd-tcp-address {address}"
        for address in connection.nsqd_tcp_addresses
        for side in ("", "destination-")
    )
    original = topic.removesuffix(".dead")
    target = "TOPIC" if original == topic else original
    return (
        f"For a topic: nsq to-nsq -t {topic} --destination-topic {target} --until-empty {addresses}"
    )


DeadLetterPaths = Annotated[  # not Path, which would make standard input of ./-
    list[str] | None, Argument(metavar="FILE", help="Files of dead letters; - is standard input.")
]


class Redriving(Publishing):
    """Each dead letter is published to one nsqd."""

    mode: ModeOption = PublishMode.FAILOVER


def redrive(
    files: DeadLetterPaths = None,
    topic: str | None = opt("-t TOPIC", "Publish to this topic, not to that of each message."),
    error: str | None = opt("REGEX", "Keep dead letters whose error matches.", "Selection"),
    dry_run: bool = opt("", "Show what would be published, by topic and error.", DELIVERY),
    *,
    publishing: Redriving,
    runtime: Session,
) -> int:
    """Publish dead letters again, to the topics that they came from.

    Reads files of --dead-letter-file and other files with lines like those of tail --json. Each
    message gets a new id and keeps its body. The files are not changed: remove them when the exit
    status is 0. Unconfirmed messages are appended to --unsent-file, to be redriven from there.

    A topic of dead letters has raw bodies: to redrive it, forward it with nsq to-nsq.

    With --channel they reach only the channel that gave them up, by a temporary nsqd (see nsq
    replay), with their ids and times; attempts begin at 0.

    Examples:
        nsq redrive dead.jsonl --dry-run
        nsq redrive dead.jsonl --error 'HTTP 5' --unsent-file again.jsonl
        nsq redrive dead.jsonl --channel billing --lookupd-http-address lookup:4161
        nsq to-nsq -t clicks.dead --destination-topic clicks --until-empty \\
            --destination-nsqd-tcp-address 127.0.0.1:4150
    """
    from nsqtools.publish.input import RecordSource
    from nsqtools.publish.publish_job import PublishJob, dead_letter_reader

    connection = publishing.connection
    if not files:
        raise ConfigurationError(
            "no file of dead letters given", hint=topic_hint(topic or "TOPIC", connection)
        )
    for path in files:
        if path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
            raise ConfigurationError(
                f"{path} is not a file of dead letters", hint=topic_hint(path, connection)
            )
    read = dead_letter_reader(topic, error)
    with publishing.open(
        runtime, b"\n", resumes=all(map(os.path.isfile, files)), dry_run=dry_run, inputs=files
    ) as run:
        job = PublishJob(
            run.publisher,
            read=read,
            unsent=run.unsent,
            dry_run=dry_run,
            warn=run.progress.tell,
            on_progress=lambda: run.progress.show(lambda: run.progress_text(0, 0, "")),
        )
        source = RecordSource(files, b"\n", job.should_stop)
        signals = run.finish(lambda: job.run(source.batches()))
    if dry_run:
        kinds = sorted(job.dead_letters.items())
        lines = (f"{counted(count, 'message')} for {name}: {why}" for (name, why), count in kinds)
        write_lines(runtime, lines)
        runtime.info(_would_be_published(job.planned))
        is_whole = not run.publisher.counts.rejected
        status = status_of_work(is_whole=is_whole, is_anything_done=bool(kinds))
        suggest_limit(runtime, job.largest_rejected)
        return signals.status(otherwise=status)
    status = report_counts(runtime, run.publisher, json=False)
    suggest_limit(runtime, job.largest_rejected)
    return signals.status(otherwise=publishing.channel.status(runtime, status))
