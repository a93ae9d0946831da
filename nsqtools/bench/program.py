"""A program that publishes or consumes, measured from outside: by nsqd's counts and its own rusage.

Whatever the program prints does not matter. Its time runs from the last answer of nsqd that shows
nothing done to the first that shows all done, so a slow start does not count, and the error is at
most two intervals of asking. Its processor time does include the start: the system knows only the
sum. It publishes the lines of its standard input, or consumes a channel that is full; words of the
command line say where (`PLACEHOLDERS`).

Trap: an ephemeral topic keeps only what fits in memory and still counts every message, so
publishing into one fills no disk.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from nsqtools.bench.bench_plan import BenchMode
from nsqtools.bench.bench_topic import (
    counts,
    delete_own,
    open_cluster,
    wait_until_queued,
)
from nsqtools.bench.bodies import Bodies
from nsqtools.bench.comparison import Round
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import EPHEMERAL

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

PLACEHOLDERS = ("{topic}", "{channel}", "{nsqd}", "{nsqd_http}", "{count}")

POLL_S = 0.01
STALLED_S = 15.0
GRACE_S = 1.0  # nsqd may still read what a program left in its socket
END_S = 5.0
BATCH = 500
LAST_WORDS = 2000  # bytes of stderr that are looked at when a program fails


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """A command line with placeholders, and what it is to do.

    Raises `ConfigurationError` for what cannot be measured.
    """

    mode: BenchMode
    command: tuple[str, ...]
    nsqd_tcp_address: str
    nsqd_http_addresses: tuple[str, ...]
    options: ClientOptions
    size: tuple[int, int]
    count: int

    def __post_init__(self) -> None:
        if self.mode is BenchMode.E2E:
            raise ConfigurationError(
                "a program cannot be measured by e2e",
                hint="e2e needs messages with a time in them. Compare programs by pub or sub.",
            )
        needed = PLACEHOLDERS[:1] if self.mode is BenchMode.PUB else PLACEHOLDERS[:2]
        for placeholder in needed:
            if not any(placeholder in word for word in self.command):
                raise ConfigurationError(
                    f"the command line of {self.command[0]} has no {placeholder}",
                    hint=f"It is called with its own topic: {', '.join(PLACEHOLDERS)} stand "
                    "for what it is to use.",
                )


class ProgramRun:
    """Runs a `ProgramPlan`: `run` on one thread, `stop` from any.

    ``show`` is called as that of `Bench` is.
    """

    def __init__(self, plan: ProgramPlan, show: Callable[[str, int], None]) -> None:
        self._plan = plan
        self._show = show
        self.interrupted = False
        lasts = plan.mode is BenchMode.SUB  # a queue that discards nothing
        self._topic = f"bench_{random.randrange(1 << 32):08x}{'' if lasts else EPHEMERAL}"
        self._channel = "bench"

    def stop(self) -> None:
        """Ask `run` to end early: its round is worth nothing then."""
        self.interrupted = True

    def run(self) -> Round:
        """Measure. Raises `NsqError` when the program fails, or nsqd does not count all of it."""
        plan = self._plan
        with ExitStack() as stack:
            cluster = stack.enter_context(
                open_cluster((plan.nsqd_tcp_address,), plan.nsqd_http_addresses, plan.options)
            )
            stack.callback(delete_own, cluster, self._topic)
            cluster.ask_nsqds(lambda nsqd: nsqd.administer("create", self._topic))
            if plan.mode is BenchMode.PUB:
                lines = stack.enter_context(tempfile.TemporaryFile())
                size = _write_lines(lines, plan)
                return self._measure(cluster, lines, size, self._published)
            cluster.ask_nsqds(lambda nsqd: nsqd.administer("create", self._topic, self._channel))
            size = self._fill()
            wait_until_queued(cluster, self._topic, self._channel, plan.count, self._keep_waiting)
            return self._measure(cluster, None, size, self._finished)

    def _published(self, cluster: Cluster) -> int:
        return counts(cluster, self._topic).published

    def _finished(self, cluster: Cluster) -> int:
        return self._plan.count - counts(cluster, self._topic, self._channel).unfinished

    def _keep_waiting(self) -> bool:
        self._show("waiting for nsqd to queue the messages", 0)
        return not self.interrupted

    def _fill(self) -> int:
        plan, size = self._plan, 0
        with Producer(plan.nsqd_tcp_address, plan.options) as producer:
            for batch in _batches(plan):
                self._show("filling the topic", 0)
                size += sum(map(len, batch))
                producer.publish_many(self._topic, batch)
        return size

    def _measure(
        self, cluster: Cluster, lines: IO[bytes] | None, size: int, done: Callable[[Cluster], int]
    ) -> Round:
        count = self._plan.count
        with tempfile.TemporaryFile() as said, _running(self._words(), lines, said) as program:
            began = moved = time.monotonic()
            before = 0
            while (now_done := done(cluster)) < count and not self.interrupted:
                now = time.monotonic()
                if now_done == 0:
                    began = now
                if now_done != before:
                    before, moved = now_done, now
                self._show("publishing" if lines else "consuming", now_done)
                if now - moved > (GRACE_S if program.has_ended else STALLED_S):
                    raise _stopped(program, now_done, count, said)
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            cpu_s = program.end(asks=lines is None or self.interrupted)
            if lines is not None and program.status != 0 and not self.interrupted:
                raise _stopped(program, now_done, count, said)
        return Round(count, seconds, size, 1e6 * cpu_s / count)

    def _words(self) -> list[str]:
        plan = self._plan
        http = plan.nsqd_http_addresses[0] if plan.nsqd_http_addresses else ""
        values = (self._topic, self._channel, plan.nsqd_tcp_address, http, str(plan.count))
        words = []
        for word in plan.command:
            for placeholder, value in zip(PLACEHOLDERS, values, strict=True):
                word = word.replace(placeholder, value)
            words.append(word)
        return words


class _Program:
    """A running program, of which the system tells what it cost when it ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.name = str(process.args[0]) if isinstance(process.args, list) else ""
        self.status = 0
        self._process = process
        self._cpu_s: float | None = None

    @property
    def has_ended(self) -> bool:
        return self._cpu_s is not None or self._reap(os.WNOHANG)

    def end(self, *, asks: bool) -> float:
        """Wait until it has ended; return its processor time, that of its children included.

        A consumer has to be asked to, if it did not end by itself.
        """
        if asks and not self.has_ended:
            os.killpg(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + (END_S if asks else STALLED_S)
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill()
        assert self._cpu_s is not None
        return self._cpu_s

    def kill(self) -> None:
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._reap(0)

    def _reap(self, flags: int) -> bool:
        pid, status, usage = os.wait4(self._process.pid, flags)
        if pid == 0:
            return False
        self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
        self._cpu_s = usage.ru_utime + usage.ru_stime
        return True


@contextmanager
def _running(words: Sequence[str], lines: IO[bytes] | None, said: IO[bytes]) -> Iterator[_Program]:
    try:
        process = subprocess.Popen(
            words,
            stdin=lines if lines is not None else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # ^C is for the one who measures
        )
    except OSError as error:
        raise ConfigurationError(f"cannot run {words[0]} ({error.strerror})") from error
    program = _Program(process)
    try:
        yield program
    finally:
        program.kill()


def _stopped(program: _Program, done: int, count: int, said: IO[bytes]) -> NsqError:
    state = f"ended with status {program.status}" if program.has_ended else "made no progress"
    said.seek(max(0, said.seek(0, os.SEEK_END) - LAST_WORDS))
    last = said.read().decode("utf-8", "replace").strip().splitlines()[-1:]
    return NsqError(
        f"{program.name} {state} after {done} of {count} messages",
        hint=f"It said: {last[0]}" if last else "",
    )


def _write_lines(file: IO[bytes], plan: ProgramPlan) -> int:
    """What the program reads, from the beginning of the file; return the bytes of all messages."""
    size = 0
    for batch in _batches(plan):
        size += sum(map(len, batch))
        file.write(b"\n".join(batch) + b"\n")
    file.seek(0)
    return size


def _batches(plan: ProgramPlan) -> Iterator[list[bytes]]:
    bodies = Bodies(plan.size, seed=0)
    for start in range(0, plan.count, BATCH):
        yield bodies.batch(min(BATCH, plan.count - start))
