"""The JVM of a session: a process beside this one, started so that it stays out of the way.

It is what ``pyspark`` itself starts, with two differences. All that the JVM, and the Python workers
below it, print goes into the session's log. And it has a session of its own, so that ^C in
the terminal reaches only this process, which then ends Spark in order. The JVM lives no longer than
we do: when its stdin ends, it ends.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

from nsqtools.errors import NsqError
from nsqtools.spark.log import Log, last_lines

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
POLL_S = 0.02

COMPLAINT = re.compile(
    r'(?:Exception in thread "\w+" (?:[\w$]+\.)*[\w$]+: (.*)|Error: .*|Error occurred during .*'
    r"|Unrecognized .*|Invalid .*)"
)
"""How the JVM, or Spark's launcher in it, begins the line that says why it does not start."""


class JVM:
    """A running JVM; `close` ends it. ``port`` and ``secret`` are for py4j."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], scratch: Path, log: Log):
        self.log = log
        told = scratch / "gateway"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told)},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._copier = Thread(
            target=log.copy, args=(self._process.stdout,), name="spark-log", daemon=True
        )
        self._copier.start()
        try:
            self._wait_for(told)
        except BaseException:
            self.kill()
            raise
        # written by org.apache.spark.api.python.PythonGatewayServer: the port, then a Java string
        data = told.read_bytes()
        port, length = struct.unpack_from(">ii", data)
        self.port = int(port)
        self.secret = data[8 : 8 + length].decode()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _wait_for(self, told: Path) -> None:
        """Wait for the file, which appears whole, or for the end of the process."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not told.exists():
            if not self.is_running:
                self._copier.join(END_TIMEOUT_S)
                raise NsqError(
                    f"Spark's JVM did not start{reason(last_lines(self.log.path))}",
                    hint=f"Its log is {self.log.path}.",
                )
            if time.monotonic() > deadline_s:
                raise NsqError(
                    f"Spark's JVM was not ready after {START_TIMEOUT_S:.0f} s",
                    hint=f"Its log is {self.log.path}.",
                )
            time.sleep(POLL_S)

    def close(self, timeout_s: float) -> None:
        """End it in order, by ending its stdin; kill it when it does not. A second time is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._copier.join(END_TIMEOUT_S)

    def kill(self) -> None:
        """End it at once, with what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass
        self._process.wait()


def reason(lines: Sequence[str]) -> str:
    """What a JVM that did not start says about it, to be put after a sentence; may be ""."""
    for line in lines:
        if found := COMPLAINT.match(line):
            return f" ({found[1] or line})"
    said = [line for line in lines if line and not line.startswith(("WARNING", "NOTE", "Picked"))]
    return f" ({said[-1]})" if said else ""
