"""Executors that are killed while tasks run: Spark starts others, nothing is lost, nothing doubled.

First one of them, then all, so that also what finished tasks had kept for others is gone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.in_process import Result
from plugins.processes import descendants, kill
from plugins.spark_cluster import SparkCluster, SparkDriver
from plugins.waiting import wait_until
from pyarrow import parquet

from nsqtools.protocol.frames import WireMessage

BEGIN = 1_790_000_000_000_000_000  # 2026-09-21T14:13:20Z
FILES, PER_FILE, AGAIN = 8, 20_000, 100
DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one day and topic; some messages of each are in the next one, too."""
    directory = tmp_path_factory.mktemp("archive")
    padding = random.Random(1).randbytes(1 << 16).hex().encode()

    def message(n: int) -> WireMessage:
        body = b"%d " % n + padding[n % 4096 :][:500]
        return WireMessage(BEGIN + n * 1000, 1, b"%016x" % n, body)

    for first in range(0, FILES * PER_FILE, PER_FILE):
        again = [message(n) for n in range(max(0, first - AGAIN), first)]
        members = [
            [message(n) for n in range(begin, begin + 1000)]
            for begin in range(first, first + PER_FILE, 1000)
        ]
        write_archive(directory / f"{first:06d}.gz", *filter(None, [again]), *members)
    return directory


def ids_in(output: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    for path in output.rglob("*.parquet"):
        table = parquet.ParquetFile(path).read(["id"])
        found.update(int(each, 16) for each in table["id"].to_pylist())
    return found


def end_with_kills(driver: SparkDriver, *moments: Callable[[], bool]) -> Result:
    """Kill one executor at the first moment of a command, and all at the last."""
    wait_until(lambda: len(driver.executors()) == 2, what="executors", timeout_s=DEADLINE_S)
    for number, moment in enumerate(moments, 1):
        wait_until(lambda m=moment: driver.has_ended or m(), what="it", timeout_s=DEADLINE_S)
        assert not driver.has_ended, driver.end()
        for victim in driver.executors()[: 2 if number == len(moments) else 1]:
            kill(victim)
    result = driver.end()
    assert result.status == 0, result.err
    assert driver.log.read_text().count("Lost executor") >= 2
    return result


@pytest.mark.slow
def test_compaction(
    small_cluster: SparkCluster, spark_env: dict[str, str], archive: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with SparkDriver(small_cluster, spark_env, tmp_path) as driver:
        driver.begin("compact", archive, "-o", output, "--open-days", "--json")
        result = end_with_kills(
            driver,
            lambda: all(descendants(each, "pyspark.daemon") for each in driver.executors()),
            lambda: any(output.glob("_compaction/staging/*.parquet")),
        )

    assert ids_in(output) == dict.fromkeys(range(FILES * PER_FILE), 1)
    [made] = json.loads(result.out)["partitions"]
    assert (made["rows"], made["duplicates"]) == (FILES * PER_FILE, (FILES - 1) * AGAIN)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_ingestion(
    small_cluster: SparkCluster,
    spark_env: dict[str, str],
    archive: Path,
    tmp_path: Path,
    format: str,
) -> None:
    output, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    command = ("ingest", archive, "-o", output, "--checkpoint", checkpoint, "--once")
    command += ("--max-rows-per-trigger", "10000", "--format", format)

    def batches() -> int:
        return len(list((checkpoint / "commits").glob("[0-9]*")))

    with SparkDriver(small_cluster, spark_env, tmp_path) as driver:
        driver.begin(*command)
        end_with_kills(driver, lambda: batches() >= 2, lambda: batches() >= 6)

    twice = 1 if format == "delta" else 2
    expected = dict.fromkeys(range(FILES * PER_FILE), 1)
    for first in range(PER_FILE, FILES * PER_FILE, PER_FILE):
        expected |= dict.fromkeys(range(first - AGAIN, first), twice)
    assert ids_in(output) == expected
