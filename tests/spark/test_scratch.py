"""The directory of a session goes with it, and those of killed sessions with the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.spark.session_files import YOUNG_S, scratch_directory

HOLD = """
import sys
from pathlib import Path
from nsqtools.spark.session_files import scratch_directory
with scratch_directory(Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def make_old(directory: Path) -> None:
    then = directory.stat().st_mtime - 2 * YOUNG_S
    os.utime(directory, (then, then))


def test_it_is_private_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as directory:
        assert directory.stat().st_mode & 0o077 == 0
        (directory / "below").mkdir()
        (directory / "below" / "file").touch()

    assert list(tmp_path.iterdir()) == []


def test_that_of_a_killed_session_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().decode().strip())
        make_old(held)

        with scratch_directory(tmp_path):
            assert held.exists()
        process.kill()
        process.wait()

    assert held.exists()
    with scratch_directory(tmp_path):
        assert not held.exists()


def test_what_is_young_or_somebody_elses_stays(tmp_path: Path) -> None:
    young, foreign = tmp_path / "nsq-spark-young", tmp_path / "nsq-spark-foreign"
    for each in (young, foreign):
        each.mkdir()
    (young / "lock").touch()
    make_old(foreign)

    with scratch_directory(tmp_path):
        assert young.exists()
        assert foreign.exists()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="cannot make a directory for Spark in /nowhere"),
        scratch_directory(Path("/nowhere")),
    ):
        pass
