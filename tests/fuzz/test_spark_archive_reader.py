"""Damaged archives through ``nsq-archive``: it reads what the archive's own reader reads, and tells
what that one tells of."""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plugins.archives import write_archive
from plugins.damage import CHANGE, Change, damaged
from plugins.examples import examples

from nsqtools.archive.finding import PARQUET_MAGIC, find_archives
from nsqtools.archive.layout import index_of
from nsqtools.archive.reader import read_messages
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings

MESSAGES = [WireMessage(1000 + n, 1, b"%016x" % n, b"body %d \xff" % n) for n in range(30)] + [
    WireMessage(2000 + n, 1, b"%016x" % n, b"body %d" % n) for n in range(30)
]

changes = st.lists(CHANGE, max_size=4)


@given(
    what=changes,
    has_index=st.booleans(),
    is_compressed=st.booleans(),
    partition_bytes=st.integers(1, 5000),
)
@settings(max_examples=examples(60))
def test_both_readers_read_the_same(
    what: list[Change], has_index: bool, is_compressed: bool, partition_bytes: int
) -> None:
    with TemporaryDirectory() as directory:
        archive, reports = Path(directory, "archive"), Path(directory, "reports")
        archive.mkdir()
        path = write_archive(archive / "a.gz", MESSAGES[:20], MESSAGES[20:40], MESSAGES[40:])
        data = path.read_bytes()
        if not is_compressed:
            data = gzip.decompress(data)
        changed = damaged(data, what)
        assume(not changed.startswith(PARQUET_MAGIC))  # refused as a file of another program
        path.write_bytes(changed)
        if not (has_index and is_compressed):
            index_of(path).unlink()
        problems: list[str] = []
        (found,) = find_archives([path])
        expected = list(read_messages(found, lambda path, problem: problems.append(problem)))
        reading = ReadSettings(
            (str(archive),), damage_path=reports, partition_bytes=partition_bytes
        )

        rows = [
            (row["topic"], row["nsqd"], row["id"], row["ts_ns"], row["attempts"], row["body"])
            for partition in plan_batch(reading)
            for batch in read_partition(partition, reading)
            for row in batch.to_pylist()
        ]

        if all(message.topic for message in expected):
            assert rows == [
                (m.topic, m.nsqd, m.id.decode("latin-1"), m.timestamp_ns, m.attempts, m.body)
                for m in expected
            ]
            assert bool(read_damage(reports)) >= bool(problems)
