"""Worker processes, seen from outside, and a few whole numbers that all of them see.

They are programs of their own (`worker`) and not forks: nothing of a caller's threads or of its
``__main__`` matters to them. An interrupt of the terminal is not for them: they end when they are
asked to, and when the process that measures is gone.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from nsqtools.bench.bench_plan import BenchJob
from nsqtools.errors import NsqError

LOOK_S = 0.1
BEGIN_AFTER_S = 0.02
# without -P the current directory would come before our package
WORKER = (sys.executable, "-P", "-c", "from nsqtools.bench.worker import main; main()")
UNKNOWN = (1 << 64) - 1


class SharedCounts:
    """What publishers have published and consumers consumed, when to stop, and what to reach.

    They are in memory that the processes share: ``fileno`` is what another one makes its own view
    from. Each worker writes only its own number, so nothing is locked: a reader gets an old value
    or the new one. (A number of eight bytes at a multiple of eight is written at once.)

    ``published`` counts what was sent, confirmed or not, by the number of the publisher, and
    ``consumed`` what was taken. ``target`` is how many there are to consume, `UNKNOWN` until the
    publishers are done.
    """

    def __init__(self, connections: int, fileno: int | None = None) -> None:
        size = 8 * (3 + 2 * connections)
        is_first = fileno is None
        if fileno is None:
            with tempfile.TemporaryFile(prefix="nsq-bench-") as file:
                file.truncate(size)
                fileno = os.dup(file.fileno())
        self.fileno = fileno
        # the target, whether to stop publishing and consuming, and the counts
        self._cells = memoryview(mmap.mmap(fileno, size)).cast("Q")
        self.published = self._cells[3 : 3 + connections]
        self.consumed = self._cells[3 + connections :]
        if is_first:
            self.target = UNKNOWN

    @property
    def target(self) -> int:
        return self._cells[0]

    @target.setter
    def target(self, count: int) -> None:
        self._cells[0] = count

    @property
    def may_publish(self) -> bool:
        return not self._cells[1]

    @property
    def may_consume(self) -> bool:
        return not self._cells[2]

    def stop_publishing(self) -> None:
        """Ask the publishers to end. (From any thread, also when all is over.)"""
        self._cells[1] = 1

    def stop_consuming(self) -> None:
        """Ask the consumers to end, whatever is missing. (From any thread.)"""
        self._cells[2] = 1

    @property
    def on_the_way(self) -> int:
        """Messages that were sent and not consumed."""
        return sum(self.published) - sum(self.consumed)


class Crew:
    """One process for each of ``jobs``, all ready when it is made. A context manager, which ends
    those that still run.

    ``on_look`` is called ten times a second while it waits for them, and may raise.
    """

    def __init__(
        self, jobs: Sequence[BenchJob], counters: SharedCounts, on_look: Callable[[], None]
    ) -> None:
        self._on_look = on_look
        self._processes: dict[Connection[Any, Any], subprocess.Popen[bytes]] = {}
        try:
            for job in jobs:
                self._start(job, counters.fileno)
            self.results()
        except BaseException:
            self.end()
            raise

    def _start(self, job: BenchJob, counters: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._processes[ours] = subprocess.Popen(
                [*WORKER, str(theirs.fileno()), str(job.plan.connections), str(counters)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whatever is printed is not ours
                pass_fds=[theirs.fileno(), counters],
                start_new_session=True,  # ^C is for the one who measures
            )
        _send(ours, job)

    def begin(self, at: float | None = None) -> float:
        """Let all begin together, at a monotonic time or as soon as they can; return when."""
        at = time.monotonic() + BEGIN_AFTER_S if at is None else at
        for connection in self._processes:
            _send(connection, at)
        return at

    def results(self) -> list[Any]:
        """Wait for the next answer of each and return them. Raises the error that one has sent."""
        answers: list[Any] = []
        waited_for = list(self._processes)
        while waited_for:
            ready = wait(waited_for, LOOK_S)
            if not ready:
                self._on_look()
            for connection in ready:
                assert isinstance(connection, Connection)
                answers.append(self._answer(connection))
                waited_for.remove(connection)
        return answers

    def _answer(self, connection: Connection[Any, Any]) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            status = self._processes[connection].wait()
            answer = NsqError(f"a worker process ended with status {status}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill those that still run."""
        for connection, process in self._processes.items():
            process.kill()
            process.wait()
            connection.close()


def _send(connection: Connection[Any, Any], value: Any) -> None:
    with suppress(BrokenPipeError):  # its last answer, or that there is none, says why
        connection.send(value)
