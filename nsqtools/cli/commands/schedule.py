"""``nsq schedule``: the scheduler, and a look at the entries that it keeps."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.connection import ConsumerConnection, ProducerConnection
from nsqtools.cli.options.params import ListenHTTP
from nsqtools.cli.options.publishing import DELIVERY
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import ListingForm, write_json, write_records
from nsqtools.cli.running.runtime import ExitStatus, Session, hangup_signals, stop_on_signals
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.schedule_request import (
    SCHEDULE_TOPIC,
    check_entry_key,
    encode_cancellation,
    format_time,
)
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import ScheduledEntry
    from nsqtools.schedule.store import StoredEntry

COLUMNS = ("key", "due", "topic", "bytes", "repeats", "error")

ScheduleTopic = Annotated[str, opt("--schedule-topic TOPIC", "Topic of the requests.", DELIVERY)]
SchedulePath = Annotated[Path, opt("--data-path DIR", "Directory of the scheduler's entries.")]
EntryKey = Annotated[str, Argument(metavar="KEY", help="Key of the entry.", parser=check_entry_key)]


def serve(
    data_path: SchedulePath,
    schedule_topic: ScheduleTopic = SCHEDULE_TOPIC,
    channel: str = opt("--channel -c CHANNEL", "Channel of the requests.", default="scheduler"),
    dead_letter_topic: str | None = opt(
        "TOPIC", "Publish refused messages to this topic.", DELIVERY
    ),
    dead_letter_file: Path | None = opt(
        "FILE", "Append refused messages to this file, for nsq redrive.", DELIVERY
    ),
    listen_http: ListenHTTP = None,
    *,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Publish messages when they are due: nsq pub --at, --in, --every and --cron.

    Requests are messages of the topic nsq.schedule. They are kept in --data-path, and finished when
    they are on disk. Each message is published at least once, never before its time, to the nsqd
    given, or to those that nsqlookupd lists. Refused messages go to the dead letters; without these
    they stay among the entries with their error.

    Two schedulers on one host may share --data-path: the second waits, and takes over when the
    first ends. On two hosts each has its own entries, and a cancellation reaches only one, so use
    keys with one active scheduler only.

    Examples:
        nsq schedule serve --data-path /var/lib/nsq-schedule
        nsq schedule serve --data-path /var/lib/nsq-schedule --dead-letter-topic orders.dead
    """
    from nsqtools.client.consumer import make_consumer
    from nsqtools.client.options import LARGEST_SIZE
    from nsqtools.client.producer import Producer
    from nsqtools.http.service import service
    from nsqtools.schedule.scheduler import CheckedClock, RejectedFile, RejectedTopic, Scheduler
    from nsqtools.schedule.store import ScheduleStore, wait_for_lock

    if dead_letter_topic is not None and dead_letter_file is not None:
        raise ConfigurationError("give either --dead-letter-topic or --dead-letter-file")
    if dead_letter_topic is not None:
        check_topic(dead_letter_topic)
    if dead_letter_topic == schedule_topic:  # each dead letter would be an invalid request
        raise ConfigurationError(f"dead letters cannot go to {schedule_topic}, which is consumed")
    # nsqd decides whether a message is too large: it accepted the request.
    options = connection.client_options(max_in_flight=1000, publish_max_msg_size=LARGEST_SIZE)
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        if scheduler is not None:
            scheduler.stop()

    scheduler: Scheduler | None = None
    with ExitStack() as stack:
        signals = stack.enter_context(stop_on_signals(stop, additional=hangup_signals()))
        if not stack.enter_context(wait_for_lock(data_path, lambda: is_stopped, runtime.info)):
            return signals.status()
        store = stack.enter_context(closing(ScheduleStore(data_path)))
        producer = stack.enter_context(
            Producer(
                connection.nsqd_tcp_addresses,
                options,
                lookupd_http_addresses=connection.lookupd_http_addresses,
                address_map=connection.address_map,
                linger_s=0.005,
            )
        )
        consumer = stack.enter_context(make_consumer(connection, schedule_topic, channel, options))
        if dead_letter_file is not None:
            keep_rejected = RejectedFile(dead_letter_file).keep
        else:
            keep_rejected = RejectedTopic(producer, dead_letter_topic or "").keep
        scheduler = Scheduler(
            store,
            consumer,
            producer,
            CheckedClock(time.time_ns, time.monotonic_ns),
            keep_rejected=keep_rejected,
            on_round=lambda: supervised.alive(),
        )
        supervised = stack.enter_context(
            service(
                listen_http,
                runtime.environ,
                metrics=scheduler.counts.metrics,
                health=scheduler.health,
            )
        )
        supervised.ready()
        if not is_stopped:
            scheduler.run()
        supervised.stopping()
        counts = scheduler.counts
        runtime.info(
            f"nsq: {counted(counts.requested, 'request', ',')}, {counts.published:,} published,"
            f" {store.counts()[0]:,} wait"
        )
    return signals.status()


def list_(
    data_path: SchedulePath,
    limit: int = opt("N", "List at most N entries, the earliest first.", default=1000, min=1),
    *,
    form: ListingForm,
    runtime: Session,
) -> int:
    """List the entries of a scheduler on this host, the earliest first.

    Examples:
        nsq schedule list --data-path /var/lib/nsq-schedule
        nsq schedule list --data-path /var/lib/nsq-schedule --json | jq -r '.[].key'
    """
    from nsqtools.schedule.store import ScheduleStore

    form.check(COLUMNS)
    with closing(ScheduleStore(data_path, read_only=True)) as store:
        documents = [_document(stored) for stored in store.entries(limit)]
    write_records(runtime, COLUMNS, documents, form, optional=("error", "repeats"))
    return ExitStatus.DONE


def show(key: EntryKey, data_path: SchedulePath, *, runtime: Session) -> int:
    """Show an entry with its body, as JSON.

    Examples:
        nsq schedule show order-42 --data-path /var/lib/nsq-schedule
    """
    from nsqtools.schedule.request import body_fields
    from nsqtools.schedule.store import ScheduleStore

    with closing(ScheduleStore(data_path, read_only=True)) as store:
        stored = store.entry(key)
    if stored is None:
        raise NotFoundError(f"entry {key} does not exist", hint="List them: nsq schedule list.")
    write_json(runtime, {**_document(stored), **body_fields(stored.entry.body)})
    return ExitStatus.DONE


def cancel(
    key: EntryKey,
    schedule_topic: ScheduleTopic = SCHEDULE_TOPIC,
    *,
    connection: ProducerConnection,
    runtime: Session,
) -> int:
    """Ask the scheduler to forget an entry: a message that is not published yet.

    The request is confirmed by nsqd, and acts when the scheduler receives it.

    Examples:
        nsq schedule cancel order-42
    """
    from nsqtools.client.producer import Producer

    with Producer(connection.nsqd_tcp_addresses, connection.client_options()) as producer:
        producer.publish(schedule_topic, encode_cancellation(key))
    runtime.info(f"nsq: cancellation of {key} requested")
    return ExitStatus.DONE


def _document(stored: StoredEntry) -> ScheduledEntry:
    from nsqtools.schedule.request import recurrence_text

    entry = stored.entry
    return {
        "key": entry.key,
        "due": format_time(entry.due_ns) if entry.due_ns else None,
        "topic": entry.topic,
        "bytes": len(entry.body),
        "repeats": recurrence_text(entry.recurrence) or None,
        "catch_up": entry.catch_up.value if entry.recurrence else None,
        "envelope": entry.has_envelope,
        "error": stored.error or None,
    }
