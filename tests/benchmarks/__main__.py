"""Compare programs side by side, and measure what README and nsq-benchmarks(7) claim.

    python tests/benchmarks consume --seconds 1 --rounds 5   # one part; saves nothing
    python tests/benchmarks report                           # every published figure

    parts.py         the measurements; contestants.py the programs, ours and their peers
    raw.py           the raw data in tests/benchmarks/results, one file for each part
    pages.py         the tables, made of the raw data alone

Compare medians and their ratios, not single figures. Figures in the text are never typed: a test
compares them with the raw data. Each part of a report runs in its own process, so a crash ends one
part only.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import pages
from benchmarks.parts import CHECKOUT, PARTS
from benchmarks.raw import RESULTS, Result, Row, machine, save

LONGEST_S = 600  # after this, a part begins no other run
HANGS_S = 1200  # after this, a part is killed


def main(arguments: list[str]) -> int:
    """Measure; return 1 if a measurement failed."""
    parser = argparse.ArgumentParser(prog="tests/benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*PARTS, "report"])
    parser.add_argument("--seconds", type=float, default=2.5, help="of a sample (2.5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds of a part (600)")
    parser.add_argument("--save", type=Path, help="directory for the raw data of a part")
    parser.add_argument("--only", action="append", choices=PARTS, help="of a report")
    parser.add_argument("--render", action="store_true", help="only make the tables of the report")
    options = parser.parse_args(arguments)
    if options.what != "report":
        result = measure(options.what, options)
        print(pages.tables(result))
        return int(any(row.error for row in result.rows))
    failed = [] if options.render else measure_all(options.only or list(PARTS), options)
    for path in pages.render_all(CHECKOUT):
        print(f"rendered {path.relative_to(CHECKOUT)}")
    subprocess.run([sys.executable, ".ci/manual"], cwd=CHECKOUT, check=True)
    for line in failed:
        print(f"FAILED: {line}")
    return int(bool(failed))


def measure_all(parts: list[str], given: argparse.Namespace) -> list[str]:
    """Run each part; return a line for each failure."""
    failed = []
    RESULTS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for part in parts:
        print(f"{time.monotonic() - began:5.0f} s  {part}", flush=True)
        command = [sys.executable, str(CHECKOUT / "tests" / "benchmarks"), part]
        command += [f"--seconds={given.seconds}", f"--rounds={given.rounds}"]
        command += [f"--save={RESULTS}", f"--longest={given.longest}"]
        try:
            subprocess.run(command, timeout=HANGS_S, check=True)
        except subprocess.SubprocessError as exc:
            failed.append(f"{part}: {exc}")
    print(f"{time.monotonic() - began:5.0f} s  done", flush=True)
    return failed


def measure(part: str, given: argparse.Namespace) -> Result:
    """Measure one part until its time is up, and save it after each run."""
    facts: dict[str, object] = {**machine(), "sample_s": given.seconds}
    facts["load_before"] = round(os.getloadavg()[0], 1)
    began = time.monotonic()
    result = Result(part, facts, [])
    for row in PARTS[part](given.seconds, given.rounds):
        result.rows.append(row)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        print(f"         {row.name} [{row.number}]: {row.error or figures}", flush=True)
        took_s = time.monotonic() - began
        if is_over := took_s > given.longest:
            late = f"not run, because {took_s:.0f} s were over"
            result.rows.append(Row("the rest", 0, error=late))
        facts |= {"load_after": round(os.getloadavg()[0], 1), "took_s": round(took_s)}
        if given.save:
            save(result, given.save)
        if is_over:
            break
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
