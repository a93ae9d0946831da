"""Raw data: one JSON file for each part, with the machine and its load, and a line for each run."""

import json
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from plugins.daemons import GO_PROGRAMS

from nsqtools import __version__

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the contestant, the round, and its figures by name, or an error."""

    name: str
    number: int
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of a part, with facts about the machine and the time."""

    part: str
    facts: dict[str, object]
    rows: list[Row]

    def values(self, name: str, figure: str) -> list[float]:
        """A figure of all runs of a contestant that have it."""
        figures = (row.figures for row in self.rows if row.name == name)
        return [run_figures[figure] for run_figures in figures if figure in run_figures]

    def middle(self, name: str, figure: str) -> float | None:
        """The median of the runs; None if all failed."""
        values = self.values(name, figure)
        return median(values) if values else None

    def names(self) -> list[str]:
        """All contestants, in the order of their first runs."""
        return list(dict.fromkeys(row.name for row in self.rows))


def save(result: Result, directory: Path) -> None:
    """Write a part's file, with one line for each run so that diffs are readable."""
    lines = []
    for row in result.rows:
        short = {name: float(f"{value:.5g}") for name, value in row.figures.items()}
        error = {"error": row.error} if row.error else {}
        lines.append(json.dumps({"name": row.name, "round": row.number, **short, **error}))
    text = json.dumps({"part": result.part, **result.facts}, indent=1)[:-2]
    rows = ",\n  ".join(lines)
    (directory / f"{result.part}.json").write_text(f'{text},\n "rows": [\n  {rows}\n ]\n}}\n')


def load(part: str, directory: Path) -> Result | None:
    """Read a part's file; None if it was not measured."""
    try:
        facts = json.loads((directory / f"{part}.json").read_text())
    except FileNotFoundError:
        return None
    rows = [
        Row(row.pop("name"), row.pop("round"), error=row.pop("error", ""), figures=row)
        for row in facts.pop("rows")
    ]
    return Result(facts.pop("part"), facts, rows)


def machine() -> dict[str, object]:
    """The facts on which figures depend."""
    cpus = Path("/proc/cpuinfo").read_text()
    memory = Path("/proc/meminfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
    kib = re.search(r"^MemTotal:\s*(\d+)", memory, re.MULTILINE)
    version = [str(GO_PROGRAMS / "nsqd"), "-version"]
    nsqd = subprocess.run(version, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "nsqtools": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "cores": os.cpu_count(),
        "cpu": model[1] if model else platform.machine(),
        "memory_gb": round(int(kib[1]) / 1e6) if kib else 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nsqd": nsqd,
        "gzip": "python-isal" if find_spec("isal") else "zlib",
    }
