"""A compaction that is killed at any moment and run again has the same result as one that was not.

The moments are looked for in what a run leaves on disk on its way. What happens between two steps
of changing places is tried step by step in `test_compact_output`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from plugins.archives import write_archive
from plugins.cli import NSQ
from plugins.spark import RunSpark
from plugins.waiting import wait_until

from nsqtools.protocol.frames import WireMessage

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21T14:13:20Z
TOPICS = ("clicks", "views")
PER_FILE, APART = 1000, 5 * SECOND // 2  # so that the first day ends in the third of four files


def make_archive(directory: Path) -> list[tuple[Any, ...]]:
    """Two topics, two days, every tenth message twice; returns what `content` shall be."""
    rows: list[tuple[Any, ...]] = []
    for topic in TOPICS:
        for part in range(4):
            first = 12_000 + part * PER_FILE
            messages = [
                WireMessage(
                    BEGIN + n * APART, 1, b"%016x" % n, b"body %d of %s" % (n, topic.encode())
                )
                for n in range(first, first + PER_FILE)
            ]
            write_archive(directory / f"{topic}.{part}.gz", messages, messages[::10], topic=topic)
            rows += [(*place(topic, each), *row(each)) for each in messages]
    return sorted(rows)


def place(topic: str, message: WireMessage) -> tuple[str, str]:
    day = datetime.fromtimestamp(message.timestamp_ns // SECOND, UTC).date()
    return f"topic={topic}", f"date={day}"


def row(message: WireMessage) -> tuple[Any, ...]:
    return "nsqd:4150", message.id.decode(), message.timestamp_ns, 1, message.body


def content(output: Path) -> list[tuple[Any, ...]]:
    """All rows, sorted, with the partition they are in."""
    rows: list[tuple[Any, ...]] = []
    for path in output.glob("topic=*/date=*/part-*.parquet"):
        table = pq.ParquetFile(path).read(["nsqd", "id", "ts_ns", "attempts", "body"])
        partition = (path.parent.parent.name, path.parent.name)
        rows += [(*partition, *each.values()) for each in table.to_pylist()]
    return sorted(rows)


class Killable:
    """``nsq spark compact`` as a process with all its children, the JVM among them."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*NSQ, *arguments],
            env=env,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the whole group, as a power failure would."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(20)


def writing(output: Path) -> bool:
    return any(output.glob("_staging/topic=*/date=*/_temporary"))


def written(output: Path) -> bool:
    return any(output.glob("_staging/topic=*/date=*/part-*"))


def first_in_place(output: Path) -> bool:
    return any(output.glob("topic=*/date=*/_manifest.json"))


def test_killed_while_it_writes_and_run_again(
    run_spark: RunSpark, spark_env: dict[str, str], tmp_path: Path
) -> None:
    killed_at(writing, run_spark, spark_env, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [written, first_in_place])
def test_killed_at_other_moments(
    moment: Callable[[Path], bool],
    run_spark: RunSpark,
    spark_env: dict[str, str],
    tmp_path: Path,
) -> None:
    killed_at(moment, run_spark, spark_env, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random(
    seed: int, run_spark: RunSpark, spark_env: dict[str, str], tmp_path: Path
) -> None:
    delay_s = random.Random(seed).uniform(0.0, 6.0)
    begun: list[float] = []

    def later(output: Path) -> bool:
        if writing(output) and not begun:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + delay_s

    killed_at(later, run_spark, spark_env, tmp_path)


def killed_at(
    moment: Callable[[Path], bool], run_spark: RunSpark, spark_env: dict[str, str], tmp_path: Path
) -> None:
    archive, output = tmp_path / "in", tmp_path / "out"
    archive.mkdir()
    expected = make_archive(archive)
    command = ["spark", "compact", str(archive), "-o", str(output), "--master", "local[2,4]"]
    run = Killable(command, spark_env)
    try:
        wait_until(lambda: run.has_ended or moment(output), what="the moment", timeout_s=90)
    finally:
        run.kill()

    again = run_spark("compact", archive, "-o", output)

    assert again.status == 0, again.err
    assert content(output) == expected
    assert not list(output.glob("_staging/*/*"))
    assert run_spark("compact", archive, "-o", output).out == b""
