"""Publish archived messages again, for ``nsq replay``.

Messages are merged by time, selected, and published in batches, each to the topic it came from or
to the one it is sent to. With a checkpoint the batches go one by one: the next begins when the one
before is confirmed and written down. Without, they follow each other without a pause.

The merge has few files open and none loaded: a file is opened when it comes to its beginning, which
its index tells, or its first message. Messages of one file keep the order in which they were
written: it is that of their times but for redeliveries. Bare bodies have no time; their files come
first, one after the other.

A batch with messages that nsqd may not have ends a replay with a checkpoint: it begins with the
first of these the next time.

A checkpoint (`Checkpoint`) is replaced whole and fsynced after each batch, so an interrupted replay
continues where it stopped: nothing is left out, and at most the one batch under way is doubled. A
file is known by its writer, its number and its first member, which it keeps wherever it is moved or
uploaded to: by the path alone it would begin again there, and another file that gets the path would
be taken for it. Two machines of one image can use the same writer and number, so the member is
needed, too. A file without an index, or with one of an early version, is known by its path; so were
all of them in version 1.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import ALL_TIMES, TimeRange, owner_of
from nsqtools.archive.reader import OnDamage, read_messages
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.text import NS
from nsqtools.publish.input import (
    BATCH_BYTES,
    BATCH_RECORDS,
    InputBatch,
    read_checkpoint,
    write_checkpoint,
)
from nsqtools.publish.publish_job import OutgoingMessage, PublishJob, UnsentFiles
from nsqtools.publish.publisher import Publisher
from nsqtools.records.envelope import Envelope, encode_many

VERSION = 2
READABLE = (1, VERSION)


class Archived(NamedTuple):
    """A message, the number of its file among those given, and its own number in it, from 1.

    ``fault`` says why the filter cannot tell whether it is to be published, which rejects it.
    """

    file: int
    number: int
    message: Envelope
    fault: str = ""


def merge(
    archives: Sequence[ArchiveFile],
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = ALL_TIMES,
) -> Iterator[Archived]:
    """Iterate over all messages. Raises `OutputError` for a file that cannot be read."""
    chosen = ((file, each) for file, each in enumerate(archives) if each.may_have(within))
    begins = sorted(((_begin(each, delimiter), file) for file, each in chosen), reverse=True)
    heads: list[tuple[int, int, int, Envelope, Iterator[Envelope]]] = []

    def push(file: int, number: int, messages: Iterator[Envelope]) -> None:
        message = next(messages, None)
        if message is not None:
            heapq.heappush(heads, (message.timestamp_ns, file, number, message, messages))

    while heads or begins:
        while begins and (not heads or begins[-1] < heads[0][:2]):
            _, file = begins.pop()
            messages = read_messages(archives[file], on_damage, delimiter=delimiter, within=within)
            push(file, 1, messages)
        if heads:
            _, file, number, message, messages = heapq.heappop(heads)
            yield Archived(file, number, message)
            push(file, number + 1, messages)


def _begin(archive: ArchiveFile, delimiter: bytes) -> int:
    """The time of a file's first message; 0 where it has none."""
    if (begins_ns := archive.begins_ns) is not None:
        return begins_ns
    messages = read_messages(archive, lambda path, problem: None, delimiter=delimiter)
    first = next(messages, None)
    return first.timestamp_ns if first else 0


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Which messages are replayed, and where to.

    ``topics`` maps a topic to the one its messages go to; the key "" is for all others, and for
    bare bodies, which have none.
    """

    within: TimeRange = ALL_TIMES
    keep: Callable[[Envelope], bool] | None = None
    dedupe: bool = False
    topics: Mapping[str, str] = field(default_factory=dict)
    delimiter: bytes = b"\n"

    def __post_init__(self) -> None:
        for topic in self.topics.values():
            check_topic(topic)

    def outgoing(self, message: Envelope) -> OutgoingMessage:
        """Return what is published. Raises `ConfigurationError` when there is no topic."""
        target = self.topics.get(message.topic) or self.topics.get("") or message.topic
        if not target:
            raise ConfigurationError(
                "the files have bare bodies, which name no topic", hint="Give --topic."
            )
        return OutgoingMessage(target, message.body, message)


class Replay:
    """`run` it on one thread; `Publisher.stop` ends it from any.

    ``speed`` None is as fast as nsqd takes them, 2 plays an hour in half an hour; ``count`` is the
    most to publish. With ``dry_run`` nothing is published. ``unsent`` gets each message that did
    not end as confirmed, as a line of JSON. ``warn`` and ``show`` are those of a `PublishJob`.
    ``goes_on`` tells that the checkpoint has some messages as done.
    """

    def __init__(
        self,
        archives: Sequence[ArchiveFile],
        selection: MessageSelection,
        publisher: Publisher,
        *,
        speed: float | None = None,
        count: int | None = None,
        dry_run: bool = False,
        checkpoint: Checkpoint | None = None,
        on_damage: OnDamage,
        unsent: UnsentFiles | None = None,
        warn: Callable[[str], None] = lambda line: None,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        self.read = 0
        self.repeated = 0
        self.timeless = 0
        self._archives = archives
        self._selection = selection
        self._publisher = publisher
        self._speed = speed
        self._first: tuple[int, float] | None = None  # the time of a message, and when it was due
        self._count = count
        self._checkpoint = None if dry_run else checkpoint
        self._done = [checkpoint.count_of(each) if checkpoint else 0 for each in archives]
        self.goes_on = any(self._done)
        self._on_damage = on_damage
        self._unsent = unsent
        self._seen: set[tuple[str, str, bytes]] = set()
        self._job = PublishJob[Archived](
            publisher,
            read=self._read,
            unsent=unsent,
            format_record=lambda each: encode_many(
                each.message.topic, each.message.nsqd, [each.message]
            ),
            on_batch_ended=self._settle if self._checkpoint else None,
            dry_run=dry_run,
            warn=warn,
            on_progress=show,
        )
        self.planned = self._job.planned  # by target topic, also what only would be published

    @property
    def total(self) -> int | None:
        """How many messages there are to read, if all files have an index."""
        counts = [archive.messages for archive in self._archives]
        return None if None in counts else sum(count or 0 for count in counts)

    def run(self) -> None:
        """Replay everything selected. Raises `OutputError` and `ConfigurationError`."""
        if self._checkpoint is not None:
            self._checkpoint.save()  # what cannot be written down is not published
        self._job.run(self._batches())

    def _read(self, archived: Archived) -> OutgoingMessage:
        if archived.fault:
            raise ValueError(archived.fault)
        return self._selection.outgoing(archived.message)

    def _batches(self) -> Iterator[InputBatch[Archived]]:
        """Messages to publish together: as many as the rate allows, or are due before a pause."""
        publisher = self._publisher
        batch: list[Archived] = []
        size = most = 0
        for archived in islice(self._selected(), self._count):
            message, now = archived.message, time.monotonic()
            due_at = self._due_at(message.timestamp_ns, now)
            if batch and (due_at > now or len(batch) >= most or size >= BATCH_BYTES):
                yield InputBatch(batch)
                if self._checkpoint is not None:
                    publisher.drain()  # and so it is written down
                if self._job.should_stop():
                    return
                batch, size = [], 0
            if not batch:
                most = publisher.allowance(BATCH_RECORDS)
            wait_s = min(max(0.0, due_at - time.monotonic()), TIMEOUT_MAX)
            if publisher.stopped.wait(wait_s):
                return
            batch.append(archived)
            size += len(message.body)
        if batch:
            yield InputBatch(batch)

    def _due_at(self, timestamp_ns: int, now: float) -> float:
        """The clock reading at which a message of that time is due; the first is at once.

        So is one without a time, a bare body, which says nothing about the others.
        """
        if self._speed is None or not timestamp_ns or self._publisher.has_given_up:
            return now
        first_ns, began = self._first = self._first or (timestamp_ns, now)
        return began + (timestamp_ns - first_ns) / NS / self._speed

    def _selected(self) -> Iterator[Archived]:
        """The messages that are to be published; `read` counts all that were looked at."""
        selection = self._selection
        # numbers in a checkpoint are those of all messages of a file
        within = ALL_TIMES if self.goes_on or self._checkpoint else selection.within
        for archived in merge(
            self._archives, self._on_damage, delimiter=selection.delimiter, within=within
        ):
            self.read += 1
            message = archived.message
            is_new = not selection.dedupe or self._is_new(message)
            if archived.number <= self._done[archived.file] or not is_new:
                continue
            if not selection.within.contains(message.timestamp_ns):
                self.timeless += not message.timestamp_ns
                continue
            try:
                is_kept = selection.keep is None or selection.keep(message)
            except ValueError as error:
                is_kept, archived = True, archived._replace(fault=f"it cannot be judged: {error}")
            if is_kept:
                selection.outgoing(message)  # raises where there is no topic
                if message.body:
                    yield archived
                else:
                    self._publisher.counts.skipped += 1

    def _is_new(self, message: Envelope) -> bool:
        if not message.id:
            return True
        identity = (message.topic, message.nsqd, message.id)
        is_new = identity not in self._seen
        self._seen.add(identity)
        self.repeated += not is_new
        return is_new

    def _settle(self, batch: InputBatch[Archived]) -> None:
        assert self._checkpoint is not None
        if self._unsent is not None:
            self._unsent.sync()  # a message that was rejected is nowhere else once this is passed
        for archived in batch.records[: min(batch.retryable, default=None)]:
            self._checkpoint.settle(self._archives[archived.file], archived.number)
        self._checkpoint.save()


# -- the checkpoint --------------------------------------------------------------------------------


class Checkpoint:
    """Reads ``path`` if it is there. Raises `ConfigurationError` for one that is not ours."""

    def __init__(self, path: Path) -> None:
        def parse(content: Any) -> dict[str, int]:
            return {str(name): int(count) for name, count in content["done"].items()}

        self.done = read_checkpoint(path, "a replay", READABLE, parse) or {}
        self._path = path.absolute()

    def count_of(self, archive: ArchiveFile) -> int:
        """Return how many messages of a file are done."""
        return max(self.done.get(name, 0) for name in {key_of(archive), path_of(archive)})

    def settle(self, archive: ArchiveFile, count: int) -> None:
        """Note how many messages of a file are done; `save` makes it durable."""
        self.done.pop(path_of(archive), None)
        self.done[key_of(archive)] = count

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        write_checkpoint(self._path, {"version": VERSION, "done": self.done})


def key_of(archive: ArchiveFile) -> str:
    """Return what a file is known by."""
    if archive.head is None or not archive.members:
        return path_of(archive)
    writer, number = archive.head
    _, length, messages, min_ts, max_ts = archive.members[0]
    return f"{writer} {number} {length} {messages} {min_ts} {max_ts}"


def path_of(archive: ArchiveFile) -> str:
    """Return the path or URL, the same for a file in progress and when it is finished."""
    if archive.is_in_progress:
        return str(owner_of(archive.path.absolute()))
    return archive.shown if archive.is_remote else str(archive.path.absolute())
