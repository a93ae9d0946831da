"""``nsq pub``: publish texts, or the lines of a stream or of files, to a topic, now or later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.params import INPUT, Json, Topic, parse_moment
from nsqtools.cli.options.publishing import (
    DELIVERY,
    CheckpointFile,
    Publishing,
    PublishInput,
    body_selector,
    parse_input,
    total_size,
)
from nsqtools.cli.parsing.binding import OptionSet, in_panel, opt
from nsqtools.cli.render.outcomes import report_counts, suggest_limit
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import HTTP_PORT_OFFSET, Address, check_topic, http_url, parse_address
from nsqtools.protocol.schedule_request import SCHEDULE_TOPIC, check_entry_key, encode_request
from nsqtools.protocol.text import NS, counted
from nsqtools.records import filters
from nsqtools.records.envelope import RecordFormat
from nsqtools.records.units import Moment, parse_span, unescape

if TYPE_CHECKING:
    from nsqtools.client.connection_settings import ConnectionSettings
    from nsqtools.publish.input import InputCheckpoint

# Bounds the delay that the check for a scheduler adds to a successful publish.
ASK_TIMEOUT_S = 1.0


def check_interval(text: str) -> str:
    """Check an interval and return its text, which the request contains. Raises ``ValueError``."""
    from nsqtools.schedule.request import parse_interval

    parse_interval(text, 0)
    return text


class Scheduling(OptionSet):
    """The time of a delayed or repeated message, which ``nsq schedule serve`` publishes.

    Raises `ConfigurationError` for options that contradict each other.
    """

    panel = "Schedule"

    at: Moment | None = opt(
        "TIME", "Publish at this time, by nsq schedule serve.", parser=parse_moment
    )
    in_: float | None = opt("--in DURATION", "Publish after DURATION.", parser=parse_span)
    every: str | None = opt("DURATION", "Publish at this interval.", parser=check_interval)
    cron: str = opt("EXPRESSION", "Publish by a cron expression: '0 6 * * 1'.", default="")
    timezone: str = opt("ZONE", "Time zone of --cron.", default="", show_default="UTC")
    catch_up: str = opt(
        "all|last|none", "Missed occurrences to publish after an outage.", default="",
        show_default="last",
    )  # fmt: skip
    key: str | None = opt(
        "KEY", "Name of the entry, for replacing and cancelling it.", parser=check_entry_key
    )
    envelope: bool = opt("", "Publish the body inside JSON with the key and due time.")
    schedule_topic: str = opt("TOPIC", "Topic of the requests.", default=SCHEDULE_TOPIC)

    def check(self) -> None:
        times = [self.at is not None or self.in_ is not None, bool(self.every), bool(self.cron)]
        self.is_used = any(times)
        if self.at is not None and self.in_ is not None:
            raise ConfigurationError("give either --at or --in")
        if self.every and self.cron:
            raise ConfigurationError("give either --every or --cron")
        if self.timezone and not self.cron:
            raise ConfigurationError("--timezone is for --cron")
        if self.catch_up and not (self.every or self.cron):
            raise ConfigurationError("--catch-up is for --every and --cron")
        if (self.key or self.envelope) and not self.is_used:
            raise ConfigurationError("--key and --envelope need --at, --in, --every or --cron")

    def check_against(self, source: PublishInput, *, defers: bool, channel: str) -> None:
        """Raise `ConfigurationError` for other options of the command that contradict these."""
        if defers:
            raise ConfigurationError("--defer excludes --at, --in, --every and --cron")
        if channel:
            raise ConfigurationError("--channel excludes --at, --in, --every and --cron")
        if self.key and len(source.texts) * (source.times or 1) != 1:
            raise ConfigurationError(
                "--key is for one message", hint="Give the text of one message as an argument."
            )

    def request_for(
        self, topic: str, select: Callable[[bytes], bytes | None] | None
    ) -> Callable[[bytes], bytes | None]:
        """Return a function that converts each body that ``select`` keeps to a request.

        Raises `ConfigurationError` for times that the scheduler would refuse.
        """
        from nsqtools.schedule.request import parse_request

        at_ns = self.at and self.at.ns
        if self.in_ is not None:
            at_ns = time.time_ns() + round(self.in_ * NS)

        def request(body: bytes) -> bytes | None:
            selected = body if select is None else select(body)
            if not selected:
                return selected
            return encode_request(
                topic,
                selected,
                at_ns=at_ns,
                every=self.every or "",
                cron=self.cron,
                timezone=self.timezone,
                catch_up=self.catch_up,
                key=self.key or "",
                envelope=self.envelope,
            )

        try:
            parse_request(request(b"x") or b"", default_key="", asked_ns=time.time_ns())
        except ValueError as error:  # InvalidRequest, or an option that is not UTF-8
            raise ConfigurationError(str(error)) from None
        return request

    def warn_without_scheduler(self, connection: ConnectionSettings, runtime: Runtime) -> None:
        """Warn of each responding nsqd on which the topic of requests has no channel."""
        for address in connection.nsqd_tcp_addresses:
            if _has_channel(parse_address(address), self.schedule_topic, connection) is False:
                runtime.info(
                    f"nsq: warning: topic {self.schedule_topic} has no channel on {address}:"
                    " start nsq schedule serve"
                )


def _has_channel(tcp: Address, topic: str, connection: ConnectionSettings) -> bool | None:
    """Ask nsqd over HTTP whether the topic has a channel. Return None without an answer.

    The HTTP port is assumed to be one above the TCP port, as by default, and this is checked.
    """
    from nsqtools.client.connection import http_access

    url = http_url(str(Address(tcp.host, min(tcp.port + HTTP_PORT_OFFSET, 65535))), 0)
    options = connection.client_options(lookupd_poll_timeout_s=ASK_TIMEOUT_S)
    try:
        with http_access(options, [url]).nsqd(url) as client:
            if client.info()["tcp_port"] != tcp.port:
                return None
            return any(stats.channels for stats in client.stats(topic).topics or ())
    except NsqError:
        return None


@in_panel(INPUT)
def pub(
    topic: Topic,
    texts: Annotated[
        list[str] | None,
        Argument(
            metavar="TEXT",
            help="Messages to publish; @FILE for the lines of a file, - for standard input.",
        ),
    ] = None,
    message: list[str] | None = opt("-m TEXT", "Publish this text, whatever it begins with."),
    file: list[str] | None = opt(  # not Path, which would make standard input of ./-
        "-f FILE", "Publish the lines of this file; - for standard input."
    ),
    repeat: int | None = opt(
        "N", "Publish the texts N times; {n}, {uuid}, {now} and {now:%H:%M} are filled in.", min=1
    ),
    interval: float | None = opt("DURATION", "Time between two rounds of --repeat."),
    format: RecordFormat = opt(
        "",
        "Records are bodies (raw), or what tail --json and archives write (jsonl).",
        default=RecordFormat.raw,
    ),
    delimiter: bytes | None = opt(
        "-d TEXT",
        "Delimiter of records; \\0 for NUL, '' for one message of everything.",
        parser=unescape,
        show_default="\\n",
    ),
    where: filters.Filter | None = opt(
        "JQ", "Publish only JSON bodies that satisfy this jq expression.", parser=filters.where
    ),
    pick: Callable[[bytes], bytes | None] | None = opt(
        "JQ",
        "Publish the result of this jq expression instead of the body ('.user').",
        parser=filters.compile_pick,
    ),
    defer: float | None = opt(
        "DURATION",
        "Defer delivery by DURATION, up to nsqd's --max-req-timeout.",
        DELIVERY,
        parser=parse_span,
    ),
    checkpoint: CheckpointFile = None,
    json: Json = False,
    *,
    publishing: Publishing,
    schedule: Scheduling,
    runtime: Session,
) -> int:
    """Publish messages: texts, or the lines of standard input or of files.

    nsqd confirms every message. At the end, messages are counted on stderr by their outcome:
    confirmed, rejected (empty JSON bodies, messages above the size limit, bodies to which --where
    or --pick cannot be applied, refused by nsqd), unknown (nsqd may have it: the connection broke
    before the answer, or its disk failed within a batch) or unsent. Empty records are skipped,
    because NSQ cannot carry them. A full batch is sent immediately, a partial one after 5 ms.

    With --checkpoint an interrupted run continues at the position where it stopped; the last
    messages may be published twice. An unknown or unsent message ends the run, and the next run
    starts with it. Lines that were appended to the last file meanwhile are published too. A last
    line without a newline is published unchanged, and again as a whole once it has grown. A second
    run with the same checkpoint is refused, by a lock on FILE.lock.

    With -d '' each file, or standard input, is one message with every byte of it.

    With --channel only that channel of the topic gets the messages, from a temporary nsqd (see nsq
    replay), which ends when they are consumed.

    With --at, --in, --every or --cron nsqd gets a request, and nsq schedule serve publishes the
    message when it is due: see nsq-schedule(7). --defer leaves the delay to nsqd, which forgets it
    when it restarts.

    The exit status is 0 if everything was confirmed, 6 if only a part was, and otherwise that of
    the error.

    Examples:
        nsq pub -t clicks hello
        nsq pub -t clicks '{"n": {n}, "at": "{now}"}' --repeat 1000 --interval 10ms
        cat log | nsq pub -t events
        tail -f app.log | nsq pub -t events --unsent-file unsent.log
        nsq pub -t events @app.log --checkpoint app.checkpoint
        nsq tail -t clicks --json -n 1000 | nsq pub -t clicks-copy --format jsonl
        find . -print0 | nsq pub -t files -d '\\0' --rate 100
        nsq pub -t orders --channel billing @missed.log --lookupd-http-address lookup:4161
        curl -s https://example.com/report.json | nsq pub -t reports -d ''
        nsq pub -t orders --at 2026-12-24T18:00Z --key order-42 '{"id": 42}'
    """
    from nsqtools.publish.input import START, RecordSource
    from nsqtools.publish.publish_job import PublishJob, record_reader

    check_topic(topic)
    source = parse_input(texts or (), message or (), file or (), repeat, interval)
    select, publish_topic = body_selector(where, pick), topic
    if schedule.is_used:
        schedule.check_against(source, defers=defer is not None, channel=publishing.channel.name)
        select = schedule.request_for(topic, select)
        publish_topic = check_topic(schedule.schedule_topic)
    ending = b"\n" if delimiter is None else delimiter
    if delimiter is not None and source.texts and publishing.unsent_file is None:
        raise ConfigurationError(
            "--delimiter is for files and standard input",
            hint="Each text is one message; give several messages as several texts.",
        )
    if not ending and (checkpoint is not None or publishing.unsent_file is not None):
        raise ConfigurationError("--checkpoint and --unsent-file need a delimiter of records")
    with (
        open_checkpoint(checkpoint, source, ending, publishing, runtime) as position,
        publishing.open(runtime, ending, resumes=False, defer_s=defer, inputs=source.paths) as run,
    ):
        publisher, total = run.publisher, total_size(source.paths)

        def progress_text() -> str:
            done = reader.bytes_read
            return run.progress_text(done, total, f"{min(1.0, done / (total or 1)):.0%}")

        job = PublishJob(
            publisher,
            publish_topic,
            record_reader(publish_topic, select, is_jsonl=format is RecordFormat.jsonl),
            unsent=run.unsent,
            on_batch_ended=position.advance if position is not None else None,
            warn=run.progress.tell,
            on_progress=lambda: run.progress.show(progress_text),
        )
        start = position.place if position else START
        rate = publishing.rate if position else 0.0
        reader = RecordSource(source.paths, ending, job.should_stop, start, rate)

        def publish() -> None:
            try:
                job.run(source.batches(reader, job.should_stop))
            finally:
                if position is not None:
                    position.save()

        signals = run.finish(publish)
    if schedule.is_used:
        schedule.warn_without_scheduler(publishing.connection, runtime)
    counts = publisher.counts
    status = report_counts(runtime, publisher, json=json)
    if position is not None and (signals.received or counts.unknown or counts.unsent):
        records = counted(position.place.records, "record", ",")
        runtime.info(f"nsq: {records} done; run it again to continue")
    suggest_limit(runtime, job.largest_rejected)
    return signals.status(otherwise=publishing.channel.status(runtime, status))


@contextmanager
def open_checkpoint(
    path: Path | None,
    source: PublishInput,
    delimiter: bytes,
    publishing: Publishing,
    runtime: Runtime,
) -> Iterator[InputCheckpoint | None]:
    """Lock and read the checkpoint of a run, None without ``--checkpoint``.

    Raises `ConfigurationError` for input and options that do not allow a checkpoint, and as
    `InputCheckpoint`.
    """
    from nsqtools.publish.input import InputCheckpoint, locked_checkpoint

    if path is None:
        yield None
        return
    if source.texts or "-" in source.paths or not all(map(os.path.isfile, source.paths)):
        raise ConfigurationError("--checkpoint is for files, not for texts, pipes or stdin")
    if publishing.unsent_file is not None:
        raise ConfigurationError(
            "--checkpoint and --unsent-file exclude each other",
            hint="With a checkpoint, the next run publishes the unsent records.",
        )
    with locked_checkpoint(path):
        checkpoint = InputCheckpoint(path, source.paths, delimiter)
        # A checkpoint that cannot be written must fail before anything is published. Otherwise
        # each run would publish everything again.
        checkpoint.save()
        if checkpoint.place.records:
            runtime.info(
                f"nsq: continuing after {counted(checkpoint.place.records, 'record', ',')}"
            )
        yield checkpoint
