"""Temporary directories are removed by their process or by the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.files.scratch import LOCK_GRACE_S, scratch_directory

HOLD = """
import sys
from pathlib import Path
from nsqtools.files.scratch import scratch_directory
with scratch_directory("nsq-spark-", Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def make_old(directory: Path) -> None:
    then = directory.stat().st_mtime - 2 * LOCK_GRACE_S
    os.utime(directory, (then, then))


def test_only_the_directory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    young, foreign = tmp_path / "nsq-spark-young", tmp_path / "nsq-spark-foreign"
    for directory in (young, foreign):
        directory.mkdir()
    (young / "lock").touch()
    make_old(foreign)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        locked = Path(process.stdout.readline().decode().strip())
        make_old(locked)

        with scratch_directory("nsq-spark-", tmp_path) as new:
            assert new.stat().st_mode & 0o077 == 0
            (new / "below").mkdir()
            assert locked.exists()
        process.kill()
        process.wait()

    assert locked.exists()
    with scratch_directory("nsq-spark-", tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == [foreign, young]


def test_a_missing_parent_is_an_error() -> None:
    with (
        pytest.raises(OutputError, match="cannot make a temporary directory in /nowhere"),
        scratch_directory("nsq-spark-", Path("/nowhere")),
    ):
        pass
