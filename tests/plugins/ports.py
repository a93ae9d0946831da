"""Ports for daemons that are restarted on the same one.

A port that the kernel chooses (``:0``) is free for others while its daemon is stopped: for another
test's daemon, and for every outgoing connection. So these ports are below the range of the kernel,
and a locked file for each keeps other workers and other runs away.
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
    """A port of 127.0.0.1 that is reserved until `release`; 0 if none is available."""

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
    """Return the descriptor of the locked file, or -1 if another process has locked it."""
    _FOLDER.mkdir(exist_ok=True)
    descriptor = os.open(_FOLDER / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _is_free(number: int) -> bool:
    """Whether nobody listens on a port, without listening on it.

    A process that another thread starts inherits all our sockets until its exec, and a socket that
    listens on the port at this moment would block the daemon.
    """
    with suppress(OSError), socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", number))
        return True
    return False
