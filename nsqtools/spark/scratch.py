"""The directory of one session or command for everything temporary, which is removed with it.

Spark removes its temporary files when it ends in good order. After ``kill -9`` they stay: so each
session has a directory of its own, locked while it lives, and the next session removes those whose
lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsqtools.errors import OutputError
from nsqtools.files.locks import try_lock

PREFIX = "nsq-spark-"
LOCK = "lock"
YOUNG_S = 60.0
"""A directory this young may be about to be locked."""


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A new directory below ``parent``; abandoned ones are removed first.

    Raises `OutputError` where none can be made.
    """
    remove_abandoned(parent)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise OutputError(
            f"cannot make a directory for Spark in {parent} ({error.strerror})",
            hint="Set TMPDIR, or SPARK_LOCAL_DIRS, to a directory that can be written.",
        ) from error
    lock = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of sessions of this user that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            state = directory.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < YOUNG_S:
                continue
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not a session's directory, or it was removed just now
            continue
        try:
            if try_lock(lock):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # where files cannot be locked nobody knows who lives
            continue
        finally:
            os.close(lock)
