"""Workers of task frameworks: processes with children, which end or are killed as a tree.

with running_worker([...], directory, ready="ready.") as worker:
    worker.terminate()      like an operator: the worker must end by itself
    worker.kill()           the worker and its children, immediately
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from plugins.waiting import patience_s, wait_until


class TaskWorker:
    """A running worker and its output."""

    def __init__(self, arguments: Sequence[str], directory: Path) -> None:
        self._output = directory / "worker.log"
        with self._output.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=directory,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._output.read_bytes()[self._start :].decode()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log, what=f"{text!r} in {self._output}", timeout_s=20)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(patience_s(30))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running_worker(
    arguments: Sequence[str], directory: Path, *, ready: str
) -> Iterator[TaskWorker]:
    """Start a worker, and wait until it prints ``ready``; kill it at the end of the block."""
    worker = TaskWorker(arguments, directory)
    try:
        worker.wait_for(ready)
        yield worker
    finally:
        worker.kill()
