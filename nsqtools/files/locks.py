"""Locks on open files: whoever has one works alone, and a process that ends gives it free."""

from __future__ import annotations

import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open; return False when another has it locked.

    Raises ``OSError`` where files cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
