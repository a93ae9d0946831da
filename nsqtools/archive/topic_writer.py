"""Write the messages of one topic to its files: settings, open files, writer.

`TopicWriter` has no thread and no clock. `take` adds messages to the members in progress, and
`flush` makes the members durable and FINishes the messages. Between the two, messages are *held*:
in flight, and touched if that takes long. After a failed write, all held messages are requeued with
backoff, and the files are cut back to their last durable member before the next write: see
`WriteFailed`.

A topic has one open file, or one for each partition if files are partitioned by message time
(`FileSet`). A file is opened for its first message. It is finished when it is full, when its
interval or age has ended, and when the present time gives a different stem. A partition by message
time stays open for as long as it receives messages.
"""

from __future__ import annotations

import errno
import functools
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Annotated

from nsqtools.archive.arrow_member import encode_batch
from nsqtools.archive.journal import Journal, TopicLock
from nsqtools.archive.layout import index_of, part_of
from nsqtools.archive.members import CompressorFactory, Plain
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.client.message import Batch, Message, MessageSource
from nsqtools.errors import OutputError
from nsqtools.protocol.text import NS, counted
from nsqtools.records.envelope import encode_lines, encode_many
from nsqtools.records.naming import FileFormat, FileNaming, Rotation, with_rev

log = logging.getLogger("nsqtools")

# The latest time of a file name, in the year 9987: the calendar of Python ends with 9999.
LATEST_S = 253_000_000_000.0
# Time between two checks for rotation. A name may change with each whole minute; checks are not
# more frequent than necessary, so that a thousand idle topics cost little.
CHECK_S = 1.0
MAX_CHECK_S = 60.0
# A partition by message time is finished after this time without messages.
PARTITION_IDLE_S = 60.0
# Stems whose next rev is kept in memory, so that no name is used twice, even if its file was moved.
MAX_REVS = 1000

THROUGHPUT = {
    # The maximum of an nsqd by default. It bounds the messages of a flush.
    "max_in_flight": 2500,
    "max_in_flight_bytes": 32 << 20,
    "max_backoff_duration_s": 30.0,
    "reconnect_base_s": 2.0,
}
"""Client options of an archiver that the user does not set."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The limits at which messages are flushed, whichever comes first. ``bytes`` are of text."""

    interval_s: float = 1.0
    bytes: int = 8 << 20
    count: int = 10_000


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """The settings of all topics.

    ``timezone`` None is local time. ``<PARTITION>`` in a name is the time of arrival, unless
    ``by_message_time``.
    """

    directories: Directories
    naming: FileNaming = field(default_factory=FileNaming)
    rotation: Rotation = field(default_factory=Rotation)
    flush: Flush = field(default_factory=Flush)
    format: FileFormat = FileFormat.jsonl
    delimiter: bytes = b"\n"
    compressor: CompressorFactory = Plain
    by_message_time: bool = False
    timezone: tzinfo | None = UTC
    skip_empty_files: bool = True

    def moment(self, at_s: float) -> datetime:
        """Return a time since 1970 in the time zone of the file names.

        A message may have any timestamp. One outside of the calendar becomes the nearest in it.
        """
        at_s = min(max(at_s, 0.0), LATEST_S)
        return datetime.fromtimestamp(at_s, UTC).astimezone(self.timezone)


@dataclass(slots=True, eq=False)
class OpenFile:
    """A file in progress, and the held messages of its next member."""

    stem: str
    part: PartFile
    last_used_s: float
    batches: list[Batch] = field(default_factory=list)
    adopted: list[Batch] = field(default_factory=list)
    """Redeliveries of held messages: FINished with them, and not written."""
    began_s: float = field(default_factory=time.monotonic)
    is_dirty: bool = False
    """Whether a flush failed, so that the file must be rolled back before it is used."""

    def release(self) -> list[Batch]:
        """Return the held batches, which the caller must FINish or requeue, and hold none."""
        released = self.batches + self.adopted
        self.batches, self.adopted = [], []
        return released


class FileSet:
    """The open files of a topic. Methods that touch files raise ``OSError``."""

    def __init__(
        self,
        topic: str,
        settings: ArchiveSettings,
        on_finished: Callable[[Path], None],
        lock: TopicLock,
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._on_finished = on_finished
        self._locks = lock.locks
        self._lock = lock
        # Each batch asks for its stem, so the stems of recent seconds are cached.
        self._stems = functools.lru_cache(MAX_REVS)(self._make_stem)
        self._files: dict[str, OpenFile] = {}
        # Files that take no more messages and are not published yet.
        self._ending: list[OpenFile] = []
        # The next rev of each stem that was used.
        self._revs: dict[str, int] = {}

    def stem(self, now_s: float, partition_s: float) -> str:
        """Return the name of a file without its rev, by the whole second."""
        return self._stems(int(now_s), int(partition_s))

    def _make_stem(self, now_s: int, partition_s: int) -> str:
        moment = self._settings.moment
        return self._settings.naming.stem(self._topic, moment(now_s), moment(partition_s))

    def unflushed(self) -> list[OpenFile]:
        """Return the files that hold messages."""
        return [file for file in self._files.values() if file.batches]

    def adopt(self, batch: Batch, message: Message) -> bool:
        """FINish a redelivery together with the held message; return whether one is held."""
        for file in self.unflushed():
            for held_batch in file.batches:
                if held_batch.nsqd == batch.nsqd and any(m.id == message.id for m in held_batch):
                    file.adopted.append(Batch(batch._source, [message]))
                    return True
        return False

    def name_of(self, file: OpenFile) -> str:
        """Return the name of a file in the work directory, for its lock and for the journal."""
        return self._settings.directories.name_of(file.part.path)

    def get(self, stem: str, now_s: float) -> OpenFile:
        """Return the open file of a stem, or create one."""
        file = self._files.get(stem)
        if file is not None and file.is_dirty:
            file = self._clean(file)
        if file is None:
            file = self._files[stem] = OpenFile(stem, self._create(stem, now_s), now_s)
        file.last_used_s = now_s
        return file

    def _create(self, stem: str, now_s: float) -> PartFile:
        directories = self._settings.directories
        rev = self._revs.get(stem, 0)
        while True:
            path = directories.work / with_rev(stem, rev)
            rev += 1
            if any(map(Path.exists, (directories.final(path), part_of(path), index_of(path)))):
                continue
            directories.make_folders(directories.work, path.parent)
            if not self._locks.take(directories.name_of(path)):
                continue
            try:
                part = PartFile(
                    path,
                    directories.file_mode,
                    self._settings.compressor,
                    now_s,
                    self._lock.next_head(),
                    is_exact=directories.chosen_file_mode is not None,
                )
            except OSError as exc:
                self._locks.release(directories.name_of(path))
                # Another process may have created the file after the check above.
                if isinstance(exc, FileExistsError):
                    continue
                raise
            self._revs[stem] = rev
            if len(self._revs) > MAX_REVS:
                del self._revs[next(iter(self._revs))]
            log.info("writing %s", path)
            return part

    # -- after a failure ------------------------------------------------------------------------

    def _clean(self, file: OpenFile) -> OpenFile | None:
        """Roll a file back to its last member; return None if it has vanished."""
        if file.part.has_vanished:
            reason = "was removed, or finished by another process; writing to a new file"
            log.error("%s %s", file.part.path, reason)
            self._locks.release(self.name_of(file))
            self.finish([file])
            self._ending.remove(file)
            return None
        file.part.roll_back()
        file.is_dirty = False
        return file

    def mark_dirty(self) -> None:
        """After a failed write, have every file rolled back before it is used."""
        for file in (*self._files.values(), *self._ending):
            file.is_dirty = True

    # -- rotation -------------------------------------------------------------------------------

    def due_for_rotation(self, now_s: float, *, all_files: bool) -> list[OpenFile]:
        """Return the files whose interval, age or stem has ended."""
        return [file for file in self._files.values() if all_files or self._is_due(file, now_s)]

    def _is_due(self, file: OpenFile, now_s: float) -> bool:
        age_s = time.monotonic() - file.began_s
        opened_at_s, offset_s = file.part.opened_at_s, self._utc_offset_s(now_s)
        if self._settings.rotation.is_over(opened_at_s, now_s, offset_s, age_s=age_s):
            return True
        if not self._settings.by_message_time:
            return file.stem != self.stem(now_s, now_s)
        # The absolute difference, so that a clock that was set back keeps no file open.
        return abs(now_s - file.last_used_s) > PARTITION_IDLE_S

    def check_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `due_for_rotation` may return another file, None for never."""
        if not self._files and not self._ending:
            return None if self._settings.skip_empty_files else 0.0
        if self._ending or self._settings.naming.changes_each_second:
            return CHECK_S
        rotation = self._settings.rotation
        wait_s = MAX_CHECK_S - now_s % MAX_CHECK_S
        if rotation.interval_s is not None:
            elapsed_s = (now_s + self._utc_offset_s(now_s)) % rotation.interval_s
            wait_s = min(wait_s, rotation.interval_s - elapsed_s)
        if rotation.age_s is not None:
            oldest_s = min(file.began_s for file in self._files.values())
            wait_s = min(wait_s, oldest_s + rotation.age_s - time.monotonic())
        return max(CHECK_S, wait_s)

    def _utc_offset_s(self, now_s: float) -> float:
        offset = self._settings.moment(now_s).utcoffset()
        return offset.total_seconds() if offset else 0.0

    def is_full(self, file: OpenFile) -> bool:
        """Return whether a file takes no more messages after its flush."""
        return self._settings.rotation.is_full(*file.part.expected_sizes)

    def finish_full(self) -> None:
        """Finish the files that take no more messages; they must not hold any."""
        full = list(filter(self.is_full, self._files.values()))
        self.finish(full)
        # Without a full file, `rotate` tries to publish the others again at the next check.
        if full:
            self.publish_ending()

    def finish(self, files: Iterable[OpenFile]) -> None:
        """End files, which must not hold messages; `publish_ending` publishes them."""
        for file in files:
            # A file that was full has ended before.
            if self._files.get(file.stem) is file:
                del self._files[file.stem]
                self._ending.append(file)

    def publish_ending(self) -> None:
        """Publish the ended files; remove those without messages.

        After an ``OSError`` the rest can be published by the next call.
        """
        while self._ending:
            file = self._ending[0]
            if file.is_dirty and self._clean(file) is None:
                continue
            if file.part.size == 0 and self._settings.skip_empty_files:
                for path in (part_of(file.part.path), index_of(file.part.path)):
                    path.unlink(missing_ok=True)
            else:
                # A gzip file without a member is not a valid file, so it gets an empty member.
                if file.part.size == 0:
                    file.part.flush(file.part.end_member(0, 0, 0))
                self._on_finished(finish_part(file.part.path, self._settings.directories))
            self._locks.release(self.name_of(file))
            del self._ending[0]

    def close(self) -> None:
        """Unlock the files that are still in progress, which recovery will finish."""
        for file in (*self._files.values(), *self._ending):
            self._locks.release(self.name_of(file))


class WriteFailed(OutputError):
    """A write failed. None of the ``count`` held messages is written; all are requeued.

    ``reason`` and ``number`` are the text and errno of the operating system.
    """

    def __init__(
        self, message: str, reason: str, count: int, number: int | None = errno.EIO
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.count = count
        self.number = number


@dataclass(slots=True)
class ArchiveTotals:
    """Counts of a topic since the start, under the names of ``--json``."""

    messages: int = 0
    bytes: Annotated[int, "Bytes on disk, of finished flushes."] = 0
    files: Annotated[int, "Files finished."] = 0
    already_written: Annotated[int, "Redelivered messages that had been written."] = 0
    failures: Annotated[int, "Writes that failed and were retried."] = 0
    ambiguous: Annotated[int, "Bodies in raw files that contain the delimiter."] = 0

    def __add__(self, other: ArchiveTotals) -> ArchiveTotals:
        return ArchiveTotals(*map(operator.add, astuple(self), astuple(other)))


class TopicWriter:
    """Writes one topic. ``on_finished`` is called with the path of each finished file.

    The ``lock`` of the topic numbers the files; `close` releases it.
    """

    def __init__(
        self,
        topic: str,
        settings: ArchiveSettings,
        journal: Journal,
        on_finished: Callable[[Path], None],
        lock: TopicLock,
    ) -> None:
        self.totals = ArchiveTotals()
        self.held_count = 0
        self.held_bytes = 0
        self._settings = settings
        self._journal = journal
        self._sources: dict[str, MessageSource] = {}
        self._files = FileSet(topic, settings, self._finished, lock)
        self._lock = lock
        self._on_finished = on_finished

    @property
    def taken(self) -> int:
        """The number of messages that are written or held."""
        return self.totals.messages + self.held_count

    # -- messages -------------------------------------------------------------------------------

    def take(self, batch: Batch, now_s: float) -> None:
        """Add messages to their files. Raises `WriteFailed`."""
        with self._requeuing_on_failure(batch):
            self._note_source(batch)
            if max([message.attempts for message in batch]) > 1:
                batch = self._without_written(batch)
            for stem, messages in self._by_file(batch, now_s):
                self._hold(self._files.get(stem, now_s), messages)

    def _hold(self, file: OpenFile, batch: Batch) -> None:
        text = self._encode(batch)
        file.part.append(text)
        file.batches.append(batch)
        self._journal.add(batch.nsqd, [message.id for message in batch])
        self.held_count += len(batch)
        self.held_bytes += len(text)
        if self._files.is_full(file):
            self._flush()

    def _encode(self, batch: Batch) -> bytes:
        if self._settings.format is FileFormat.arrow:
            return encode_batch(batch.topic, batch.nsqd, batch)
        if self._settings.format is FileFormat.jsonl:
            return encode_many(batch.topic, batch.nsqd, batch)
        delimiter = self._settings.delimiter
        text = encode_lines(batch.topic, batch.nsqd, batch, delimiter=delimiter)
        if delimiter and text.count(delimiter) > len(batch):
            if not self.totals.ambiguous:
                log.warning(
                    "topic %s: bodies contain the delimiter, so raw files do not show where they "
                    "end; --format jsonl does",
                    batch.topic,
                )
            self.totals.ambiguous += sum(delimiter in message.body for message in batch)
        return text

    def _by_file(self, batch: Batch, now_s: float) -> Iterator[tuple[str, Batch]]:
        """Iterate over the messages of a batch, by the stem of their file."""
        if not batch:
            return
        if not self._settings.by_message_time:
            yield self._files.stem(now_s, now_s), batch
            return
        stems: dict[str, list[Message]] = {}
        for message in batch:
            stem = self._files.stem(now_s, message.timestamp_ns / NS)
            stems.setdefault(stem, []).append(message)
        for stem, messages in stems.items():
            yield stem, Batch(batch._source, messages)

    # -- redelivered messages -------------------------------------------------------------------

    def _note_source(self, batch: Batch) -> None:
        """Retain recent identities after a new connection, because FINs may be lost with the old
        one."""
        previous = self._sources.get(batch.nsqd)
        if previous is not batch._source:
            self._sources[batch.nsqd] = batch._source
            if previous is not None:
                self._retain_ids()

    def on_late_finish(self) -> None:
        """Retain recent identities after nsqd refused a FIN as too late. Raises `WriteFailed`."""
        with self._requeuing_on_failure():
            self._retain_ids()

    def _retain_ids(self) -> None:
        """Keep the identities of recent messages, which may be redelivered after a long backlog."""
        try:
            self._flush()
        finally:
            # The FINs of earlier messages may be lost, whether the held ones can be written or not.
            self._journal.pin_recent()

    def _without_written(self, batch: Batch) -> Batch:
        """Return the messages that are not written yet, and FINish those that are durable."""
        fresh = []
        for message in batch:
            if message.attempts == 1 or not self._journal.has_message(batch.nsqd, message.id):
                fresh.append(message)
                continue
            self.totals.already_written += 1
            if not self._files.adopt(batch, message):
                message.finish()
        return Batch(batch._source, fresh)

    # -- flushing -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make all held messages durable, then FINish them. Raises `WriteFailed`."""
        with self._requeuing_on_failure():
            self._flush()

    def _flush(self) -> None:
        for file in self._files.unflushed():
            ids: dict[str, list[bytes]] = {}
            for batch in file.batches:
                ids.setdefault(batch.nsqd, []).extend([message.id for message in batch])
            times = [message.timestamp_ns for batch in file.batches for message in batch]
            member = file.part.end_member(len(times), min(times), max(times))
            self._journal.record(self._files.name_of(file), file.part.head, member, ids)
            file.part.flush(member)
            self._journal.confirm()
            self.totals.messages += member.messages
            self.totals.bytes += member.length
            for batch in file.release():
                batch.finish()
        self.held_count = self.held_bytes = 0
        self._files.finish_full()

    def rotate(self, now_s: float, *, all_files: bool = False) -> None:
        """Finish the files that are due, or all of them. Raises `WriteFailed`."""
        with self._requeuing_on_failure():
            # Asked only once, because a file that becomes due during the flush is not flushed.
            due = self._files.due_for_rotation(now_s, all_files=all_files)
            if any(file.batches for file in due):
                self._flush()
            self._files.finish(due)
            self._files.publish_ending()
            if not (self._settings.skip_empty_files or all_files):
                self._files.get(self._files.stem(now_s, now_s), now_s)

    def check_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `rotate` may have work to do, None for never."""
        return self._files.check_in_s(now_s)

    def touch(self) -> None:
        """Restart the timeouts of all held messages."""
        for batch in self.held_batches():
            for message in batch:
                message.touch()

    def held_batches(self) -> Iterable[Batch]:
        """Return the held batches of all files."""
        return [batch for file in self._files.unflushed() for batch in file.batches]

    def close(self) -> None:
        """Release all locks, after the last `rotate`.

        A file that could not be finished is recovered at the next start.
        """
        self._files.close()
        self._journal.close()
        self._lock.release()

    def _finished(self, path: Path) -> None:
        self.totals.files += 1
        self._on_finished(path)

    @contextmanager
    def _requeuing_on_failure(self, *batches: Batch) -> Iterator[None]:
        """On an ``OSError``, requeue all held messages and ``batches``, and raise `WriteFailed`."""
        try:
            yield
        except OSError as exc:
            self.totals.failures += 1
            files = self._files.unflushed()
            # A file at the size limit of the file system, or of ulimit -f, takes no more messages.
            if exc.errno == errno.EFBIG:
                self._files.finish(files)
            held = [batch for file in files for batch in file.release()]
            for batch in held:
                self._journal.discard(batch.nsqd, [message.id for message in batch])
            count = sum(batch.requeue(0) for batch in (*held, *batches))
            self.held_count = self.held_bytes = 0
            self._files.mark_dirty()
            path = exc.filename or self._settings.directories.work
            requeued = f": {counted(count, 'message')} back in the queue" if count else ""
            reason = exc.strerror or str(exc)
            message = f"cannot write {path} ({reason}){requeued}"
            raise WriteFailed(message, reason, count, exc.errno) from exc
