"""The examples of nsq-lake(7): DuckDB, Polars and pandas read compacted tables."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.archives import numbered, write_archive
from plugins.cli import RunNsq

GUIDE = (Path(__file__).parents[2] / "man" / "nsq-lake.7.md").read_text("utf-8")
PROGRAMS = dict(re.findall(r"```python (\w+)\n(.*?)```", GUIDE, re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_other_programs_read_the_lake(run_nsq: RunNsq, tmp_path: Path, package: str) -> None:
    write_archive(tmp_path / "a" / "clicks.gz", numbered(0, 123), numbered(0, 123))
    for topic in ("007", "7"):  # as numbers they would be equal
        write_archive(tmp_path / "a" / f"{topic}.gz", numbered(0, 1), topic=topic)
    command = ["archive", "compact", str(tmp_path / "a"), "-o", str(tmp_path / "lake")]
    assert run_nsq(command).status == 0
    into = ["install", "-q", "--target", str(tmp_path / "site"), package]
    subprocess.run([sys.executable, "-m", "pip", *into], check=True)

    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", PROGRAMS[package]]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert "123" in result.stdout
    assert package == "pandas" or "007" in result.stdout
