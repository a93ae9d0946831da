"""``nsq pub``: lines of a stream, or of files, to a topic."""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nsqtools.cli.options.connection import ProducerConnection
from nsqtools.cli.options.params import INPUT, Json, Topic, delimiter_option, duration_option
from nsqtools.cli.options.publishing import (
    DELIVERY,
    Rate,
    RetryTimeout,
    RetryUnknown,
    Spread,
    UnsentRecords,
)
from nsqtools.cli.render.outcomes import report_counts
from nsqtools.cli.render.progress import Progress
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.client.spread import PublishMode
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.commands import MAX_DELAY_S
from nsqtools.protocol.names import check_topic
from nsqtools.records.units import argument_bytes, parse_span, unescape


def parse_delimiter(text: str) -> bytes:
    """Read a delimiter with escapes. Raises ``ValueError``."""
    if not text:
        raise ValueError("a delimiter cannot be empty")
    return unescape(text)


def parse_defer(text: str) -> float:
    """Read a delay in seconds. Raises ``ValueError`` for one that nsqd refuses."""
    seconds = parse_span(text)
    if seconds > MAX_DELAY_S:
        raise ValueError(f"{text!r} is above nsqd's limit of 1h")
    return seconds


class InputFormat(Enum):
    """What a record of the input is."""

    raw = "raw"
    jsonl = "jsonl"


Paths = Annotated[
    list[Path] | None,
    Argument(metavar="FILE", help="Files to publish; without any, or -, standard input."),
]
Messages = Annotated[
    list[str] | None,
    Option(
        "--message",
        "-m",
        metavar="TEXT",
        help="Publish this text, and do not read standard input.",
        rich_help_panel=INPUT,
    ),
]
Format = Annotated[
    InputFormat,
    Option(
        "--format",
        help="raw: each record is a body. jsonl: what tail --json and archives write.",
        rich_help_panel=INPUT,
    ),
]
Delimiter = Annotated[
    bytes | None,
    delimiter_option("What ends each record; \\0 for NUL.", panel=INPUT, parser=parse_delimiter),
]
Defer = Annotated[
    float | None,
    duration_option(
        "--defer",
        "Defer delivery of each message by DURATION, up to 1h.",
        panel=DELIVERY,
        parser=parse_defer,
    ),
]


def pub(
    topic: Topic,
    files: Paths = None,
    message: Messages = None,
    format: Format = InputFormat.raw,
    delimiter: Delimiter = None,
    rate: Rate = 0.0,
    defer: Defer = None,
    mode: Spread = PublishMode.ALL,
    retry_timeout: RetryTimeout = None,
    retry_unknown: RetryUnknown = False,
    unsent_file: UnsentRecords = None,
    json: Json = False,
    *,
    connection: ProducerConnection,
    runtime: Session,
) -> int:
    """Publish the lines of standard input, or of files, to a topic.

    nsqd confirms every message. The counts at the end, on stderr, say how they ended: confirmed,
    rejected (empty JSON bodies, messages above the size limit, refused by nsqd), unknown (the
    connection broke before the answer) or unsent. Empty records are skipped, because NSQ cannot
    carry them. A full batch is sent at once, a partial one after 5 ms.

    The exit status is 0 when everything was confirmed, 6 when only a part was; otherwise it is that
    of the error.

    Examples:
        nsq pub -t clicks -m hello
        cat log | nsq pub -t events
        tail -f app.log | nsq pub -t events --unsent-file unsent.log
        nsq tail -t clicks --json -n 1000 | nsq pub -t clicks-copy --format jsonl
        find . -print0 | nsq pub -t files -d '\\0' --rate 100
    """
    from nsqtools.publish.publish_job import PublishJob, UnsentFiles
    from nsqtools.publish.publisher import RETRY_TIMEOUT_S, PublishOptions, each_counted

    check_topic(topic)
    if message and files:
        raise ConfigurationError("give either messages (-m) or files")
    for path in files or ():
        if str(path) != "-" and not path.exists():
            raise OutputError(
                f"cannot read {path} (No such file or directory)",
                hint=f"To publish the text itself: -m {path}",
            )
    ending = b"\n" if delimiter is None else delimiter
    unsent = None
    if unsent_file is not None:
        unsent = UnsentFiles(unsent_file, ending, each_counted(mode, connection.nsqd_tcp_addresses))
    with Progress(runtime) as progress:
        job = PublishJob(
            topic,
            connection.nsqd_tcp_addresses,
            paths=[str(path) for path in files] if files else ["-"],
            records=[argument_bytes(text) for text in message] if message else None,
            delimiter=ending,
            is_jsonl=format is InputFormat.jsonl,
            rate=rate,
            client_options=connection.client_options(),
            options=PublishOptions(
                mode,
                RETRY_TIMEOUT_S if retry_timeout is None else retry_timeout,
                retry_unknown,
                defer,
            ),
            unsent=unsent,
            warn=lambda line: warn(runtime, progress, line),
            show=lambda counts: progress.show(lambda: f"{counts.confirmed:,} confirmed"),
        )
        with stopping(job.stop) as signals, unsent or nullcontext():
            job.run()
    status = report_counts(runtime, job, json=json)
    if job.options_for_larger:
        words = " ".join(f"-X {option}" for option in job.options_for_larger)
        runtime.tell(f"hint: Where nsqd takes larger messages: {words}")
    return signals.status(otherwise=status)


def warn(runtime: Runtime, progress: Progress, line: str) -> None:
    """Say something on stderr in the middle of the run."""
    progress.clear()
    runtime.tell(f"nsq: {line}")
