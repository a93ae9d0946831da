"""A queue in files, in the formats of go-diskqueue: either program opens the other's directory.

``NAME.diskqueue.000000.dat`` and so on hold records (int32 length, bytes), appended up to a size
and deleted when read; ``NAME.diskqueue.meta.dat`` holds depth and the two positions. Reads are
buffered, but a position moves only when a record is handed over.

Durability is Go's: an fsync of the data, then the meta file, after every so many operations, after
``sync_timeout`` (by the owner, see `needs_sync`), at a new file, and at close. What was written
after the last meta is found again by the file being longer than the meta says; then reading
continues to its end and writing in the next file. A file that cannot be read on is renamed to
``.bad`` and the next one is tried.

Two faults of the original are not copied: data files without a meta file are read and not
overwritten, and a file that was read to its end when the writer rolled is deleted, not ``.bad``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nsqtools.files.durable import NewestContent
from nsqtools.files.opening import open_to_write
from nsqtools.protocol.message import MIN_MESSAGE_SIZE
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.record_file import (
    LENGTH_SIZE,
    CorruptFile,
    RecordReader,
    count_records,
    encode_length,
)

_DATA_FILE = re.compile(r"(.+)\.diskqueue\.(\d{6,})\.dat")
_ANY_FILE = re.compile(r"(.+)\.diskqueue\.(?:\d{6,}|meta)\.dat")


def queues_with_files(data_path: Path, *, with_meta: bool = False) -> set[str]:
    """Return the names of the queues that have data files, or a meta file. Raises ``OSError``."""
    pattern = _ANY_FILE if with_meta else _DATA_FILE
    found = (pattern.fullmatch(name) for name in os.listdir(data_path))
    return {match[1] for match in found if match}


class DiskQueue:
    """One queue. ``name`` is ``TOPIC`` or ``TOPIC:CHANNEL``.

    ``may_have_files`` false saves looking for files of a queue that has no meta file.
    """

    def __init__(
        self,
        name: str,
        data_path: Path,
        *,
        max_bytes_per_file: int,
        max_msg_size: int,
        sync_every: int,
        log: DaemonLog,
        may_have_files: bool = True,
    ) -> None:
        self.name = name
        self.depth = 0
        self._path = data_path
        self._max_bytes_per_file = max_bytes_per_file
        self._max_record = max_msg_size + MIN_MESSAGE_SIZE
        self._sync_every = sync_every
        self._log = log
        self._read_file = self._read_position = 0
        self._write_file = self._write_position = 0
        self._reader: RecordReader | None = None
        self._writer = -1
        self._operations = 0  # since the last sync
        self._meta = NewestContent(self._meta_path, 0o600, name_is_durable=False)
        self._open(may_have_files)

    @property
    def needs_sync(self) -> bool:
        """Whether anything happened since the last sync."""
        return self._operations > 0

    def put(self, records: Sequence[bytes]) -> None:
        """Append records. Raises ``OSError``; then a prefix of them may have been written."""
        block: list[bytes] = []
        block_size = 0
        for record in records:
            size = LENGTH_SIZE + len(record)
            if not MIN_MESSAGE_SIZE <= len(record) <= self._max_record:
                self._append(block, block_size)
                raise OSError(
                    f"invalid message write size ({len(record)}) "
                    f"minMsgSize={MIN_MESSAGE_SIZE} maxMsgSize={self._max_record}"
                )
            position = self._write_position + block_size
            if position and position + size > self._max_bytes_per_file:
                self._append(block, block_size)
                self._roll()
                block, block_size = [], 0
            block += (encode_length(len(record)), record)
            block_size += size
        self._append(block, block_size)
        self._count(len(records))

    def get(self, count: int, max_bytes: int) -> list[bytes]:
        """Remove and return up to ``count`` records; an empty list means that there are none.

        ``max_bytes`` is exceeded by the last record at most.
        """
        records: list[bytes] = []
        size = 0
        while len(records) < count and size < max_bytes and self.has_unread:
            try:
                record = self._next_record()
            except (OSError, CorruptFile) as exc:
                self._log.error(
                    f"DISKQUEUE({self.name}) reading at {self._read_position} of "
                    f"{self._file(self._read_file)} - {exc}"
                )
                self._set_aside()
                continue
            if record is not None:
                records.append(record)
                size += len(record)
                self.depth -= 1
                self._check_tail()
        if records:
            self._count(len(records))
        return records

    def empty(self) -> None:
        """Drop everything and go on in a new file. Raises ``OSError``."""
        self._log.info(f"DISKQUEUE({self.name}): emptying")
        self._skip_to_new_file()
        self._meta.remove()
        self._operations = 0

    def delete(self) -> None:
        """Close and remove all files. Raises ``OSError``."""
        self._log.info(f"DISKQUEUE({self.name}): deleting")
        self._skip_to_new_file()
        self._meta.remove()

    def close(self) -> None:
        """Sync and close. Raises ``OSError``."""
        self._log.info(f"DISKQUEUE({self.name}): closing")
        try:
            if self.needs_sync:
                self.sync()
        finally:
            self._close_reader()
            self._close_writer()

    def sync(self) -> None:
        """Make what was put and read durable. Raises ``OSError``."""
        if self._writer >= 0:
            os.fsync(self._writer)
        self._meta.write(self._positions(), self._meta.number())
        self._operations = 0

    def begin_sync(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what another thread has to do for a sync, and what to call here once it is done.

        The first is called exactly once, and may raise ``OSError``. Everything up to now is durable
        then; the queue may be used meanwhile.
        """
        data = os.dup(self._writer) if self._writer >= 0 else -1
        positions, number = self._positions(), self._meta.number()
        operations = self._operations

        def work() -> None:
            try:
                if data >= 0:
                    os.fsync(data)
                self._meta.write(positions, number)
            finally:
                if data >= 0:
                    os.close(data)

        def done() -> None:
            self._operations = max(0, self._operations - operations)

        return work, done

    def _positions(self) -> bytes:
        return (
            f"{self.depth}\n{self._read_file},{self._read_position}\n"
            f"{self._write_file},{self._write_position}\n"
        ).encode()

    def try_sync(self) -> None:
        """Make it durable; a failure is logged and the next sync tries again."""
        try:
            self.sync()
        except OSError as exc:
            self._log.error(f"DISKQUEUE({self.name}) failed to sync - {exc}")

    def describe(self, error: OSError) -> str:
        """Return the error of a write in Go's words."""
        if error.strerror is None:
            return str(error)
        operation = "open" if error.filename else "write"
        return f"{operation} {self._file(self._write_file)}: {error.strerror.lower()}"

    def _count(self, operations: int) -> None:
        self._operations += operations
        if self._operations >= self._sync_every:
            self.try_sync()

    # files

    @property
    def _meta_path(self) -> Path:
        return self._path / f"{self.name}.diskqueue.meta.dat"

    def _file(self, number: int) -> Path:
        return self._path / f"{self.name}.diskqueue.{number:06d}.dat"

    def _open(self, may_have_files: bool) -> None:
        try:
            numbers = self._meta_path.read_text("ascii").replace(",", "\n").split()
            depth, read_file, read_position, write_file, write_position = map(int, numbers)
        except (OSError, ValueError) as exc:
            if not isinstance(exc, FileNotFoundError):
                self._log.error(f"DISKQUEUE({self.name}) failed to retrieveMetaData - {exc}")
            if may_have_files:
                self._adopt_files()
            return
        self.depth = depth
        self._read_file, self._read_position = read_file, read_position
        self._write_file, self._write_position = write_file, write_position
        size = self._size(write_file)
        if write_position < size:
            self._log.warn(
                f"DISKQUEUE({self.name}) {self._file(write_file)} metadata writePos "
                f"{write_position} < file size of {size}, skipping to new file"
            )
            self._write_file += 1
            self._write_position = 0
            self._recount()

    def _adopt_files(self) -> None:
        try:
            names = os.listdir(self._path)
        except OSError as exc:
            self._log.error(f"DISKQUEUE({self.name}) failed to look for files - {exc}")
            return
        found = (_DATA_FILE.fullmatch(name) for name in names)
        numbers = sorted(int(match[2]) for match in found if match and match[1] == self.name)
        if numbers:
            self._log.warn(f"DISKQUEUE({self.name}) has no metadata, reading all its files")
            self._read_file = numbers[0]
            self._write_file = numbers[-1] + 1
            self._recount()

    def _recount(self) -> None:
        """Set the depth to the number of records that can be read, after a crash."""
        self.depth = 0
        self._operations = 1  # so that the next sync makes it durable
        position = self._read_position
        for number in range(self._read_file, self._write_file):
            self.depth += count_records(self._file(number), position, self._max_record)
            position = 0

    def _size(self, number: int) -> int:
        try:
            return self._file(number).stat().st_size
        except OSError:
            return 0

    def _roll(self) -> None:
        read_to_end = self._read_file == self._write_file and not self.has_unread
        old = self._write_file
        self._write_file += 1
        self._write_position = 0
        if read_to_end:
            self._close_reader()
            self._read_file, self._read_position = self._write_file, 0
        self.try_sync()
        self._close_writer()
        if read_to_end:
            self._remove(old)

    def _append(self, block: list[bytes], size: int) -> None:
        if not block:
            return
        if self._writer < 0:
            path = self._file(self._write_file)
            self._writer = open_to_write(path, os.O_RDWR | os.O_CREAT)
            self._log.info(f"DISKQUEUE({self.name}): writeOne() opened {path}")
        data = b"".join(block)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(
                    self._writer, memoryview(data)[done:], self._write_position + done
                )
        except OSError:
            self._close_writer()  # the next attempt overwrites what may have been written
            raise
        self._write_position += size
        self.depth += len(block) // 2

    def _close_writer(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # reading

    @property
    def has_unread(self) -> bool:
        """Whether `get` has anything to try: after a crash the depth alone does not say."""
        if self._read_file == self._write_file:
            return self._read_position < self._write_position
        return self._read_file < self._write_file

    def _next_record(self) -> bytes | None:
        """Return the record at the read position; None after having moved on to the next file."""
        if self._reader is None:
            path = self._file(self._read_file)
            self._reader = RecordReader(path, self._read_position, self._max_record)
            self._log.info(f"DISKQUEUE({self.name}): readOne() opened {path}")
        is_complete = self._read_file < self._write_file
        record = self._reader.read(None if is_complete else self._write_position)
        self._read_position = self._reader.position
        if record is None and not is_complete:
            raise CorruptFile("unexpected EOF")
        if is_complete and self._reader.is_at_end():
            self._next_file(delete=True)
        return record

    def _next_file(self, *, delete: bool) -> None:
        self._close_reader()
        old = self._read_file
        self._read_file += 1
        self._read_position = 0
        self.try_sync()
        if delete:
            self._remove(old)

    def _remove(self, number: int) -> None:
        try:
            self._file(number).unlink(missing_ok=True)
        except OSError as exc:
            self._log.error(f"DISKQUEUE({self.name}) failed to remove data file - {exc}")

    def _set_aside(self) -> None:
        if self._read_file == self._write_file:
            self._close_writer()
            self._write_file += 1
            self._write_position = 0
        bad = self._file(self._read_file)
        self._log.warn(f"DISKQUEUE({self.name}) jump to next file and saving bad file as {bad}.bad")
        try:
            bad.rename(f"{bad}.bad")
        except OSError:
            self._log.error(
                f"DISKQUEUE({self.name}) failed to rename bad diskqueue file {bad} to {bad}.bad"
            )
        self._next_file(delete=False)
        self._check_tail()

    def _check_tail(self) -> None:
        """At the end of all files the depth must be 0; after a crash it need not have been."""
        if self.has_unread:
            return
        if self.depth:
            sign, reason = ("positive", "data loss") if self.depth > 0 else ("negative", "")
            self._log.error(
                f"DISKQUEUE({self.name}) {sign} depth at tail ({self.depth}), "
                f"{reason or 'metadata corruption'}, resetting 0..."
            )
            self.depth = 0
            self._operations += 1
        at_end = (self._read_file, self._read_position)
        if at_end != (self._write_file, self._write_position):
            self._log.error(f"DISKQUEUE({self.name}) read position is past the end, corruption")
            self._skip_to_new_file()

    def _skip_to_new_file(self) -> None:
        self._close_reader()
        self._close_writer()
        for number in range(self._read_file, self._write_file + 1):
            self._remove(number)
        self._write_file += 1
        self._read_file = self._write_file
        self._read_position = self._write_position = self.depth = 0
