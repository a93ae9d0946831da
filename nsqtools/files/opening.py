"""Open files safely in shared directories, lock them, and reload values of changed files.

In a directory that other users can write to, a name may be a link to any file, a FIFO that blocks
its reader, or an endless device. Only regular files are opened. Reading follows a link that the
user names, but no link in a listed directory. Writing follows no link, and refuses a file that
another user planted: its owner is neither this user nor root nor the owner of the directory, who
could replace it anyway.

Trap: the check is made on the descriptor after the open, because a name can change in between. So
the open itself must neither block nor change anything: ``O_NONBLOCK``, and never ``O_TRUNC``.

A lock of an open file is released at the latest when its process ends.

`FolderLocks` are thousands of locks on one descriptor: each name is mapped to a byte far beyond the
end of a lock file, and byte ranges are locked. Traps: classic range locks (F_SETLK) belong to the
process and are released when it closes any descriptor of the file, so locks of the open file
(F_OFD_SETLK) are used on systems that have them. Range locks and `try_lock` ignore each other.

`ReloadedValue` rebuilds a value, such as a TLS context, when its files have changed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from nsqtools.errors import ConfigurationError

# Made by fsck at the root of a file system; only root can read it.
LOST_AND_FOUND = "lost+found"


class NotRegularError(OSError):
    """A link, a directory, a FIFO, a socket or a device where a regular file is expected."""


class NotOursError(OSError):
    """A file of another user, where only this user should write."""


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file is a regular file of the user of this process."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def state_of(path: str | Path) -> tuple[int, ...] | None:
    """Return values that differ after a write or a replacement; None if there is no status."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def status_of(path: Path) -> os.stat_result:
    """Return the status of a file, through links. A link that leads to itself counts as missing."""
    try:
        return path.stat()
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        raise FileNotFoundError(errno.ENOENT, exc.strerror, str(path)) from None


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file, through links. Raises `NotRegularError`, ``OSError``."""
    return os.fdopen(descriptor_to_read(path), "rb")


def read_small(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises ``ValueError`` for a larger file, and the errors of `open_to_read`.
    """
    with open_to_read(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def data_offsets(descriptor: int, step: int) -> Iterator[int]:
    """Iterate over the offsets of a file's pieces of ``step`` bytes, without pieces in holes.

    A sparse file may have a size of a terabyte without content.
    """
    offset, size = 0, os.fstat(descriptor).st_size
    while offset < size:
        try:
            offset = max(offset, os.lseek(descriptor, offset, os.SEEK_DATA) // step * step)
        except OSError as exc:
            # ENXIO: only a hole follows. Any other error: no support for holes, so read it all.
            if exc.errno == errno.ENXIO:
                return
        yield offset
        offset += step


def descriptor_to_read(path: Path) -> int:
    """Open as `open_to_read` does. Raises `NotRegularError`, ``OSError``."""
    return _open(path, os.O_RDONLY)


def open_to_write(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file that no other user planted, with the flags of `os.open`.

    ``O_TRUNC`` is not allowed. A new file has ``mode``, less the umask. Raises `NotRegularError`,
    `NotOursError`, ``OSError``.
    """
    descriptor = _open(path, flags | os.O_NOFOLLOW, mode)
    try:
        refuse_planted(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_planted(path: Path, status: os.stat_result) -> None:
    """Raise `NotOursError` for a file that another user planted."""
    if status.st_uid not in (os.geteuid(), 0, path.parent.stat().st_uid):
        owner = _user_name(status.st_uid)
        raise NotOursError(errno.EPERM, f"it belongs to another user, {owner}", str(path))


def open_own(path: Path) -> BinaryIO:
    """Open a file of this user to read, whose content decides what is removed.

    Raises the errors of `open_to_write`.
    """
    return os.fdopen(open_to_write(path, os.O_RDONLY), "rb")


def _user_name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to it; create it if missing.

    Raises the errors of `open_to_write`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(open_to_write(path, flags), "ab")


def _open(path: Path, flags: int, mode: int = 0o600) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _refusal(exc.errno, path, "is a symbolic link") from exc
        if exc.errno == errno.ENXIO:  # a FIFO that no process reads
            raise _refusal(exc.errno, path, "is not a regular file") from exc
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(errno.EINVAL, path, "is not a regular file")
    return descriptor


def _refusal(number: int, path: Path, problem: str) -> NotRegularError:
    return NotRegularError(number, f"it {problem}", str(path))


def walk(
    root: Path,
    on_error: Callable[[OSError], object] = lambda error: None,
    follows: Callable[[str], bool] | None = None,
) -> Iterator[tuple[Path, list[str]]]:
    """Iterate over a directory and its subdirectories, each once.

    Args:
        root: The directory. It may be a link itself.
        on_error: Called with the error of a directory that cannot be listed.
        follows: Decides by the path of a link to a directory whether it is followed, and then
            links to files are listed as well. None follows no link and lists none, because a link
            leads out of the directory or to a file that is listed anyway.

    Yields the path of each directory and the names of its files. Directories behind links come
    last. lost+found is skipped.
    """
    visited: set[tuple[int, ...]] = set()
    pending = [str(root)]
    while pending:
        links: list[str] = []
        for folder, folders, names in chain.from_iterable(
            os.walk(top, onerror=on_error) for top in pending
        ):
            state = None
            try:
                state = os.stat(folder)
            except OSError as exc:
                on_error(exc)
            if state is None or (state.st_dev, state.st_ino) in visited:
                folders.clear()
                continue
            visited.add((state.st_dev, state.st_ino))
            folders[:] = sorted({*folders} - {LOST_AND_FOUND})
            if follows is None:
                skipped = [
                    name
                    for name in (*folders, *names)
                    if os.path.islink(os.path.join(folder, name))
                ]
                warn_of_links(folder, skipped)
                names = [name for name in names if name not in skipped]
            else:
                links += filter(follows, (os.path.join(folder, name) for name in folders))
            yield Path(folder), sorted(names)
        pending = links


_folders_with_links: set[str] = set()  # A warning was logged for these.


def warn_of_links(folder: str | Path, names: Sequence[str]) -> None:
    """Log once for a directory that its links are not followed."""
    visible = sorted(name for name in names if not name.startswith("."))
    if visible and str(folder) not in _folders_with_links:
        _folders_with_links.add(str(folder))
        suffix = f" (and {len(visible) - 1} more)" if len(visible) > 1 else ""
        path = os.path.join(folder, visible[0])
        log.warning("%s is a link, which is not followed%s: name its target", path, suffix)


def is_own_link(path: str) -> bool:
    """Return whether a path is a link that no other user planted."""
    with suppress(OSError):
        refuse_planted(Path(path), os.lstat(path))
        return os.path.islink(path)
    return False


def has_writer(path: Path) -> bool | None:
    """Return whether a program on this machine has a file open for writing.

    Returns None if the system cannot answer: on other systems than Linux, on other file systems
    than local disks, and for files of other users. Raises `NotRegularError`, ``OSError``.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return None
    with closing_fd(descriptor_to_read(path)) as descriptor:
        try:
            # A program that opens the file during the lease makes the kernel send a signal. The
            # default, SIGIO, would end this process; SIGURG is ignored.
            fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as exc:
            return True if exc.errno == errno.EAGAIN else None
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, as Go does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS reports an unlimited hard limit, and refuses values above OPEN_MAX.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another descriptor has the lock.

    Raises ``OSError`` on file systems without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Lock an open file during the block; wait for the lock first. Raises ``OSError``."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock_file(path: Path) -> int | None:
    """Open or create a lock file, and lock it; return None if another process has the lock.

    Close the descriptor to release the lock. Raises ``OSError``.
    """
    descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        if not try_lock(descriptor):
            return None
        undo.pop_all()
    return descriptor


class FolderLocks:
    """Locks of names, among all processes that use the same lock file. Threads may share one.

    The first `take` creates the file. Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._offsets: set[int] = set()  # of the bytes that this object has locked

    def take(self, name: str) -> bool:
        """Lock a name; return False if it is locked already, by this or another process."""
        offset = _lock_offset(name)
        with self._lock:
            if self._descriptor is None:
                self._descriptor = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
            if offset in self._offsets or not _lock_byte(self._descriptor, offset, fcntl.F_WRLCK):
                return False
            self._offsets.add(offset)
        return True

    def release(self, name: str) -> None:
        """Unlock a name if this object has locked it."""
        offset = _lock_offset(name)
        with self._lock:
            if offset in self._offsets and self._descriptor is not None:
                self._offsets.discard(offset)
                _lock_byte(self._descriptor, offset, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all locks."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._offsets.clear()


def _lock_offset(name: str) -> int:
    """Return the offset of a name's byte. Two names collide with a probability of 2^-62."""
    # The import takes 5 ms, which commands without such locks avoid.
    import hashlib

    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") >> 2


_F_SETSIG = 10  # The value on Linux; the fcntl module of macOS lacks the name.
_FLOCK = struct.Struct("hhqqi4x")  # on 64-bit systems: type, whence, start, length, pid
# The value is the same on every processor. A Python that was built with older headers, as uv
# distributes it, lacks the name.
_LINUX_OFD_SETLK = 37 if sys.platform == "linux" else None
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", _LINUX_OFD_SETLK) if struct.calcsize("P") == 8 else None


def _lock_byte(descriptor: int, offset: int, kind: int) -> bool:
    try:
        if _OFD_SETLK is not None:
            fcntl.fcntl(descriptor, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
        else:
            operation = fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(descriptor, operation, 1, offset, os.SEEK_SET)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


log = logging.getLogger("nsqtools")


def exposure_of_secret(path: Path) -> str:
    """Return a warning if other users can read a file with a secret, else "".

    If root owns the file, its group may read it.
    """
    try:
        status = path.stat()
    except OSError:
        return ""
    if not stat.S_ISREG(status.st_mode):  # The reader reports a directory or a device.
        return ""
    allowed = stat.S_IRGRP if status.st_uid == 0 else 0
    if not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    return f"others can read the secret in {path} (mode {mode:04o}): chmod 600 {path}"


_exposed: set[Path] = set()  # A warning was logged for these.


def warn_of_exposure(path: Path) -> None:
    """Log once that others can read a file with a secret, password or key.

    Call this before reading such a file.
    """
    if path.absolute() not in _exposed and (problem := exposure_of_secret(path)):
        _exposed.add(path.absolute())
        log.warning("%s", problem)


T = TypeVar("T")


class ReloadedValue(Generic[T]):
    """A value built from files, and rebuilt when they have changed.

    An empty name is no file. The constructor raises the errors of ``build``. Threads may share it;
    two that call at the same time may build the value twice.
    """

    def __init__(self, files: Sequence[str], build: Callable[[], T]) -> None:
        self._files = tuple(filter(None, files))
        self._build = build
        self._file_states = self._states()
        self._value = build()
        self._logged_problem = ""

    def check(self) -> T:
        """Return the current value. Raises `ConfigurationError` if it cannot be rebuilt."""
        states = self._states()
        if states != self._file_states:
            self._value = self._build()
            self._file_states = states
            self._logged_problem = ""
        return self._value

    def get(self) -> T:
        """Return the current value, or the previous one while the files are invalid.

        A certificate and its key are rarely replaced at the same moment.
        """
        try:
            return self.check()
        except ConfigurationError as exc:
            # Each request may call this, so a problem is logged once.
            if str(exc) != self._logged_problem:
                self._logged_problem = str(exc)
                log.warning("%s; using the previous content", exc)
            return self._value

    def _states(self) -> list[tuple[int, ...] | None]:
        return [state_of(path) for path in self._files]
