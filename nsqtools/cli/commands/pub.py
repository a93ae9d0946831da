"""``nsq pub``: texts, or lines of a stream or of files, to a topic."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from typer import Argument

from nsqtools.cli.options.params import INPUT, Json, Topic, parse_delimiter
from nsqtools.cli.options.publishing import (
    DELIVERY,
    CheckpointFile,
    Publishing,
    body_selector,
    parse_input,
    total_size,
)
from nsqtools.cli.options.scheduling import Scheduling
from nsqtools.cli.parsing.binding import in_panel, opt
from nsqtools.cli.render.outcomes import report_counts
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.records import filters
from nsqtools.records.envelope import RecordFormat
from nsqtools.records.units import parse_span


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
    file: list[Path] | None = opt(
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
        "-d TEXT", "What ends each record; \\0 for NUL.", parser=parse_delimiter, show_default="\\n"
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

    nsqd confirms every message. The counts at the end, on stderr, say how they ended: confirmed,
    rejected (empty JSON bodies, messages above the size limit, bodies to which --where or --pick
    cannot be applied, refused by nsqd), unknown (nsqd may have it: the connection broke before the
    answer, or its disk failed within a batch) or unsent. Empty records are skipped, because NSQ
    cannot carry them. A full batch is sent at once, a partial one after 5 ms.

    With --checkpoint an interrupted run continues in its files where it stopped; the messages that
    were being published then may be published twice. One that is unknown or unsent ends the run,
    and the next begins with it. What was appended to the last file since is published too. A last
    line without its end is published as it is, and again, whole, once it has grown. A second run
    with the same checkpoint meanwhile is refused, by a lock on FILE.lock.

    With --channel the messages reach that channel of the topic and no other, by a temporary nsqd
    (see nsq replay), which ends when they are consumed.

    With --at, --in, --every or --cron nsqd gets a request, and nsq schedule serve publishes the
    message when it is due: see nsq-schedule(7). --defer leaves the delay to nsqd, which forgets it
    when it restarts.

    The exit status is 0 when everything was confirmed, 6 when only a part was; otherwise it is that
    of the error.

    Examples:
        nsq pub -t clicks hello
        nsq pub -t clicks '{"n": {n}, "at": "{now}"}' --repeat 1000 --interval 10ms
        cat log | nsq pub -t events
        tail -f app.log | nsq pub -t events --unsent-file unsent.log
        nsq pub -t events @app.log --checkpoint app.checkpoint
        nsq tail -t clicks --json -n 1000 | nsq pub -t clicks-copy --format jsonl
        find . -print0 | nsq pub -t files -d '\\0' --rate 100
        nsq pub -t orders --channel billing @missed.log --lookupd-http-address lookup:4161
        nsq pub -t orders --at 2026-12-24T18:00Z --key order-42 '{"id": 42}'
    """
    from nsqtools.publish.input import START, InputCheckpoint, RecordSource, locked_checkpoint
    from nsqtools.publish.publish_job import PublishJob, record_reader

    check_topic(topic)
    given = parse_input(texts or (), message or (), file or (), repeat, interval)
    select, publish_topic = body_selector(where, pick), topic
    if schedule.is_used:
        schedule.check_against(
            given.texts, defers=defer is not None, channel=publishing.channel.name
        )
        select, publish_topic = schedule.request_for(topic, select), schedule.schedule_topic
    ending, noted = delimiter or b"\n", None
    with ExitStack() as stack:
        if checkpoint is not None:
            if given.texts or "-" in given.paths or not all(map(os.path.isfile, given.paths)):
                raise ConfigurationError("--checkpoint is for files, not for texts, pipes or stdin")
            if publishing.unsent_file is not None:
                raise ConfigurationError(
                    "--checkpoint and --unsent-file exclude each other",
                    hint="With a checkpoint, the next run publishes what was not sent.",
                )
            stack.enter_context(locked_checkpoint(checkpoint))
            noted = InputCheckpoint(checkpoint, given.paths, ending)
            noted.save()  # where it cannot be written, each run would publish all again
            if noted.place.records:
                runtime.info(f"nsq: going on after {noted.place.records:,} records")
        run = stack.enter_context(
            publishing.open(runtime, ending, resumes=False, defer_s=defer, inputs=given.paths)
        )
        publisher, total = run.publisher, total_size(given.paths)

        def progress_text() -> str:
            done = source.bytes_read
            return run.progress_text(done, total, f"{min(1.0, done / (total or 1)):.0%}")

        job = PublishJob(
            publisher,
            publish_topic,
            record_reader(publish_topic, select, is_jsonl=format is RecordFormat.jsonl),
            unsent=run.unsent,
            on_batch_ended=noted.advance if noted is not None else None,
            warn=run.progress.tell,
            on_progress=lambda: run.progress.show(progress_text),
        )
        begin = noted.place if noted else START
        rate = publishing.rate if noted else 0.0
        source = RecordSource(given.paths, ending, job.should_stop, begin, rate)

        def publish() -> None:
            try:
                job.run(given.batches(source, lambda: publisher.is_stopped))
            finally:
                if noted is not None:
                    noted.save()

        signals = run.finish(publish)
    if schedule.is_used:
        schedule.warn_without_scheduler(publishing.connection, runtime)
    counts = publisher.counts
    status = report_counts(runtime, publisher, json=json)
    if noted is not None and (signals.received or counts.unknown or counts.unsent):
        runtime.info(f"nsq: {noted.place.records:,} records are done; run it again to go on")
    if job.largest_rejected:
        larger = f"-X publish_max_msg_size={job.largest_rejected}"
        runtime.info(f"hint: Where nsqd takes larger messages: {larger}")
    return signals.status(otherwise=publishing.channel.status(runtime, status))
