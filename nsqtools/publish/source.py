"""Records from files and streams, in batches: a full one at once, a partial one after a moment.

A batch ends when it is full, when nothing more came for `LINGER_S`, or at the end of the input. So
``tail -f log | nsq pub`` is prompt and a large file is fast, without a setting for it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nsqtools.errors import OutputError
from nsqtools.records.envelope import Splitter

LINGER_S = 0.005
READ_SIZE = 1 << 18
BATCH_RECORDS = 1000
BATCH_BYTES = 1 << 19
MAX_RECORD_BYTES = 1 << 28  # beyond it the delimiter must be wrong
PIPE_SIZE = 1 << 20
STOP_CHECK_S = 0.2


class InputPlace(NamedTuple):
    """A place in the input: the number of the file, the bytes and, of all files, the records
    before it."""

    file: int
    offset: int
    records: int


BEGIN = InputPlace(0, 0, 0)


class RecordSource:
    """Reads inputs one after the other.

    ``paths`` are files, ``-`` is standard input. ``is_stopped`` is asked between reads, and a wait
    for input ends soon after it says yes. ``begin`` is where to begin; ``place`` is the end of the
    latest batch.
    """

    def __init__(
        self,
        paths: Sequence[str],
        delimiter: bytes,
        is_stopped: Callable[[], bool],
        begin: InputPlace = BEGIN,
    ) -> None:
        self.place = begin
        self._bytes_before = 0
        self._paths = paths
        self._delimiter = delimiter
        self._is_stopped = is_stopped
        self._lacking = 0  # bytes of the delimiter that the last record of a file does not have
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def bytes_read(self) -> int:
        """The bytes before the place, in all files."""
        return self._bytes_before + self.place.offset

    def batches(self) -> Iterator[list[bytes]]:
        """Iterate over batches of records, without their delimiters.

        Raises `OutputError` for a file that cannot be read, `NsqError` for a record without end.
        """
        for file, path in enumerate(self._paths):
            if file < self.place.file:
                continue
            descriptor, is_ours = _open(path)
            try:
                if self.place.file == file and self.place.offset:
                    os.lseek(descriptor, self.place.offset, os.SEEK_SET)
                elif file != self.place.file:
                    self._bytes_before += self.place.offset
                    self.place = InputPlace(file, 0, self.place.records)
                yield from self._read(descriptor, path)
            finally:
                if is_ours:
                    os.close(descriptor)

    def _read(self, descriptor: int, path: str) -> Iterator[list[bytes]]:
        splitter = Splitter(self._delimiter, limit=MAX_RECORD_BYTES)
        while not self._is_stopped():
            if not _is_ready(descriptor, LINGER_S if self._pending else STOP_CHECK_S):
                if self._pending:
                    yield self._take()
                continue
            chunk = _read_chunk(descriptor, path)
            records = splitter.feed(chunk) if chunk else splitter.end()
            if not chunk:
                self._lacking = len(self._delimiter) * len(records)
            self._pending += records
            self._pending_bytes += sum(map(len, records))
            while len(self._pending) >= BATCH_RECORDS or self._pending_bytes >= BATCH_BYTES:
                yield self._take()
            if not chunk:
                break
        if self._pending:
            yield self._take()

    def _take(self) -> list[bytes]:
        batch = self._pending[:BATCH_RECORDS]
        self._pending = self._pending[BATCH_RECORDS:]
        left = sum(map(len, self._pending))
        taken = self._pending_bytes - left + len(batch) * len(self._delimiter)
        self._pending_bytes = left
        if not self._pending:
            taken -= self._lacking
            self._lacking = 0
        file, offset, records = self.place
        self.place = InputPlace(file, offset + taken, records + len(batch))
        return batch


def _open(path: str) -> tuple[int, bool]:
    if path == "-":
        _widen_pipe(0)
        return 0, False
    try:
        return os.open(path, os.O_RDONLY), True
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc


def _widen_pipe(descriptor: int) -> None:
    """Let the writer run ahead further: fewer and larger reads."""
    import fcntl

    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    except (OSError, AttributeError):
        pass  # no pipe, or not on Linux


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    # a regular file is always ready
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _read_chunk(descriptor: int, path: str) -> bytes:
    try:
        return os.read(descriptor, READ_SIZE)
    except OSError as exc:
        name = "standard input" if path == "-" else path
        raise OutputError(f"cannot read {name} ({exc.strerror})") from exc
