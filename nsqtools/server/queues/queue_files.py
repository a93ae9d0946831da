"""The format of the files of a disk queue, and the thread that waits for the disk.

Data files, ``NAME.diskqueue.000000.dat`` and so on, contain records without gaps: an int32 length
and that number of bytes. They are read forward in large pieces. After an invalid record nothing
marks the start of the next one, so nsqd gives up the rest of the file (`CorruptFile`).
``NAME.diskqueue.meta.dat`` has the positions.

Operations that wait for a disk must not block the loop: syncs, renames and removals. Those of one
daemon run on one thread, in the order of their submission, so that no file is removed before the
sync after which it is not needed. Without a loop (tests, recovery) `DiskWork` runs them directly.

`QueueFile` reads a file without its nsqd, and returns all intact records. A record has neither a
checksum nor a marker. It is accepted when its length is within the file, its timestamp is possible,
its id is 16 hexadecimal digits, and the same holds for the record after it, or the file ends there.
Otherwise the next position that looks like a record is searched. If that is within the previous
record, then the length of the previous record is wrong. If it is after the previous record, that
record is intact and the bytes between the two are damaged.

Traps: a changed byte in a body is not detected. A record whose length has become smaller is
accepted, truncated, with a gap after it.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Self

from nsqtools.files.durable import unused_name
from nsqtools.files.opening import descriptor_to_read, read_small
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.protocol.text import NS

# -- the disk thread -------------------------------------------------------------------------------

Work = Callable[[], None]
Done = Callable[[OSError | None], None]


class DiskWork:
    """Runs operations that wait for a disk, on the thread of the caller."""

    # True while the owner closes. It syncs each file itself, so syncs that are queued do nothing.
    is_ending = False

    def run(self, work: Work, done: Done) -> None:
        """Run ``work``, then call ``done`` on the caller's thread with its error or None."""
        try:
            work()
        except OSError as exc:
            done(exc)
        else:
            done(None)

    def sync(self, descriptor: int) -> None:
        """Make the data of an open file durable. Raises ``OSError``."""
        os.fsync(descriptor)


def one_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor with a running thread: the system may refuse to start one later.

    Raises ``RuntimeError`` if it refuses now.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    executor.submit(int)
    return executor


class DiskThread(DiskWork):
    """Runs operations on a separate thread until `end`. Raises as `one_thread`."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.sync_count = 0
        self.sync_s = self.longest_sync_s = 0.0
        self._loop = loop
        self._executor = one_thread("nsqd-disk")

    def run(self, work: Work, done: Done) -> None:
        if self.is_ending:
            super().run(work, done)
            return

        def finished(future: Future[None]) -> None:
            if future.cancelled():
                return
            exc = future.exception()
            done(exc if isinstance(exc, OSError | None) else OSError(repr(exc)))

        self._loop.run_in_executor(self._executor, work).add_done_callback(finished)

    async def wait_for(self, work: Work) -> None:
        """Run ``work`` after all operations that were submitted before. Raises its error."""
        await self._loop.run_in_executor(self._executor, work)

    def sync(self, descriptor: int) -> None:
        started_s = time.monotonic()
        super().sync(descriptor)
        took_s = time.monotonic() - started_s
        self.sync_count += 1
        self.sync_s += took_s
        self.longest_sync_s = max(self.longest_sync_s, took_s)

    def end(self) -> None:
        """Finish the submitted operations, except syncs. Later ones run on the caller's thread."""
        self.is_ending = True
        self._executor.shutdown()


# -- records ---------------------------------------------------------------------------------------

QUEUE_FILE = re.compile(r"(.+)\.diskqueue\.(?:(\d{6,})\.dat(\.bad(?:\.\d+)?)?|meta\.dat)")
"""Matches the name of a file. The groups are the queue, the number of a data file, and the suffix
of a data file that was set aside: ``.bad``, or ``.bad.1`` and so on if that name exists."""


def set_aside_name(path: Path) -> Path:
    """Return the new name of a data file to set aside. The Go nsqd overwrites an older one."""
    return unused_name(path.with_name(f"{path.name}.bad"))


def queues_with_files(data_path: Path) -> dict[str, list[int]]:
    """Return the numbers of the data files of each queue that has data files or a meta file.

    Raises ``OSError``.
    """
    queues: dict[str, list[int]] = {}
    for match in map(QUEUE_FILE.fullmatch, os.listdir(data_path)):
        if match and not match[3]:
            numbers = queues.setdefault(match[1], [])
            if match[2]:
                numbers.append(int(match[2]))
    return queues


LENGTH_SIZE = 4
_LENGTH = struct.Struct(">i")
encode_length = _LENGTH.pack
"""Return the length field of a record."""
_READ_SIZE = 1 << 18  # of one read, on the thread of the loop
_META_BYTES = 4096  # five numbers, and the empty lines that `NewestContent.note` may leave


class CorruptFile(Exception):
    """The bytes at the read position are not a record."""


class Block(NamedTuple):
    """Records in the format of a file, and the size of each one there.

    ``bounds`` are the smallest and the largest size, if the caller has them.
    """

    data: bytes
    sizes: list[int]
    bounds: tuple[int, int] | None = None


def count_records(path: Path, position: int, max_size: int) -> int:
    """Return how many records can be read from a position on.

    An error ends the count without a message: reading the queue will meet it again and log it.
    """
    count = 0
    with suppress(OSError, CorruptFile), closing(RecordReader(path, position, max_size)) as reader:
        while reader.read(None) is not None:
            count += 1
    return count


class RecordReader:
    """Reads one file. ``position`` is the end of the last record. Raises ``OSError``."""

    def __init__(self, path: Path, position: int, max_size: int) -> None:
        self.position = position
        self._max_size = max_size
        self._descriptor = descriptor_to_read(path)
        # The bytes of the file after `position` begin at `_used` in the buffer.
        self._buffer = b""
        self._used = 0

    def read(self, end: int | None) -> bytes | None:
        """Return the next record, None at the end of the file.

        ``end`` is the write position of a file that is still being written, otherwise None. Raises
        `CorruptFile` or ``OSError``.
        """
        head = self._peek(LENGTH_SIZE, end)
        if not head:
            return None
        if len(head) < LENGTH_SIZE:
            raise CorruptFile("unexpected EOF")
        length: int = _LENGTH.unpack(head)[0]
        if not MIN_MESSAGE_SIZE <= length <= self._max_size:
            raise CorruptFile(f"invalid message read size ({length})")
        size = LENGTH_SIZE + length
        record = self._peek(size, end)
        if len(record) < size:
            raise CorruptFile("unexpected EOF")
        self._used += size
        self.position += size
        return record[LENGTH_SIZE:]

    def is_at_end(self) -> bool:
        """Return whether a file that is no longer being written ends here."""
        return not self._peek(1, None)

    def _peek(self, size: int, end: int | None) -> bytes:
        if len(self._buffer) - self._used < size:
            unread = self._buffer[self._used :]
            offset = self.position + len(unread)
            # Bytes beyond the write position may be changed by the next write, so do not buffer
            # them.
            limit = max(_READ_SIZE, size) if end is None else min(_READ_SIZE + size, end - offset)
            self._buffer = unread + os.pread(self._descriptor, limit, offset)
            self._used = 0
        return self._buffer[self._used : self._used + size]

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a network file system may report an earlier failure here
            os.close(self._descriptor)


class Positions(NamedTuple):
    """The content of a meta file."""

    depth: int
    read_file: int
    read_position: int
    write_file: int
    write_position: int

    @classmethod
    def read(cls, meta: Path) -> Positions:
        """Return the content of a meta file. Raises ``OSError``, ``ValueError``."""
        text = read_small(meta, _META_BYTES).decode("ascii")
        depth, *positions = map(int, text.replace(",", "\n").split())
        read_file, read_position, write_file, write_position = positions
        if min(positions) < 0:
            raise ValueError("a position is negative")
        if max(positions) >= 1 << 63:
            raise ValueError("a position is above what Go can count")
        if positions[:2] > positions[2:]:
            raise ValueError("the read position is past the write position")
        return cls(depth, read_file, read_position, write_file, write_position)

    def encode(self) -> bytes:
        """Return the bytes of the meta file."""
        return "{}\n{},{}\n{},{}\n".format(*self).encode()


# -- files with damage -----------------------------------------------------------------------------

_HEAD = struct.Struct(">iqH16s")  # length, timestamp, attempts, id
# The first byte of a timestamp is below 0x2f until 2077. Text has larger bytes, so the expression
# rejects nearly all positions within a body.
_LIKE_A_HEAD = re.compile(rb"(?=[\0-\x7f].{3}[\0-\x2f].{9}[0-9a-f]{16})", re.DOTALL)
# A timestamp that is further in the future is damage. A clock that is years ahead is not.
_AHEAD_NS = 10 * 365 * 86400 * NS
_WINDOW = 1 << 20  # bytes of one read of a search


class Record(NamedTuple):
    """The offset, the size and the header of a message in a file."""

    at: int
    size: int
    timestamp_ns: int
    attempts: int
    id: bytes

    @property
    def end(self) -> int:
        """The offset after the record."""
        return self.at + self.size


class NoRecord(NamedTuple):
    """Bytes that are not a record."""

    at: int
    end: int


class QueueFile:
    """An open data file. Bytes that are appended later are ignored. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = descriptor_to_read(path)
        self.size = os.fstat(self._descriptor).st_size
        self._latest_ns = time.time_ns() + _AHEAD_NS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def scan(self, start: int = 0) -> Iterator[Record | NoRecord]:
        """Yield the records and gaps from an offset on."""
        at, record = start, self._record(start, self.size)
        while at < self.size:
            if record is None:
                next_at = self._search(at + 1)
                yield NoRecord(at, next_at)
            else:
                following = self._record(record.end, self.size)
                if following is not None or record.end == self.size:
                    yield record
                    at, record = record.end, following
                    continue
                next_at = self._search(at + 1)
                if next_at < record.end:
                    yield NoRecord(at, next_at)
                else:
                    yield record
                    yield NoRecord(record.end, next_at)
            at, record = next_at, self._record(next_at, self.size)

    def content(self, record: Record) -> bytes:
        """Return the bytes of timestamp, attempts, id and body."""
        return os.pread(self._descriptor, record.size - LENGTH_SIZE, record.at + LENGTH_SIZE)

    def is_being_written(self, gap: NoRecord) -> bool:
        """Return whether the gap can be an incomplete record at the end of the file."""
        is_short = gap.end - gap.at < _HEAD.size
        return gap.end == self.size and (is_short or self._record(gap.at, 1 << 31) is not None)

    def _record(self, at: int, end: int) -> Record | None:
        head = os.pread(self._descriptor, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        length, timestamp_ns, attempts, message_id = _HEAD.unpack(head)
        if (
            MIN_MESSAGE_SIZE <= length <= end - at - LENGTH_SIZE
            and 0 < timestamp_ns < self._latest_ns
            and not message_id.translate(None, b"0123456789abcdef")
        ):
            return Record(at, LENGTH_SIZE + length, timestamp_ns, attempts, message_id)
        return None

    def _search(self, at: int) -> int:
        """Return the offset of the next record, or the end of the file."""
        while (at := self._after_hole(at)) < self.size:
            window = os.pread(self._descriptor, _WINDOW + _HEAD.size, at)
            for match in _LIKE_A_HEAD.finditer(window):
                if self._record(at + match.start(), self.size) is not None:
                    return at + match.start()
            at += _WINDOW
        return self.size

    def _after_hole(self, at: int) -> int:
        """Return the first offset that may have data: a hole may have a terabyte of zeros."""
        try:
            # A record may begin in the hole: its length and its timestamp can begin with zeros.
            return max(at, os.lseek(self._descriptor, at, os.SEEK_DATA) - _HEAD.size)
        except OSError as exc:
            # ENXIO: there is no data after the hole. Otherwise the file system has no holes.
            return self.size if exc.errno == errno.ENXIO else at
