"""Locks on open files: the holder of one works alone, and the end of its process releases it.

`FolderLocks` are thousands of locks on one descriptor: each name is a byte of a lock file, far
beyond its end, and byte ranges are locked. Traps: classic range locks (F_SETLK) belong to the
process and are released when it closes any descriptor of the file, so those of open files
(F_OFD_SETLK) are used wherever the system has them. And ranges are no locks against `try_lock`: the
two do not see each other.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsqtools.files.opening import open_to_write


def try_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open; return False when another has it locked.

    Raises ``OSError`` where files cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of an open file, after its holder has released it. Raises ``OSError``."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock_file(path: Path) -> int | None:
    """Open a lock file, made if missing, and lock it; return None when another has it locked.

    Close the descriptor to release it. Raises ``OSError``.
    """
    descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
    try:
        if try_lock(descriptor):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


class FolderLocks:
    """Locks on names, for all who open the same lock file. Threads may share it.

    The file is made by the first `take`. Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._busy = threading.Lock()
        self._descriptor: int | None = None
        self._taken: set[int] = set()

    def take(self, name: str) -> bool:
        """Lock a name; return False when it is locked already, by another process or here."""
        place = _place(name)
        with self._busy:
            if self._descriptor is None:
                self._descriptor = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
            if place in self._taken or not _lock_byte(self._descriptor, place, fcntl.F_WRLCK):
                return False
            self._taken.add(place)
        return True

    def release(self, name: str) -> None:
        """Unlock a name that was taken; another is left alone."""
        place = _place(name)
        with self._busy:
            if place in self._taken and self._descriptor is not None:
                self._taken.discard(place)
                _lock_byte(self._descriptor, place, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release everything."""
        with self._busy:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._taken.clear()


def _place(name: str) -> int:
    """Return the byte of a name: two names share one with a probability of 2^-62."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit systems: type, whence, start, length, pid
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", None) if struct.calcsize("P") == 8 else None


def _lock_byte(descriptor: int, place: int, kind: int) -> bool:
    try:
        if _OFD_SETLK is not None:
            fcntl.fcntl(descriptor, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        else:
            operation = fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(descriptor, operation, 1, place, os.SEEK_SET)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True
