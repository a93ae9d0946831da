"""``nsq redrive``: dead letters back to where they came from."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument

from nsqtools.cli.options.connection import ProducerConnection
from nsqtools.cli.options.publishing import (
    DELIVERY,
    Rate,
    RetryTimeout,
    UnsentRecords,
    publish_options,
    unsent_files,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress, report_publishing
from nsqtools.cli.render.output import write_lines
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.runtime import Session
from nsqtools.client.publication import PublishMode
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted

Paths = Annotated[
    list[Path], Argument(metavar="FILE", help="Files of dead letters; - is standard input.")
]


def redrive(
    files: Paths,
    topic: str | None = opt(
        "-t TOPIC", "Publish to this topic; default: the topic of each message."
    ),
    error: str | None = opt("REGEX", "Keep dead letters whose error matches.", "Selection"),
    rate: Rate = 0.0,
    retry_timeout: RetryTimeout = None,
    unsent_file: UnsentRecords = None,
    dry_run: bool = opt("", "Show what would be published, by topic and error.", DELIVERY),
    *,
    connection: ProducerConnection,
    runtime: Session,
) -> int:
    """Publish dead letters again, to the topics that they came from.

    Reads the files that --dead-letter-file writes, and everything else in the form of tail --json.
    Each message gets a new id, and its body is what it was. With several nsqd, messages go to the
    first that works. The files are left as they are: remove them when the exit status is 0. What
    was not confirmed is appended to --unsent-file, to be redriven from there.

    A topic of dead letters has raw bodies: to redrive it, forward it with nsq to-nsq.

    Examples:
        nsq redrive dead.jsonl --dry-run
        nsq redrive dead.jsonl --error 'HTTP 5' --unsent-file again.jsonl
        nsq to-nsq -t clicks.dead --destination-topic clicks --until-empty \\
            --destination-nsqd-tcp-address 127.0.0.1:4150
    """
    from nsqtools.publish.redrive import Redrive

    for path in files:
        if str(path) != "-" and not path.is_file():
            raise ConfigurationError(f"{path} is not a file of dead letters")
    unsent = unsent_files(unsent_file, b"\n", PublishMode.FAILOVER, connection)
    with Progress(runtime) as progress:
        job = Redrive(
            [str(path) for path in files],
            connection.nsqd_tcp_addresses,
            topic=topic,
            error=error,
            rate=rate,
            client_options=connection.client_options(),
            options=publish_options(PublishMode.FAILOVER, retry_timeout),
            unsent=unsent,
            warn=lambda line: runtime.tell(f"nsq: {line}"),
            show=lambda: progress.show(lambda: f"{job.counts.confirmed:,} confirmed"),
            is_dry=dry_run,
        )
        with stopping(job.stop) as signals, unsent or nullcontext():
            job.run()
    if dry_run:
        kinds = sorted(job.kinds.items())
        lines = (f"{counted(count, 'message')} for {name}: {why}" for (name, why), count in kinds)
        write_lines(runtime, lines)
        return signals.status()
    status = report_publishing(
        runtime,
        job.counts.summary(),
        confirmed=job.counts.confirmed,
        is_complete=not job.counts.unconfirmed,
        error=job.last_error,
    )
    return signals.status(otherwise=status)
