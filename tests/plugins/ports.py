"""Ports for daemons that are restarted on the same one.

A port that the kernel chooses (``:0``) is free to anybody while its daemon is away: to another
test's daemon, and to every outgoing connection. So these are from below the range that the kernel
chooses from, and a locked file for each keeps other workers and other runs away.
"""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

LOWEST = 12_000
_FOLDER = Path(tempfile.gettempdir(), f"nsqtools-test-ports-{os.getuid()}")


class ReservedPort:
    """A port of 127.0.0.1 that stays ours until `release`; 0 where none can be had."""

    def __init__(self) -> None:
        for _ in range(50):
            self.number = random.randrange(LOWEST, max(LOWEST + 1, _first_of_kernel()))
            self._lock = _lock(self.number)
            if self._lock >= 0 and _is_free(self.number):
                return
            self.release()
        self.number = 0

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        self.release()


def _first_of_kernel() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32_768


def _lock(number: int) -> int:
    """Return the descriptor of the locked file, -1 when somebody else has it."""
    _FOLDER.mkdir(exist_ok=True)
    descriptor = os.open(_FOLDER / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _is_free(number: int) -> bool:
    """Whether nobody listens there. We do not listen to find out.

    A process that another thread starts has all our sockets until its exec, and one that listens
    there in that moment would keep the daemon away.
    """
    with suppress(OSError), socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", number))
        return True
    return False
