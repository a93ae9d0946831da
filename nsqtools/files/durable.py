"""Make data and names durable, replace files atomically, and name files without overwriting any.

A name is durable only after an fsync of its directory: without it a file whose content was fsynced
can have no name after a power failure. A `LineFile` may be shared by several processes.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from nsqtools.errors import OutputError
from nsqtools.files.opening import NotRegularError, closing_fd, locked, open_to_read

COPY = ".copy"

_TEMPORARY = r"\..+\.[0-9a-f]{16}\.tmp"
TEMPORARY = re.compile(rf"{_TEMPORARY}|\..+\{COPY}")

NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that create a file and never open an existing one, nor follow a link."""

# FAT, some network mounts and FUSE file systems have no hard links; EMLINK is a full link count.
NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_TRANSIENT_ERRORS = (
    DISK_FULL_ERRORS
    | {errno.EIO, errno.ESTALE, errno.EROFS}  # a disk or a file server that returns
    | {errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN}  # not mounted at the moment
    | {errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
    | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
    | {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETXTBSY}
    | {errno.EFBIG}  # the next file is smaller
    | {errno.EEXIST}  # the next name is free
)
OBSTACLE_ERRORS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
"""Errors that an operator may resolve while a daemon runs. A batch job does not wait for that."""

_OPEN = ("/proc/", "/dev/fd/")  # open files of a process by name; macOS has the latter

# SMB, FUSE and some network mounts refuse to sync a directory. PostgreSQL and SQLite ignore it too.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def is_transient_error(number: int | None) -> bool:
    """Return whether a write that failed with this error may succeed later.

    A loop of writes must end at any other error: its retries would never succeed.
    """
    return number in _TRANSIENT_ERRORS


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``: one system call may write only a part of it, as on a full disk."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


def sync_data(descriptor: int) -> None:
    """Make the content of a file durable. Raises ``OSError``."""
    # macOS has no fdatasync, and its fsync leaves data in the cache of the drive.
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


def append_whole(descriptor: int, lines: bytes, *, is_durable: bool = True) -> None:
    """Append all of the lines or none. Raises ``OSError``.

    Half a line would merge with the next line that is appended. The lock keeps other writers
    waiting, so that the truncation after an error removes none of their lines.
    """
    with locked(descriptor):
        start = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, lines)
            if is_durable:
                sync_data(descriptor)
        except OSError:
            with suppress(OSError):  # A pipe or a device cannot be truncated.
                os.ftruncate(descriptor, start)
            raise


@contextmanager
def adding_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to an ``OSError`` without one, as calls with a descriptor raise it."""
    try:
        yield
    except OSError as exc:
        exc.filename = exc.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a directory durable, on file systems that support it."""
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
    """Replace the content of a file atomically: readers see the old content or the new one.

    Args:
        path: The file. A link is replaced, not followed.
        content: The new content.
        mode: The mode of the new file, less the umask, or the status of a file whose permissions
            and owner it gets (see `make_alike`).
        is_durable: Whether to sync. False is for content that is written often and may be lost.

    Raises ``OSError``, also if ``path`` is not a regular file (/dev/null), and for a link to an
    open file: in place of /dev/stdout, root would leave a file for all processes. The old file
    remains then.
    """
    is_stream = path.is_symlink() and os.path.join(path.parent, path.readlink()).startswith(_OPEN)
    if is_stream or (path.exists() and not path.is_file()):
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    with temporary_file(path, content, mode, is_durable=is_durable) as draft:
        draft.replace(path)
    if is_durable:
        sync_folder(path.parent)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield an unused name in the directory of ``path``; a file with it is removed at the end.

    An ``OSError`` names ``path``, because the temporary name means nothing to a user. After a kill
    `remove_temporaries` removes the file.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield draft
    except OSError as exc:
        if exc.filename is None or str(exc.filename) == str(draft):
            exc.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            draft.unlink()


@contextmanager
def temporary_file(
    path: Path, content: bytes, mode: int | os.stat_result, *, is_durable: bool = True
) -> Iterator[Path]:
    """Write a file that the caller renames to ``path``: see `temporary_path`."""
    with temporary_path(path) as draft:
        new_file = os.open(draft, NEW | os.O_WRONLY, mode if isinstance(mode, int) else 0o600)
        with closing_fd(new_file) as descriptor:
            if not isinstance(mode, int):
                make_alike(descriptor, mode)
            write_all(descriptor, content)
            if is_durable:
                os.fsync(descriptor)
        yield draft


class NewestContent:
    """A file that several threads replace, where older content never replaces newer content.

    Call `number` and `note` on one thread only: `number` when the content is built.
    """

    def __init__(self, path: Path, *, name_is_durable: bool = True) -> None:
        self._path = path
        self._name_is_durable = name_is_durable
        self._lock = threading.Lock()
        self._number = self._written = 0
        self._note: tuple[int, bytes] = (0, b"")

    def number(self) -> int:
        """Return the number for the content that the caller builds now."""
        self._number += 1
        return self._number

    def write(self, content: bytes, number: int) -> None:
        """Replace the file, unless it has newer content or was removed. Raises ``OSError``."""
        with temporary_file(self._path, content, 0o600) as draft, self._lock:
            if is_newer := number > self._written:
                draft.replace(self._path)
                self._written = number
                note_number, note = self._note
                # A newer note was written to the file that this one replaced.
                if note_number > number:
                    _overwrite(self._path, note)
        if is_newer and self._name_is_durable:
            sync_folder(self._path.parent)

    def note(self, content: bytes) -> None:
        """Overwrite the file in place, without waiting for the disk.

        The content survives a kill, but perhaps no power failure. It must be short, and its readers
        must accept empty lines at its end. Raises ``OSError``.
        """
        self._note = self.number(), content
        _overwrite(self._path, content)

    def remove(self, number: int) -> None:
        """Remove the file. Content with a lower number is not written afterwards."""
        with self._lock:
            self._written = max(self._written, number)
            self._path.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite the beginning of a file. A replacement would wait for the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(path, flags, 0o600)) as descriptor:
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, content.ljust(size, b"\n"), 0)


def remove_temporaries(folder: Path, before_s: float = math.inf) -> None:
    """Remove temporary files that a kill left, if their last write was before a time.

    Without a time, no other process may replace files in the folder now. Raises ``OSError``.
    """
    for name in os.listdir(folder):
        path = folder / name
        with suppress(FileNotFoundError):  # Another process may remove it first.
            if re.fullmatch(_TEMPORARY, name) and path.lstat().st_mtime < before_s:
                path.unlink()


def make_folders(root: Path, folder: Path, mode: int, *, is_exact: bool = False) -> None:
    """Make the directories from ``root`` down to ``folder``, durably. ``root`` must exist.

    A missing ``root`` is not made again: after the loss of a disk, files would land below its mount
    point. The directories get ``mode``, less the umask unless it ``is_exact``.
    """
    missing = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        make_folder(path, mode, is_exact=is_exact)
        sync_folder(path.parent)


def make_folder(path: Path, mode: int, *, is_exact: bool = False) -> None:
    """Make a directory unless it exists; another process may make it at the same time."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        if is_exact:
            path.chmod(mode)


def link_file(source: Path, target: Path) -> None:
    """Give a file the name ``target`` atomically, and never overwrite another file.

    ``source`` remains if the file system has hard links, and is renamed otherwise. Across file
    systems the file is copied and fsynced first. Raises `FileExistsError` if another file has the
    name; a second call for the same file does nothing.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if not source.samefile(target):
            raise
    except OSError as exc:
        if exc.errno == errno.EXDEV:
            copy = copy_of(target)
            try:
                copy_file(source, copy)
                link_file(copy, target)
            finally:
                copy.unlink(missing_ok=True)
        elif exc.errno in NO_HARD_LINKS:
            if target.exists():
                raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
            source.rename(target)
        else:
            exc.filename = str(target)
            raise


def numbered_name(path: Path) -> Path:
    """Return the first unused name of ``path.1``, ``path.2`` and so on; a broken link uses one.

    Only one process may make such names in a folder, because the name is not reserved.
    """
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def unused_name(path: Path) -> Path:
    """Return ``path`` if no file is lost by replacing it, else the `numbered_name`."""
    return numbered_name(path) if path.exists() else path


def copy_of(path: Path) -> Path:
    """Return the temporary name of ``path`` while it is copied from another file system."""
    return path.with_name(f".{path.name}{COPY}")


def make_alike(descriptor: int, status: os.stat_result) -> None:
    """Give a new file the permissions of another one, and its owner if this process may.

    If root replaces the file of a user, the user can still read it. The set-user-ID bit is dropped:
    on a file of root it would give root's rights to the author of the content.
    """
    with suppress(OSError):
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, status.st_mode & 0o777)


def copy_file(source: Path, target: Path, mode: int | None = None) -> None:
    """Copy a file and make the content of the copy durable.

    The copy has ``mode``, less the umask, or with None the permissions of the source.
    """
    with open_to_read(source) as original:
        target.unlink(missing_ok=True)
        descriptor = os.open(target, NEW | os.O_WRONLY, 0o600 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as copy:
            if mode is None:
                make_alike(descriptor, os.fstat(original.fileno()))
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(descriptor)


class LineFile:
    """A file of lines, each synced when `append` returns.

    The file is opened for each append, because it may be renamed or removed between them. An
    incomplete last line, left by a crash, gets its line end first. The file is locked while one
    process writes, because an incomplete write is truncated again, which must not remove another
    process's lines.

    Raises `OutputError` if the file cannot be opened or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the program may change its directory between two appends
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
