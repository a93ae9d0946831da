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

from nsqtools.cli.registry import COMMANDS, Command

BARE = "python -c pass"
FRONT_DOOR_TARGET = "target < 2.5 x"
COMMAND_TARGET = "target < 9 x"
WARM_UPS = 3


def main(rounds: int = 20) -> None:
    """Run every case ``rounds`` times in turn and print medians and ratios."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    runs = {BARE: (["-c", "pass"], "")}
    for option in ("--version", "--help"):
        runs[f"nsq {option}"] = (["-m", "nsqtools", option], FRONT_DOOR_TARGET)
    for name, entry in COMMANDS.items():
        target = "" if isinstance(entry, Command) and entry.raw else COMMAND_TARGET
        runs[f"nsq {name} --help"] = (["-m", "nsqtools", name, "--help"], target)
    times_s: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UPS + rounds):
        for name, (arguments, _) in runs.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL, check=True
            )
            if turn >= WARM_UPS:
                times_s[name].append(time.perf_counter() - begin)
    bare_s = statistics.median(times_s[BARE])
    for name, (_, target) in runs.items():
        median_s = statistics.median(times_s[name])
        print(f"{name:20} {median_s * 1000:6.1f} ms {median_s / bare_s:5.2f} x  {target}".rstrip())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
