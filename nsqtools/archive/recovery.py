"""Finish what a crash left: cut each file back to its index, and publish it.

What lies behind the last indexed member was not FINished: nsqd delivers it again. A file whose
index is missing or short of the file's start is another matter (somebody removed the index): its
index is made anew from the file itself, so that nothing that may have been FINished is dropped.

Files that a living process writes are locked, and are left alone.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nsqtools.archive.finishing import Directories, finish
from nsqtools.archive.index import Index, load_index
from nsqtools.archive.layout import (
    INDEX,
    PART,
    hidden_below,
    index_of,
    owner_of,
    part_of,
)
from nsqtools.archive.scan import scan_members
from nsqtools.files.durable import write_all
from nsqtools.files.locks import try_lock

log = logging.getLogger("nsqtools")


def recover(directories: Directories) -> list[Path]:
    """Finish every file in progress that nobody writes; return their final paths.

    One that cannot be recovered is reported in the log and left as it is.
    """
    finished = []
    for part in list(hidden_below(directories.work, PART)):
        try:
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
    descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
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
    if end < size:
        os.ftruncate(descriptor, end)
        log.warning("%s: %d bytes that were not finished are cut off", path, size - end)
    os.fsync(descriptor)
    index = os.open(index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
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
