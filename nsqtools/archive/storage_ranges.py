"""Read an object as a file, by ranges: a request brings what is read next, not the whole object.

Reading on where the last read ended brings more with each request, because each costs a round trip
of tens of milliseconds; a read somewhere else begins small again. Every range is of the version
that was opened: an object that is replaced meanwhile raises `ChangedError` and never gives a
mixture of two.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqtools.archive.storage import Storage

FIRST_SIZE = 256 << 10
LARGEST_SIZE = 8 << 20


class RangeFile(io.RawIOBase):
    """``size`` and ``version`` are those of the object when it was opened."""

    def __init__(self, storage: Storage, name: str, size: int, version: str) -> None:
        super().__init__()
        self.name = storage.where(name)
        self._storage = storage
        self._object = name
        self._size = size
        self._version = version
        self._position = 0
        self._held = b""
        self._held_at = 0
        self._next_size = FIRST_SIZE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return ``size`` bytes, fewer only at the end. Raises ``OSError``."""
        left = max(0, self._size - self._position)
        size = left if size < 0 else min(size, left)
        begin = self._position - self._held_at
        if not 0 <= begin <= len(self._held) or begin + size > len(self._held):
            self._fetch(size)
            begin = self._position - self._held_at
        data = self._held[begin : begin + size]
        self._position += len(data)
        return data

    def _fetch(self, size: int) -> None:
        """Hold at least ``size`` bytes from the position on."""
        begin = self._position - self._held_at
        rest = self._held[begin:] if 0 <= begin <= len(self._held) else b""
        is_next = bool(self._held) and 0 <= begin <= len(self._held)
        self._next_size = min(2 * self._next_size, LARGEST_SIZE) if is_next else FIRST_SIZE
        start = self._position + len(rest)
        length = min(max(size - len(rest), self._next_size), self._size - start)
        data = self._storage.read_range(self._object, start, length, self._version)
        self._held = rest + data
        self._held_at = self._position

    def readlines(self, hint: int = -1, /) -> list[bytes]:
        """Return whole lines of about ``hint`` bytes together."""
        lines = self.read(hint).splitlines(keepends=True)
        while lines and not lines[-1].endswith(b"\n") and (more := self.read(FIRST_SIZE)):
            head, newline, rest = more.partition(b"\n")
            lines[-1] += head + newline
            if newline:
                self._position -= len(rest)
        return lines
