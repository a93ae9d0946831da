"""Directories of a process, which go with it or with the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.files.scratch import YOUNG_S, scratch_directory

HOLD = """
import sys
from pathlib import Path
from nsqtools.files.scratch import scratch_directory
with scratch_directory("nsq-spark-", Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def make_old(directory: Path) -> None:
    then = directory.stat().st_mtime - 2 * YOUNG_S
    os.utime(directory, (then, then))


def test_that_of_a_killed_process_is_removed_and_others_are_not(tmp_path: Path) -> None:
    young, foreign = tmp_path / "nsq-spark-young", tmp_path / "nsq-spark-foreign"
    for each in (young, foreign):
        each.mkdir()
    (young / "lock").touch()
    make_old(foreign)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        held = Path(process.stdout.readline().decode().strip())
        make_old(held)

        with scratch_directory("nsq-spark-", tmp_path) as own:
            assert own.stat().st_mode & 0o077 == 0
            (own / "below").mkdir()
            assert held.exists()
        process.kill()
        process.wait()

    assert held.exists()
    with scratch_directory("nsq-spark-", tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == [foreign, young]
    with (
        pytest.raises(OutputError, match="cannot make a temporary directory in /nowhere"),
        scratch_directory("nsq-spark-", Path("/nowhere")),
    ):
        pass
