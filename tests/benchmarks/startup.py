"""How long ``nsq`` takes to start, as ratios to a bare interpreter.

    python tests/benchmarks/startup.py [ROUNDS]

Rounds are interleaved and medians compared, since single times on a shared machine say nothing.
Bytecode is written first, and the environment is free of variables that forbid it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

BARE = ("python -c pass", ["-c", "pass"], None)
RUNS = [
    ("nsq --version", ["-m", "nsqtools", "--version"], 2.5),
    ("nsq --help", ["-m", "nsqtools", "--help"], 2.5),
    ("nsq options --help", ["-m", "nsqtools", "options", "--help"], 9.0),
    ("nsq pub --help", ["-m", "nsqtools", "pub", "--help"], 9.0),
    ("nsq tail --help", ["-m", "nsqtools", "tail", "--help"], 9.0),
]
WARM_UPS = 3


def main(rounds: int = 20) -> None:
    """Run every case ``rounds`` times in turn and print medians and ratios."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    times: dict[str, list[float]] = {}
    for turn in range(WARM_UPS + rounds):
        for name, arguments, _ in (BARE, *RUNS):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL)
            if turn >= WARM_UPS:
                times.setdefault(name, []).append(time.perf_counter() - begin)
    bare_s = statistics.median(times[BARE[0]])
    for name, _, target in (BARE, *RUNS):
        seconds = statistics.median(times[name])
        goal = f"   (target < {target} x)" if target else ""
        print(f"{name:20} {seconds * 1000:6.1f} ms {seconds / bare_s:5.2f} x{goal}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
