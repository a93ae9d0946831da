"""The data files of a disk queue: records of an int32 length and so many bytes, end to end.

Reading goes forward in large pieces. Where the bytes are not a record there is nothing to find the
next one by, so the rest of the file is given up (`CorruptFile`).

``NAME.diskqueue.000000.dat`` and so on hold the data, ``NAME.diskqueue.meta.dat`` the positions.

Trap: removing 100 MB takes a file system long, so it is done behind the loop. By then a queue of
the same name may exist again, with files of the same names. So a file is renamed at once and
removed later, under a name that the next start recognizes as a temporary one.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nsqtools.files.opening import descriptor_to_read, open_to_read
from nsqtools.protocol.message import MIN_MESSAGE_SIZE
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.disk_thread import Behind

_DATA_FILE = re.compile(r"(.+)\.diskqueue\.(\d{6,})\.dat")
_ANY_FILE = re.compile(r"(.+)\.diskqueue\.(?:\d{6,}|meta)\.dat")


def queues_with_files(data_path: Path, *, with_meta: bool = False) -> set[str]:
    """Return the names of the queues that have data files, or a meta file. Raises ``OSError``."""
    pattern = _ANY_FILE if with_meta else _DATA_FILE
    found = (pattern.fullmatch(name) for name in os.listdir(data_path))
    return {match[1] for match in found if match}


class QueueFiles:
    """The files of the queue ``name`` in a directory."""

    def __init__(self, data_path: Path, name: str, behind: Behind, log: DaemonLog) -> None:
        self.name = name
        self.meta = data_path / f"{name}.diskqueue.meta.dat"
        self._path = data_path
        self._behind = behind
        self._log = log

    def data(self, number: int) -> Path:
        """Return the path of a data file."""
        return self._path / f"{self.name}.diskqueue.{number:06d}.dat"

    def size(self, number: int) -> int:
        """Return the size of a data file, 0 without one."""
        try:
            return self.data(number).stat().st_size
        except OSError:
            return 0

    def numbers(self) -> list[int]:
        """Return the numbers of the data files that are there."""
        try:
            names = os.listdir(self._path)
        except OSError as exc:
            self._log.error(f"DISKQUEUE({self.name}) failed to look for files - {exc}")
            return []
        found = (_DATA_FILE.fullmatch(name) for name in names)
        return sorted(int(match[2]) for match in found if match and match[1] == self.name)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove data files, behind the loop; failures are logged."""
        condemned: list[str] = []
        for number in numbers:
            path = self.data(number)
            beside = self._path / f".{path.name}.{os.urandom(8).hex()}.tmp"
            try:
                os.rename(path, beside)
            except FileNotFoundError:
                continue
            except OSError as exc:
                self._log.error(f"DISKQUEUE({self.name}) failed to remove data file - {exc}")
            else:
                condemned.append(str(beside))

        def work() -> None:
            for path in condemned:
                os.unlink(path)

        if condemned:
            self._behind.run(work, self._removed)

    def _removed(self, error: OSError | None) -> None:
        if error is not None:
            self._log.error(f"DISKQUEUE({self.name}) failed to remove data file - {error}")

    def set_aside(self, number: int) -> None:
        """Rename a file that cannot be read to ``.bad``."""
        bad = self.data(number)
        self._log.warn(f"DISKQUEUE({self.name}) jump to next file and saving bad file as {bad}.bad")
        try:
            bad.rename(f"{bad}.bad")
        except OSError:
            self._log.error(
                f"DISKQUEUE({self.name}) failed to rename bad diskqueue file {bad} to {bad}.bad"
            )


LENGTH_SIZE = 4
_LENGTH = struct.Struct(">i")
_READ_SIZE = 1 << 18


class CorruptFile(Exception):
    """The file cannot be read on from here."""


class Block(NamedTuple):
    """Records as they stand in a file, and the size of each there."""

    data: bytes
    sizes: list[int]


def encode_length(length: int) -> bytes:
    """Return what stands before a record."""
    return _LENGTH.pack(length)


def encode_block(records: Iterable[bytes]) -> Block:
    """Return records as they stand in a file."""
    encoded = [encode_length(len(record)) + record for record in records]
    return Block(b"".join(encoded), list(map(len, encoded)))


def count_records(path: Path, position: int, max_size: int) -> int:
    """Return how many whole records a file has from a position on; 0 when it cannot be read."""
    count = 0
    try:
        with open_to_read(path) as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(position)
            while len(head := file.read(LENGTH_SIZE)) == LENGTH_SIZE:
                length = _LENGTH.unpack(head)[0]
                position += LENGTH_SIZE + length
                if not MIN_MESSAGE_SIZE <= length <= max_size or position > end:
                    break
                file.seek(position)
                count += 1
    except OSError:
        pass  # reading the records will fail, too, and say why
    return count


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
        os.close(self._descriptor)
