"""Append lines to a file that several processes may share."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsqtools.errors import OutputError
from nsqtools.files.durable import append_whole, sync_folder
from nsqtools.files.opening import closing_fd, locked


class LineFile:
    """A file of lines, each synced when `append` returns.

    The file is opened for each append, because it may be renamed or removed between them. An
    incomplete last line, left by a crash, gets its line end first. The file is locked while one
    process writes, because an incomplete write is truncated again, which must not remove another
    process's lines.

    Raises `OutputError` if the file cannot be opened or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._opened() as descriptor:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError as exc:
            raise OutputError(f"cannot write {path} ({exc.strerror})") from exc
        if not is_file:
            raise OutputError(f"dead letters must be in a regular file, and {path} is not one")

    def append(self, lines: bytes) -> None:
        """Append lines, all or none. Raises ``OSError``."""
        with self._opened() as descriptor:
            append_whole(descriptor, lines)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open and lock the file that has the name now, and complete its last line."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with closing_fd(os.open(self.path, flags, 0o600)) as descriptor, locked(descriptor):
            size = os.fstat(descriptor).st_size
            if not size:
                sync_folder(self.path.parent)
            elif os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
            yield descriptor
