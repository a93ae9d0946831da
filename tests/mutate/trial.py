"""Trying mutants: a copy of the package and its tests for each worker, a forked pytest for each

What all tests import from elsewhere is loaded once, before the forks: that is most of the time of a
short test. The package itself is not: each try imports it from the copy, which has the mutant.

A mutant is killed when its tests fail or do not end in time. Anything else, such as a test that is
not found or a copy that cannot be imported, is an error of the list.
"""

from __future__ import annotations

import enum
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from mutate.mutants import PACKAGE, REPOSITORY, Mutant

# What `tests/conftest.py` and most tests need; none of it may import the package.
SHARED_IMPORTS = (
    *(
        "_pytest.assertion.rewrite",
        "pytest",
        "hypothesis",
        "hypothesis.stateful",
        "cryptography.x509",
    ),
    *("httpx", "httpcore", "typer", "rich.console", "starlette.applications", "uvicorn"),
    *("jsonschema", "pexpect", "pyte", "snappy", "asyncio", "multiprocessing"),
)
# of what is loaded before the fork; assertions of the tests themselves are rewritten
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
LIMIT_S = 120.0
POLL_S = 0.01


class Verdict(enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    ERROR = "error"


def load_shared() -> None:
    """Import what the forked processes share."""
    for name in SHARED_IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    assert not loaded, f"the package must be imported from the copies only: {loaded}"


def copy_repository(target: Path) -> Path:
    """A copy of what is in the working tree and under version control, with the Go programs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = REPOSITORY / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    programs = REPOSITORY / "tests" / "go" / "bin"
    if programs.exists():
        (target / "tests" / "go" / "bin").symlink_to(programs)
    return target


def try_mutant(copy: Path, mutant: Mutant, tests: tuple[str, ...] = ()) -> tuple[Verdict, str]:
    """Run the mutant's tests, or others, on it; return the verdict and what pytest printed."""
    path = copy / PACKAGE / mutant.file
    original = path.read_text("utf-8")
    try:
        mutated = mutant.apply(original)
        compile(mutated, str(path), "exec")
    except (ValueError, SyntaxError) as exc:
        return Verdict.ERROR, str(exc)
    path.write_text(mutated, "utf-8")
    try:
        return run_tests(copy, tests or mutant.killed_by)
    finally:
        path.write_text(original, "utf-8")


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[Verdict, str]:
    """What tests say of a copy: ``SURVIVED`` when they pass."""
    printed = copy / "printed"
    child = os.fork()
    if child == 0:
        os.setsid()
        _become_pytest(copy, printed, tests)
    status = _wait(child)
    text = printed.read_text("utf-8", "replace")
    if status is None:
        return Verdict.KILLED, f"{text}\nnot over after {LIMIT_S:g} s"
    if status == 0:
        return Verdict.SURVIVED, text
    return (Verdict.KILLED if status == 1 else Verdict.ERROR), text


def _become_pytest(copy: Path, printed: Path, tests: tuple[str, ...]) -> None:
    """Of the forked process: never returns."""
    status = 70
    try:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        # in front of where an editable installation points to; for processes of the tests as well
        sys.path[:0] = [str(copy)]
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = False
        importlib.invalidate_caches()
        import pytest

        # the temporary directory of the whole run is removed by who made it
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", *QUIET]
        base = copy.parent / f"{copy.name}-tmp"
        status = int(pytest.main([*options, f"--basetemp={base}", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int | None:
    """Its exit status; None when it took too long. What it started is ended in any case."""
    deadline = time.monotonic() + LIMIT_S
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status
