"""One topic's messages into its files: settings, open files, writer.

`TopicWriter` has no thread and no clock of its own. `take` puts messages into the members being
made, `flush` makes these durable and FINishes the messages. Between the two they are *held*:
unanswered, to be touched when that takes long. When anything cannot be written, everything held
goes back to nsqd with backoff, and the files go back to their last durable member before they are
written again: see `WriteFailed`.

A topic has one file open, or with partitions by message time one for each of them (`FileSet`). A
file is opened for its first message. It is finished when it is full, when its interval or age is
over, and when its stem is not that of the present any more; partitions by message time stay open
while messages come for them.
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

from nsqtools.archive.journal import Journal, TopicLock
from nsqtools.archive.layout import index_of, part_of
from nsqtools.archive.members import CompressorFactory, Plain
from nsqtools.archive.part_file import Directories, PartFile, finish
from nsqtools.client.message import Batch, Message, MessageSource
from nsqtools.errors import OutputError
from nsqtools.protocol.text import NS
from nsqtools.records.envelope import RecordFormat, encode_lines, encode_many
from nsqtools.records.naming import FileNaming, Rotation, with_rev

log = logging.getLogger("nsqtools")

LATEST_S = 253_000_000_000.0  # in the year 9987
CHECK_S = 1.0
MAX_CHECK_S = 60.0  # whole minutes; a thousand topics that are quiet cost little
PARTITION_IDLE_S = 60.0
REMEMBERED_STEMS = 1000  # a name is not used twice, even if its file was moved away

THROUGHPUT = {
    "max_in_flight": 2500,  # as much as an nsqd allows: it bounds what a flush can hold
    "max_in_flight_bytes": 32 << 20,
    "max_backoff_duration_s": 30.0,
    "reconnect_base_s": 2.0,
}
"""Client options of an archiver, where the user gives none."""


@dataclass(frozen=True, slots=True)
class Flush:
    """When messages are made durable and FINished: whichever comes first. ``bytes`` are text."""

    interval_s: float = 1.0
    bytes: int = 8 << 20
    count: int = 10_000


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """All of it. ``timezone`` None is local time.

    ``<PARTITION>`` is the time of arrival, or ``by_message_time``.
    """

    directories: Directories
    naming: FileNaming = field(default_factory=FileNaming)
    rotation: Rotation = field(default_factory=Rotation)
    flush: Flush = field(default_factory=Flush)
    format: RecordFormat = RecordFormat.jsonl
    delimiter: bytes = b"\n"
    compressor: CompressorFactory = Plain
    by_message_time: bool = False
    timezone: tzinfo | None = UTC
    skip_empty_files: bool = True

    def moment(self, at_s: float) -> datetime:
        """Return a time since 1970 as the clock of the file names shows it.

        A message may claim any time; those that no calendar has become the nearest that it has.
        """
        at_s = min(max(at_s, 0.0), LATEST_S)
        return datetime.fromtimestamp(at_s, UTC).astimezone(self.timezone)


@dataclass(slots=True, eq=False)
class OpenFile:
    """A file in progress, and what is held in the member being made."""

    stem: str
    part: PartFile
    last_used_s: float
    batches: list[Batch] = field(default_factory=list)
    adopted: list[Batch] = field(default_factory=list)
    """Second deliveries of what is held: FINished with it, and not written."""
    began_s: float = field(default_factory=time.monotonic)
    is_dirty: bool = False
    """A flush failed: it must be rolled back before it is used."""

    def release(self) -> list[Batch]:
        """Hand over what is held: it is to be answered."""
        released = self.batches + self.adopted
        self.batches, self.adopted = [], []
        return released


class FileSet:
    """All methods but `stem` and `holding` raise ``OSError``."""

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
        self._stems = functools.lru_cache(REMEMBERED_STEMS)(self._make_stem)
        self._files: dict[str, OpenFile] = {}
        self._ending: list[OpenFile] = []  # full or over, and still to be published
        self._revs: dict[str, int] = {}  # the next number of each stem that was used

    def stem(self, now_s: float, partition_s: float) -> str:
        """Return the name but for its rev. Those of a second are remembered: each read asks."""
        return self._stems(int(now_s), int(partition_s))

    def _make_stem(self, now_s: int, partition_s: int) -> str:
        moment = self._settings.moment
        return self._settings.naming.stem(self._topic, moment(now_s), moment(partition_s))

    def unflushed(self) -> list[OpenFile]:
        """Return the files with something held."""
        return [file for file in self._files.values() if file.batches]

    def adopt(self, batch: Batch, message: Message) -> bool:
        """If a message is held, answer this second delivery with it; return whether it is held."""
        for file in self.unflushed():
            for held in file.batches:
                if held.nsqd == batch.nsqd and any(other.id == message.id for other in held):
                    file.adopted.append(Batch(batch.source, [message]))
                    return True
        return False

    def name_of(self, file: OpenFile) -> str:
        """Return the path of a file below the work directory."""
        return self._settings.directories.name_of(file.part.path)

    def get(self, stem: str, now_s: float) -> OpenFile:
        """Return the open file of a stem, or begin one."""
        file = self._files.get(stem)
        if file is not None and file.is_dirty:
            file = self._clean(file)
        if file is None:
            file = self._files[stem] = OpenFile(stem, self._begin(stem, now_s), now_s)
        file.last_used_s = now_s
        return file

    def _begin(self, stem: str, now_s: float) -> PartFile:
        directories = self._settings.directories
        rev = self._revs.get(stem, 0)
        while True:
            path = directories.work / with_rev(stem, rev)
            rev += 1
            taken = (directories.final(path), part_of(path), index_of(path))
            if any(map(Path.exists, taken)):
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
                if isinstance(exc, FileExistsError):  # another process has just made it
                    continue
                raise
            self._revs[stem] = rev
            if len(self._revs) > REMEMBERED_STEMS:
                del self._revs[next(iter(self._revs))]
            log.info("writing %s", path)
            return part

    # -- after a failure ------------------------------------------------------------------------

    def _clean(self, file: OpenFile) -> OpenFile | None:
        """Bring a file back to its last member, or leave it when it is gone."""
        if file.part.has_vanished:
            what = "was removed, or finished by another process; writing into a new file"
            log.error("%s %s", file.part.path, what)
            self._locks.release(self.name_of(file))
            self.finish([file])
            self._ending.remove(file)
            return None
        file.part.roll_back()
        file.is_dirty = False
        return file

    def mark_dirty(self) -> None:
        """Something could not be written: no file is used before it was rolled back."""
        for file in (*self._files.values(), *self._ending):
            file.is_dirty = True

    # -- rotation -------------------------------------------------------------------------------

    def due_for_rotation(self, now_s: float, *, all_files: bool) -> list[OpenFile]:
        """Return the files whose time is over."""
        return [file for file in self._files.values() if all_files or self._is_over(file, now_s)]

    def _is_over(self, file: OpenFile, now_s: float) -> bool:
        age_s = time.monotonic() - file.began_s
        opened_at_s, offset_s = file.part.opened_at_s, self._utc_offset_s(now_s)
        if self._settings.rotation.is_over(opened_at_s, now_s, offset_s, age_s=age_s):
            return True
        if not self._settings.by_message_time:
            return file.stem != self.stem(now_s, now_s)
        # a clock that was set back keeps no file open
        return abs(now_s - file.last_used_s) > PARTITION_IDLE_S

    def check_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds `over` may have something new; None for never."""
        if not self._files and not self._ending:
            return None if self._settings.skip_empty_files else 0.0
        if self._ending or self._settings.naming.changes_each_second:
            return CHECK_S
        rotation = self._settings.rotation
        wait_s = MAX_CHECK_S - now_s % MAX_CHECK_S
        if rotation.interval_s is not None:
            into_it_s = (now_s + self._utc_offset_s(now_s)) % rotation.interval_s
            wait_s = min(wait_s, rotation.interval_s - into_it_s)
        if rotation.age_s is not None:
            oldest_s = min(file.began_s for file in self._files.values())
            wait_s = min(wait_s, oldest_s + rotation.age_s - time.monotonic())
        return max(CHECK_S, wait_s)

    def _utc_offset_s(self, now_s: float) -> float:
        offset = self._settings.moment(now_s).utcoffset()
        return offset.total_seconds() if offset else 0.0

    def is_full(self, file: OpenFile) -> bool:
        """Return whether a file takes no more after its flush."""
        return self._settings.rotation.is_full(*file.part.expected_sizes)

    def finish_full(self) -> None:
        """Finish the files that take no more; nothing may be held."""
        full = list(filter(self.is_full, self._files.values()))
        self.finish(full)
        if full:  # what could not be published earlier is tried again by the clock
            self.publish_ending()

    def finish(self, files: Iterable[OpenFile]) -> None:
        """Write no more to files; `publish_ending` names them. They must hold nothing."""
        for file in files:
            if self._files.get(file.stem) is file:  # else it was full
                del self._files[file.stem]
                self._ending.append(file)

    def publish_ending(self) -> None:
        """Publish the files that are finished; one without messages is removed.

        One that cannot be published now can be the next time.
        """
        while self._ending:
            file = self._ending[0]
            if file.is_dirty and self._clean(file) is None:
                continue
            if file.part.size == 0 and self._settings.skip_empty_files:
                for each in (part_of(file.part.path), index_of(file.part.path)):
                    each.unlink(missing_ok=True)
            else:
                if file.part.size == 0:  # an empty gzip file is one with an empty member
                    file.part.flush(file.part.end_member(0, 0, 0))
                self._on_finished(finish(file.part.path, self._settings.directories))
            self._locks.release(self.name_of(file))
            del self._ending[0]

    def close(self) -> None:
        """Leave what is still in progress to recovery."""
        for file in (*self._files.values(), *self._ending):
            self._locks.release(self.name_of(file))


class WriteFailed(OutputError):
    """Nothing of what was held, ``count`` messages, is written; it is back in the queue.

    ``reason`` and ``number`` are the system's.
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
    """Counts of a topic since the start, as ``--json`` has them."""

    messages: int = 0
    bytes: Annotated[int, "As on disk, of finished flushes."] = 0
    files: Annotated[int, "Files finished."] = 0
    already_written: Annotated[int, "Messages that came again and had been written."] = 0
    failures: Annotated[int, "Writes that failed and were tried again."] = 0
    ambiguous: Annotated[int, "Bodies in raw files that contain the delimiter."] = 0

    def __add__(self, other: ArchiveTotals) -> ArchiveTotals:
        return ArchiveTotals(*map(operator.add, astuple(self), astuple(other)))


class TopicWriter:
    """Writes one topic. ``on_finished`` gets the path of each file that is complete.

    The ``lock`` of the topic, released in the end, numbers the files.
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
        """Messages that are written or held."""
        return self.totals.messages + self.held_count

    # -- messages -------------------------------------------------------------------------------

    def take(self, batch: Batch, now_s: float) -> None:
        """Put messages into their files. Raises `WriteFailed`."""
        with self._writing(batch):
            self._note_source(batch)
            if max([message.attempts for message in batch]) > 1:
                batch = self._without_known(batch)
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
        if self._settings.format is RecordFormat.jsonl:
            return encode_many(batch.topic, batch.nsqd, batch)
        delimiter = self._settings.delimiter
        text = encode_lines(batch.topic, batch.nsqd, batch, delimiter=delimiter)
        if delimiter and text.count(delimiter) > len(batch):
            if not self.totals.ambiguous:
                log.warning(
                    "topic %s: bodies contain the delimiter; where they end is lost in raw "
                    "files; --format jsonl keeps it",
                    batch.topic,
                )
            self.totals.ambiguous += sum(delimiter in message.body for message in batch)
        return text

    def _by_file(self, batch: Batch, now_s: float) -> Iterator[tuple[str, Batch]]:
        """The messages of a batch by the stem of the file that they belong in."""
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
            yield stem, Batch(batch.source, messages)

    # -- messages that come again ---------------------------------------------------------------

    def _note_source(self, batch: Batch) -> None:
        """Where a connection was lost, FINs may have been lost with it."""
        before = self._sources.get(batch.nsqd)
        if before is not batch.source:
            self._sources[batch.nsqd] = batch.source
            if before is not None:
                self._retain_ids()

    def on_late_finish(self) -> None:
        """nsqd refused FINs as too late: what they were for comes again. Raises `WriteFailed`."""
        with self._writing():
            self._retain_ids()

    def _retain_ids(self) -> None:
        """Remember for long what was written lately, for it may come again after a long backlog."""
        self._flush()
        self._journal.pin_recent()

    def _without_known(self, batch: Batch) -> Batch:
        """Return the messages that are not written; of the others FINish those that are durable."""
        fresh = []
        for message in batch:
            if message.attempts == 1 or not self._journal.has_message(batch.nsqd, message.id):
                fresh.append(message)
                continue
            self.totals.already_written += 1
            if not self._files.adopt(batch, message):
                message.finish()
        return Batch(batch.source, fresh)

    # -- flushing -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make everything held durable, then FINish it. Raises `WriteFailed`."""
        with self._writing():
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
        """Finish the files whose time is over, or all of them. Raises `WriteFailed`."""
        with self._writing():
            over = self._files.due_for_rotation(
                now_s, all_files=all_files
            )  # once: time goes on meanwhile
            if any(file.batches for file in over):
                self._flush()
            self._files.finish(over)
            self._files.publish_ending()
            if not (self._settings.skip_empty_files or all_files):
                self._files.get(self._files.stem(now_s, now_s), now_s)

    def check_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds `rotate` may have something to do; None for never."""
        return self._files.check_in_s(now_s)

    def touch(self) -> None:
        """Restart the timeouts of everything held."""
        for batch in self.held():
            for message in batch:
                message.touch()

    def held(self) -> Iterable[Batch]:
        """Iterate over what is held."""
        return [batch for file in self._files.unflushed() for batch in file.batches]

    def close(self) -> None:
        """Let go of everything, after the last `rotate`; a file that could not be finished then is
        recovered at the next start."""
        self._files.close()
        self._journal.close()
        self._lock.release()

    def _finished(self, path: Path) -> None:
        self.totals.files += 1
        self._on_finished(path)

    @contextmanager
    def _writing(self, *others: Batch) -> Iterator[None]:
        """When something cannot be written, give all that is held back to nsqd, and say so."""
        try:
            yield
        except OSError as exc:
            self.totals.failures += 1
            files = self._files.unflushed()
            if exc.errno == errno.EFBIG:  # of the file system, or of ulimit -f
                self._files.finish(files)
            held = [batch for file in files for batch in file.release()]
            for batch in held:
                self._journal.discard(batch.nsqd, [message.id for message in batch])
            count = sum(batch.requeue(0) for batch in (*held, *others))
            self.held_count = self.held_bytes = 0
            self._files.mark_dirty()
            path = exc.filename or self._settings.directories.work
            back = f": {count} messages are back in the queue" if count else ""
            reason = exc.strerror or str(exc)
            message = f"cannot write {path} ({reason}){back}"
            raise WriteFailed(message, reason, count, exc.errno) from exc
