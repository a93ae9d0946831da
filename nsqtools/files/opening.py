"""Open files without being tricked, lock them, and notice when they have changed.

Only regular files are opened, and no symbolic links where we write.

In a directory that other users can write to, a name may be a link to any file, a FIFO that blocks
its reader, or a device without an end. Reading follows a link that the user names, but none that is
found in a directory, and takes only what turns out to be a regular file; writing follows none, and
takes no file that another user planted: one that is neither ours nor root's nor of the owner of the
directory, who could replace it anyway.

Trap: the check comes after the open, on the descriptor, because a name can change in between. So
the open itself must neither block nor change anything: ``O_NONBLOCK``, and never ``O_TRUNC``.

Locks on open files: the holder of one works alone, and the end of its process releases it.

`FolderLocks` are thousands of locks on one descriptor: each name is a byte of a lock file, far
beyond its end, and byte ranges are locked. Traps: classic range locks (F_SETLK) belong to the
process and are released when it closes any descriptor of the file, so those of open files
(F_OFD_SETLK) are used wherever the system has them. And ranges are no locks against `try_lock`: the
two do not see each other.

`Renewed` is what is made of files, made again when they have changed: certificates, secrets.
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

LOST = "lost+found"  # of fsck, which only root can read, where a disk of its own is mounted


class NotRegularError(OSError):
    """A link, a directory, a FIFO, a socket or a device where a regular file is expected."""


class NotOursError(OSError):
    """A file of another user where only we write."""


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file is a regular one that this process's user made."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def state_of(path: str | Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None where it cannot be looked at."""
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
    """Return what a regular file holds. Raises ``ValueError`` for a larger one, and as
    `open_to_read`."""
    with open_to_read(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def data_offsets(descriptor: int, step: int) -> Iterator[int]:
    """Yield the offsets of the pieces of ``step`` bytes that a file has, without those in holes.

    A sparse file may claim a terabyte that nobody wrote.
    """
    at, size = 0, os.fstat(descriptor).st_size
    while at < size:
        try:
            at = max(at, os.lseek(descriptor, at, os.SEEK_DATA) // step * step)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return  # the rest is a hole; other errors are of systems that know none
        yield at
        at += step


def descriptor_to_read(path: Path) -> int:
    """Open as `open_to_read` does. Raises `NotRegularError`, ``OSError``."""
    return _open(path, os.O_RDONLY)


def open_to_write(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor with ``flags`` as of `os.open`, ``O_TRUNC`` not among them.

    A new file has ``mode``, less the umask. Raises `NotRegularError`, `NotOursError`, ``OSError``.
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
    """Close a descriptor in the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_planted(path: Path, status: os.stat_result) -> None:
    """Raise `NotOursError` for what another user put there."""
    if status.st_uid not in (os.geteuid(), 0, path.parent.stat().st_uid):
        whose = _name_of(status.st_uid)
        raise NotOursError(errno.EPERM, f"it belongs to another user, {whose}", str(path))


def open_own(path: Path) -> BinaryIO:
    """Open a file to read that only we write, and that says what may be removed. Raises as
    `open_to_write`."""
    return os.fdopen(open_to_write(path, os.O_RDONLY), "rb")


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file for messages that must not get lost, after what it holds; made if missing.

    Raises as `open_to_write`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(open_to_write(path, flags), "ab")


def _open(path: Path, flags: int, mode: int = 0o600) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _refusal(exc.errno, path, "is a symbolic link") from exc
        if exc.errno == errno.ENXIO:  # a FIFO without a reader
            raise _refusal(exc.errno, path, "is not a regular file") from exc
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(errno.EINVAL, path, "is not a regular file")
    return descriptor


def _refusal(number: int, path: Path, what: str) -> NotRegularError:
    return NotRegularError(number, f"it {what}", str(path))


def walk(
    root: Path,
    on_error: Callable[[OSError], object] = lambda error: None,
    follows: Callable[[str], bool] | None = None,
) -> Iterator[tuple[Path, list[str]]]:
    """Iterate over a directory and all below it, each once: its path, and the names of its files.

    Links lead out of it, or to what is there anyway: without ``follows`` they are left out, except
    the directory itself. Directories behind the links that it takes come last, and files are links
    or not. What fsck found is left out.
    The errors of directories that cannot be listed go to ``on_error``.
    """
    seen: set[tuple[int, ...]] = set()
    waiting = [str(root)]
    while waiting:
        links: list[str] = []
        for folder, folders, names in chain.from_iterable(
            os.walk(top, onerror=on_error) for top in waiting
        ):
            state = None
            try:
                state = os.stat(folder)
            except OSError as exc:
                on_error(exc)
            if state is None or (state.st_dev, state.st_ino) in seen:
                folders.clear()
                continue
            seen.add((state.st_dev, state.st_ino))
            folders[:] = sorted({*folders} - {LOST})
            if follows is None:
                links_left = [name for name in (*folders, *names) if _is_link(folder, name)]
                warn_of_links(folder, links_left)
                names = [name for name in names if name not in links_left]
            else:
                links += filter(follows, (os.path.join(folder, name) for name in folders))
            yield Path(folder), sorted(names)
        waiting = links


def _is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))


_with_links: set[str] = set()  # directories that were named


def warn_of_links(folder: str | Path, names: Sequence[str]) -> None:
    """Log once for a directory that links in it are not followed."""
    shown = sorted(name for name in names if not name.startswith("."))
    if shown and str(folder) not in _with_links:
        _with_links.add(str(folder))
        others = f" (nor are {len(shown) - 1} more there)" if len(shown) > 1 else ""
        path = os.path.join(folder, shown[0])
        log.warning("%s is a link, which is not followed%s: name what it leads to", path, others)


def is_own_link(path: str) -> bool:
    """Return whether a path is a link, and none that another user planted."""
    with suppress(OSError):
        refuse_planted(Path(path), os.lstat(path))
        return os.path.islink(path)
    return False


def has_writer(path: Path) -> bool | None:
    """Return whether some program of this machine has a file open for writing.

    None where the system cannot tell: elsewhere than on local disks of Linux, and of files of other
    users. Raises `NotRegularError`, ``OSError``.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return None
    with closing_fd(descriptor_to_read(path)) as descriptor:
        try:
            # who opens it in this moment makes the system signal; SIGIO would end this process
            fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as exc:
            return True if exc.errno == errno.EAGAIN else None
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def allow_many() -> None:
    """Raise the soft limit of open files to the hard one, as Go does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system may refuse what it says that it allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        if not try_lock(descriptor):
            return None
        undo.pop_all()
    return descriptor


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
    import hashlib  # takes 5 ms, which a command without such files does not pay

    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") >> 2


_F_SETSIG = 10  # Linux; fcntl lacks the name on macOS
_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit systems: type, whence, start, length, pid
# Its value on every processor. Pythons built with older headers, as those of uv, lack the name.
_LINUX = 37 if sys.platform == "linux" else None
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", _LINUX) if struct.calcsize("P") == 8 else None


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


log = logging.getLogger("nsqtools")


def exposure_of_secret(path: Path) -> str:
    """Say who else can read a file with a secret, "" if none. Root's may be read by a group."""
    try:
        status = path.stat()
    except OSError:
        return ""
    allowed = stat.S_IRGRP if status.st_uid == 0 else 0
    if not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    return f"others can read the secret in {path} (mode {mode:04o}): chmod 600 {path}"


_exposed: set[Path] = set()  # that were named


def warn_of_exposure(path: Path) -> None:
    """Name a file with a secret, password or key that others can read, once, in the log.

    Whatever reads such a file calls this.
    """
    if path.absolute() not in _exposed and (problem := exposure_of_secret(path)):
        _exposed.add(path.absolute())
        log.warning("%s", problem)


T = TypeVar("T")


class Renewed(Generic[T]):
    """What ``build`` makes of files (an empty name is none). Raises what ``build`` raises.

    Any thread may ask; two at the same time may build it twice.
    """

    def __init__(self, files: Sequence[str], build: Callable[[], T]) -> None:
        self._files = tuple(filter(None, files))
        self._build = build
        self._seen = self._states()
        self._built = build()
        self._reported = ""

    def check(self) -> T:
        """Return it as its files are now. Raises `ConfigurationError` if it cannot be made."""
        now = self._states()
        if now != self._seen:
            self._built = self._build()
            self._seen = now
            self._reported = ""
        return self._built

    def get(self) -> T:
        """Return it as its files are now, or, while they cannot be used, as before.

        Certificate and key are seldom replaced in one moment.
        """
        try:
            return self.check()
        except ConfigurationError as exc:
            if str(exc) != self._reported:  # it may be asked for each request
                self._reported = str(exc)
                log.warning("%s; using what was read before", exc)
            return self._built

    def _states(self) -> list[tuple[int, ...] | None]:
        return [state_of(path) for path in self._files]
