"""The commands on a cluster of Spark, whose executors are processes of their own.

What local mode hides shows here: tasks run in other processes than the driver, which get only what
was pickled, find nsqtools by themselves, and share nothing with the driver but a directory.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.clients import bodies_in
from plugins.http_api import Nsqd
from plugins.spark_cluster import SparkDriver

from nsqtools.protocol.frames import WireMessage

BEGIN = 1_790_000_000_000_000_000  # 2026-09-21T14:13:20Z
FILES, MEMBERS, PER_MEMBER = 4, 5, 50
KINDS = [b"plain", b"a\nb\0", b"\xff\xfe\x80", "ü".encode(), b'{"a": 1}']


def messages() -> list[WireMessage]:
    count = FILES * MEMBERS * PER_MEMBER
    return [
        WireMessage(BEGIN + n * 1_000_000, 1, b"%016x" % n, b"%d " % n + KINDS[n % len(KINDS)])
        for n in range(count)
    ]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of several files with several members each."""
    directory = tmp_path / "archive"
    directory.mkdir()
    found = messages()
    members = [found[n : n + PER_MEMBER] for n in range(0, len(found), PER_MEMBER)]
    for n in range(FILES):
        write_archive(directory / f"clicks-{n}.gz", *members[n * MEMBERS : (n + 1) * MEMBERS])
    return directory


@pytest.mark.parametrize(
    "cluster", ["small_cluster", pytest.param("shared_cluster", marks=pytest.mark.slow)]
)
def test_an_archive_becomes_parquet_and_messages_again_on_workers_that_the_doctor_sees(
    cluster: str,
    request: pytest.FixtureRequest,
    spark_env: dict[str, str],
    archive: Path,
    nsqd: Nsqd,
    tmp_path: Path,
) -> None:
    from pyarrow import parquet

    output = tmp_path / "parquet"
    expected = sorted(message.body for message in messages())
    ingest = ("ingest", archive, "-o", output, "--checkpoint", tmp_path / "cp", "--once")

    with SparkDriver(request.getfixturevalue(cluster), spark_env, tmp_path) as driver:
        checked = driver.run("doctor", "--json")
        driver.run(*ingest)
        driver.run("replay", output, "--nsqd-tcp-address", nsqd.tcp_address)

    found = {each["check"]: each for each in json.loads(checked.out)}
    found.pop("java", None)  # it may be old here
    assert {each["state"] for each in found.values()} == {"ok"}
    tables = [parquet.read_table(path) for path in output.rglob("*.parquet")]
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(row["body_bytes"] or row["body"].encode() for row in rows) == expected
    assert bodies_in(nsqd, "clicks", len(expected)) == expected
