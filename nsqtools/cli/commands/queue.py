"""``nsq queue``: what the data directory of an nsqd holds, read without touching it.

Damage is reported on stderr, a line each, and the exit status is 6.
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
    from nsqtools.server.stored_queues import Part, StoredMessage, StoredQueue, StoredQueues

DataPath = Annotated[
    Path, Argument(metavar="DATA_PATH", help="The --data-path of an nsqd, of Go or nsq nsqd.")
]

_QUEUES = "topic channel messages deferred bytes oldest newest files state memory"
QUEUES = tuple(_QUEUES.split())
AT_ONCE = 1000


def https_settings(
    context: Context,
    flags: Annotated[
        dict[str, Any],
        Provided(subset(ClientFlags, *(each for each in HTTPS_FLAGS if "tls_" in each))),
    ],
) -> dict[str, str]:
    """The way to an nsqd that is asked over HTTPS, as text under go-nsq's names."""
    return texts_of(effective_options(context))


def list_(
    data_path: DataPath,
    nsqd_http_address: str | None = opt(
        "HOST:PORT", "The nsqd that runs there: how much it has in memory."
    ),
    *,
    settings: Annotated[dict[str, str], Provided(https_settings)],
    form: ListingForm,
    runtime: Session,
) -> int:
    """List the queues in a data directory, and their state.

    What a queue holds is good or damaged. Files and databases are orphaned that no nsqd.dat or no
    metadata knows, set aside that nsqd renamed to .bad or copied to .damaged.N because they lost
    messages, and read when their nsqd is past them. What nsqd has in memory is not in its files.
    The exit status is 6 when something is damaged.

    Examples:
        nsq queue list /var/lib/nsqd
        nsq queue list /var/lib/nsqd --nsqd-http-address 127.0.0.1:4151 --json
    """
    from nsqtools.server.stored_queues import DUE_FILE, GOOD, StoredQueues

    form.check(QUEUES)
    memory = None if nsqd_http_address is None else in_memory(nsqd_http_address, settings)
    damage = DamageReporter(runtime)
    rows: list[tuple[str | int | None, ...]] = []
    with StoredQueues(data_path) as stored:
        for queue in reported(stored, damage):
            states = list(dict.fromkeys(part.state for part in queue.parts)) or [GOOD]
            for state in states:
                parts = [part for part in queue.parts if part.state == state]
                before = damage.count
                figures = figures_of(parts, damage)
                is_damaged = state == GOOD and (damage.count > before or bool(queue.problems))
                held = None
                if memory is not None and state == states[0]:
                    held = memory.get((queue.topic, queue.channel), 0)
                shown = "damaged" if is_damaged else state
                rows.append((queue.topic, queue.channel or None, *figures, len(parts), shown, held))
        write_listing(runtime, QUEUES, rows, form, optional=("memory", "deferred", "bytes"))
        if times_kept := sum(map(len, stored.due.values())):
            runtime.info(
                f"nsq: {data_path / DUE_FILE} has the times of "
                f"{counted(times_kept, 'deferred message')}: after nsq nsqd --recover-only "
                "--durable they are deferred still, else they are delivered at once"
            )
        if memory is not None and not stored.is_durable:
            runtime.info(f"nsq: {counted(sum(memory.values()), 'message')} in memory, not in files")
        elif not stored.is_durable:
            runtime.info(
                "nsq: what a running nsqd has in memory is not in its files; --nsqd-http-address "
                "shows how much"
            )
    return damage.status


def figures_of(parts: list[Part], damage: DamageReporter) -> tuple[int | str | None, ...]:
    """Messages, deferred ones (None where files do not say), bytes, oldest and newest."""
    from nsqtools.server.stored_queues import StoredRows

    messages = deferred = size = newest_ns = 0
    oldest_ns = sys.maxsize
    for part in parts:
        for each in part.messages(damage, bodies=False):
            messages += 1
            deferred += bool(each.due_ns)
            size += each.size
            oldest_ns = min(oldest_ns, each.timestamp_ns)
            newest_ns = max(newest_ns, each.timestamp_ns)
    says_due = any(isinstance(part, StoredRows) for part in parts)
    times = [
        utc_text(each // NS, "seconds") if messages else None for each in (oldest_ns, newest_ns)
    ]
    return messages, deferred if says_due else None, size, *times


def in_memory(address: str, settings: dict[str, str]) -> dict[tuple[str, str], int]:
    """How many messages of each queue an nsqd has outside its files."""
    from nsqtools.client.connection import http_access
    from nsqtools.client.options import ClientOptions
    from nsqtools.cluster.queue_rows import rows_of_topic
    from nsqtools.protocol.names import NSQD_HTTP_PORT, http_url

    access = http_access(ClientOptions().with_options(settings), (address,))
    with access.nsqd(http_url(address, NSQD_HTTP_PORT)) as client:
        stats = client.stats()
    rows = (row for topic in stats.topics or () for row in rows_of_topic("", topic))
    return {(row.topic, row.channel): row.memory + row.in_flight + row.deferred for row in rows}


def reported(
    stored: StoredQueues,
    damage: DamageReporter,
    topic: str | None = None,
    channel: str | None = None,
) -> Iterator[StoredQueue]:
    """Iterate over queues as `chosen` does; report what is known before messages are read."""
    for path, problem in stored.problems:
        damage(path, problem)
    for queue in chosen(stored.queues, topic, channel):
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

    Nothing is delivered: attempts stay as they are, and consumers see nothing. Without --channel
    each message that waits in the topic or in one of its channels is printed once. What is damaged
    is skipped and reported on stderr, as are messages to which --where or --pick cannot be applied;
    then the exit status is 6. Files that are set aside are not printed: see nsq queue recover.

    Examples:
        nsq queue cat /var/lib/nsqd -t clicks -c archive -n 10
        nsq queue cat /var/lib/nsqd -t clicks --where '.status >= 500' --json
    """
    from nsqtools.server.stored_queues import READ, SET_ASIDE, StoredQueues, digest

    damage, unjudged = DamageReporter(runtime), UnjudgedReporter(runtime, keep)
    keep, encode, nsqd = unjudged.keep, printer(runtime, unjudged), place_of(data_path)
    with StoredQueues(data_path) as stored:
        queues = list(reported(stored, damage, topic, channel))
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
        while some := list(islice(messages, AT_ONCE)):
            runtime.write(encode(topic, nsqd, some))
    return unjudged.sum_up() or damage.status


def chosen(queues: list[StoredQueue], topic: str | None, channel: str | None) -> list[StoredQueue]:
    """The queues of a topic and a channel, each None for all. Raises `NotFoundError`."""
    from nsqtools.cluster.topics import not_found_error

    of_topic = [each for each in queues if topic in (None, each.topic)]
    if topic is not None and not of_topic:
        raise not_found_error("topic", topic, {each.topic for each in queues})
    found = [each for each in of_topic if channel in (None, each.channel)]
    if channel is not None and not found:
        raise not_found_error("channel", channel, {each.channel for each in of_topic})
    return found


def place_of(data_path: Path) -> str:
    """The name in place of the nsqd, which no file has: ids of two nsqd may be equal."""
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
        for queue in reported(stored, damage):
            before, waiting = damage.count, 0
            for part in queue.parts:
                found = sum(1 for _ in part.messages(damage, bodies=False))
                files, messages = files + 1, messages + found
                waiting += found if part.state == GOOD else 0
            if damage.count == before and (depth := stored.depth_of(queue)) not in (None, waiting):
                damage(
                    data_path / f"{queue.name}.diskqueue.meta.dat",
                    f"says {counted(depth or 0, 'message')}, and the files have {waiting}",
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
    all: bool = opt("", "Take good files too, and those that nsqd has read to their end."),
    json: Json = False,
    *,
    runtime: Session,
) -> int:
    """Bring the messages of damaged and orphaned files into an archive.

    Those of databases that nsqd.dat does not name, too, and of files and copies of databases that
    nsqd set aside (.bad, .damaged.N). nsq replay publishes the archive. Each message is in it once,
    and none that waits in a good file of the same queue. nsqd delivered what is before the first
    damage of a .bad file, and most of a .damaged.N; which of that was finished no file tells. What
    cannot be read is reported by file and bytes; then the exit status is 6.

    Examples:
        nsq queue recover /var/lib/nsqd -o recovered.log.gz
        nsq archive cat recovered.log.gz -n 10 && nsq replay recovered.log.gz
    """
    from nsqtools.server.stored_queues import StoredQueues, recovered

    if output.absolute().parent.resolve() == data_path.resolve():
        raise ConfigurationError("--output must not be in the data directory, which stays as it is")
    if output.exists():
        raise OutputError(f"{output} is there already", hint="Name another file with --output.")
    damage = DamageReporter(runtime)
    with StoredQueues(data_path) as stored:
        queues = list(reported(stored, damage, topic, channel))
        messages = recovered(queues, damage, everything=all)
        with exit_on_signals():
            count, written = write_archive(output, place_of(data_path), messages)
    if json:
        document: RecoveredDocument = {
            "archive": str(written) if count else None,
            "messages": count,
            "damaged": damage.documents,
        }
        write_json(runtime, document)
    where = f" in {written}" if count else ": nothing is damaged, orphaned or set aside"
    runtime.info(f"nsq: {counted(count, 'message')}{where}")
    return damage.status


def write_archive(
    path: Path, nsqd: str, messages: Iterator[tuple[str, StoredMessage]]
) -> tuple[int, Path]:
    """Write messages to a new archive, which appears whole; return how many, and its path.

    That is another one where the index of an archive that is gone has the name. Raises ``OSError``.
    """
    from nsqtools.archive.members import members_of
    from nsqtools.archive.part_file import Directories, PartFile, finish
    from nsqtools.files.scratch import scratch_directory
    from nsqtools.records.envelope import encode_many
    from nsqtools.records.naming import EXTENSIONS, Codec

    written, parent = path, path.absolute().parent
    total = 0
    codec = next((each for each in EXTENSIONS if path.suffix == EXTENSIONS[each]), Codec.NONE)
    with scratch_directory(".nsq-recover-", parent) as drafts:
        file = PartFile(drafts / path.name, 0o640, members_of(codec), time.time())
        while some := list(islice(messages, AT_ONCE)):
            for topic, message in some:
                file.append(encode_many(topic, nsqd, [message]))
            times = [message.timestamp_ns for _, message in some]
            file.flush(file.end_member(len(some), min(times), max(times)))
            total += len(some)
        if total:
            written = path.with_name(finish(file.path, Directories(parent, drafts)).name)
    return total, written
