"""A file in progress: text in, durable members out, all or nothing.

It is locked for as long as it is written: whoever finds a ``.part`` that is not locked may recover
it. After a failed flush `roll_back` brings file and index back to the last durable member; nothing
may be written before that has worked.

Text is compressed as it arrives, so the work is spread and little is left to do at the flush. Each
flush ends the gzip member: it can then be read by itself, and costs only a few bytes. python-isal
compresses five times as fast as zlib, to files a tenth larger. It is used when it can be imported
and no level was asked for; the levels are zlib's.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nsqtools.archive.layout import Head, Member, index_of, part_of
from nsqtools.files.durable import NEW, blaming, sync_folder, write_all
from nsqtools.files.locks import try_lock

CREATE = NEW | os.O_RDWR | os.O_APPEND
DEFAULT_LEVEL = 6
ISAL_LEVEL = 2
GZIP_WINDOW = 31  # 15 bits of window, and 16 for the gzip header

CompressorFactory = Callable[[], "Compressor"]


class Compressor(Protocol):
    """Of one member: fed, then flushed once. `zlib.compressobj` is one."""

    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


class Plain:
    """Leaves text as it is."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def gzip_members(level: int | None) -> CompressorFactory:
    """Return what begins a gzip member; ``level`` is 1 to 9, None for a good one."""
    if level is None and (isal := _isal()) is not None:
        return lambda: isal.compressobj(ISAL_LEVEL, isal.DEFLATED, GZIP_WINDOW)
    wanted = DEFAULT_LEVEL if level is None else level
    return lambda: zlib.compressobj(wanted, zlib.DEFLATED, GZIP_WINDOW)


def _isal() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    return isal_zlib


class PartFile:
    """The file that will be ``path``, whose directory must exist.

    ``now_s`` is the time since 1970, kept as ``opened_at_s``. The ``head`` goes before the members
    in the index. Raises `FileExistsError` when the name is taken, and ``OSError``.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        compressor: CompressorFactory,
        now_s: float,
        head: Head | None = None,
    ) -> None:
        self.path = path
        self.opened_at_s = now_s
        self.size = 0  # of what is durable, on disk
        self.uncompressed_size = 0
        first_line = head.encode() if head else b""
        self._index_size = len(first_line)
        self._new_compressor = compressor
        self._data = os.open(part_of(path), CREATE, mode)
        try:
            self._lock()
            self._index = self._begin_index(mode, first_line)
        except OSError as exc:
            if exc.filename == str(index_of(path)):
                part_of(path).unlink()
            os.close(self._data)
            raise
        sync_folder(path.parent)
        self._begin_member()

    def _begin_index(self, mode: int, first_line: bytes) -> int:
        """Make the index; its first line becomes durable with that of the first member."""
        path = index_of(self.path)
        descriptor = os.open(path, CREATE, mode)
        try:
            with blaming(path):
                write_all(descriptor, first_line)
        except OSError:
            path.unlink()
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self) -> None:
        """Raise when somebody took the empty file for a leftover just before it is locked."""
        if not try_lock(self._data) or not os.fstat(self._data).st_nlink:
            raise FileExistsError(f"{self.path} is being recovered by another process")

    def _begin_member(self) -> None:
        self._compressor = self._new_compressor()
        self._chunks: list[bytes] = []
        self._text_size = self._chunks_size = 0

    def append(self, text: bytes) -> None:
        """Add text to the member that is being made; nothing is written yet."""
        self._text_size += len(text)
        if chunk := self._compressor.compress(text):
            self._chunks.append(chunk)
            self._chunks_size += len(chunk)

    def end_member(self, count: int, min_ts: int, max_ts: int) -> Member:
        """Return the member that `flush` will write."""
        self._chunks.append(self._compressor.flush())
        return Member(self.size, sum(map(len, self._chunks)), count, min_ts, max_ts)

    def flush(self, member: Member) -> None:
        """Make a member durable. Raises ``OSError``; then `roll_back` comes next."""
        if self.has_vanished:
            raise OSError(errno.ENOENT, "it was removed while it was written", str(self.path))
        with blaming(self.path):
            write_all(self._data, b"".join(self._chunks))
            os.fdatasync(self._data)
            line = member.encode()
            write_all(self._index, line)
            os.fdatasync(self._index)
        self.size = member.end
        self.uncompressed_size += self._text_size
        self._index_size += len(line)
        self._begin_member()

    @property
    def expected_sizes(self) -> tuple[int, int]:
        """The sizes on disk and uncompressed, as far as known, when the member is flushed."""
        return self.size + self._chunks_size, self.uncompressed_size + self._text_size

    def roll_back(self) -> None:
        """Forget what is not durable. Raises ``OSError`` when that fails: try again later."""
        self._begin_member()
        with blaming(self.path):
            os.ftruncate(self._index, self._index_size)
            os.ftruncate(self._data, self.size)

    @property
    def has_vanished(self) -> bool:
        """Whether it was removed: what it held is gone."""
        return not os.fstat(self._data).st_nlink

    def close(self) -> None:
        """Close it, which releases its lock: recovery may take it."""
        os.close(self._index)
        os.close(self._data)

    def remove(self) -> None:
        """Close and remove it: it holds nothing."""
        part_of(self.path).unlink(missing_ok=True)
        index_of(self.path).unlink(missing_ok=True)
        self.close()
