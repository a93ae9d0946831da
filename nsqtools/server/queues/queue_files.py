"""What is in the files of a disk queue, and the thread that waits for the disk.

Data files hold records of an int32 length and that number of bytes, end to end. Reading goes
forward in large pieces. Where the bytes are not a record there is nothing to find the next one by,
so the rest of the file is given up (`CorruptFile`). ``NAME.diskqueue.000000.dat`` and so on hold
the data, ``NAME.diskqueue.meta.dat`` the positions.

What waits for a disk must not hold up the loop: syncs, renamed files, files to be removed. All such
work of one daemon runs on one thread, in the order in which it was given, so a removal never
overtakes the sync that stops needing the file. Without a loop (tests, recovery) `DiskWork` does the
same on the spot.

What reads a file without its nsqd, `QueueFile`, takes every whole record around what is damaged.
A record has no checksum and no mark, so it is believed when it looks like one (its length is
within the file, its time is possible, its id is 16 hexadecimal digits) and what follows it does, or
is the end. Where that fails, the next place that looks like a record is searched. If it is within
the record before, that one has a wrong length; else that one is whole, and its neighbor is not.

Traps: a changed byte in a body cannot be seen. A record whose length shrank is believed, cut short,
before a gap.
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
    """Runs work that waits for a disk, on the spot."""

    is_ending = False  # the owner closes: syncs that wait are left to it

    def run(self, work: Work, done: Done) -> None:
        """Do ``work``, then call ``done`` on the caller's thread with what it raised."""
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
    """Return an executor whose thread runs already: later the system may have none left.

    Raises ``RuntimeError`` if it has none now.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    executor.submit(int)
    return executor


class DiskThread(DiskWork):
    """Runs work on a thread of its own, until `end`. Raises ``RuntimeError`` without a thread."""

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
        """Do ``work`` after all that was given before. Raises what it raises."""
        await self._loop.run_in_executor(self._executor, work)

    def sync(self, descriptor: int) -> None:
        started_s = time.monotonic()
        super().sync(descriptor)
        took_s = time.monotonic() - started_s
        self.sync_count += 1
        self.sync_s += took_s
        self.longest_sync_s = max(self.longest_sync_s, took_s)

    def end(self) -> None:
        """Finish what was given, without the syncs; later work is done on the spot."""
        self.is_ending = True
        self._executor.shutdown()


# -- records ---------------------------------------------------------------------------------------

QUEUE_FILE = re.compile(r"(.+)\.diskqueue\.(?:(\d{6,})\.dat(\.bad(?:\.\d+)?)?|meta\.dat)")
"""Of the name of a file: the queue, its number unless it is the meta file, and what a file that was
set aside has behind it. That is ``.bad``, or ``.bad.1`` and so on where that name was taken."""


def set_aside_name(path: Path) -> Path:
    """Return the name under which to set a data file aside. Go's nsqd replaces an older one."""
    return unused_name(path.with_name(f"{path.name}.bad"))


def queues_with_files(data_path: Path) -> dict[str, list[int]]:
    """Return the numbers of the data files of each queue that has some, or a meta file.

    Raises ``OSError``.
    """
    found: dict[str, list[int]] = {}
    for match in map(QUEUE_FILE.fullmatch, os.listdir(data_path)):
        if match and not match[3]:
            numbers = found.setdefault(match[1], [])
            if match[2]:
                numbers.append(int(match[2]))
    return found


LENGTH_SIZE = 4
_LENGTH = struct.Struct(">i")
encode_length = _LENGTH.pack
"""Return the bytes in front of a record."""
_READ_SIZE = 1 << 18
_META_BYTES = 4096  # five numbers, and the empty lines that `NewestContent.note` may leave


class CorruptFile(Exception):
    """The file cannot be read on from here."""


class Block(NamedTuple):
    """Records as they are in a file, and the size of each there."""

    data: bytes
    sizes: list[int]
    bounds: tuple[int, int] | None = None  # the smallest and the largest size, where known


def count_records(path: Path, position: int, max_size: int) -> int:
    """Return how many whole records a file has from a position on; 0 when it cannot be read."""
    count = 0
    with suppress(OSError, CorruptFile), closing(RecordReader(path, position, max_size)) as reader:
        while reader.read(None) is not None:
            count += 1
    return count  # what fails here fails when it is read, too, and is said then


class RecordReader:
    """Reads one file from a position on. Raises ``OSError`` when it cannot be opened."""

    def __init__(self, path: Path, position: int, max_size: int) -> None:
        self.position = position  # after the last record that was returned
        self._max_size = max_size
        self._descriptor = descriptor_to_read(path)
        self._buffer = b""  # what follows the position, from _used on
        self._used = 0

    def read(self, end: int | None) -> bytes | None:
        """Return the next record, None at the end of the file.

        ``end`` is how far it may be read while it is still written, None for all of it. Raises
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
        """Return whether nothing follows in a file that is no longer written."""
        return not self._peek(1, None)

    def _peek(self, size: int, end: int | None) -> bytes:
        if len(self._buffer) - self._used < size:
            rest = self._buffer[self._used :]
            at = self.position + len(rest)
            wanted = max(_READ_SIZE, size) if end is None else min(_READ_SIZE + size, end - at)
            self._buffer = rest + os.pread(self._descriptor, wanted, at)
            self._used = 0
        return self._buffer[self._used : self._used + size]

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a network file system may have something to say
            os.close(self._descriptor)


class Positions(NamedTuple):
    """What the meta file holds."""

    depth: int
    read_file: int
    read_position: int
    write_file: int
    write_position: int

    @classmethod
    def read(cls, meta: Path) -> Positions:
        """Return what a meta file holds. Raises ``OSError``, ``ValueError``."""
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
        """Return the content of the meta file."""
        return "{}\n{},{}\n{},{}\n".format(*self).encode()


# -- around damage ---------------------------------------------------------------------------------

_HEAD = struct.Struct(">iqH16s")  # length, timestamp, attempts, id
# the first byte of a time is below 0x2f until 2077: text, which is above it, costs no second look
_LIKE_A_HEAD = re.compile(rb"(?=[\0-\x7f].{3}[\0-\x2f].{9}[0-9a-f]{16})", re.DOTALL)
_AHEAD_NS = 10 * 365 * 86400 * NS
_WINDOW = 1 << 20


class Record(NamedTuple):
    """Where a message is, with its length, and what is in front of its body."""

    at: int
    size: int
    timestamp_ns: int
    attempts: int
    id: bytes

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.at + self.size


class NoRecord(NamedTuple):
    """Bytes that are no record."""

    at: int
    end: int


class QueueFile:
    """An open data file, as long as it is now. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = descriptor_to_read(path)
        self.size = os.fstat(self._descriptor).st_size
        self._latest_ns = time.time_ns() + _AHEAD_NS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def scan(self, start: int = 0) -> Iterator[Record | NoRecord]:
        """Yield what there is from an offset on."""
        at, record = start, self._record(start, self.size)
        while at < self.size:
            if record is None:
                found = self._search(at + 1)
                yield NoRecord(at, found)
            else:
                following = self._record(record.end, self.size)
                if following is not None or record.end == self.size:
                    yield record
                    at, record = record.end, following
                    continue
                found = self._search(at + 1)
                if found < record.end:
                    yield NoRecord(at, found)
                else:
                    yield record
                    yield NoRecord(record.end, found)
            at, record = found, self._record(found, self.size)

    def content(self, record: Record) -> bytes:
        """Return timestamp, attempts, id and body, as they are in the file."""
        return os.pread(self._descriptor, record.size - LENGTH_SIZE, record.at + LENGTH_SIZE)

    def is_being_written(self, gap: NoRecord) -> bool:
        """Whether it can be the beginning of a record, at the end of the file."""
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
        """Return where the next record is, else the end."""
        while (at := self._after_hole(at)) < self.size:
            some = os.pread(self._descriptor, _WINDOW + _HEAD.size, at)
            for match in _LIKE_A_HEAD.finditer(some):
                if self._record(at + match.start(), self.size) is not None:
                    return at + match.start()
            at += _WINDOW
        return self.size

    def _after_hole(self, at: int) -> int:
        """Return where data can be at the earliest: a sparse file may claim a terabyte of zeros."""
        try:  # a head may begin in the hole: its length and time can begin with zeros
            return max(at, os.lseek(self._descriptor, at, os.SEEK_DATA) - _HEAD.size)
        except OSError as exc:
            return self.size if exc.errno == errno.ENXIO else at  # else it knows no holes
