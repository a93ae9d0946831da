"""Publish archived messages again, for ``nsq replay``.

Messages are merged by time, selected, and published in batches, to their original topics or to
others. With a checkpoint, a batch starts only after the previous one is confirmed and recorded.
Without one, batches are published without a pause.

The merge reads files in a streaming way and has few of them open: a file is opened when the merge
reaches its first time, which is in its index or its first message. Messages of one file keep the
order in which they were written, which is the order of time except for redeliveries. Bare bodies
have no times, so their files come first, one after the other.

If nsqd may have lost messages of a batch, a replay with a checkpoint ends. The next run begins with
the first of these messages.

A checkpoint (`Checkpoint`) is replaced atomically and fsynced after each batch, so an interrupted
replay continues where it stopped: no message is lost, and at most one batch is published twice. A
file is identified by its writer, its number and its first member, which do not change when it is
moved or uploaded. By its path, a moved file would be replayed again, and another file with the path
would be skipped. Machines that were cloned from one image may use the same writer and number, so
the member is needed as well. A file without an index, or with an index of an early version, is
identified by its path, as were all files in version 1. So is a file of a table, and a table whose
files were replaced is refused.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple

from nsqtools.archive.finding import ArchiveFile, files_in_table
from nsqtools.archive.layout import ALL_TIMES, TimeRange, owner_of
from nsqtools.archive.reader import OnDamage, read_messages
from nsqtools.archive.replacements import replaced_rows
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.text import NS
from nsqtools.publish.input import (
    BATCH_BYTES,
    BATCH_RECORDS,
    InputBatch,
    locked_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from nsqtools.publish.publish_job import OutgoingMessage, PublishJob, UnsentFiles
from nsqtools.publish.publisher import Publisher
from nsqtools.records.envelope import Envelope, encode_many

VERSION = 2
READABLE = (1, VERSION)


class Archived(NamedTuple):
    """A message with the index of its file and its number in the file, from 1.

    ``fault`` is the error of a filter that could not be applied, so that the message is rejected.
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
    """Iterate over all messages by time. Raises `OutputError` for an unreadable file."""
    # The last element is the earliest one, so that pop removes it.
    begins = sorted(
        (
            (_first_time(archive, delimiter), file)
            for file, archive in enumerate(archives)
            if archive.may_have(within)
        ),
        reverse=True,
    )
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


def _first_time(archive: ArchiveFile, delimiter: bytes) -> int:
    """Return the time of the first message of a file, 0 without one."""
    if (begins_ns := archive.begins_ns) is not None:
        return begins_ns
    messages = read_messages(archive, lambda path, problem: None, delimiter=delimiter)
    first = next(messages, None)
    return first.timestamp_ns if first else 0


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """The messages to replay, and their target topics.

    ``topics`` maps a topic to its target. The key "" is for all other topics, and for bare bodies,
    which have no topic.
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
        """Return the message to publish. Raises `ConfigurationError` if it has no topic."""
        target = self.topics.get(message.topic) or self.topics.get("") or message.topic
        if not target:
            raise ConfigurationError(
                "the files have bare bodies, which have no topic", hint="Give --topic."
            )
        return OutgoingMessage(target, message.body, message)


class Replay:
    """One replay: `run` it on one thread. `Publisher.stop` ends it from any thread.

    Args:
        inputs: The files to read, the messages to publish, and the checkpoint to continue at.
        publisher: Publishes the messages.
        speed: The pace relative to the original: 2 replays an hour in half an hour. None publishes
            as fast as nsqd accepts.
        dry_run: Publish nothing, but count `planned`.
        on_damage: Called with the path and the problem of damaged files.
        unsent: Gets each unconfirmed message as a line of JSON.
        warn: See `PublishJob`.
        on_progress: Called often with this object.

    ``resumes`` is true if the checkpoint has completed messages of the archives.
    """

    def __init__(
        self,
        inputs: ReplayInputs,
        publisher: Publisher,
        *,
        speed: float | None = None,
        dry_run: bool = False,
        on_damage: OnDamage,
        unsent: UnsentFiles | None = None,
        warn: Callable[[str], None] = lambda line: None,
        on_progress: Callable[[Replay], None] = lambda replay: None,
    ) -> None:
        self.read = 0
        self.repeated = 0
        self.timeless = 0
        self._archives = archives = inputs.archives
        self._selection = inputs.selection
        self._publisher = publisher
        self._speed = speed
        self._first: tuple[int, float] | None = None  # the time of the first message, and when due
        self._count = inputs.count
        checkpoint = Checkpoint(inputs.checkpoint) if inputs.checkpoint else None
        if checkpoint is not None:
            checkpoint.refuse_replaced(archives)
        self._checkpoint = None if dry_run else checkpoint
        self._completed = [checkpoint.count_of(file) if checkpoint else 0 for file in archives]
        self.resumes = any(self._completed)
        self._on_damage = on_damage
        self._unsent = unsent
        self._identities: set[tuple[str, str, bytes]] = set()
        self._job = PublishJob[Archived](
            publisher,
            read=self._read,
            unsent=unsent,
            format_record=_unsent_line,
            on_batch_ended=self._record_batch if self._checkpoint else None,
            dry_run=dry_run,
            warn=warn,
            on_progress=lambda: on_progress(self),
        )
        self.planned = self._job.planned  # messages by target topic, also in a dry run

    @property
    def largest_rejected(self) -> int:
        """The size in bytes of the largest body above the message limit, 0 if none."""
        return self._job.largest_rejected

    @property
    def total(self) -> int | None:
        """The number of messages in the files, None if a file has no index."""
        counts = [archive.messages for archive in self._archives]
        return None if None in counts else sum(count or 0 for count in counts)

    def run(self) -> None:
        """Replay the selected messages. Raises `OutputError` and `ConfigurationError`."""
        # If the checkpoint cannot be written, nothing is published.
        if self._checkpoint is not None:
            self._checkpoint.save()
        self._job.run(self._batches())

    def _read(self, archived: Archived) -> OutgoingMessage:
        if archived.fault:
            raise ValueError(archived.fault)
        return self._selection.outgoing(archived.message)

    def _batches(self) -> Iterator[InputBatch[Archived]]:
        """Iterate over batches, which end at the limit of the rate or before a pause."""
        publisher = self._publisher
        batch: list[Archived] = []
        size = limit = 0
        for archived in islice(self._selected(), self._count):
            message, now = archived.message, time.monotonic()
            due_at = self._due_at(message.timestamp_ns, now)
            if batch and (due_at > now or len(batch) >= limit or size >= BATCH_BYTES):
                yield InputBatch(batch)
                # When the batch is confirmed, the checkpoint records it.
                if self._checkpoint is not None:
                    publisher.drain()
                if self._job.should_stop():
                    return
                batch, size = [], 0
            if not batch:
                limit = publisher.allowance(BATCH_RECORDS)
            wait_s = min(max(0.0, due_at - time.monotonic()), TIMEOUT_MAX)
            if publisher.stopped.wait(wait_s):
                return
            batch.append(archived)
            size += len(message.body)
        if batch:
            yield InputBatch(batch)

    def _due_at(self, timestamp_ns: int, now: float) -> float:
        """Return the monotonic time at which to publish a message with this timestamp.

        The first message, and each message without a timestamp, is due immediately.
        """
        if self._speed is None or not timestamp_ns or self._publisher.has_given_up:
            return now
        first_ns, first_due = self._first = self._first or (timestamp_ns, now)
        return first_due + (timestamp_ns - first_ns) / NS / self._speed

    def _selected(self) -> Iterator[Archived]:
        """Iterate over the messages to publish. `read` also counts the others."""
        selection = self._selection
        # The numbers of a checkpoint count all messages of a file, so none may be skipped.
        within = ALL_TIMES if self.resumes or self._checkpoint else selection.within
        for archived in merge(
            self._archives, self._on_damage, delimiter=selection.delimiter, within=within
        ):
            self.read += 1
            message = archived.message
            # The identities of completed messages are needed to find their duplicates.
            is_new = not selection.dedupe or self._is_new(message)
            if archived.number <= self._completed[archived.file] or not is_new:
                continue
            if not selection.within.contains(message.timestamp_ns):
                self.timeless += not message.timestamp_ns
                continue
            try:
                is_selected = selection.keep is None or selection.keep(message)
            except ValueError as error:
                is_selected = True
                archived = archived._replace(fault=f"the filter cannot be applied: {error}")
            if is_selected:
                # This raises an error for a message without a topic before anything is published.
                selection.outgoing(message)
                if message.body:
                    yield archived
                else:
                    self._publisher.counts.skipped += 1

    def _is_new(self, message: Envelope) -> bool:
        if not message.id:
            return True
        identity = (message.topic, message.nsqd, message.id)
        is_new = identity not in self._identities
        self._identities.add(identity)
        self.repeated += not is_new
        return is_new

    def _record_batch(self, batch: InputBatch[Archived]) -> None:
        assert self._checkpoint is not None
        if self._unsent is not None:
            # The next run skips rejected messages, so they must be durable first.
            self._unsent.sync()
        for archived in batch.records[: min(batch.retryable, default=None)]:
            self._checkpoint.record(self._archives[archived.file], archived.number)
        self._checkpoint.save()


def _unsent_line(archived: Archived) -> bytes:
    message = archived.message
    return encode_many(message.topic, message.nsqd, [message])


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The inputs of ``nsq replay``, whose messages can be counted before they are published.

    ``count`` is the maximum number of messages to publish. ``checkpoint`` is the file that records
    completed messages.
    """

    archives: Sequence[ArchiveFile]
    selection: MessageSelection
    count: int | None = None
    checkpoint: Path | None = None

    @property
    def local_files(self) -> list[str]:
        """The paths of the archives on local disks."""
        return [str(archive.path) for archive in self.archives if not archive.is_remote]

    def locked(self) -> AbstractContextManager[None]:
        """Lock the checkpoint against other processes. Raises `ConfigurationError`."""
        return locked_checkpoint(self.checkpoint) if self.checkpoint else nullcontext()

    def count_messages(
        self, publisher: Publisher, on_progress: Callable[[Replay], None]
    ) -> Mapping[str, int]:
        """Return how many messages would be published to each topic.

        Damage is not reported, because publishing reads the files again and reports it.
        """
        replay = Replay(
            self,
            publisher,
            dry_run=True,
            on_damage=lambda path, problem: None,
            on_progress=on_progress,
        )
        replay.run()
        return replay.planned


# -- the checkpoint --------------------------------------------------------------------------------


class Checkpoint:
    """The numbers of completed messages of each file, loaded from ``path`` if it exists.

    Raises `ConfigurationError` for a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        def parse(content: Any) -> dict[str, int]:
            return {str(name): int(count) for name, count in content["done"].items()}

        self.done = read_checkpoint(path, "a replay", READABLE, parse) or {}
        self._path = path.absolute()

    def count_of(self, archive: ArchiveFile) -> int:
        """Return the number of completed messages of a file."""
        names = {checkpoint_key_of(archive), checkpoint_path_of(archive)}
        return max(self.done.get(name, 0) for name in names)

    def refuse_replaced(self, archives: Iterable[ArchiveFile]) -> None:
        """Raise `ConfigurationError` if files of a table were replaced after they were replayed.

        A compaction or an erasure has moved their messages to new files of the same folders, which
        would be published again as a whole.
        """
        names = {checkpoint_path_of(archive) for archive in archives if archive.table is not None}
        folders = {name.rpartition("/")[0] for name in names}
        for name in sorted(self.done.keys() - names):
            if name.rpartition("/")[0] in folders and _is_replaced(name):
                raise ConfigurationError(
                    f"{name} was replayed, and its table has other files with its messages now",
                    hint="Give a new --checkpoint, and --since to leave out what was published.",
                )

    def record(self, archive: ArchiveFile, count: int) -> None:
        """Set the number of completed messages of a file; `save` makes it durable."""
        self.done.pop(checkpoint_path_of(archive), None)
        self.done[checkpoint_key_of(archive)] = count

    def save(self) -> None:
        """Write the file durably. Raises `OutputError`."""
        write_checkpoint(self._path, {"version": VERSION, "done": self.done})


def checkpoint_key_of(archive: ArchiveFile) -> str:
    """Return the name of a file in a checkpoint."""
    if archive.head is None or not archive.members:
        return checkpoint_path_of(archive)
    writer, number = archive.head
    _, length, messages, min_ts, max_ts = archive.members[0]
    return f"{writer} {number} {length} {messages} {min_ts} {max_ts}"


def _is_replaced(path: str) -> bool:
    """Return whether a file belonged to a table, and other files have its messages now."""
    try:
        root, _ = files_in_table(path)
    except ConfigurationError:  # it is no current file of a Delta table
        return True
    return replaced_rows(root, path[len(str(root)) + 1 :]) > 0


def checkpoint_path_of(archive: ArchiveFile) -> str:
    """Return the path or URL of a file. A file in progress has its final path."""
    if archive.is_in_progress:
        return str(owner_of(archive.path.absolute()))
    return archive.shown if archive.is_remote else str(archive.path.absolute())
