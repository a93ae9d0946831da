"""The commands on a Spark cluster, whose executors are separate processes.

These tests show what local mode hides: tasks run in other processes than the driver. They receive
only pickled data, must find nsqtools themselves, and share only a directory or a bucket with the
driver. The tests with a bucket, little memory or killed executors run with ``-m slow``, as they
need the jars for object stores and Delta (690 MB), or minutes.
"""

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from plugins.archives import BEGIN_NS, write_archive
from plugins.clients import bodies_in
from plugins.daemons import Nsqd
from plugins.object_store import Bucket
from plugins.processes import descendants, kill, peak_bytes
from plugins.spark import SparkCluster, SparkDriver
from plugins.waiting import wait_until
from pyarrow import parquet

from nsqtools.protocol.frames import WireMessage

FILES, MEMBERS, PER_MEMBER, PADDING = 4, 5, 50, 1000
KILLED, PER_FILE, AGAIN = 8, 20_000, 100
KINDS = [b"plain", b"a\nb\0", b"\xff\xfe\x80", "ü".encode(), b'{"a": 1}']


def messages(padding: int) -> list[WireMessage]:
    """Messages of all kinds, with padding that compresses to about half."""
    dice = random.Random(7)

    def body(n: int) -> bytes:
        return b"%d %s %s" % (n, KINDS[n % len(KINDS)], dice.randbytes(padding // 2).hex().encode())

    count = FILES * MEMBERS * PER_MEMBER
    return [WireMessage(BEGIN_NS + n * 1_000_000, 1, b"%016x" % n, body(n)) for n in range(count)]


def write_files(directory: Path, padding: int = 0) -> Path:
    directory.mkdir()
    all_messages = messages(padding)
    members = [all_messages[n : n + PER_MEMBER] for n in range(0, len(all_messages), PER_MEMBER)]
    for n in range(FILES):
        write_archive(directory / f"clicks-{n}.gz", *members[n * MEMBERS : (n + 1) * MEMBERS])
    return directory


def test_an_archive_is_compacted_and_replayed_on_workers_that_the_doctor_checks(
    small_cluster: SparkCluster, spark_env: dict[str, str], nsqd: Nsqd, tmp_path: Path
) -> None:
    archive, output = write_files(tmp_path / "archive"), tmp_path / "parquet"
    expected = sorted(message.body for message in messages(0))
    ingest = ("ingest", archive, "-o", output, "--checkpoint", tmp_path / "cp", "--once")

    with SparkDriver(small_cluster, spark_env, tmp_path) as driver:
        checked = driver.run("doctor", "--json")
        driver.run(*ingest)
        driver.run("replay", output, "--nsqd-tcp-address", nsqd.tcp_address)

    states = {check["check"]: check["state"] for check in json.loads(checked.out)}
    assert states.pop("java") in ("ok", "warning")  # depends on the age of the Java
    names = ("python", "nsqtools", "pyspark", "pyarrow", "session", "executors")
    assert states == dict.fromkeys(names, "ok")
    tables = [parquet.read_table(path) for path in output.rglob("*.parquet")]
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(row["body_bytes"] or row["body"].encode() for row in rows) == expected
    assert bodies_in(nsqd, "clicks", len(expected)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_driver_and_executors_share_only_a_bucket(
    spark_cluster: SparkCluster,
    spark_env: dict[str, str],
    bucket: Bucket,
    nsqd: Nsqd,
    tmp_path: Path,
    format: str,
) -> None:
    """From archive to lake, report and nsqd; executors have only the credentials of the session."""
    archive, lake = f"{bucket.url}/archive", f"{bucket.url}/lake"
    for path in write_files(tmp_path / "archive", PADDING).iterdir():
        bucket.storage.put_file(f"archive/{path.name}", path)
    keys = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    expected = sorted(message.body for message in messages(PADDING))

    with SparkDriver(spark_cluster, spark_env | keys, tmp_path, (archive, lake)) as driver:
        compact = ("compact", archive, "-o", lake, "--open-days", "--format", format)
        result = driver.run(*compact, "--delete-archives", "--yes")
        assert "4 archives deleted" in result.err
        assert not [name for name in bucket.names() if name.startswith("archive/")]
        report = driver.run("report", lake, "--json")
        driver.run("replay", lake, "--nsqd-tcp-address", nsqd.tcp_address)

    [total] = json.loads(report.out)["topics"]
    assert (total["messages"], total["duplicates"]) == (len(expected), 0)
    assert total["bytes"] == sum(map(len, expected))
    assert bodies_in(nsqd, "clicks", len(expected)) == expected


GIB = 1 << 30
ARCHIVE_BYTES = int(os.environ.get("NSQTOOLS_TEST_ARCHIVE_BYTES") or 2 * GIB)
BODY_BYTES = 4000


@pytest.mark.slow
def test_executors_of_512_mb_compact_an_archive_of_2_gb(
    small_cluster: SparkCluster, spark_env: dict[str, str], tmp_path: Path
) -> None:
    """Bodies of one day and topic, which is one partition of the output."""
    archive, lake = tmp_path / "archive", tmp_path / "lake"
    archive.mkdir()
    pool = random.Random(1).randbytes(1 << 20).hex().encode()
    per_file = 50_000
    count = ARCHIVE_BYTES // BODY_BYTES // per_file * per_file

    def message(n: int) -> WireMessage:
        at = n * 7919 % (len(pool) - BODY_BYTES)
        return WireMessage(BEGIN_NS + n * 1000, 1, b"%016x" % n, pool[at : at + BODY_BYTES])

    for first in range(0, count, per_file):
        spans = (range(n, n + 1000) for n in range(first, first + per_file, 1000))
        write_archive(archive / f"{first}.zst", *([message(n) for n in span] for span in spans))
    peaks: dict[int, int] = {}

    with SparkDriver(small_cluster, spark_env, tmp_path) as driver:
        driver.begin("compact", archive, "-o", lake, "--open-days", "--json")
        while not driver.has_ended:
            for process in descendants(driver.pid):
                peaks[process.pid] = max(peaks.get(process.pid, 0), peak_bytes(process.pid))
            time.sleep(1)
        result = driver.end()
        report = driver.run("report", lake, "--json")

    assert result.status == 0, result.err
    [total] = json.loads(report.out)["topics"]
    assert (total["messages"], total["bytes"]) == (count, count * BODY_BYTES)
    assert (total["duplicates"], "Lost executor" in driver.log.read_text()) == (0, False)
    print("peaks in MB:", sorted(peak >> 20 for peak in peaks.values()))
    assert max(peaks.values()) < GIB


@pytest.mark.slow
def test_compaction_while_executors_are_killed(
    small_cluster: SparkCluster, spark_env: dict[str, str], tmp_path: Path
) -> None:
    """Kill one executor while tasks run, and all when files are staged, so that the output that
    finished tasks kept for others is lost as well. Spark starts new executors, and no message is
    lost or duplicated."""
    archive, output = tmp_path / "archive", tmp_path / "out"
    padding = random.Random(1).randbytes(1 << 16).hex().encode()

    def message(n: int) -> WireMessage:
        body = b"%d " % n + padding[n % 4096 :][:500]
        return WireMessage(BEGIN_NS + n * 1000, 1, b"%016x" % n, body)

    for first in range(0, KILLED * PER_FILE, PER_FILE):  # of one day and topic
        # Also in the file before.
        repeated = [message(n) for n in range(max(0, first - AGAIN), first)]
        spans = (range(n, n + 1000) for n in range(first, first + PER_FILE, 1000))
        members = ([*map(message, span)] for span in spans)
        write_archive(archive / f"{first:06d}.gz", *filter(None, [repeated]), *members)

    with SparkDriver(small_cluster, spark_env, tmp_path) as driver:

        def runs_tasks() -> bool:
            return any(descendants(executor, "pyspark.daemon") for executor in driver.executors())

        def is_staged() -> bool:
            return any(output.glob("_compaction/staging/*.parquet"))

        driver.begin("compact", archive, "-o", output, "--open-days", "--json")
        wait_until(lambda: len(driver.executors()) == 2, what="executors", timeout_s=180)
        for moment, victims in ((runs_tasks, 1), (is_staged, 2)):
            wait_until(lambda m=moment: driver.has_ended or m(), what="it", timeout_s=180)  # type: ignore[misc]
            assert not driver.has_ended, driver.end()
            for victim in driver.executors()[:victims]:
                kill(victim)
        result = driver.end()
        assert result.status == 0, result.err
        assert driver.log.read_text().count("Lost executor") >= 2

    files = map(parquet.ParquetFile, output.glob("topic=*/*/*.parquet"))
    ids = Counter(
        int(message_id, 16) for file in files for message_id in file.read(["id"])["id"].to_pylist()
    )
    assert ids == dict.fromkeys(range(KILLED * PER_FILE), 1)
    [partition] = json.loads(result.out)["partitions"]
    assert (partition["rows"], partition["duplicates"]) == (KILLED * PER_FILE, (KILLED - 1) * AGAIN)
