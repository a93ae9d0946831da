"""Start commands in a small separate process with one thread. The interface is `Starter`.

No command may outlive nsqtools, not even after kill -9. The process notices the end of its socket
and kills every process group that it has started. Only this process starts commands, so its list
is complete. If it is killed itself, `Starter.lost` kills the commands. (PR_SET_PDEATHSIG would need
Python between fork and exec, which triples the cost of a command.)

Background processes of a command live on, unless a signal of ours ended the command. In that case
the rest of its process group is killed while the number of the group is still in use.

This file is also the program of the process, run by its path, so it must not import nsqtools.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

REQUEST = struct.Struct("=iQII")  # signal (0: start), token, number of words, length of the rest
REPLY = struct.Struct("=Biq")  # kind, number, token
STARTED, ENDED, NOT_STARTED = range(3)  # with the process id, the exit status, the errno
EXIT_TIMEOUT_S = 5.0  # after the end of its socket; then the process is killed
# Limits of open files before nsqtools raises its own, for commands: select() fails above 1024.
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)


class EndedCommand(NamedTuple):
    """The end of a command. ``status`` is negative after a signal; ``errno`` is set if the command
    could not be started."""

    token: int
    status: int
    errno: int


class Starter:
    """The process that starts commands. Call `read` when ``replies`` is readable."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.replies, write_end = os.pipe()
        with theirs:
            fds = (theirs.fileno(), write_end)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", __file__, *map(str, (*fds, *LIMITS))],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C must reach only nsqtools
            )
            os.close(write_end)
        self._requests = ours
        self._partial_reply = b""
        self._pids: dict[int, int] = {}

    def start(
        self, token: int, words: Sequence[bytes], environ: Sequence[bytes], fds: Sequence[int]
    ) -> None:
        """Start the program ``words[0]``, a path, with the arguments ``words[1:]``.

        ``environ`` (``NAME=value``) is added to our environment, and ``fds`` are the standard
        streams. Words and variables must not contain NUL. Raises ``OSError`` if the process has
        ended.
        """
        strings = b"\0".join([*words, *environ])
        request = REQUEST.pack(0, token, len(words), len(strings))
        socket.send_fds(self._requests, [request], fds)
        self._requests.sendall(strings)

    def signal(self, token: int, number: int) -> None:
        """Send a signal to the process group of a command that still runs."""
        with contextlib.suppress(OSError):
            self._requests.sendall(REQUEST.pack(number, token, 0, 0))

    def read(self) -> list[EndedCommand] | None:
        """Return the commands that have ended, or None if the process itself has ended."""
        data = os.read(self.replies, 65536)
        if not data:
            return None
        data = self._partial_reply + data
        complete = len(data) - len(data) % REPLY.size
        self._partial_reply = data[complete:]
        ends = []
        for kind, number, token in REPLY.iter_unpack(data[:complete]):
            if kind == STARTED:
                self._pids[token] = number
            else:
                self._pids.pop(token, None)
                ends.append(EndedCommand(token, *((number, 0) if kind == ENDED else (0, number))))
        return ends

    def lost(self) -> None:
        """Kill the commands after the process was killed."""
        for pid in {*self._pids.values(), *_leaders(self._process.pid)}:
            _kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the process, which kills all running commands."""
        self._requests.close()
        os.close(self.replies)
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _leaders(session: int) -> Iterator[int]:
    """Yield the process groups of a session whose leader runs, on systems with /proc.

    These include commands whose start the process could not report any more.
    """
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(name)
            with open(f"/proc/{name}/stat", "rb") as file:
                _, _, group, its_session = file.read().rpartition(b") ")[2].split()[:4]
            if int(its_session) == session and int(group) == pid != session:
                yield pid


# -- the process itself ----------------------------------------------------------------------------

_LEFT_TO_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which decide when this ends
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python


class _Process:
    def __init__(self, requests: int, replies: int) -> None:
        os.set_inheritable(requests, False)
        os.set_inheritable(replies, False)
        self._requests = socket.socket(fileno=requests)
        self._replies = replies
        self._tokens: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._signalled: set[int] = set()

    def run(self) -> None:
        """Serve requests until the other end of the socket is closed; then kill all commands."""
        try:
            self._run()
        finally:
            for pid in self._tokens:
                _kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in _LEFT_TO_US:
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self._reap()
                    elif not self._take():
                        return

    def _take(self) -> bool:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        head, fds, _, _ = socket.recv_fds(self._requests, REQUEST.size, 3, flags)
        head += self._receive(REQUEST.size - len(head)) if head else b""
        if len(head) < REQUEST.size:
            return False
        number, token, words, length = REQUEST.unpack(head)
        if number:
            if token in self._pids:
                self._signalled.add(self._pids[token])
                _kill(self._pids[token], number)
            return True
        parts = self._receive(length).split(b"\0")
        self._start(token, parts[:words], parts[words:], fds)
        for fd in fds:
            os.close(fd)
        return True

    def _receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            chunk = self._requests.recv(length - len(data))
            if not chunk:
                raise ConnectionError
            data += chunk
        return data

    def _start(
        self, token: int, words: list[bytes], added: list[bytes], fds: Sequence[int]
    ) -> None:
        try:
            pid = os.posix_spawn(
                words[0],
                words,
                {**os.environb, **dict(variable.split(b"=", 1) for variable in added)},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(fds)],
                setpgroup=0,
                setsigdef=(*_LEFT_TO_US, *_IGNORED),
                setsigmask=(),
            )
        except OSError as exc:
            self._reply(NOT_STARTED, exc.errno or 0, token)
            return
        self._tokens[pid], self._pids[token] = token, pid
        self._reply(STARTED, pid, token)

    def _reap(self) -> None:
        for pid, status in _ended():
            if pid in self._signalled:
                self._signalled.discard(pid)
                # Safe after the leader was reaped: the number of a group is not reused while the
                # group has members.
                _kill(pid, signal.SIGKILL)
            token = self._tokens.pop(pid)
            del self._pids[token]
            self._reply(ENDED, status, token)

    def _reply(self, kind: int, number: int, token: int) -> None:
        os.write(self._replies, REPLY.pack(kind, number, token))


def _ended() -> Iterator[tuple[int, int]]:
    """Collect each child that has ended; its exit status is negative for a signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


if __name__ == "__main__":
    fds, limits = [*map(int, sys.argv[1:3])], [*map(int, sys.argv[3:])]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], limits[1]))
    process = _Process(*fds)
    with contextlib.suppress(OSError):  # nsqtools has ended
        process.run()
