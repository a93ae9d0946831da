"""The command. Each part runs in a process of its own, so that none disturbs or ends another."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import pages
from benchmarks.report.parts import CHECKOUT, PARTS, Settings
from benchmarks.report.raw import RESULTS, Result, Row, machine, save

LONGEST_S = 240  # then a part begins no other run
HANGS_S = 600  # then it is killed


def main(arguments: list[str]) -> int:
    """Measure and render; 1 when something could not be measured."""
    parser = argparse.ArgumentParser(prog="tests/benchmarks report", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; repeatable")
    parser.add_argument("--render", action="store_true", help="make the tables, measure nothing")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a sample (2.5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where raw data goes")
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds of a part (240)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    settings = Settings(given.seconds, given.rounds)
    if given.part:
        return measure(given.part, settings, given.results, given.longest)
    failed = [] if given.render else measure_all(given.only or list(PARTS), given)
    if given.results == RESULTS:
        for path in pages.render_all(CHECKOUT):
            print(f"rendered {path.relative_to(CHECKOUT)}")
        subprocess.run([sys.executable, ".ci/manual"], cwd=CHECKOUT, check=True)
    for line in failed:
        print(f"FAILED: {line}")
    return int(bool(failed))


def measure_all(parts: list[str], given: argparse.Namespace) -> list[str]:
    """Run each part; return what failed."""
    failed = []
    given.results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for part in parts:
        print(f"{time.monotonic() - began:5.0f} s  {part}", flush=True)
        command = [sys.executable, str(CHECKOUT / "tests" / "benchmarks"), "report"]
        command += ["--part", part, f"--seconds={given.seconds}", f"--rounds={given.rounds}"]
        command += [f"--results={given.results}", f"--longest={given.longest}"]
        try:
            done = subprocess.run(command, timeout=HANGS_S, check=False)
            ended = f"{part} ended with status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as exc:
            ended = f"{part} was not done after {exc.timeout:.0f} s"
        if ended:
            failed.append(ended)
    print(f"{time.monotonic() - began:5.0f} s  done", flush=True)
    return failed


def measure(part: str, settings: Settings, results: Path, longest_s: float) -> int:
    """Measure one part, and save it after each run; 1 when a run failed or time was up."""
    facts: dict[str, object] = {**machine(), "sample_s": settings.seconds}
    facts["load_before"] = round(os.getloadavg()[0], 1)
    began = time.monotonic()
    rows: list[Row] = []
    for row in PARTS[part](settings):
        rows.append(row)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        print(f"         {row.name} [{row.number}]: {row.error or shown}", flush=True)
        if (took_s := time.monotonic() - began) > longest_s:
            rows.append(Row("the rest", 0, error=f"not run, because {took_s:.0f} s were over"))
            break
        save(Result(part, with_end(facts, began), rows), results)
    save(Result(part, with_end(facts, began), rows), results)
    return int(any(row.error for row in rows))


def with_end(facts: dict[str, object], began: float) -> dict[str, object]:
    load, took_s = round(os.getloadavg()[0], 1), round(time.monotonic() - began)
    return {**facts, "load_after": load, "took_s": took_s}
