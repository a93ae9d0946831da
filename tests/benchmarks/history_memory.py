"""The memory of a full history: 1,000 channels and 300 topics on each of 10 nsqd.

    .venv/bin/python tests/benchmarks/history_memory.py          # prints MB for shares with traffic

The frames of a day are made from 20 that differ, each a copy of its own, because adding 43,200
samples would take long. Numbers of queues with traffic are random, which compresses worst.
"""

from __future__ import annotations

import random
import subprocess
import sys

from nsqtools.cluster.history import MAX_SERIES, NODE_POINTS, levels_for
from nsqtools.cluster.history_frames import NAN, Frame, Frames, Level, pack
from nsqtools.cluster.history_values import QUANTITIES, Values

SERIES, NODES, KINDS = 1300, 10, 20


def main() -> None:
    if len(sys.argv) > 1:
        print(f"{float(sys.argv[1]):4.0%} with traffic: {measured_mb(float(sys.argv[1])):.0f} MB")
        return
    for share in ("0.1", "0.5", "1"):
        subprocess.run([sys.executable, __file__, share], check=True)


def measured_mb(share: float) -> float:
    assert SERIES < MAX_SERIES
    before = resident_mb()
    kept = [Frames(levels_for(2.0), len(QUANTITIES))]
    kept.append(Frames([Level(2.0, 2.0 * NODE_POINTS)], len(QUANTITIES)))
    for frames, series in zip(kept, (SERIES, SERIES * NODES), strict=True):
        made = [columns(series, share) for _ in range(KINDS)]
        for level, frames_of_level in zip(frames.levels, frames._frames, strict=True):
            for number in range(int(level.keep_s / level.step_s)):
                copies = tuple(bytes(bytearray(each)) for each in made[number % KINDS])
                frames_of_level.append(Frame(float(number), copies))
    return resident_mb() - before


def columns(series: int, share: float) -> tuple[bytes, ...]:
    rows = (values(number % 100 < share * 100) for number in range(series))
    return tuple(map(pack, zip(*rows, strict=True)))


def values(has_traffic: bool) -> Values:
    if not has_traffic:
        return (*(0.0,) * (len(QUANTITIES) - 1), NAN)
    counts = (random.randrange(limit) for limit in (100_000, 1000, 100, 10))
    return (*counts, *(random.randrange(10_000) / 2.013 for _ in range(5)), random.random())


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    main()
