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
from collections.abc import Sequence

from nsqtools.cli.registry import COMMANDS, Command

BARE = "python -c pass"
FRONT_DOOR_TARGET = "target < 2.5 x"
COMMAND_TARGET = "target < 9 x"
WARM_UPS = 3


SHORT = ("--version", "--help", "pub --help", "tail --help")


def main(rounds: int = 20) -> None:
    """Run every case ``rounds`` times in turn and print medians and ratios."""
    targets = {f"nsq {option}": FRONT_DOOR_TARGET for option in ("--version", "--help")}
    for name, entry in COMMANDS.items():
        is_raw = isinstance(entry, Command) and entry.raw
        targets[f"nsq {name} --help"] = "" if is_raw else COMMAND_TARGET
    found = times_s(rounds, [name.removeprefix("nsq ") for name in targets])
    bare_s = statistics.median(found[BARE])
    for name, values in found.items():
        median_s = statistics.median(values)
        target = targets.get(name, "")
        print(f"{name:20} {median_s * 1000:6.1f} ms {median_s / bare_s:5.2f} x  {target}".rstrip())


def times_s(rounds: int, lines: Sequence[str]) -> dict[str, list[float]]:
    """How long ``nsq LINE`` took in each round, for each line, beside a bare interpreter."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    runs = {BARE: ["-c", "pass"]}
    runs |= {f"nsq {line}": ["-m", "nsqtools", *line.split()] for line in lines}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UPS + rounds):
        for name, arguments in runs.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL, check=True
            )
            if turn >= WARM_UPS:
                found[name].append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
