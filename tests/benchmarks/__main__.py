"""Compare programs side by side, and measure what README and nsq-benchmarks(7) claim.

    python tests/benchmarks consume --seconds 1 --rounds 5   # one part; nothing is kept
    python tests/benchmarks report                           # all that is claimed

    parts.py         what is measured; contestants.py the programs, ours and their peers
    raw.py           what was measured, kept in tests/benchmarks/results, one file a part
    pages.py         the tables, made of that alone

What counts are medians and their ratios, not a single figure. A figure in the text is never typed:
a test compares. Each part of a report runs in a process of its own: none ends another.
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

LONGEST_S = 600  # then a part begins no other run
HANGS_S = 1200  # then it is killed


def main(arguments: list[str]) -> int:
    """Measure; 1 when something could not be measured."""
    parser = argparse.ArgumentParser(prog="tests/benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*PARTS, "report"])
    parser.add_argument("--seconds", type=float, default=2.5, help="of a sample (2.5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds of a part (600)")
    parser.add_argument("--save", type=Path, help="directory for the raw data of a part")
    parser.add_argument("--only", action="append", choices=PARTS, help="of a report")
    parser.add_argument("--render", action="store_true", help="only make the tables of the report")
    given = parser.parse_args(arguments)
    if given.what != "report":
        result = measure(given.what, given)
        print(pages.tables(result))
        return int(any(row.error for row in result.rows))
    failed = [] if given.render else measure_all(given.only or list(PARTS), given)
    for path in pages.render_all(CHECKOUT):
        print(f"rendered {path.relative_to(CHECKOUT)}")
    subprocess.run([sys.executable, ".ci/manual"], cwd=CHECKOUT, check=True)
    for line in failed:
        print(f"FAILED: {line}")
    return int(bool(failed))


def measure_all(parts: list[str], given: argparse.Namespace) -> list[str]:
    """Run each part; return what failed."""
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
    """Measure one part until its time is up; where it is saved, that is after each run."""
    facts: dict[str, object] = {**machine(), "sample_s": given.seconds}
    facts["load_before"] = round(os.getloadavg()[0], 1)
    began = time.monotonic()
    result = Result(part, facts, [])
    for row in PARTS[part](given.seconds, given.rounds):
        result.rows.append(row)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        print(f"         {row.name} [{row.number}]: {row.error or shown}", flush=True)
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
