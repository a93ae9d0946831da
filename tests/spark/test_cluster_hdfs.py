"""On a cluster whose driver and executors share nothing but an HDFS, Hadoop's minicluster.

With ``-m slow``: it takes minutes, and jars of 60 MB.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.clients import bodies_in
from plugins.hdfs import HDFS
from plugins.http_api import Nsqd
from plugins.spark_cluster import IVY, SparkCluster, SparkDriver

from nsqtools.protocol.message import WireMessage

BEGIN = 1_790_000_000_000_000_000  # 2026-09-21T14:13:20Z
FILES, MEMBERS, PER_MEMBER = 4, 5, 50
KINDS = [b"plain", b"a\nb\0", b"\xff\xfe\x80", "ü".encode(), b'{"a": 1}']

HAS_DELTA = metadata.version("pyspark").startswith("4.2.")


def messages() -> list[WireMessage]:
    def body(n: int) -> bytes:
        return b"%d %s %s" % (n, KINDS[n % len(KINDS)], b"%032x" % (n * 7919**7) * 8)

    count = FILES * MEMBERS * PER_MEMBER
    return [WireMessage(BEGIN + n * 1_000_000, 1, b"%016x" % n, body(n)) for n in range(count)]


@pytest.fixture
def archive(hdfs: HDFS, tmp_path: Path) -> list[Path]:
    """The files of an archive, of which the first half is in HDFS."""
    directory = tmp_path / "archive"
    directory.mkdir()
    found = messages()
    members = [found[n : n + PER_MEMBER] for n in range(0, len(found), PER_MEMBER)]
    for n in range(FILES):
        write_archive(directory / f"clicks-{n}.gz", *members[n * MEMBERS : (n + 1) * MEMBERS])
    files = sorted(directory.iterdir(), key=lambda path: path.name.lstrip("."))
    put(hdfs, files[: len(files) // 2])
    return files


def put(hdfs: HDFS, files: list[Path]) -> None:
    for path in files:
        hdfs.storage.put_file(f"archive/{path.name}", path)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", *(["delta"] if HAS_DELTA else [])])
def test_an_hdfs_is_all_that_driver_and_executors_share(
    spark_cluster: SparkCluster,
    spark_env: dict[str, str],
    hdfs: HDFS,
    archive: list[Path],
    nsqd: Nsqd,
    tmp_path: Path,
    format: str,
) -> None:
    """A stream in two runs, and archive to lake to report to nsqd; counts and bytes are equal."""
    stored, lake, live = (f"{hdfs.url}/{name}" for name in ("archive", "lake", "live"))
    expected = sorted(message.body for message in messages())
    total = {"messages": len(expected), "bytes": sum(map(len, expected)), "duplicates": 0}
    is_delta = format == "delta"
    ingest = ("ingest", stored, "-o", live, "--checkpoint", f"{hdfs.url}/checkpoint", "--once")
    replay = ("replay", lake, "--nsqd-tcp-address", nsqd.tcp_address)

    with SparkDriver(
        spark_cluster,
        spark_env | hdfs.env,
        tmp_path,
        places=(stored, lake),
        delta=is_delta,
        conf={"spark.jars.ivy": str(IVY)},
    ) as driver:
        driver.run("doctor", "--shared-dir", hdfs.url)
        assert not [name for name in hdfs.names() if ".nsq-doctor" in name]
        first = driver.run(*ingest, "--format", format, "--json")
        put(hdfs, archive[len(archive) // 2 :])
        second = driver.run(*ingest, "--format", format, "--json")
        compact = ("compact", stored, "-o", lake, "--open-days", "--format", format)
        made = driver.run(*compact, "--delete-archives", "--yes")
        reports = [driver.run("report", each, "--json") for each in (lake, live)]
        if is_delta:  # whose files would not be the same in a later run
            driver.run(*replay)
        for _ in range(0 if is_delta else 2):
            driver.run(*replay, "--ledger", f"{hdfs.url}/ledger")

    halves = [json.loads(each.out)["rows"] for each in (first, second)]
    assert halves == [len(expected) // 2] * 2
    assert "4 archives deleted" in made.err
    assert not [name for name in hdfs.names() if name.startswith("archive/")]
    for report in reports:
        [found] = json.loads(report.out)["topics"]
        assert {name: found[name] for name in total} == total
    assert bodies_in(nsqd, "clicks", len(expected)) == expected
    assert nsqd.topic_stats("clicks")["message_count"] == len(expected)
