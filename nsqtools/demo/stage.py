"""Where the demonstration takes place: daemons on free ports, an empty directory, and processes.

Commands run in the directory and find the daemons through the environment, so that the command line
that runs is the one that is shown, but for the addresses in it: those are shown as
the usual ones. Nothing of the user's settings reaches them.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple, Self

from nsqtools.errors import NsqError
from nsqtools.server.embedded import EmbeddedNsqd, EmbeddedNsqlookupd

TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
COLUMNS = 100  # of the terminal that tables are made for
READ_SIZE = 1 << 16

THEIRS = ("NSQ_", "SPARK_LOCAL_DIRS")
"""What the user has set, and what would lead out of our directory."""

OWN_DIRECTORIES = ("TMPDIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")


class DemoFailed(NsqError):
    """A step of the demonstration did not end as it should."""


class DemoStopped(NsqError):
    """The demonstration was stopped in the middle."""


class Done(NamedTuple):
    """What a command wrote."""

    out: bytes
    err: str

    @property
    def lines(self) -> list[bytes]:
        return self.out.splitlines()


class Stage:
    """Set up by entering it; everything is gone when it is left.

    ``directory`` is where commands run. ``stop`` may be called from any thread: the command that
    runs is ended, and `run` raises `DemoStopped`.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._given_environ = environ
        self._resources = ExitStack()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            directory = TemporaryDirectory(prefix="nsq-demo-", ignore_cleanup_errors=True)
            self.directory = Path(undo.enter_context(directory))
            self.lookupd = undo.enter_context(EmbeddedNsqlookupd())
            self.nsqd = undo.enter_context(
                EmbeddedNsqd(lookupd_tcp_address=(self.lookupd.tcp_address,))
            )
            self._resources = undo.pop_all()
        self._environ = self._environment()
        self._usual = {
            self.lookupd.tcp_address: "127.0.0.1:4160",
            self.lookupd.http_address: "127.0.0.1:4161",
            self.nsqd.tcp_address: "127.0.0.1:4150",
            self.nsqd.http_address: "127.0.0.1:4151",
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._resources.close()

    def stop(self) -> None:
        """End what runs, and let nothing more begin. Returns when it has ended."""
        with self._lock:
            self._is_stopped = True
            process = self._process
            if process is None:
                return
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_group(process.pid)

    def shown(self, *arguments: str) -> str:
        """The command line as a person would type it where the daemons have the usual ports."""
        words = [self._usual.get(word, word) for word in arguments]
        return f"nsq {shlex.join(words)}"

    def run(
        self, *arguments: str, as_on_a_terminal: bool = False, timeout_s: float | None = None
    ) -> Done:
        """Run ``nsq`` to its end. With a terminal for its output, that is what tables are like.

        Raises `DemoFailed` when it fails or takes too long, `DemoStopped` when it was stopped.
        """
        timeout_s = timeout_s or TIMEOUT_S
        if as_on_a_terminal:
            with _Terminal() as terminal:
                process = self._start(arguments, stdout=terminal.for_child)
                out = terminal.read()
                _, err = self._finish(process, arguments, timeout_s)
        else:
            process = self._start(arguments, stdout=subprocess.PIPE)
            out, err = self._finish(process, arguments, timeout_s)
        if process.returncode != 0:
            said = err.decode(errors="replace").strip()
            raise DemoFailed(
                f"the demonstration failed: {self.shown(*arguments)} ended with status "
                f"{process.returncode}: {said}"
            )
        return Done(out or b"", err.decode(errors="replace"))

    def _start(self, arguments: Sequence[str], stdout: int) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_stopped:
                raise DemoStopped("the demonstration was stopped")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nsqtools", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                cwd=self.directory,
                env=self._environ,
                start_new_session=True,  # ^C is for us, who then end it
            )
            return self._process

    def _finish(
        self, process: subprocess.Popen[bytes], arguments: Sequence[str], timeout_s: float
    ) -> tuple[bytes, bytes]:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoFailed(
                f"the demonstration failed: {self.shown(*arguments)} took over {timeout_s:g} s"
            ) from None
        finally:
            end_group(process.pid)
            process.communicate()
            with self._lock:
                self._process = None
        if self._is_stopped:
            raise DemoStopped("the demonstration was stopped")
        return out, err

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in self._given_environ.items() if not k.startswith(THEIRS)}
        own = {name: self.directory / f".{name.lower()}" for name in OWN_DIRECTORIES}
        for path in own.values():
            path.mkdir()
        package_home = str(Path(__file__).parents[3])
        paths = [package_home, *filter(None, [kept.get("PYTHONPATH")])]
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(paths),
            **{name: str(path) for name, path in own.items()},
            "NO_COLOR": "1",
            "NSQ_NSQD_TCP_ADDRESS": self.nsqd.tcp_address,
            "NSQ_NSQD_HTTP_ADDRESS": self.nsqd.http_address,
        }


def end_group(pid: int) -> None:
    """Kill what is left of a process and of those it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class _Terminal:
    """A terminal whose output we read."""

    def __enter__(self) -> Self:
        import fcntl
        import pty
        import struct
        import termios

        self._ours, self.for_child = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        return self

    def read(self) -> bytes:
        """Everything until the child has closed it."""
        os.close(self.for_child)
        self.for_child = -1
        parts = []
        while True:
            try:
                part = os.read(self._ours, READ_SIZE)
            except OSError:  # how Linux says that no process has it open
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts).replace(b"\r\n", b"\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for descriptor in (self._ours, self.for_child):
            if descriptor >= 0:
                os.close(descriptor)
