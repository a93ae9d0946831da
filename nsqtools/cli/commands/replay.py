"""``nsq replay``: archived messages back into topics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ProducerConnection
from nsqtools.cli.options.params import (
    SELECTION,
    ArchivePaths,
    Count,
    Delimiter,
    Json,
    Since,
    Until,
    time_range,
)
from nsqtools.cli.options.printing import FromTopics, MessageFilter, TopicFilter
from nsqtools.cli.options.publishing import (
    DELIVERY,
    CheckpointFile,
    DryRun,
    Rate,
    RetryTimeout,
    RetryUnknown,
    Spread,
    TopicMap,
    UnsentMessages,
    how_far,
    publish_options,
    topic_map,
    unsent_files,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import DamageReporter, Progress, report_counts
from nsqtools.cli.render.output import write_json, write_text
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.client.publication import PublishMode
from nsqtools.protocol.text import counted, escape_line
from nsqtools.records.filters import every

if TYPE_CHECKING:
    from nsqtools.replay.replay import Replay


def parse_speed(text: str) -> float:
    """Read ``2x`` or ``0.5``. Raises ``ValueError``."""
    try:
        speed = float(text.strip().removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ValueError(f"{text!r} is not a speed; write 1x, 2x or 0.5x")
    return speed


def replay(
    paths: ArchivePaths,
    topic: TopicMap = None,
    since: Since = None,
    until: Until = None,
    from_topic: FromTopics = None,
    count: Count = None,
    dedupe: bool = opt(
        "", "Publish each message once, by topic, nsqd and id; remembers every id.", SELECTION
    ),
    delimiter: Delimiter = None,
    rate: Rate = 0.0,
    speed: float | None = opt(
        "FACTOR",
        "Multiple of the original speed (1x, 10x); without it, full speed.",
        DELIVERY,
        parser=parse_speed,
    ),
    mode: Spread = PublishMode.ROUND_ROBIN,
    retry_timeout: RetryTimeout = None,
    retry_unknown: RetryUnknown = False,
    checkpoint: CheckpointFile = None,
    unsent_file: UnsentMessages = None,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    keep: MessageFilter,
    connection: ProducerConnection,
    runtime: Session,
) -> int:
    """Publish archived messages again, in order of time.

    Reads what nsq to-file and nsq_to_file write, compressed or not, files in progress and damaged
    ones too (what is damaged is skipped and reported). With --checkpoint an interrupted replay
    continues where it stopped; at most the batch of 1000 messages that was being published then is
    published twice.

    Examples:
        nsq replay /var/nsq --topic clicks=clicks-again --dry-run
        nsq replay clicks.*.log.gz --since -2h --speed 10x
        nsq replay /var/nsq --from-topic clicks --where '.status >= 500' -n 100 --topic retries
        nsq replay /var/nsq --checkpoint replay.json --rate 5000
    """
    from nsqtools.archive.finding import find_archives
    from nsqtools.replay.replay import Checkpoint, MessageSelection, Replay

    chosen = TopicFilter(from_topic or ())
    selection = MessageSelection(
        time_range(since, until),
        every([chosen, keep] if keep else [chosen]),
        dedupe,
        topic_map(topic or ()),
        b"\n" if delimiter is None else delimiter,
    )
    archives = find_archives(paths)
    unsent = unsent_files(unsent_file, b"", mode, connection)
    with Progress(runtime) as progress, unsent or nullcontext():
        damage = DamageReporter(runtime, progress)
        began_s = runtime.monotonic()

        def how_far_now() -> str:
            counted, elapsed_s = (
                f"{job.read:,} of {job.total or 0:,}",
                runtime.monotonic() - began_s,
            )
            return how_far(job.counts.confirmed, job.read, job.total or 0, elapsed_s, read=counted)

        job = Replay(
            archives,
            connection.nsqd_tcp_addresses,
            selection,
            client_options=connection.client_options(),
            options=publish_options(mode, retry_timeout, retry_unknown=retry_unknown),
            speed=speed,
            rate=rate,
            count=count,
            dry_run=dry_run,
            checkpoint=Checkpoint(checkpoint) if checkpoint else None,
            on_damage=damage,
            unsent=unsent,
            show=lambda: progress.show(how_far_now),
        )
        with stopping(job.stop) as signals:
            job.run()
    if count is None and not signals.received and not job.last_error:
        chosen.check()
    status = report(runtime, job, damage, dry_run=dry_run, json=json)
    if checkpoint is not None and (job.counts.unknown or job.counts.unsent):
        runtime.tell(
            "nsq: run it again to continue; up to 1000 messages of the last batch may come twice"
        )
    return signals.status(otherwise=status)


def report(
    runtime: Runtime, job: Replay, damage: DamageReporter, *, dry_run: bool, json: bool
) -> ExitStatus:
    """Report what was published, or would be; return the exit status."""
    if not dry_run:
        return report_counts(runtime, job, json=json, repeated=job.repeated, damage=damage)
    if json:
        write_json(runtime, {"topics": job.planned}, indent=2)
    else:
        planned = sorted(job.planned.items())
        write_text(runtime, "".join(f"{escape_line(topic)}\t{count}\n" for topic, count in planned))
    runtime.tell(f"nsq: {counted(job.counts.confirmed, 'message')} would be published")
    return damage.status
