"""Real log lines: what this machine itself has logged, repeated to any size.

Made-up lines are all alike; real ones have every length, quoting and encoding that logs have.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

LOGS = Path("/var/log")
ENOUGH_LINES = 1000


def machine_log_lines() -> list[bytes]:
    """The lines of this machine's text logs that are not empty, without their newlines."""
    lines: list[bytes] = []
    for path in sorted(LOGS.rglob("*.log")):
        try:
            text = path.read_bytes()
        except OSError:  # not everybody may read every log
            continue
        if b"\0" not in text:
            lines += [line for line in text.split(b"\n") if line]
    return lines


@pytest.fixture
def real_log(tmp_path: Path) -> Callable[[int], Path]:
    """A factory of files of real log lines, at least as large as asked for, in bytes."""
    lines = machine_log_lines()
    if len(lines) < ENOUGH_LINES:
        pytest.skip(f"only {len(lines)} log lines below {LOGS}: too few to be of use")

    def make(size: int) -> Path:
        path = tmp_path / "real.log"
        block = b"\n".join(lines) + b"\n"
        with path.open("wb") as log:
            for _ in itertools.takewhile(lambda _: log.tell() < size, itertools.count()):
                log.write(block)
        return path

    return make


def sorted_digest(path: Path) -> tuple[int, str]:
    """The number of lines of a file, and a digest of them in order."""
    *lines, rest = path.read_bytes().split(b"\n")  # splitlines() would also split at a lone \r
    assert rest == b"", "the file ends inside a line"
    return len(lines), hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()
