"""A file in progress: text in, durable members out, all or nothing.

It is open, and locked, only while something is written: a thousand topics need no descriptors for
their files. Between two writes whatever is in the file is durable and indexed, so another process
that recovers it then does no harm: it finishes the file early, which is noticed here before the
next write, and that goes into a new file. `FolderLocks` keep polite processes from doing so. After
a failed flush `roll_back` brings file and index back to the last durable member; nothing may be
written before that has worked.

Text is compressed as it arrives, so the work is spread and little is left to do at the flush. Each
flush ends the member (`codecs`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nsqtools.archive.codecs import Compressor, CompressorFactory
from nsqtools.archive.layout import Head, Member, index_of, part_of
from nsqtools.files.durable import NEW, blaming, sync_folder, write_all
from nsqtools.files.locks import try_lock
from nsqtools.files.opening import open_to_write

CREATE = NEW | os.O_RDWR | os.O_APPEND
GONE = "another process has removed or finished it"


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
        self._identity = _make(part_of(path), index_of(path), mode, first_line)
        self._begin_member()

    def _begin_member(self) -> None:
        self._compressor: Compressor | None = None  # one takes up to 300 kB
        self._chunks: list[bytes] = []
        self._text_size = self._chunks_size = 0

    def append(self, text: bytes) -> None:
        """Add text to the member that is being made; nothing is written yet."""
        if self._compressor is None:
            self._compressor = self._new_compressor()
        self._text_size += len(text)
        if chunk := self._compressor.compress(text):
            self._chunks.append(chunk)
            self._chunks_size += len(chunk)

    def end_member(self, count: int, min_ts: int, max_ts: int) -> Member:
        """Return the member that `flush` will write."""
        compressor = self._compressor or self._new_compressor()
        self._chunks.append(compressor.flush())
        return Member(self.size, sum(map(len, self._chunks)), count, min_ts, max_ts)

    def flush(self, member: Member) -> None:
        """Make a member durable. Raises ``OSError``; then `roll_back` comes next."""
        with self._opened() as (data, index):
            write_all(data, b"".join(self._chunks))
            os.fdatasync(data)
            line = member.encode()
            write_all(index, line)
            os.fdatasync(index)
        self.size = member.end
        self.uncompressed_size += self._text_size
        self._index_size += len(line)
        self._begin_member()

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """The data and the index, open and locked against recovery."""
        with blaming(self.path), ExitStack() as stack:
            if self.has_vanished:
                raise OSError(errno.ENOENT, GONE, str(self.path))
            data = open_to_write(part_of(self.path), os.O_RDWR | os.O_APPEND)
            stack.callback(os.close, data)
            if not try_lock(data) or self.has_vanished:
                raise OSError(errno.ENOENT, GONE, str(self.path))
            index = open_to_write(index_of(self.path), os.O_RDWR | os.O_APPEND)
            stack.callback(os.close, index)
            yield data, index

    @property
    def expected_sizes(self) -> tuple[int, int]:
        """The sizes on disk and uncompressed, as far as known, when the member is flushed."""
        return self.size + self._chunks_size, self.uncompressed_size + self._text_size

    def roll_back(self) -> None:
        """Forget what is not durable. Raises ``OSError`` when that fails: try again later."""
        self._begin_member()
        with self._opened() as (data, index):
            os.ftruncate(index, self._index_size)
            os.ftruncate(data, self.size)

    @property
    def has_vanished(self) -> bool:
        """Whether another process has removed or finished it. Raises ``OSError``, also when the
        whole directory is missing: it may come back, with the file."""
        try:
            found = part_of(self.path).lstat()
        except FileNotFoundError:
            self.path.parent.stat()
            return True
        return (found.st_dev, found.st_ino) != self._identity

    def remove(self) -> None:
        """Remove it: it holds nothing."""
        part_of(self.path).unlink(missing_ok=True)
        index_of(self.path).unlink(missing_ok=True)


def _make(part: Path, index: Path, mode: int, first_line: bytes) -> tuple[int, int]:
    """Make both files, and their names durable; return what identifies the data.

    The first line of the index becomes durable with that of the first member.
    """
    with ExitStack() as stack:
        data = os.open(part, CREATE, mode)
        stack.callback(os.close, data)
        if not try_lock(data) or not os.fstat(data).st_nlink:
            # somebody took the empty file for a leftover just before it was locked
            raise FileExistsError(f"{part} is being recovered by another process")
        try:
            descriptor = os.open(index, CREATE, mode)
            stack.callback(os.close, descriptor)
        except OSError:
            part.unlink()
            raise
        try:
            with blaming(index):
                write_all(descriptor, first_line)
        except OSError:
            part.unlink()
            index.unlink()
            raise
        sync_folder(part.parent)
        made = os.fstat(data)
    return made.st_dev, made.st_ino
