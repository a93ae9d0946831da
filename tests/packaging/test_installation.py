"""The extra ``standard`` is installed from wheels alone on all platforms of README."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from plugins.examples import slow
from plugins.waiting import patience_s

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.15"]
LIBRARIES = ["gnu", "musl"]
# The oldest and the newest Python on the C library that fewer packages support.
QUICK = [("3.11", "musl"), ("3.15", "musl")]
CASES = [(python, library) for python in PYTHONS for library in LIBRARIES]


@pytest.mark.parametrize(
    ("python", "library"), [case if case in QUICK else slow(*case) for case in CASES]
)
def test_standard_has_wheels(python: str, library: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:"]
    command += ["--python-platform", f"x86_64-unknown-linux-{library}", "--python-version", python]
    command += ["--extra", "standard", "--no-header", "--no-annotate", str(PYPROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(120))
    if done.returncode and "error sending request" in done.stderr:
        pytest.skip("no package index can be reached")

    assert done.returncode == 0, done.stderr
    names = {line.partition("==")[0] for line in done.stdout.splitlines()}
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    assert {"httptools", "jq", "starlette", "textual", "typer"} <= names
    assert names.isdisjoint({"google-re2", "pycurl"})
    assert project["requires-python"] == f">={PYTHONS[0]}"
