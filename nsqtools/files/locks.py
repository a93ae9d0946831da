"""Locks on open files: whoever has one works alone, and the end of a process releases it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nsqtools.files.opening import open_to_write


def try_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open; return False when another has it locked.

    Raises ``OSError`` where files cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path) -> int | None:
    """Open a lock file, made if missing, and lock it; return None when another has it locked.

    Close the descriptor to release it. Raises ``OSError``.
    """
    descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
    try:
        if try_lock(descriptor):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
