"""Turn a file in progress into a finished one, after its last flush or after a crash.

A finished file appears whole, under a name nobody else has. The index goes first, so that no
finished file lacks its own; then the file; then the hidden names go. Every step may be the last one
before a crash, and doing it all again leads to the same end.

Recovery cuts each file back to its index and finishes it. What lies after the last indexed member
was not FINished: nsqd delivers it again. A file without an index is another matter (somebody
removed it): its index is rebuilt from the file itself, so that nothing that may have been FINished
is dropped. Files that a living process has begun are locked (see `FolderLocks`; and by themselves
while they are written), and are left alone.
"""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from nsqtools.archive.layout import (
    INDEX,
    LOCKS,
    PART,
    Index,
    hidden_below,
    index_of,
    load_index,
    owner_of,
    part_of,
    read_index,
)
from nsqtools.archive.members import scan_members
from nsqtools.files.durable import copy_of, make_folders, place, sync_folder, write_all
from nsqtools.files.locks import FolderLocks, try_lock
from nsqtools.files.opening import open_to_write
from nsqtools.records.naming import with_rev


@dataclass(frozen=True, slots=True)
class Directories:
    """Where files are finished and where they are in progress (often the same), and modes.

    Both are absolute and must exist; `make` makes them.
    """

    output: Path
    work: Path
    file_mode: int = 0o640
    folder_mode: int = 0o750

    def make(self) -> None:
        """Make both directories where they are missing. Raises ``OSError``."""
        for folder in (self.output, self.work):
            folder.mkdir(self.folder_mode, parents=True, exist_ok=True)

    def locks(self) -> FolderLocks:
        """Return the locks on topics and on files in progress, all free."""
        return FolderLocks(self.work / LOCKS)

    @property
    def are_locked(self) -> bool:
        """Whether any archiver ever took a lock here."""
        return (self.work / LOCKS).exists()

    def name_of(self, path: Path) -> str:
        """Return the name of a file of the work directory: of its lock, and in journals."""
        return str(path.relative_to(self.work))

    def final(self, path: Path) -> Path:
        """Return where a file of the work directory belongs when it is finished."""
        return self.output / path.relative_to(self.work)

    def have_member(self, name: str, offset: int, length: int) -> bool:
        """Look a member up in the index of its file, in progress or finished. Raises ``OSError``.

        ``name`` is as of `name_of`.
        """
        path = self.work / name
        for where in (path, self.final(path)):
            members = read_index(index_of(where)) or []
            if any((member.offset, member.length) == (offset, length) for member in members):
                return True
        return False


def finish(path: Path, directories: Directories) -> Path:
    """Publish the file ``path`` of the work directory; return its final path.

    It must be durable, cut to its index, and not be written any more. Raises ``OSError``.
    """
    part, index = part_of(path), index_of(path)
    wanted = directories.final(path)
    make_folders(directories.output, wanted.parent, directories.folder_mode)
    for rev in itertools.count():
        final = wanted.with_name(with_rev(wanted.name, rev))
        try:
            if not _is_same(part, index, final):
                place(index, index_of(final))
                place(part, final)
            break
        except FileExistsError:
            continue
    sync_folder(final.parent)
    copy_of(final).unlink(missing_ok=True)  # left by a crash
    part.unlink(missing_ok=True)
    if index != index_of(final):
        index.unlink(missing_ok=True)
    sync_folder(part.parent)
    return final


def _is_same(part: Path, index: Path, final: Path) -> bool:
    """Return whether ``final`` is the finished file already: a crash or error came before the end.

    Times and sizes of every member are in the index, so two that are equal are of one file.
    """
    if not part.exists():
        return True
    if not final.exists() or not index_of(final).exists():
        return False
    return (
        part.stat().st_size == final.stat().st_size
        and part.stat().st_size > 0
        and index.read_bytes() == index_of(final).read_bytes()
    )


log = logging.getLogger("nsqtools")


def recover(directories: Directories) -> list[Path]:
    """Finish every file in progress that nobody writes; return their final paths.

    One that cannot be recovered is reported in the log and left as it is.
    """
    finished = []
    locks = directories.locks()
    try:
        for part in list(hidden_below(directories.work, PART)):
            try:
                if directories.are_locked and not locks.take(directories.name_of(owner_of(part))):
                    continue
                final = _recover_unlocked(part, directories)
            except OSError as exc:
                log.error("cannot recover %s (%s)", exc.filename or part, exc.strerror)
                continue
            if final is not None:
                log.warning("recovered %s", final)
                finished.append(final)
    finally:
        locks.close()
    _remove_strays(directories)
    return finished


def _recover_unlocked(part: Path, directories: Directories) -> Path | None:
    descriptor = open_to_write(part, os.O_RDWR)
    try:
        if not try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
            return None  # it is being written, or another process was faster
        path = owner_of(part)
        if not cut_to_index(path, descriptor):
            part_of(path).unlink()
            index_of(path).unlink(missing_ok=True)
            return None
        return finish(path, directories)
    finally:
        os.close(descriptor)


def cut_to_index(path: Path, descriptor: int) -> bool:
    """Cut the open file of ``path`` to its last durable member; return whether one is left."""
    size = os.fstat(descriptor).st_size
    index_path = index_of(path)
    found = load_index(index_path)
    if found is None:
        found = Index(None, scan_members(part_of(path)).members)
    members = [member for member in found.members if member.end <= size]
    end = members[-1].end if members else 0
    index = open_to_write(index_path, os.O_RDWR | os.O_CREAT, 0o640)  # not one that was planted
    try:
        if end < size:
            os.ftruncate(descriptor, end)
            log.warning("%s: %d bytes that were not finished are cut off", path, size - end)
        os.fsync(descriptor)
        write_all(index, Index(found.head, members).encode())
        os.ftruncate(index, os.lseek(index, 0, os.SEEK_CUR))
        os.fsync(index)
    finally:
        os.close(index)
    return bool(members)


def _remove_strays(directories: Directories) -> None:
    """Remove an index whose file has been moved to the output directory."""
    if directories.work == directories.output:
        return
    for index in list(hidden_below(directories.work, INDEX)):
        path = owner_of(index)
        if not part_of(path).exists() and directories.final(path).exists():
            index.unlink(missing_ok=True)
