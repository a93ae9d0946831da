"""The life of a file: in progress, finished, or found by recovery after a crash.

*In progress* (`PartFile`): text in, durable members out, all or nothing. It is open, and locked,
only while something is written: a thousand topics need no descriptors for their files. Between two
writes whatever is in the file is durable and indexed, so another process that recovers it then does
no harm: it finishes the file early, which is noticed here before the next write, and that goes into
a new file. `FolderLocks` keep polite processes from doing so. After a failed flush `roll_back`
brings file and index back to the last durable member; nothing may be written before that has
worked. Text is compressed as it arrives, so the work is spread and little is left to do at the
flush.

*Finished* (`finish`): it appears whole, under a name that no other file has. The index goes first,
so that no finished file lacks its own; then the file; then the hidden names go. Every step may be
the last one before a crash, and doing it all again leads to the same end.

*Recovery* (`recover`) cuts each file back to its index and finishes it. What lies after the last
indexed member was not FINished: nsqd delivers it again. If the index was removed, it is rebuilt
from the file itself, so that nothing that may have been FINished is dropped. Files that a living
process has begun are locked, and are left alone.
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
from nsqtools.errors import OutputError
from nsqtools.files.durable import (
    DISK_FULL_ERRORS,
    NEW,
    adding_path_to_errors,
    copy_of,
    link_file,
    make_folder,
    make_folders,
    sync_data,
    sync_folder,
    write_all,
)
from nsqtools.files.opening import FolderLocks, closing_fd, open_to_write, try_lock
from nsqtools.records.naming import with_rev

log = logging.getLogger("nsqtools")

CREATE = NEW | os.O_RDWR | os.O_APPEND
GONE = "another process has removed or finished it"


class PartFile:
    """The file that will be ``path``, whose directory must exist.

    ``now_s`` is the time since 1970, kept as ``opened_at_s``. The ``head`` goes before the members
    in the index. The mode is less the umask, unless it ``is_exact``. Raises `FileExistsError` when
    the name is taken, and ``OSError``.
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
        self.size = 0  # of what is durable, on disk
        self.uncompressed_size = 0
        first_line = head.encode() if head else b""
        self._index_size = len(first_line)
        self._new_compressor = compressor
        writable = mode | 0o600  # until it is finished
        exact = writable if is_exact else None
        self._identity = _make(part_of(path), index_of(path), writable, first_line, exact)
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
        """The data and the index, open and locked against recovery."""
        flags = os.O_RDWR | os.O_APPEND
        gone = OSError(errno.ENOENT, GONE, str(self.path))
        with adding_path_to_errors(self.path):
            if self.has_vanished:
                raise gone
            with closing_fd(open_to_write(part_of(self.path), flags)) as data:
                if not try_lock(data) or self.has_vanished:
                    raise gone
                with closing_fd(open_to_write(index_of(self.path), flags)) as index:
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


def _make(
    part: Path, index: Path, mode: int, first_line: bytes, exact: int | None
) -> tuple[int, int]:
    """Make both files, and their names durable; return what identifies the data.

    The first line of the index becomes durable with that of the first member.
    """
    with closing_fd(os.open(part, CREATE, mode)) as data, ExitStack() as undo:
        undo.callback(part.unlink)
        if not try_lock(data) or not os.fstat(data).st_nlink:
            undo.pop_all()
            # another process took the empty file for a leftover just before it was locked
            raise FileExistsError(f"{part} is being recovered by another process")
        with closing_fd(os.open(index, CREATE, mode)) as descriptor, adding_path_to_errors(index):
            undo.callback(index.unlink)
            if exact is not None:
                os.fchmod(data, exact)
                os.fchmod(descriptor, exact)
            write_all(descriptor, first_line)
        sync_folder(part.parent)
        made = os.fstat(data)
        undo.pop_all()
    return made.st_dev, made.st_ino


@dataclass(frozen=True, slots=True)
class Directories:
    """Where files are finished and where they are in progress (often the same), and modes.

    Both are absolute and must exist; `make` makes them. A mode that the user chose is exact, the
    other is less the umask.
    """

    output: Path
    work: Path
    chosen_file_mode: int | None = None
    chosen_folder_mode: int | None = None

    @property
    def file_mode(self) -> int:
        return 0o640 if self.chosen_file_mode is None else self.chosen_file_mode

    def make(self) -> None:
        """Make both directories where they are missing. Raises ``OSError``."""
        mode, is_exact = self._folder_mode
        for folder in (self.output, self.work):
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                make_folder(folder, mode, is_exact=is_exact)

    @property
    def _folder_mode(self) -> tuple[int, bool]:
        chosen = self.chosen_folder_mode
        return (0o750, False) if chosen is None else (chosen, True)

    def make_folders(self, root: Path, folder: Path) -> None:
        """Make the directories from one of both down to ``folder``. Raises ``OSError``."""
        mode, is_exact = self._folder_mode
        make_folders(root, folder, mode, is_exact=is_exact)

    def try_out(self) -> None:
        """Try all that archiving does in both directories.

        What a file system refuses now it would refuse each message. A full disk may have room
        later, and is left to the archivers. Raises `OutputError`, which names the operation.
        """
        for folder in {self.output, self.work}:
            self._try_out(folder)

    def _try_out(self, folder: Path) -> None:
        trial = folder / f".nsq-archive.{os.urandom(8).hex()}.tmp"
        renamed = trial.with_name(f".nsq-archive.{os.urandom(8).hex()}.tmp")
        operation = "make files"
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
                raise OutputError(
                    f"cannot {operation} in {folder} ({exc.strerror})",
                    hint="Give a directory of another file system; --work-dir may be a local one.",
                ) from exc
        finally:
            for path in (trial, renamed):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def check_name(self, name: str) -> None:
        """Raise `OutputError` for a file name that the file systems have no room for.

        The longest that a file has is that of its index.
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
        """Return the locks on topics and on files in progress, all free."""
        return FolderLocks(self.work / LOCKS)

    def name_of(self, path: Path) -> str:
        """Return the name of a file of the work directory: of its lock, and in journals."""
        return str(path.relative_to(self.work))

    def final(self, path: Path) -> Path:
        """Return where a file of the work directory belongs when it is finished."""
        return self.output / path.relative_to(self.work)

    def have_member(self, name: str, head: Head | None, offset: int, length: int) -> bool:
        """Look a member up in the index of its file, in progress or finished. Raises ``OSError``.

        ``name`` is as of `name_of`. It can be that of a later file: recovery removes a file without
        members, and its name is used again. The ``head`` tells; a rebuilt index has none.
        """
        path = self.work / name
        for where in (path, self.final(path)):
            index = load_index(index_of(where))
            if index is None or (head and index.head and head != index.head):
                continue
            if any((member.offset, member.length) == (offset, length) for member in index.members):
                return True
        return False


def finish(path: Path, directories: Directories) -> Path:
    """Publish the file ``path`` of the work directory; return its final path.

    It must be durable, cut to its index, and not be written any more. Raises ``OSError``.
    """
    part, index = part_of(path), index_of(path)
    _add_total(index)
    wanted = directories.final(path)
    directories.make_folders(directories.output, wanted.parent)
    for rev in itertools.count():
        final = wanted.with_name(with_rev(wanted.name, rev))
        try:
            if not _is_same(part, index, final):
                if os.path.lexists(final):  # an index beside it would be taken for its own
                    continue
                there = load_index(index_of(final))
                if there is None or there != load_index(index):  # else of a try that failed then
                    link_file(index, index_of(final))
                mode = part.stat().st_mode & 0o777
                if mode & 0o200 > directories.file_mode & 0o200:
                    part.chmod(mode - 0o200)
                link_file(part, final)
            break
        except FileExistsError:
            continue
    sync_folder(final.parent)
    copy_of(final).unlink(missing_ok=True)  # left by a crash
    part.unlink(missing_ok=True)
    with suppress(OSError):  # it is published, and what is left is removed by recovery
        if index != index_of(final):
            index.unlink(missing_ok=True)
        sync_folder(part.parent)
    return final


def _add_total(index: Path) -> None:
    """End an index with its total. It is derived: torn, or lost in a crash, it is missing."""
    found = load_index(index)
    if found is None or not found.members:
        return
    total = total_of(found.members).encode()
    if not index.read_bytes().endswith(b"\n" + total):
        with closing_fd(open_to_write(index, os.O_WRONLY | os.O_APPEND)) as descriptor:
            write_all(descriptor, total)


def _is_same(part: Path, index: Path, final: Path) -> bool:
    """Return whether ``final`` is the finished file already: a crash or error came before the end.

    Times and sizes of every member are in the index, so two that are equal are of one file.
    """
    if not part.exists():
        return True
    if not final.exists() or not index_of(final).exists():
        return False
    is_as_long = 0 < part.stat().st_size == final.stat().st_size
    return is_as_long and load_index(index) == load_index(index_of(final))


def recover(directories: Directories) -> list[Path]:
    """Finish every file in progress that no process writes; return their final paths.

    One that cannot be recovered is reported in the log and left as it is.
    """
    finished = []
    with ExitStack() as stack:
        locks = cache(lambda at: stack.enter_context(closing(FolderLocks(at / LOCKS))))
        for part in list(hidden_below(directories.work, PART)):
            path = owner_of(part)
            try:
                # those of archivers here, below and above, who took one for each file
                folders = [at for at in path.parents if os.access(at / LOCKS, os.R_OK | os.W_OK)]
                if not all(locks(at).take(str(path.relative_to(at))) for at in folders):
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
            return None  # it is being written, or another process was faster
        path = owner_of(part)
        if not cut_to_index(path, descriptor):
            part_of(path).unlink()
            index_of(path).unlink(missing_ok=True)
            return None
        return finish(path, directories)


def cut_to_index(path: Path, descriptor: int) -> bool:
    """Cut the open file of ``path`` to its last durable member; return whether one is left."""
    size = os.fstat(descriptor).st_size
    index_path = index_of(path)
    found = load_index(index_path)
    if found is None:
        found = Index(None, scan_members(part_of(path)))
    members = [member for member in found.members if member.end <= size]
    end = end_of(members)
    flags = os.O_RDWR | os.O_CREAT
    with closing_fd(open_to_write(index_path, flags, 0o640)) as index:  # not one that was planted
        if end < size:
            os.ftruncate(descriptor, end)
            log.warning("%s: %d bytes that were not finished are cut off", path, size - end)
        os.fsync(descriptor)
        write_all(index, Index(found.head, members).encode())
        os.ftruncate(index, os.lseek(index, 0, os.SEEK_CUR))
        os.fsync(index)
    return bool(members)


def _remove_strays(directories: Directories) -> None:
    """Remove an index whose file has been moved to the output directory."""
    if directories.work == directories.output:
        return
    for index in list(hidden_below(directories.work, INDEX)):
        path = owner_of(index)
        if not part_of(path).exists() and directories.final(path).exists():
            index.unlink(missing_ok=True)
