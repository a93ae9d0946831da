"""System calls that make things durable, and place files without overwriting any.

A name is durable only when its directory was fsynced: an fsynced file can be nameless after a
power failure.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from nsqtools.files.opening import NotRegularError, closing_fd, locked, open_to_read

COPY = ".copy"

_TEMPORARY = r"\..+\.[0-9a-f]{16}\.tmp"
TEMPORARY = re.compile(rf"{_TEMPORARY}|\..+\{COPY}")

NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that make a file, and never open one that is there, a link included."""

NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
_CAN_PASS = {
    *FULL_DISK,
    *(errno.EIO, errno.ESTALE, errno.EROFS),  # a disk or a server that comes back
    *(errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),  # not mounted at the moment
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
    *(errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETXTBSY),
    errno.EFBIG,  # the next file is smaller
    errno.EEXIST,  # the next name is free
}
IN_THE_WAY = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
"""Errors that somebody may resolve while a daemon runs; a job that is to end does not wait."""
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def can_pass(number: int | None) -> bool:
    """Return whether writing that failed with an error may work later.

    Whoever writes in a loop ends with the other errors: to try again would be forever.
    """
    return number in _CAN_PASS


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; a disk that fills up takes a part first."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_data(descriptor: int) -> None:
    """Make what was written to a file durable. Raises ``OSError``."""
    if sys.platform == "darwin":  # it has no fdatasync, and fsync leaves it in the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


def append_whole(descriptor: int, lines: bytes, *, is_durable: bool = True) -> None:
    """Append lines, all or none: what follows would be glued to half a line. Raises ``OSError``.

    Others who append so wait meanwhile: what is cut off is none of theirs.
    """
    with locked(descriptor):
        start = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, lines)
            if is_durable:
                sync_data(descriptor)
        except OSError:
            with suppress(OSError):  # no regular file
                os.ftruncate(descriptor, start)
            raise


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` that has none: those of descriptors do not know theirs."""
    try:
        yield
    except OSError as exc:
        exc.filename = exc.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a directory durable, on file systems that can.

    Some (SMB, FUSE, network mounts) refuse it for directories; PostgreSQL and SQLite go on, too.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closing_fd(os.open(folder, flags)) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as exc:
            if exc.errno not in _NO_FOLDER_SYNC:
                raise


def replace_file(
    path: Path, content: bytes, mode: int | os.stat_result = 0o640, *, is_durable: bool = True
) -> None:
    """Make ``content`` what a file holds, durably: its readers see the old or the new, no mixture.

    ``mode`` is that of the new file, less the umask; or the status of another, which `make_alike`
    makes it like. A link at ``path`` is replaced, not followed.
    ``is_durable`` false leaves it to the system when the new content reaches the disk: for what is
    written often and can be lost. Raises ``OSError``, also where ``path`` is not a regular
    file (/dev/null); then the old one is still there.
    """
    if path.exists() and not path.is_file():
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    with written_beside(path, content, mode, is_durable=is_durable) as beside:
        beside.replace(path)
    if is_durable:
        sync_folder(path.parent)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Give a file a new name in the same directory for now; what has it in the end is removed.

    An ``OSError`` names ``path``: the other means nothing to a user. See `remove_temporaries`.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield beside
    except OSError as exc:
        if exc.filename is None or str(exc.filename) == str(beside):
            exc.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            beside.unlink()


@contextmanager
def written_beside(
    path: Path, content: bytes, mode: int | os.stat_result, *, is_durable: bool = True
) -> Iterator[Path]:
    """Write a file that is to get the name ``path``: see `temporary_beside`."""
    with temporary_beside(path) as beside:
        made = os.open(beside, NEW | os.O_WRONLY, mode if isinstance(mode, int) else 0o600)
        with closing_fd(made) as descriptor:
            if not isinstance(mode, int):
                make_alike(descriptor, mode)
            write_all(descriptor, content)
            if is_durable:
                os.fsync(descriptor)
        yield beside


class NewestContent:
    """A file that several threads replace: content that is older than what it has is left out.

    `number` is called on one thread only, when the content is put together; so is `note`.
    """

    def __init__(self, path: Path, *, name_is_durable: bool = True) -> None:
        self._path = path
        self._name_is_durable = name_is_durable
        self._lock = threading.Lock()
        self._number = self._written = 0
        self._noted: tuple[int, bytes] = (0, b"")

    def number(self) -> int:
        """Return the number of the content that is being put together now."""
        self._number += 1
        return self._number

    def write(self, content: bytes, number: int) -> None:
        """Replace the file, unless it has newer content or was removed. Raises ``OSError``."""
        with written_beside(self._path, content, 0o600) as beside, self._lock:
            if is_newer := number > self._written:
                beside.replace(self._path)
                self._written = number
                noted, newer = self._noted
                if noted > number:  # in the file that was replaced
                    _overwrite(self._path, newer)
        if is_newer and self._name_is_durable:
            sync_folder(self._path.parent)

    def note(self, content: bytes) -> None:
        """Let a kill find this content, without waiting for the disk: a power failure may not.

        It must be short, and its readers must bear empty lines at its end. Raises ``OSError``.
        """
        self._noted = self.number(), content
        _overwrite(self._path, content)

    def remove(self, number: int) -> None:
        """Remove the file; content with a lower number is not written any more."""
        with self._lock:
            self._written = max(self._written, number)
            self._path.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite what a file begins with; a new name would wait for the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(path, flags, 0o600)) as descriptor:
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, content.ljust(size, b"\n"), 0)


def remove_temporaries(folder: Path, before_s: float = math.inf) -> None:
    """Remove what a kill during `replace_file` left, if it was last written to before a time.

    Without one no process may be replacing files there now. Raises ``OSError``.
    """
    for name in os.listdir(folder):
        path = folder / name
        with suppress(FileNotFoundError):  # another process removed it
            if re.fullmatch(_TEMPORARY, name) and path.lstat().st_mtime < before_s:
                path.unlink()


def make_folders(root: Path, folder: Path, mode: int, *, is_exact: bool = False) -> None:
    """Make the directories from ``root`` down to ``folder``. ``root`` itself must be there.

    If it were made again when it is gone, files would land below the mount point of a lost disk.
    They have ``mode``, less the umask unless it ``is_exact``.
    """
    missing = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        make_folder(path, mode, is_exact=is_exact)
        sync_folder(path.parent)


def make_folder(path: Path, mode: int, *, is_exact: bool = False) -> None:
    """Make a directory; one that another process has made just now stays as it is."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        if is_exact:
            path.chmod(mode)


def place(source: Path, target: Path) -> None:
    """Give the file ``source`` also, or instead, the name ``target``, which appears at once.

    Across file systems it is copied and fsynced first. Raises `FileExistsError` when there is
    another file; one that is the same file already is fine.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if not source.samefile(target):
            raise
    except OSError as exc:
        if exc.errno == errno.EXDEV:
            beside = copy_of(target)
            try:
                copy_file(source, beside)
                place(beside, target)
            finally:
                beside.unlink(missing_ok=True)
        elif exc.errno in NO_HARD_LINKS:
            if target.exists():
                raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
            source.rename(target)
        else:
            exc.filename = str(target)  # not the source, which is where it should be
            raise


def numbered_name(path: Path) -> Path:
    """Return the first of ``path.1``, ``path.2`` and so on that nothing has, not even a link.

    Only one process may make such names: nothing reserves it.
    """
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def unused_name(path: Path) -> Path:
    """Return ``path`` if replacing it loses nothing (no file, or a link to none), else as
    `numbered_name` does."""
    return numbered_name(path) if path.exists() else path


def copy_of(path: Path) -> Path:
    """Return where ``path`` is put together when it comes from another file system."""
    return path.with_name(f".{path.name}{COPY}")


def make_alike(descriptor: int, status: os.stat_result) -> None:
    """Give a new file the permissions of another, and its owner where we may.

    What root puts in the place of a user's file stays that user's to read. The set-user-ID bit is
    left out: on a file of root it would give root's rights to whoever wrote the content.
    """
    with suppress(OSError):
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, status.st_mode & 0o777)


def copy_file(source: Path, target: Path, mode: int | None = None) -> None:
    """Make ``target`` a copy whose content is durable.

    ``mode``, less the umask, is that of the copy; None makes it like the source.
    """
    with open_to_read(source) as original:
        target.unlink(missing_ok=True)
        made = os.open(target, NEW | os.O_WRONLY, 0o600 if mode is None else mode)
        with os.fdopen(made, "wb") as copy:
            if mode is None:
                make_alike(made, os.fstat(original.fileno()))
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(made)
