"""Run jobs of a compaction in parallel."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from typing import Any

from nsqtools.archive.slices import Job, JobResult, run_job
from nsqtools.errors import NsqError
from nsqtools.files.scratch import environment_variables

# Jobs in threads of this process: Arrow works without the lock of the interpreter for seven eighths
# of the time, and the imports of a process cost as much as 100,000 messages.
MAX_THREADS = 4

RunJobs = Callable[[Sequence[Job]], Iterable[tuple[int, JobResult]]]
"""Runs jobs in any order, and yields the index and the result of each."""


def in_parallel(workers: int) -> RunJobs:
    """Return a runner of at most so many jobs at a time; a single job runs in this thread."""

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        count = min(workers, len(jobs))
        if count < 2:
            yield from enumerate(map(run_job, jobs))
        elif count <= MAX_THREADS:
            yield from _run_in_threads(jobs, count)
        else:
            yield from _run_in_processes(jobs, count)

    return run


def _run_in_threads(jobs: Sequence[Job], count: int) -> Iterator[tuple[int, JobResult]]:
    stop = threading.Event()
    with ThreadPoolExecutor(count, "nsq-compact") as pool:
        try:
            yield from _results(pool, jobs, stop.is_set)
        finally:
            # After an error or a signal, the other jobs end at their next batch.
            stop.set()


def _run_in_processes(jobs: Sequence[Job], count: int) -> Iterator[tuple[int, JobResult]]:
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    with (
        # Otherwise new interpreters would import modules from the current directory.
        environment_variables({"PYTHONSAFEPATH": "1"}),
        ProcessPoolExecutor(count, get_context("spawn"), _start_worker) as pool,
    ):
        try:
            yield from _results(pool, jobs)
        except BrokenProcessPool:
            raise NsqError(
                "a process of the compaction was killed",
                hint="Run it again: finished partitions are kept. Fewer --processes need less "
                "memory.",
            ) from None


def _results(
    pool: Executor, jobs: Iterable[Job], *arguments: Callable[[], bool]
) -> Iterator[tuple[int, JobResult]]:
    """Run the jobs, and iterate over the results as they come."""
    numbers = {pool.submit(run_job, job, *arguments): number for number, job in enumerate(jobs)}
    try:
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Let the parent process handle SIGINT, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from multiprocessing import parent_process

    import pyarrow

    pyarrow.set_cpu_count(1)
    threading.Thread(target=_exit_with_parent, args=[parent_process()], daemon=True).start()


def _exit_with_parent(parent: Any) -> None:
    parent.join()
    os._exit(1)
