"""The states of a file: in progress, finished, and recovered after a crash.

*In progress* (`PartFile`): text becomes durable members, each as a whole or not at all. The file is
open and locked only while it is written, so a thousand topics need no descriptors for their files.
Between two writes all of its content is durable and indexed. If another process recovers it then,
it only finishes the file early; the next write notices that and goes to a new file. The locks of
`FolderLocks` prevent it, unless they are lost. After a failed flush, `roll_back` cuts file and
index back to the last durable member, and must succeed before the next write. Text is compressed as
it arrives, which spreads the work and leaves little of it to the flush.

*Finished* (`finish_part`): the file appears whole, under a name that no other file has. The index
is placed first, so that no finished file lacks its index, then the file; the hidden names are
removed last. A crash may follow any step, and repeating all steps leads to the same result.

*Recovery* (`recover_parts`) cuts each file back to its index and finishes it. Data after the last
indexed member was not FINished, so nsqd redelivers it. If the index was removed, it is rebuilt from
the file, so that no data is dropped that may have been FINished. Files of a running process are
locked and stay as they are.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nsqtools.archive.layout import (
    INDEX,
    LOCKS,
    PART,
    Head,
    Index,
    Member,
    end_of,
    hidden_below,
    index_of,
    load_index,
    owner_of,
    part_of,
    total_of,
)
from nsqtools.archive.members import Compressor, CompressorFactory, scan_members
from nsqtools.archive.place import translating_errors
from nsqtools.errors import OutputError
from nsqtools.files.durable import (
    DISK_FULL_ERRORS,
    NEW,
    adding_path_to_errors,
    copy_of,
    link_file,
    make_folder,
    make_folders,
    replace_file,
    sync_data,
    sync_folder,
    write_all,
)
from nsqtools.files.opening import FolderLocks, closing_fd, open_to_write, try_lock
from nsqtools.records.naming import with_rev

log = logging.getLogger("nsqtools")

CREATE = NEW | os.O_RDWR | os.O_APPEND
VANISHED = "another process has removed or finished it"


class PartFile:
    """A file in progress, which will be finished as ``path``. Its directory must exist.

    Args:
        mode: permissions, from which the umask is subtracted unless ``is_exact``.
        now_s: time since 1970, kept as ``opened_at_s``.
        head: the first line of the index.

    Raises `FileExistsError` if the name is taken, and ``OSError``.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        compressor: CompressorFactory,
        now_s: float,
        head: Head | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self.path = path
        self.opened_at_s = now_s
        self.head = head
        # Sizes of the durable members.
        self.size = 0
        self.uncompressed_size = 0
        first_line = head.encode() if head else b""
        self._index_size = len(first_line)
        self._new_compressor = compressor
        # `finish_part` removes the permission to write that the user did not ask for.
        writable = mode | 0o600
        exact = writable if is_exact else None
        self._identity = _create(part_of(path), index_of(path), writable, first_line, exact)
        self._begin_member()

    def _begin_member(self) -> None:
        # A compressor takes up to 300 kB, so it is created with the first text of a member.
        self._compressor: Compressor | None = None
        self._chunks: list[bytes] = []
        self._text_size = self._chunks_size = 0

    def append(self, text: bytes) -> None:
        """Add text to the member in progress, in memory."""
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
        """Make a member durable. After an ``OSError``, call `roll_back` before anything else."""
        with self._opened() as (data, index):
            write_all(data, b"".join(self._chunks))
            sync_data(data)
            line = member.encode()
            write_all(index, line)
            sync_data(index)
        self.size = member.end
        self.uncompressed_size += self._text_size
        self._index_size += len(line)
        self._begin_member()

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """Open data and index, and lock them against recovery."""
        flags = os.O_RDWR | os.O_APPEND
        vanished = OSError(errno.ENOENT, VANISHED, str(self.path))
        with adding_path_to_errors(self.path):
            if self.has_vanished:
                raise vanished
            with closing_fd(open_to_write(part_of(self.path), flags)) as data:
                # Checked again, because the file may have been recovered just before the lock.
                if not try_lock(data) or self.has_vanished:
                    raise vanished
                with closing_fd(open_to_write(index_of(self.path), flags)) as index:
                    yield data, index

    @property
    def expected_sizes(self) -> tuple[int, int]:
        """The sizes on disk and uncompressed after a flush, as far as they are known."""
        return self.size + self._chunks_size, self.uncompressed_size + self._text_size

    def roll_back(self) -> None:
        """Cut the file back to its last durable member. After an ``OSError``, try again later."""
        self._begin_member()
        with self._opened() as (data, index):
            os.ftruncate(index, self._index_size)
            os.ftruncate(data, self.size)

    @property
    def has_vanished(self) -> bool:
        """Whether another process has removed or finished the file.

        Raises ``OSError``, also if the directory is missing: it may come back, with the file.
        """
        try:
            stat = part_of(self.path).lstat()
        except FileNotFoundError:
            self.path.parent.stat()
            return True
        return (stat.st_dev, stat.st_ino) != self._identity


def _create(
    part: Path, index: Path, mode: int, first_line: bytes, exact: int | None
) -> tuple[int, int]:
    """Create both files, with durable names; return device and inode of the data.

    The first line of the index becomes durable together with the line of the first member.
    """
    with closing_fd(os.open(part, CREATE, mode)) as data, ExitStack() as undo:
        undo.callback(part.unlink)
        if not try_lock(data) or not os.fstat(data).st_nlink:
            # Another process took the empty file for a leftover before it was locked here.
            undo.pop_all()
            raise FileExistsError(f"{part} is being recovered by another process")
        with closing_fd(os.open(index, CREATE, mode)) as descriptor, adding_path_to_errors(index):
            undo.callback(index.unlink)
            if exact is not None:
                os.fchmod(data, exact)
                os.fchmod(descriptor, exact)
            write_all(descriptor, first_line)
        sync_folder(part.parent)
        stat = os.fstat(data)
        undo.pop_all()
    return stat.st_dev, stat.st_ino


@dataclass(frozen=True, slots=True)
class Directories:
    """The directories of finished files and of files in progress (often one), and their modes.

    Paths are absolute; `make` creates the directories. A mode that the user chose is exact, and the
    umask is subtracted from a default mode.
    """

    output: Path
    work: Path
    chosen_file_mode: int | None = None
    chosen_folder_mode: int | None = None

    @property
    def file_mode(self) -> int:
        return 0o640 if self.chosen_file_mode is None else self.chosen_file_mode

    def prepare(self) -> None:
        """Create the directories that are missing, and try both out. Raises `OutputError`."""
        with translating_errors("use", self.work):
            self.make()
            self.try_out()

    def make(self) -> None:
        """Create the directories that are missing. Raises ``OSError``."""
        mode, is_exact = self._folder_mode
        for folder in (self.output, self.work):
            if not folder.is_dir():
                make_folders(Path(folder.anchor), folder.parent, mode, is_exact=is_exact)
                make_folder(folder, mode, is_exact=is_exact)

    @property
    def _folder_mode(self) -> tuple[int, bool]:
        chosen = self.chosen_folder_mode
        return (0o750, False) if chosen is None else (chosen, True)

    def make_folders(self, root: Path, folder: Path) -> None:
        """Create the directories below ``root`` down to ``folder``. Raises ``OSError``."""
        mode, is_exact = self._folder_mode
        make_folders(root, folder, mode, is_exact=is_exact)

    def try_out(self) -> None:
        """Try every operation of archiving in both directories.

        An operation that the file system refuses now would fail for each message. A full disk is
        accepted, because archivers wait for room. Raises `OutputError`, which names the operation.
        """
        for folder in {self.output, self.work}:
            self._try_out(folder)

    def _try_out(self, folder: Path) -> None:
        trial = folder / f".nsq-archive.{os.urandom(8).hex()}.tmp"
        renamed = trial.with_name(f".nsq-archive.{os.urandom(8).hex()}.tmp")
        operation = "create files"
        try:
            with closing_fd(os.open(trial, CREATE, 0o600)) as descriptor:
                if self.chosen_file_mode is not None:
                    operation = f"set the mode {self.chosen_file_mode:o} of files"
                    os.fchmod(descriptor, self.chosen_file_mode | 0o600)
                operation = "write files"
                write_all(descriptor, b"\n")
                sync_data(descriptor)
                if folder == self.work:
                    operation = "lock files"
                    try_lock(descriptor)
                    with closing(FolderLocks(trial)) as locks:
                        locks.take("trial")
            operation = "rename files"
            link_file(trial, renamed)
            operation = "sync the directory"
            sync_folder(folder)
        except OSError as exc:
            if exc.errno not in DISK_FULL_ERRORS:
                is_denied = isinstance(exc, PermissionError)
                raise OutputError(
                    f"cannot {operation} in {folder} ({exc.strerror})",
                    hint="Give a directory in which this user may create files."
                    if is_denied
                    else "Give a directory of another file system; --work-dir may be a local one.",
                ) from exc
        finally:
            for path in (trial, renamed):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def check_name(self, name: str) -> None:
        """Raise `OutputError` for a file name that is too long for a file system.

        The longest name of a file is the name of its index.
        """
        for folder in {self.output, self.work}:
            longest = index_of(folder / with_rev(name, 1))
            try:
                for path in (
                    longest,
                    *(folder / part for part in longest.relative_to(folder).parts),
                ):
                    with suppress(FileNotFoundError, NotADirectoryError):
                        path.lstat()
            except OSError as exc:
                raise OutputError(
                    f"cannot write {longest} ({exc.strerror})",
                    hint="Give a shorter --filename-format.",
                ) from exc

    def locks(self) -> FolderLocks:
        """Return the locks of topics and of files in progress, none of them locked."""
        return FolderLocks(self.work / LOCKS)

    def name_of(self, path: Path) -> str:
        """Return the name of a file in the work directory, for its lock and for journals."""
        return str(path.relative_to(self.work))

    def final(self, path: Path) -> Path:
        """Return the path at which a file of the work directory is finished."""
        return self.output / path.relative_to(self.work)

    def have_member(self, name: str, head: Head | None, offset: int, length: int) -> bool:
        """Return whether the index of a file, in progress or finished, has a member.

        ``name`` is the name of `name_of`. A later file may have it as well, because recovery
        removes a file without members and its name is used again; the ``head`` distinguishes them.
        A rebuilt index has no head. Raises ``OSError``.
        """
        path = self.work / name
        for candidate in (path, self.final(path)):
            index = load_index(index_of(candidate))
            if index is None or (head and index.head and head != index.head):
                continue
            if any((member.offset, member.length) == (offset, length) for member in index.members):
                return True
        return False


def finish_part(path: Path, directories: Directories) -> Path:
    """Publish the file ``path`` of the work directory; return its final path.

    The file must be durable and cut to its index, and must not be written again. Raises
    ``OSError``.
    """
    part, index = part_of(path), index_of(path)
    _add_total(index)
    first_choice = directories.final(path)
    directories.make_folders(directories.output, first_choice.parent)
    for rev in itertools.count():
        final = first_choice.with_name(with_rev(first_choice.name, rev))
        try:
            if not _is_published(part, index, final):
                # An index must never be placed next to a file that it does not belong to.
                if os.path.lexists(final):
                    continue
                # An attempt that failed may have placed the same index.
                existing = load_index(index_of(final))
                if existing is None or existing != load_index(index):
                    link_file(index, index_of(final))
                mode = part.stat().st_mode & 0o777
                if mode & 0o200 > directories.file_mode & 0o200:
                    part.chmod(mode - 0o200)
                link_file(part, final)
            break
        except FileExistsError:
            continue
    sync_folder(final.parent)
    # A crash may have left the copy.
    copy_of(final).unlink(missing_ok=True)
    part.unlink(missing_ok=True)
    # The file is published by now, and recovery removes leftovers.
    with suppress(OSError):
        if index != index_of(final):
            index.unlink(missing_ok=True)
        sync_folder(part.parent)
    return final


def _add_total(index: Path) -> None:
    """End an index with its total.

    The line is not fsynced, because the members have the same figures. If a crash tears it, readers
    see an index without a total.
    """
    content = load_index(index)
    if content is None or not content.members:
        return
    total = total_of(content.members).encode()
    if not index.read_bytes().endswith(b"\n" + total):
        with closing_fd(open_to_write(index, os.O_WRONLY | os.O_APPEND)) as descriptor:
            write_all(descriptor, total)


def _is_published(part: Path, index: Path, final: Path) -> bool:
    """Return whether ``final`` is the file already, because a crash or error came after placing it.

    An index has times and sizes of every member, so equal indexes belong to the same file.
    """
    if not part.exists():
        return True
    if not final.exists() or not index_of(final).exists():
        return False
    is_as_long = 0 < part.stat().st_size == final.stat().st_size
    return is_as_long and load_index(index) == load_index(index_of(final))


def recover_parts(directories: Directories) -> list[Path]:
    """Finish every file in progress that no process writes; return their final paths.

    A file that cannot be recovered is logged and stays as it is.
    """
    finished = []
    with ExitStack() as stack:
        locks = cache(lambda folder: stack.enter_context(closing(FolderLocks(folder / LOCKS))))
        for part in list(hidden_below(directories.work, PART)):
            path = owner_of(part)
            try:
                # The work directory of the file's archiver may be any of the folders above it.
                folders = [f for f in path.parents if os.access(f / LOCKS, os.R_OK | os.W_OK)]
                if not all(locks(f).take(str(path.relative_to(f))) for f in folders):
                    continue
                final = _recover_unlocked(part, directories)
            except OSError as exc:
                log.error("cannot recover %s (%s)", exc.filename or part, exc.strerror)
                continue
            if final is not None:
                log.warning("recovered %s", final)
                finished.append(final)
    _remove_strays(directories)
    return finished


def _recover_unlocked(part: Path, directories: Directories) -> Path | None:
    with closing_fd(open_to_write(part, os.O_RDWR)) as descriptor:
        if not try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
            # The file is being written, or another process has recovered it.
            return None
        path = owner_of(part)
        if not cut_to_index(path, descriptor):
            part_of(path).unlink()
            index_of(path).unlink(missing_ok=True)
            return None
        return finish_part(path, directories)


def cut_to_index(path: Path, descriptor: int) -> bool:
    """Cut the open file of ``path`` back to its last durable member; return whether it has one."""
    size = os.fstat(descriptor).st_size
    index_path = index_of(path)
    if (index := load_index(index_path)) is None:
        index = Index(None, scan_members(part_of(path)))
        # After a kill, half of a new index would cut off the rest of the file.
        replace_file(index_path, index.encode())
    members = [member for member in index.members if member.end <= size]
    end = end_of(members)
    # `open_to_write` refuses an index that another user planted.
    with closing_fd(open_to_write(index_path, os.O_RDWR)) as index_descriptor:
        if end < size:
            os.ftruncate(descriptor, end)
            log.warning("%s: cut off %d unfinished bytes", path, size - end)
        os.fsync(descriptor)
        write_all(index_descriptor, Index(index.head, members).encode())
        os.ftruncate(index_descriptor, os.lseek(index_descriptor, 0, os.SEEK_CUR))
        os.fsync(index_descriptor)
    return bool(members)


def _remove_strays(directories: Directories) -> None:
    """Remove an index whose file has been moved to the output directory."""
    if directories.work == directories.output:
        return
    for index in list(hidden_below(directories.work, INDEX)):
        path = owner_of(index)
        if not part_of(path).exists() and directories.final(path).exists():
            index.unlink(missing_ok=True)
