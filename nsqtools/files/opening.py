"""Open files without being tricked: regular files only, and no symbolic links where we write.

In a directory that other users can write to, a name may be a link to any file, a FIFO that blocks
its reader, or a device without an end. Reading follows links (an archive may be linked) but takes
only what turns out to be a regular file; writing follows none, and takes no file that another user
planted: one that is neither ours nor root's nor of the owner of the directory, who could replace it
anyway.

Trap: the check comes after the open, on the descriptor, because a name can change in between. So
the open itself must neither block nor change anything: ``O_NONBLOCK``, and never ``O_TRUNC``.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO


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


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file, through links. Raises `NotRegularError`, ``OSError``."""
    return os.fdopen(descriptor_to_read(path), "rb")


def descriptor_to_read(path: Path) -> int:
    """Open as `open_to_read` does. Raises `NotRegularError`, ``OSError``."""
    return _open(path, os.O_RDONLY)


def open_to_write(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor with ``flags`` as of `os.open`, ``O_TRUNC`` not among them.

    A new file has ``mode``, less the umask. Raises `NotRegularError`, `NotOursError`, ``OSError``.
    """
    descriptor = _open(path, flags | os.O_NOFOLLOW, mode)
    owner = os.fstat(descriptor).st_uid
    if owner not in (os.geteuid(), 0) and owner != path.parent.stat().st_uid:
        os.close(descriptor)
        raise NotOursError(errno.EPERM, f"it belongs to another user, {_name_of(owner)}", str(path))
    return descriptor


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def open_to_append(path: Path, mode: int = 0o600) -> BinaryIO:
    """Open a file for messages that must not get lost, after what it holds; made if missing.

    Raises as `open_to_write`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(open_to_write(path, flags, mode), "ab")


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


def allow_many() -> None:
    """Raise the soft limit of open files to the hard one, as Go does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system may refuse what it says that it allows
            pass
