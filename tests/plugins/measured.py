"""Run ``nsq`` in a process of its own, and see what it cost: time, memory, threads, descriptors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from plugins.waiting import patience_s

COST = "cost: "

# What it prints at the end is a line of stderr. Time is that of the command: an interpreter
# that starts on a busy machine says nothing about it.
_RUNNER = """
import json, os, sys, threading, time
from contextlib import suppress
from nsqtools.cli.main import main

most = {"threads": 0, "descriptors": 0}

def watch():
    while True:
        most["threads"] = max(most["threads"], threading.active_count() - 1)
        most["descriptors"] = max(most["descriptors"], len(os.listdir("/proc/self/fd")))
        time.sleep(0.02)

def peak_mb():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000

def starved():  # seconds that threads were ready and waited for a processor
    waited_ns = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended meanwhile
            with open(f"/proc/self/task/{task}/schedstat") as schedstat:
                waited_ns += int(schedstat.read().split()[1])
    return waited_ns / 1e9

threading.Thread(target=watch, daemon=True).start()
began = time.monotonic() - starved()
status = main(sys.argv[1:])
sys.stdout.flush()
seconds = time.monotonic() - starved() - began
cost = {"seconds": seconds, "peak_mb": peak_mb(), "status": status, **most}
sys.stderr.write("\\ncost: " + json.dumps(cost) + "\\n")
sys.stderr.flush()
os._exit(status)
"""


class Cost(NamedTuple):
    """How a run ended and what it took at most. Megabytes are those of RSS; ``seconds`` are without
    those in which other programs had the processors."""

    status: int
    out: bytes
    err: str
    seconds: float
    peak_mb: float
    threads: int
    descriptors: int


RunMeasured = Callable[[Sequence[str]], Cost]


@pytest.fixture
def run_measured(nsq_env: dict[str, str]) -> RunMeasured:
    """Run ``nsq ARGS`` to its end: ``run_measured(["tail", ...]).peak_mb``."""

    def run(arguments: Sequence[str]) -> Cost:
        done = subprocess.run(
            [sys.executable, "-c", _RUNNER, *arguments],
            capture_output=True,
            env=nsq_env,
            timeout=patience_s(60),
            check=False,
        )
        lines = done.stderr.decode().splitlines()
        # a thread may still log while the process ends
        costs = [line for line in lines if line.startswith(COST)]
        assert len(costs) == 1, done.stderr.decode()
        [cost] = costs
        lines.remove(cost)
        return Cost(out=done.stdout, err="\n".join(lines), **json.loads(cost.removeprefix(COST)))

    return run
