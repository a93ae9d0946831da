"""What counts as a process below another one."""

from __future__ import annotations

import os
import subprocess
import sys

from plugins.processes import descendants

FORKS = "import os, sys; os.fork() or sys.stdin.read(); print(flush=True); sys.stdin.read()"


def test_a_jvm_that_starts_a_program_counts_once_and_what_python_forks_counts() -> None:
    def started(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [name, "-c", FORKS],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    with started("java") as java, started("python") as python:
        for process in (java, python):
            assert process.stdout is not None
            process.stdout.readline()  # it has forked
        found = [each.pid for each in descendants(os.getpid(), FORKS)]
        assert java.pid in found
        assert python.pid in found
        assert len(found) == 3, found
        for process in (java, python):
            assert process.stdin is not None
            process.stdin.close()
