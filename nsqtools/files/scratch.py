"""Temporary directories that are removed even after a kill, and temporary environment variables.

Each directory is locked while its process lives. The next process that makes a directory of the
same kind removes the unlocked ones.
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
LOCK_GRACE_S = 60.0
"""Time in which a process locks its new directory, at the latest."""


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory below ``parent`` (default: the system's) and remove it after the block.

    Abandoned directories with the same prefix are removed first. Raises `OutputError` if no
    directory can be made.
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
    """Remove the directories of this user's killed processes."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            state = directory.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < LOCK_GRACE_S:
                continue
            with closing_fd(open_to_write(directory / LOCK, os.O_RDWR)) as lock:
                if try_lock(lock):
                    shutil.rmtree(directory, ignore_errors=True)
        # It is no scratch directory, another process removed it, or it cannot be locked.
        except OSError:
            continue


@contextmanager
def environment_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables during the block, or unset those with the value None."""

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    previous = {name: os.environ.get(name) for name in changes}
    put(changes)
    try:
        yield
    finally:
        put(previous)
