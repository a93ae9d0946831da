"""Directories for what is put together and does not stay, of which a kill leaves nothing for long.
And variables of this process that others start with, which do not stay either.

Each directory is locked while its process lives, and the next one of its kind removes those that
are not locked any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nsqtools.errors import OutputError
from nsqtools.files.opening import closing_fd, lock_file, open_to_write, try_lock

LOCK = "lock"
YOUNG_S = 60.0
"""A directory this young may be about to be locked."""


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new directory below ``parent``, or where the system has temporary files.

    Abandoned ones whose names have the same prefix are removed first. Raises `OutputError` where
    none can be made.
    """
    try:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent, prefix)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = lock_file(directory / LOCK)
    except OSError as error:
        raise OutputError(
            f"cannot make a temporary directory in {parent} ({error.strerror})",
            hint="Name one that can be written: TMPDIR, for Spark SPARK_LOCAL_DIRS, or --output.",
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the directories of processes of this user that were killed."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            state = directory.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < YOUNG_S:
                continue
            with closing_fd(open_to_write(directory / LOCK, os.O_RDWR)) as lock:
                if try_lock(lock):
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # not one of these, removed just now, or where files cannot be locked
            continue


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process, or remove those that are None, and restore them."""

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in changes}
    put(changes)
    try:
        yield
    finally:
        put(before)
