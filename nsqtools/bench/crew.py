"""Starts and watches worker processes, and shares a few counters with them.

Workers are separate programs (`worker`) and not forks, so the caller's threads and its
``__main__`` do not matter. They run in their own session, since Ctrl-C at the terminal is for the
measuring process alone: it asks them to end, and they end when it has died.
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

ANSWER_POLL_S = 0.1
BEGIN_AFTER_S = 0.02  # until each worker has read the time at which to begin
# Without -P a module in the current directory could replace ours.
WORKER = (sys.executable, "-P", "-c", "from nsqtools.bench.worker import main; main()")
UNKNOWN = (1 << 64) - 1


class SharedCounts:
    """Counters in shared memory: messages published and consumed, the target, and two stops.

    Another process opens the same memory by ``fileno``. Each worker writes only its own counter, so
    no lock is needed: an aligned write of eight bytes is atomic, and a reader sees the old value or
    the new one.

    ``published`` has the messages sent by each publisher, confirmed or not, and ``consumed`` the
    messages received by each consumer. ``target`` is the number to consume, `UNKNOWN` until the
    publishers have ended.
    """

    def __init__(self, connections: int, fileno: int | None = None) -> None:
        size = 8 * (3 + 2 * connections)
        is_first = fileno is None
        if fileno is None:
            with tempfile.TemporaryFile(prefix="nsq-bench-") as file:
                file.truncate(size)
                fileno = os.dup(file.fileno())
        self.fileno = fileno
        # target, stop publishing, stop consuming, then a counter for each worker
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
        """Ask the publishers to end. Callable from any thread, also after the measurement."""
        self._cells[1] = 1

    def stop_consuming(self) -> None:
        """Ask the consumers to end without the missing messages. Callable from any thread."""
        self._cells[2] = 1

    @property
    def unconsumed(self) -> int:
        """Messages that were sent and have not been consumed."""
        return sum(self.published) - sum(self.consumed)


class Crew:
    """One process for each of ``jobs``, started and ready. A context manager that ends them.

    ``on_poll`` is called ten times a second while the crew waits for answers, and may raise.
    """

    def __init__(
        self, jobs: Sequence[BenchJob], counters: SharedCounts, on_poll: Callable[[], None]
    ) -> None:
        self._on_poll = on_poll
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
                stdout=subprocess.DEVNULL,  # a stray print must not mix with the report
                pass_fds=[theirs.fileno(), counters],
                start_new_session=True,  # Ctrl-C must not reach the workers
            )
        _send(ours, job)

    def begin(self, at: float | None = None) -> float:
        """Have all begin at one monotonic time, by default as soon as possible; return it."""
        at = time.monotonic() + BEGIN_AFTER_S if at is None else at
        for connection in self._processes:
            _send(connection, at)
        return at

    def results(self) -> list[Any]:
        """Wait for the next answer of each worker. Raises the error that a worker sent."""
        answers: list[Any] = []
        pending = list(self._processes)
        while pending:
            ready = wait(pending, ANSWER_POLL_S)
            if not ready:
                self._on_poll()
            for connection in ready:
                assert isinstance(connection, Connection)
                answers.append(self._answer(connection))
                pending.remove(connection)
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
        """Kill the workers that still run."""
        for connection, process in self._processes.items():
            process.kill()
            process.wait()
            connection.close()


def _send(connection: Connection[Any, Any], value: Any) -> None:
    # A worker that has ended left an answer or none: `_answer` reports either.
    with suppress(BrokenPipeError):
        connection.send(value)
