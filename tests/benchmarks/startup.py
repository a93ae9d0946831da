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

from nsqtools.cli.registry import COMMANDS

BARE = "python -c pass"
FRONT_DOOR_TARGET = 2.5
COMMAND_TARGET = 9.0
WARM_UPS = 3


def main(rounds: int = 20) -> None:
    """Run every case ``rounds`` times in turn and print medians and ratios."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    runs: list[tuple[str, list[str]]] = [(BARE, ["-c", "pass"])]
    for arguments in (["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)):
        runs.append((f"nsq {' '.join(arguments)}", ["-m", "nsqtools", *arguments]))
    times_s: dict[str, list[float]] = {name: [] for name, _ in runs}
    for turn in range(WARM_UPS + rounds):
        for name, arguments in runs:
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL, check=True
            )
            if turn >= WARM_UPS:
                times_s[name].append(time.perf_counter() - begin)
    bare_s = statistics.median(times_s[BARE])
    for name, arguments in runs:
        median_s = statistics.median(times_s[name])
        target = COMMAND_TARGET if len(arguments) == 4 else FRONT_DOOR_TARGET
        print(f"{name:20} {median_s * 1000:6.1f} ms {median_s / bare_s:5.2f} x (target {target} x)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
