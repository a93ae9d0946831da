"""A queue in files, in the formats of go-diskqueue: either program opens the other's directory.

Data files contain records (int32 length, bytes). They grow to a maximum size and are removed when
they have been read. The meta file contains the depth and the two positions. Reads are buffered, but
the read position moves only when a record is returned.

Durability is Go's: an fsync of the data, then the meta file, after ``sync_every`` operations, after
``sync_timeout`` (by the owner, see ``on_dirty``), at a new file, and at close. Only the last one
waits for the disk. The others overwrite the meta file immediately, so that it is current after a
kill, but without a sync, which would block the loop. Then ``background`` syncs the data, and the
meta file after it, so that a power failure leaves a consistent pair. One such sync runs at a time,
and later changes belong to the next one.

If the last data file is longer than the meta file states, or a later one exists, records were
written after the meta file. They are read as well, and writing continues in a new file. A file with
an invalid record is renamed to ``.bad`` and the next one is read, unless only this process cannot
read it at this time. Positions alone never remove a file. A file before the read position is
renamed, too, because the damage can be in the meta file. Missing files are skipped in one step,
because damaged positions may be 10^17 apart.

Trap: a file system needs long to remove 100 MB, so ``background`` does it. By then a queue of the
same name may exist again, with files of the same names. So a file is renamed immediately and
removed later, under a name that the next start recognizes as a temporary one.

Three faults of the original are not copied. Data files without a meta file are read and not
overwritten. A file that was read to its end when the writer began a new one is deleted, and not
renamed to ``.bad``. A file for which the process had no descriptor left is read later.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nsqtools.files.durable import NewestContent
from nsqtools.files.opening import open_to_write
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.queue_files import (
    LENGTH_SIZE,
    Block,
    CorruptFile,
    DiskWork,
    Positions,
    RecordReader,
    Work,
    count_records,
    queues_with_files,
    set_aside_name,
)

# Errors of this process: the file itself is good, and can be read later.
_FILE_IS_GOOD = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)
# Failed reads before the rest of a file is given up. A disk may fail for a moment.
_READ_ATTEMPTS = 5
# Up to this number of files it is faster to test each name than to list the directory.
_FEW_FILES = 100

Mark = tuple[int, int, int]
"""File and position of the writer, and the depth: the state that `DiskQueue.undo` restores."""


class DiskQueue:
    """One queue. ``name`` is ``TOPIC`` or ``TOPIC:CHANNEL``.

    The queue removes its own entry from ``existing``, the result of `queues_with_files`.
    ``on_dirty`` is called when there are changes to sync, once or more often.
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
        existing: dict[str, list[int]],
        background: DiskWork | None = None,
        on_dirty: Callable[[DiskQueue], object] = lambda _: None,
    ) -> None:
        self.name = name
        self.depth = 0
        self._max_bytes_per_file = max_bytes_per_file
        self._max_record = max_msg_size + MIN_MESSAGE_SIZE
        self._log = log
        self._background = background or DiskWork()
        self._folder = data_path
        self._meta_path = data_path / f"{name}.diskqueue.meta.dat"
        self._meta = NewestContent(self._meta_path, name_is_durable=False)
        self._sync_every = max(1, sync_every)
        self._on_dirty = on_dirty
        # Puts, gets and other changes: all of them, and those before the last sync.
        self._operations = self._synced = 0
        self._unnoted = 0  # operations since the meta file was written
        self._is_syncing = False
        self._read_file = self._read_position = 0
        self._write_file = self._write_position = 0
        self._reader: RecordReader | None = None
        self._writer = -1
        if name in existing:
            self._open(existing.pop(name))

    @property
    def needs_sync(self) -> bool:
        """Whether there were operations since the last sync."""
        return self._operations > self._synced

    def put(self, blocks: Sequence[Block]) -> Mark:
        """Append records, all or none, and return the argument of `undo`. No block may be empty.

        Raises ``OSError``.
        """
        # A new file begins before the mark, so `undo` never has to reopen the previous one.
        end = self._write_position + blocks[0].sizes[0] if blocks and self._write_position else 0
        if end > self._max_bytes_per_file:
            self._roll()
        mark = (self._write_file, self._write_position, self.depth)
        try:
            for block in blocks:
                self._check_sizes(block)
            for block in blocks:
                if self._write_position + len(block.data) <= self._max_bytes_per_file:
                    self._append(block.data, len(block.sizes))
                else:
                    self._append_in_files(block)
        except OSError:
            self.undo(mark)
            raise
        self._count(sum(len(block.sizes) for block in blocks))
        return mark

    def _check_sizes(self, block: Block) -> None:
        for size in block.bounds or (min(block.sizes), max(block.sizes)):
            if not MIN_MESSAGE_SIZE <= size - LENGTH_SIZE <= self._max_record:
                raise OSError(
                    f"invalid message write size ({size - LENGTH_SIZE}) "
                    f"minMsgSize={MIN_MESSAGE_SIZE} maxMsgSize={self._max_record}"
                )

    def _append_in_files(self, block: Block) -> None:
        """Append records that do not all fit into the current file."""
        start = end = count = 0
        for size in block.sizes:
            position = self._write_position + end - start
            if position and position + size > self._max_bytes_per_file:
                self._append(block.data[start:end], count)
                self._roll()
                start, count = end, 0
            end += size
            count += 1
        self._append(block.data[start:], count)

    def undo(self, mark: Mark) -> None:
        """Remove the records of puts after the mark. None may have been read meanwhile."""
        number, position, _ = mark
        if (number, position) == (self._write_file, self._write_position):
            return
        self._close_writer()
        self._remove(range(number + 1, self._write_file + 1))
        self._write_file, self._write_position, self.depth = mark
        with suppress(OSError):  # the next record overwrites the bytes otherwise
            os.truncate(self._data(number), position)
        self._count(1)

    def get(self, count: int, max_bytes: int) -> list[bytes]:
        """Remove and return up to ``count`` records, none when reading fails.

        Only the last record may exceed ``max_bytes``.
        """
        records: list[bytes] = []
        size = failures = 0
        while len(records) < count and size < max_bytes and self.has_unread:
            try:
                record = self._next_record()
            except FileNotFoundError:
                self._skip_missing()
                continue
            except (OSError, CorruptFile) as exc:
                self._log.error(
                    f"DISKQUEUE({self.name}) reading at {self._read_position} of "
                    f"{self._data(self._read_file)} - {exc}"
                )
                if getattr(exc, "errno", 0) in _FILE_IS_GOOD:
                    break
                failures += 1
                if isinstance(exc, CorruptFile) or failures >= _READ_ATTEMPTS:
                    self._set_aside("which cannot be read further")
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
        """Drop all records and remove all files. The next put begins a new file."""
        self._log.info(f"DISKQUEUE({self.name}): emptying")
        self._skip_to_new_file()
        self._synced, self._unnoted = self._operations, 0
        number = self._meta.number()
        self._background.run(lambda: self._meta.remove(number), self._report)

    def close(self) -> None:
        """Sync and close. Raises ``OSError``."""
        self._log.info(f"DISKQUEUE({self.name}): closing")
        try:
            if self.needs_sync:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing the meta file."""
        self._close_reader()
        self._close_writer()

    def describe(self, error: OSError) -> str:
        """Return the error of a write in Go's words."""
        if error.strerror is None:
            return str(error)
        operation = "open" if error.filename else "write"
        return f"{operation} {self._data(self._write_file)}: {error.strerror.lower()}"

    # syncs

    def sync(self) -> None:
        """Make all puts and gets durable now. Raises ``OSError``."""
        if self._writer >= 0:
            self._background.sync(self._writer)
        self._meta.write(self._positions(), self._meta.number())
        self._synced, self._unnoted = self._operations, 0

    def start_sync(self) -> None:
        """Make all puts and gets until now durable in the background. A failure is logged."""
        operations = self._operations
        try:
            work = self._sync(os.dup(self._writer) if self._writer >= 0 else -1, is_open=True)
        except OSError as exc:  # no descriptor left
            self._report(exc)
            self._on_dirty(self)
            return
        self._is_syncing = True

        def finished(error: OSError | None) -> None:
            self._is_syncing = False
            self._report(error)
            if error is None:  # operations during the sync belong to the next one
                self._synced = max(self._synced, operations)
                self._start_if_due()
            if self.needs_sync:
                self._on_dirty(self)

        self._background.run(work, finished)

    def _start_if_due(self) -> None:
        is_due = self._operations - self._synced >= self._sync_every
        if is_due and not (self._is_syncing or self._background.is_ending):
            self.start_sync()

    def _count(self, operations: int) -> None:
        """Count operations, and sync when there are ``sync_every``."""
        if not self.needs_sync:
            self._on_dirty(self)
        self._operations += operations
        self._unnoted += operations
        if self._unnoted >= self._sync_every:
            self._note()
        self._start_if_due()

    def _note(self) -> None:
        self._unnoted = 0
        try:
            self._meta.note(self._positions())
        except OSError as exc:
            self._report(exc)

    def _positions(self) -> bytes:
        read, write = self._read_position, self._write_position
        return Positions(self.depth, self._read_file, read, self._write_file, write).encode()

    def _leave_file(self, data: int) -> None:
        """Sync and close the descriptor of a complete file (-1: none), and write the meta file."""
        self._note()
        self._background.run(self._sync(data, is_open=False), self._report)

    def _sync(self, data: int, *, is_open: bool) -> Work:
        positions, number = self._positions(), self._meta.number()

        def work() -> None:
            try:
                # The owner syncs an open file when it closes the queue.
                if is_open and self._background.is_ending:
                    return
                if data >= 0:
                    self._background.sync(data)
                self._meta.write(positions, number)
            finally:
                if data >= 0:
                    os.close(data)

        return work

    def _report(self, error: OSError | None, operation: str = "sync") -> None:
        if error is not None:
            self._log.error(f"DISKQUEUE({self.name}) failed to {operation} - {error}")

    # files

    def _open(self, numbers: Sequence[int]) -> None:
        try:
            positions = Positions.read(self._meta_path)
        except (FileNotFoundError, ValueError) as exc:
            if isinstance(exc, ValueError):
                self._log.error(f"DISKQUEUE({self.name}) failed to retrieveMetaData - {exc}")
            if numbers:
                self._log.warn(f"DISKQUEUE({self.name}) has no metadata, reading all its files")
                self._read_file, self._write_file = min(numbers), max(numbers) + 1
                self._recount()
            return
        self.depth, self._read_file, self._read_position = positions[:3]
        self._write_file, self._write_position = positions[3:]
        for number in sorted(number for number in numbers if number < self._read_file):
            # A power failure undid the removal, or the meta file belongs to other files.
            self._rename_to_bad(number, "which is before the read position")
        last = max([self._write_file, *numbers])
        size = self._data(self._write_file).stat().st_size if self._write_file in numbers else 0
        # A kill leaves more bytes than the position, a power failure fewer. Later files show that
        # the meta file is an older one.
        if self._write_position != size or last > self._write_file:
            self._log.warn(
                f"DISKQUEUE({self.name}) file {self._write_file} has {size} bytes, "
                f"{self._write_position} in its metadata, or is not the last; skipping to new file"
            )
            self._write_file = last + 1
            self._write_position = 0
            self._recount()
        if self._read_file not in numbers:
            if self.has_unread:
                self._skip_missing()
                self._recount()
            self._check_tail()
        elif self._read_position > self._data(self._read_file).stat().st_size:
            self._set_aside(f"shorter than the read position, {self._read_position}")
            self._recount()

    def _recount(self) -> None:
        """Set the depth to the number of records that can be read, after a crash."""
        self.depth = 0
        position = self._read_position
        for number in self._existing(range(self._read_file, self._write_file)):
            is_first = number == self._read_file
            start = position if is_first else 0
            self.depth += count_records(self._data(number), start, self._max_record)
        self._count(1)  # the next sync writes the depth

    def _roll(self) -> None:
        is_read = not self.has_unread
        full, self._writer = self._writer, -1
        self._write_file += 1
        self._write_position = 0
        self._leave_file(full)
        # The reader has read the full file but has not met its end, where a file is removed.
        if is_read:
            self._remove([self._next_file()])

    def _append(self, data: bytes, count: int) -> None:
        if not count:
            return
        if self._writer < 0:
            path = self._data(self._write_file)
            self._writer = open_to_write(path, os.O_RDWR | os.O_CREAT)
            self._log.info(f"DISKQUEUE({self.name}): writeOne() opened {path}")
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(
                    self._writer, memoryview(data)[done:], self._write_position + done
                )
        except OSError:
            # The publish is refused. After a kill before the next put, nsqd would read its records.
            with suppress(OSError):
                os.ftruncate(self._writer, self._write_position)
            self._close_writer()
            raise
        self._write_position += len(data)
        self.depth += count

    def _close_writer(self) -> None:
        if self._writer >= 0:
            writer, self._writer = self._writer, -1
            with suppress(OSError):  # a network file system may report the failure of a sync
                os.close(writer)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # reading

    @property
    def has_unread(self) -> bool:
        """Whether `get` has files to read. After a crash the depth may be wrong."""
        if self._read_file == self._write_file:  # twice as fast as a comparison of tuples
            return self._read_position < self._write_position
        return self._read_file < self._write_file

    def _next_record(self) -> bytes | None:
        """Return the record at the read position, None after changing to the next file."""
        if self._reader is None:
            path = self._data(self._read_file)
            self._reader = RecordReader(path, self._read_position, self._max_record)
            self._log.info(f"DISKQUEUE({self.name}): readOne() opened {path}")
        is_complete = self._read_file < self._write_file
        record = self._reader.read(None if is_complete else self._write_position)
        self._read_position = self._reader.position
        if record is None and not is_complete:
            raise CorruptFile("unexpected EOF")
        if is_complete and self._reader.is_at_end():
            self._remove([self._next_file()])
        return record

    def _next_file(self, number: int | None = None) -> int:
        """Read the next file from now on, or the one given; return the number of the old one."""
        self._close_reader()
        old_number, self._read_position = self._read_file, 0
        self._read_file = old_number + 1 if number is None else number
        self._leave_file(-1)
        return old_number

    def _write_elsewhere(self) -> None:
        """Write to a new file if the file being read, which is damaged, is the current one."""
        if self._read_file == self._write_file:
            self._close_writer()
            self._write_file += 1
            self._write_position = 0

    def _set_aside(self, reason: str) -> None:
        self._write_elsewhere()
        self._rename_to_bad(self._read_file, f"{reason}; jump to next file")
        self._next_file()
        self._check_tail()

    def _rename_to_bad(self, number: int, reason: str) -> None:
        path = self._data(number)
        bad = set_aside_name(path)
        self._log.warn(f"DISKQUEUE({self.name}) saving bad file {path}, {reason}, as {bad}")
        try:
            path.rename(bad)
        except OSError:
            self._log.error(
                f"DISKQUEUE({self.name}) failed to rename bad diskqueue file {path} to {bad}"
            )

    def _skip_missing(self) -> None:
        """Continue with the next file that exists: the one to be read does not."""
        self._write_elsewhere()
        first = self._read_file
        later = self._existing(range(first + 1, self._write_file))
        self._next_file(later[0] if later else self._write_file)
        self._log.warn(
            f"DISKQUEUE({self.name}) files {first} to {self._read_file - 1} are gone, with the "
            "messages that they had"
        )
        self._check_tail()

    def _check_tail(self) -> None:
        """Correct the depth at the end of all files, where it must be 0: a crash can change it."""
        if self.has_unread:
            return
        if self.depth:
            cause = "data loss" if self.depth > 0 else "metadata corruption"
            self._log.error(f"DISKQUEUE({self.name}) depth {self.depth} at its end, {cause}")
            self.depth = 0
            self._count(1)
        read_end = (self._read_file, self._read_position)
        if read_end != (self._write_file, self._write_position):
            self._log.error(f"DISKQUEUE({self.name}) read position is past the end, corruption")
            self._skip_to_new_file()

    def _skip_to_new_file(self) -> None:
        self._close_reader()
        self._close_writer()
        self._remove(self._existing(range(self._read_file, self._write_file + 1)))
        self._read_file = self._write_file = self._write_file + 1
        self._read_position = self._write_position = self.depth = 0

    # names of files

    def _data(self, number: int) -> Path:
        """Return the path of a data file."""
        return self._folder / f"{self.name}.diskqueue.{number:06d}.dat"

    def _existing(self, numbers: range) -> list[int]:
        """Return the numbers that have a file, in order."""
        if numbers.stop - numbers.start <= _FEW_FILES:
            return [number for number in numbers if self._data(number).exists()]
        listed = queues_with_files(self._folder).get(self.name, [])
        return sorted(number for number in listed if number in numbers)

    def _remove(self, numbers: Iterable[int]) -> None:
        """Remove data files in the background; failures are logged."""
        operation = "remove data file"
        renamed: list[str] = []
        for number in numbers:
            path = self._data(number)
            temporary = self._folder / f".{path.name}.{os.urandom(8).hex()}.tmp"
            try:
                os.rename(path, temporary)
            except FileNotFoundError:
                continue
            except OSError as exc:
                self._report(exc, operation)
            else:
                renamed.append(str(temporary))

        def work() -> None:
            for path in renamed:
                os.unlink(path)

        if renamed:
            self._background.run(work, lambda error: self._report(error, operation))
