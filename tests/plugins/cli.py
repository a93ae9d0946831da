"""Run ``nsq``: to its end, as a process to talk to, or on a terminal.

`run_nsq` runs to the end and returns the output. `spawn_nsq` starts a process for a dialog, and
`nsq_on_a_terminal` a process on a terminal (pexpect), for colors, tables and progress.
`nsq_on_a_screen` shows the screen of a user: ``screen.wait_for("clicks")`` (pyte). Processes that
still run at the end of a test are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pexpect
import pyte
import pytest
from plugins import in_process
from plugins.in_process import Result, run_in_process
from plugins.waiting import patience_s

import nsqtools
from nsqtools.cli import registry

CHECKOUT = Path(nsqtools.__file__).parents[1]
NSQ = (sys.executable, "-m", "nsqtools")
DEADLINE_S = patience_s(30.0)
WATCH_S = patience_s(300.0)
NEED_A_PROCESS = {"bench", "demo", "spark", "work"}  # they start processes, a JVM or users' code


# A small program starts the command: a process counts the memory of the program that started it.
_PEAK_KB = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_kb_of(*arguments: str) -> int:
    """Run ``nsq``, which succeeds, and return the largest memory that it had, in KiB."""
    command = (sys.executable, "-c", _PEAK_KB, *NSQ, *arguments)
    return int(subprocess.check_output(command, stderr=subprocess.DEVNULL))


class Given(registry.Command):
    """A command whose function is given instead of imported."""

    def __init__(self, function: Callable[..., int | None], *, raw: bool):
        super().__init__("", "A command for a test.", raw=raw)
        self.function = function

    def load(self) -> Callable[..., int | None]:
        return self.function


class NsqProcess(subprocess.Popen[bytes]):
    """A process with pipes for all three streams."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def end(self, number: int, timeout_s: float = 10.0) -> tuple[bytes, bytes]:
        """Send a signal, and wait for the end; return its stdout and stderr."""
        self.send_signal(number)
        return self.communicate(timeout=patience_s(timeout_s))


GivenCommand = Callable[..., None]
RunNsq = Callable[..., Result]
SpawnNsq = Callable[..., NsqProcess]
TerminalNsq = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Restore logging after every test, because a left handler would hide later logs."""
    with in_process.own_logging():
        yield


@pytest.fixture
def given_command(monkeypatch: pytest.MonkeyPatch, own_logging: None) -> GivenCommand:
    """Register a function as the command ``given``, for a run in this process."""

    def register(function: Callable[..., int | None], *, raw: bool = False) -> None:
        monkeypatch.setitem(registry.COMMANDS, "given", Given(function, raw=raw))

    return register


@pytest.fixture
def nsq_env(tmp_path: Path) -> dict[str, str]:
    """An environment without settings, colors or addresses of a user."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    return kept | {"HOME": str(tmp_path), "TERM": "xterm", "PYTHONPATH": str(CHECKOUT)}


@pytest.fixture
def run_nsq(nsq_env: dict[str, str]) -> RunNsq:
    """Run ``nsq ARGS`` to its end: ``run_nsq(["schema"], stdin=b"", env={...})``.

    It runs in this process, unless the command is one of `NEED_A_PROCESS`. A ``terminal`` with a
    number of ``columns`` joins stdin, stdout and stderr.
    """

    def run(
        args: Sequence[str],
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
        *,
        terminal: bool = False,
        columns: int = 0,
    ) -> Result:
        environ = {**nsq_env, **(env or {})}
        arguments = [str(arg) for arg in args]
        if NEED_A_PROCESS.isdisjoint(arguments[:1]) or "--help" in arguments:
            return run_in_process(
                arguments, stdin, environ, timeout, terminal=terminal, columns=columns
            )
        command = [*NSQ, *arguments]
        done = subprocess.run(
            command, input=stdin, env=environ, capture_output=True, timeout=timeout
        )
        return Result(done.returncode, done.stdout, done.stderr.decode())

    return run


@pytest.fixture
def spawn_nsq(nsq_env: dict[str, str]) -> Iterator[SpawnNsq]:
    """Start ``nsq ARGS`` with pipes for all three streams and return the running process."""
    started: list[NsqProcess] = []
    watches: list[threading.Timer] = []

    def spawn(
        args: Sequence[str], env: Mapping[str, str] | None = None, *, soft_descriptors: int = 0
    ) -> NsqProcess:
        # a shell sets it, because this process has more open descriptors than some tests allow
        limit = ["sh", "-c", f'ulimit -Sn {soft_descriptors}; exec "$@"', "sh"]
        process = NsqProcess(
            [*(limit if soft_descriptors else ()), *NSQ, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**nsq_env, **(env or {})},
        )
        started.append(process)
        watch = threading.Timer(WATCH_S, process.kill)  # otherwise a test would read forever
        watch.daemon = True
        watch.start()
        watches.append(watch)
        return process

    yield spawn
    for watch in watches:
        watch.cancel()
    for process in started:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(BrokenPipeError):  # unsent input of a process that has ended
                stream.close()
        process.wait(DEADLINE_S)


@pytest.fixture
def nsq_on_a_terminal(nsq_env: dict[str, str]) -> Iterator[TerminalNsq]:
    """Start ``nsq ARGS`` on its own terminal, which shows stderr as well."""
    started: list[pexpect.spawn[str]] = []

    def spawn(
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        *,
        lines: int = 24,
        encoding: str | None = "utf-8",
    ) -> pexpect.spawn[str]:
        child = pexpect.spawn(
            NSQ[0],
            [*NSQ[1:], *args],
            env={**nsq_env, **(env or {})},
            encoding=encoding,
            timeout=DEADLINE_S,
            dimensions=(lines, columns),
        )
        started.append(child)
        return child

    yield spawn
    for child in started:
        end_terminal(child)


def end_terminal(child: pexpect.spawn[Any]) -> None:
    """Kill the process on a terminal, and wait for its end longer than the 0.1 s of pexpect."""
    if child.isalive():
        child.kill(signal.SIGKILL)
        child.wait()
    child.close()


def all_commands(entries: Any = registry.COMMANDS, prefix: str = "") -> dict[str, registry.Command]:
    """Every command by its words, including commands of groups: ``topic create``."""
    commands = {}
    for name, entry in entries.items():
        if isinstance(entry, registry.Command):
            commands[prefix + name] = entry
        else:
            commands |= all_commands(entry.commands, f"{prefix}{name} ")
    return commands


class TerminalScreen:
    def __init__(self, child: pexpect.spawn[bytes], columns: int, lines: int) -> None:
        self.child = child
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""  # all output

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without trailing blanks."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def selected(self) -> str:
        """The last of the lines in reverse video."""
        cells = self._screen.buffer
        return [line for n, line in enumerate(self.lines) if cells[n][0].reverse][-1]

    def press(self, *keys: str) -> None:
        """Type keys, which the program gets in one read."""
        self.child.send("".join(keys))

    def see(self, keys: str | Sequence[str], *texts: str, gone: str = "") -> list[str]:
        """Press keys, then `wait_for`."""
        self.press(*([keys] if isinstance(keys, str) else keys))
        return self.wait_for(*texts, gone=gone)

    def wait_for(self, *texts: str, gone: str = "") -> list[str]:
        """Wait until all texts are on the screen, and ``gone`` is not; return its lines."""
        return self.wait_until(
            lambda lines: (
                all(any(text in line for line in lines) for text in texts)
                and not (gone and any(gone in line for line in lines))
            ),
            what=f"{texts} on the screen",
        )

    def wait_until(self, condition: Callable[[list[str]], bool], *, what: str) -> list[str]:
        """Wait until the condition is true for the lines of the screen; return the lines."""
        deadline = time.monotonic() + patience_s(15)
        while not condition(self.lines):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time: {what}\n" + "\n".join(self.lines))
            self.go_on()
        return self.lines

    def resize(self, columns: int, lines: int) -> None:
        """Resize the window, as dragging its corner does."""
        self._screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def wait_for_end(self) -> int | None:
        """Read until the program has ended; return its exit status."""
        while self.go_on():
            pass
        self.child.close()
        status: int | None = self.child.exitstatus
        return status

    def go_on(self) -> bool:
        """Read the output of a moment; return whether the program may write more."""
        try:
            data = self.child.read_nonblocking(65536, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True


NsqOnAScreen = Callable[..., TerminalScreen]


@pytest.fixture
def nsq_on_a_screen(nsq_on_a_terminal: TerminalNsq) -> NsqOnAScreen:
    def spawn(
        arguments: Sequence[str], *, columns: int = 80, lines: int = 24, **env: str
    ) -> TerminalScreen:
        env = {"LC_ALL": "C.UTF-8", "TERM": "xterm", **env}
        child = nsq_on_a_terminal(arguments, env, columns, lines=lines, encoding=None)
        return TerminalScreen(child, columns, lines)

    return spawn
