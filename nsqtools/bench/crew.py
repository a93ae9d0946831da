"""Worker processes, seen from outside: started, triggered, read and ended.

They are programs of their own (`worker`) and not forks: nothing of a caller's threads or of its
``__main__`` matters to them. An interrupt of the terminal is not for them: they end when they are
asked to, and when the process that measures is gone.
"""

from __future__ import annotations

import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from nsqtools.bench.bench_plan import READY, Job, WorkerError
from nsqtools.bench.counters import Counters
from nsqtools.errors import NsqError

LOOK_S = 0.1
BEGIN_AFTER_S = 0.02
WORKER = (sys.executable, "-m", "nsqtools.bench.worker")


class WorkerFailed(NsqError):
    """A worker could not do its job; says and advises what its error did."""

    def __init__(self, failure: WorkerError) -> None:
        super().__init__(failure.message, hint=failure.hint)
        self.category = failure.category


class Crew:
    """One process for each of ``jobs``. A context manager, which ends those that still run.

    ``on_look`` is called ten times a second while it waits for them, and may raise.
    """

    def __init__(
        self, jobs: Sequence[Job], counters: Counters, connections: int, on_look: Callable[[], None]
    ) -> None:
        self._on_look = on_look
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for job in jobs:
                self._start(job, [*WORKER, str(connections), str(counters.fileno)], counters.fileno)
            for answer in self._wait():
                assert answer == READY
        except BaseException:
            self.end()
            raise

    def _start(self, job: Job, command: Sequence[str], fileno: int) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fileno],
            start_new_session=True,  # ^C is for the one who measures
        )
        self._processes.append(process)
        self._send(process, job)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def begin(self, at: float | None = None) -> float:
        """Let all begin together, at a monotonic time or as soon as they can; return when."""
        at = time.monotonic() + BEGIN_AFTER_S if at is None else at
        for process in self._processes:
            self._send(process, at)
        return at

    def results(self) -> list[Any]:
        """Wait for all to finish and return their results. Raises `WorkerFailed`."""
        return self._wait()

    def end(self) -> None:
        """Kill those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # what it never read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _wait(self) -> list[Any]:
        answers: list[Any] = []
        while len(answers) < len(self._processes):
            try:
                answer = self._answers.get(timeout=LOOK_S)
            except queue.Empty:
                self._on_look()
                continue
            if isinstance(answer, WorkerError):
                raise WorkerFailed(answer)
            answers.append(answer)
        return answers

    def _send(self, process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(value, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # its last answer, or that there is none, says why

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while True:
            try:
                answer = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):
                status = process.wait()
                gone = WorkerError("failed", f"a worker process ended with status {status}", "")
                self._answers.put(gone)
                return
            self._answers.put(answer)
            if answer != READY:
                return
