"""``nsq queue``: read the data directory of an nsqd without changing it.

Each damage is reported in a line on stderr, and then the exit status is 6.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from nsqtools.cli.options.connection import HTTPS_FLAGS, ClientFlags, effective_options
from nsqtools.cli.options.params import Channel, Count, Json, Topic
from nsqtools.cli.options.printing import MessageFilter, MessagePrinter
from nsqtools.cli.parsing.binding import Provided, opt, subset
from nsqtools.cli.render.outcomes import DamageReporter, UnjudgedReporter
from nsqtools.cli.render.output import ListingForm, write_json, write_listing
from nsqtools.cli.running.runtime import Session, exit_on_signals
from nsqtools.client.connection_settings import texts_of
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.text import NS, counted, utc_text

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import RecoveredDocument
    from nsqtools.server.stored_queues import StoredMessage, StoredPart, StoredQueue, StoredQueues

DataPath = Annotated[
    Path, Argument(metavar="DATA_PATH", help="The --data-path of an nsqd, of Go or nsq nsqd.")
]

_QUEUES = "topic channel messages deferred bytes oldest newest files state memory"
QUEUES = tuple(_QUEUES.split())


def https_settings(
    context: Context,
    flags: Annotated[
        dict[str, Any],
        Provided(subset(ClientFlags, *(name for name in HTTPS_FLAGS if "tls_" in name))),
    ],
) -> dict[str, str]:
    """Return the options for requests to nsqd over HTTPS, as text under go-nsq's names."""
    return texts_of(effective_options(context))


def list_(
    data_path: DataPath,
    nsqd_http_address: str | None = opt(
        "HOST:PORT", "The running nsqd, to show how much it has in memory."
    ),
    *,
    settings: Annotated[dict[str, str], Provided(https_settings)],
    form: ListingForm,
    runtime: Session,
) -> int:
    """List the queues in a data directory, and their state.

    The state of a queue is good or damaged. Its other files and databases are orphaned if they are
    not in nsqd.dat or the metadata, set aside if nsqd renamed them to .bad or copied them to
    .damaged.N because they lost messages, and read if nsqd is past them. Messages in memory are not
    in the files. The exit status is 6 if anything is damaged.

    Examples:
        nsq queue list /var/lib/nsqd
        nsq queue list /var/lib/nsqd --nsqd-http-address 127.0.0.1:4151 --json
    """
    from nsqtools.server.stored_queues import DUE_FILE, GOOD, StoredQueues

    form.check(QUEUES)
    memory = None if nsqd_http_address is None else count_in_memory(nsqd_http_address, settings)
    damage = DamageReporter(runtime)
    rows: list[tuple[str | int | None, ...]] = []
    with StoredQueues(data_path) as stored:
        for queue in report_queues(stored, damage):
            states = list(dict.fromkeys(part.state for part in queue.parts)) or [GOOD]
            for state in states:
                parts = [part for part in queue.parts if part.state == state]
                damages = damage.count
                figures = figures_of_parts(parts, damage)
                is_damaged = state == GOOD and (damage.count > damages or bool(queue.problems))
                in_memory = None
                if memory is not None and state == states[0]:
                    in_memory = memory.get((queue.topic, queue.channel), 0)
                state_name = "damaged" if is_damaged else state
                names = queue.topic, queue.channel or None
                rows.append((*names, *figures, len(parts), state_name, in_memory))
        write_listing(runtime, QUEUES, rows, form, optional=("memory", "deferred", "bytes"))
        if deferred := sum(map(len, stored.due.values())):
            runtime.info(
                f"nsq: {data_path / DUE_FILE} has the times of "
                f"{counted(deferred, 'deferred message')}: after nsq nsqd --recover-only "
                "--durable they stay deferred, otherwise they are delivered immediately"
            )
        if memory is not None and not stored.is_durable:
            runtime.info(f"nsq: {counted(sum(memory.values()), 'message')} in memory, not in files")
        elif not stored.is_durable:
            runtime.info(
                "nsq: messages in the memory of a running nsqd are not in its files; "
                "--nsqd-http-address shows how many"
            )
    return damage.status


def figures_of_parts(
    parts: list[StoredPart], damage: DamageReporter
) -> tuple[int | str | None, ...]:
    """Return the messages, deferred messages (None if unknown), bytes, oldest and newest time."""
    from nsqtools.server.stored_queues import StoredRows

    messages = deferred = size = newest_ns = 0
    oldest_ns = sys.maxsize
    for part in parts:
        for message in part.messages(damage, bodies=False):
            messages += 1
            deferred += bool(message.due_ns)
            size += message.size
            oldest_ns = min(oldest_ns, message.timestamp_ns)
            newest_ns = max(newest_ns, message.timestamp_ns)
    # Only rows of a database contain the due time.
    has_due_times = any(isinstance(part, StoredRows) for part in parts)
    times = [
        utc_text(time_ns // NS, "seconds") if messages else None
        for time_ns in (oldest_ns, newest_ns)
    ]
    return messages, deferred if has_due_times else None, size, *times


def count_in_memory(address: str, settings: dict[str, str]) -> dict[tuple[str, str], int]:
    """Return the number of messages of each queue that an nsqd has outside its files."""
    from nsqtools.client.connection import http_access
    from nsqtools.client.options import ClientOptions
    from nsqtools.cluster.queue_rows import rows_of_topic
    from nsqtools.protocol.names import NSQD_HTTP_PORT, http_url

    access = http_access(ClientOptions().with_options(settings), (address,))
    with access.nsqd(http_url(address, NSQD_HTTP_PORT)) as client:
        stats = client.stats()
    rows = (row for topic in stats.topics or () for row in rows_of_topic("", topic))
    return {(row.topic, row.channel): row.memory + row.in_flight + row.deferred for row in rows}


def report_queues(
    stored: StoredQueues,
    damage: DamageReporter,
    topic: str | None = None,
    channel: str | None = None,
) -> Iterator[StoredQueue]:
    """Iterate over the selected queues, and report their problems before messages are read."""
    for path, problem in stored.problems:
        damage(path, problem)
    for queue in select_queues(stored.queues, topic, channel):
        for path, problem in queue.problems:
            damage(path, problem)
        yield queue


def cat(
    data_path: DataPath,
    topic: Topic,
    channel: Channel = None,
    count: Count = None,
    *,
    keep: MessageFilter,
    printer: MessagePrinter,
    runtime: Session,
) -> int:
    """Print the messages that wait in a queue.

    Nothing is delivered: attempts do not change, and consumers are not affected. Without --channel
    each message in the topic or in one of its channels is printed once. Damage is skipped and
    reported on stderr, as are messages to which --where or --pick cannot be applied; then the exit
    status is 6. Files that are set aside are not printed: see nsq queue recover.

    Examples:
        nsq queue cat /var/lib/nsqd -t clicks -c archive -n 10
        nsq queue cat /var/lib/nsqd -t clicks --where '.status >= 500' --json
    """
    from nsqtools.records.envelope import bounded_batches
    from nsqtools.server.stored_queues import READ, SET_ASIDE, StoredQueues, digest

    damage, unjudged = DamageReporter(runtime), UnjudgedReporter(runtime, keep)
    keep, encode, nsqd = unjudged.keep, printer(runtime, unjudged), nsqd_name(data_path)
    with StoredQueues(data_path) as stored:
        queues = list(report_queues(stored, damage, topic, channel))
        parts = [
            part for queue in queues for part in queue.parts if part.state not in (READ, SET_ASIDE)
        ]

        def waiting() -> Iterator[StoredMessage]:
            seen: set[bytes] = set()
            for part in parts:
                for message in part.messages(damage):
                    if len(queues) > 1:
                        if (key := digest(topic, message)) in seen:
                            continue
                        seen.add(key)
                    if keep is None or keep(message):
                        yield message

        messages = islice(waiting(), count)
        for batch in bounded_batches(messages, lambda message: message.size):
            runtime.write(encode(topic, nsqd, batch))
    return unjudged.sum_up() or damage.status


def select_queues(
    queues: list[StoredQueue], topic: str | None, channel: str | None
) -> list[StoredQueue]:
    """Return the queues of a topic and channel, None for all. Raises `NotFoundError`."""
    from nsqtools.cluster.topics import not_found_error

    of_topic = [queue for queue in queues if topic in (None, queue.topic)]
    if topic is not None and not of_topic:
        raise not_found_error("topic", topic, {queue.topic for queue in queues})
    selected = [queue for queue in of_topic if channel in (None, queue.channel)]
    if channel is not None and not selected:
        raise not_found_error("channel", channel, {queue.channel for queue in of_topic})
    return selected


def nsqd_name(data_path: Path) -> str:
    """Return a name for the nsqd, which the files do not contain.

    It distinguishes messages of two nsqd with equal ids.
    """
    import socket

    return f"{socket.gethostname()}:{data_path.absolute()}"


def verify(data_path: DataPath, json: Json = False, *, runtime: Session) -> int:
    """Read every message and report what is damaged.

    Offsets and depth in the metadata are compared with the files, unless an nsqd is running there.
    Prints a line for each problem; the exit status is 6 when there is one.

    Examples:
        nsq queue verify /var/lib/nsqd
        nsq queue verify /var/lib/nsqd --json | jq -r '.damaged[].file'
    """
    from nsqtools.server.stored_queues import GOOD, StoredQueues

    damage = DamageReporter(runtime)
    files = messages = 0
    with StoredQueues(data_path) as stored:
        for queue in report_queues(stored, damage):
            damages, good_messages = damage.count, 0
            for part in queue.parts:
                count = sum(1 for _ in part.messages(damage, bodies=False))
                files, messages = files + 1, messages + count
                good_messages += count if part.state == GOOD else 0
            if damage.count > damages:
                continue
            if (depth := stored.depth_of(queue)) not in (None, good_messages):
                damage(
                    data_path / f"{queue.name}.diskqueue.meta.dat",
                    f"has a depth of {counted(depth or 0, 'message')}, "
                    f"but the files have {good_messages}",
                )
        if stored.is_in_use and not stored.is_durable:
            runtime.info(f"nsq: {data_path} is in use: its metadata is not compared with the files")
    damage.report(files, messages, json=json)
    return damage.status


def recover(
    data_path: DataPath,
    output: Annotated[Path, opt("--output -o FILE", "The archive: NAME.log, .log.gz or .log.zst.")],
    topic: str | None = opt("--topic -t TOPIC", "Only this topic."),
    channel: Channel = None,
    all: bool = opt("", "Include good files, and files that nsqd has read to their end."),
    json: Json = False,
    *,
    runtime: Session,
) -> int:
    """Bring the messages of damaged and orphaned files into an archive.

    These are databases that are not in nsqd.dat, and files and copies of databases that nsqd set
    aside (.bad, .damaged.N). nsq replay publishes the archive. It contains each message once, and
    no message that waits in a good file of the same queue. nsqd has delivered the messages before
    the first damage of a .bad file, and most of a .damaged.N; which of them were finished is not in
    the files. Unreadable parts are reported by file and bytes; then the exit status is 6.

    Examples:
        nsq queue recover /var/lib/nsqd -o recovered.log.gz
        nsq archive cat recovered.log.gz -n 10 && nsq replay recovered.log.gz
    """
    from nsqtools.server.stored_queues import StoredQueues, recovered

    if output.absolute().parent.resolve() == data_path.resolve():
        raise ConfigurationError("--output must not be in the data directory, which stays as it is")
    if output.exists():
        raise OutputError(f"{output} exists already", hint="Name another file with --output.")
    damage = DamageReporter(runtime)
    with StoredQueues(data_path) as stored:
        queues = list(report_queues(stored, damage, topic, channel))
        messages = recovered(queues, damage, everything=all)
        with exit_on_signals():
            count, written = write_archive(output, nsqd_name(data_path), messages)
    if json:
        document: RecoveredDocument = {
            "archive": str(written) if count else None,
            "messages": count,
            "damaged": damage.documents,
        }
        write_json(runtime, document)
    suffix = f" in {written}" if count else ": nothing is damaged, orphaned or set aside"
    runtime.info(f"nsq: {counted(count, 'message')}{suffix}")
    return damage.status


def write_archive(
    path: Path, nsqd: str, messages: Iterator[tuple[str, StoredMessage]]
) -> tuple[int, Path]:
    """Write messages to a new archive, which appears when complete; return count and path.

    The path differs from ``path`` if the index of a deleted archive has the name. Raises
    ``OSError``.
    """
    from nsqtools.archive.members import members_of
    from nsqtools.archive.part_file import Directories, PartFile, finish_part
    from nsqtools.files.scratch import scratch_directory
    from nsqtools.records.envelope import bounded_batches, encode_many
    from nsqtools.records.naming import EXTENSIONS, Codec

    written, parent = path, path.absolute().parent
    total = 0
    codec = next((codec for codec in EXTENSIONS if path.suffix == EXTENSIONS[codec]), Codec.NONE)
    with scratch_directory(".nsq-recover-", parent) as drafts:
        file = PartFile(drafts / path.name, 0o640, members_of(codec), time.time())
        for batch in bounded_batches(messages, lambda item: item[1].size):
            for topic, message in batch:
                file.append(encode_many(topic, nsqd, [message]))
            times = [message.timestamp_ns for _, message in batch]
            file.flush(file.end_member(len(batch), min(times), max(times)))
            total += len(batch)
        if total:
            written = path.with_name(finish_part(file.path, Directories(parent, drafts)).name)
    return total, written
