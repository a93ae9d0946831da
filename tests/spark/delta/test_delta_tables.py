"""``nsq spark compact`` and ``ingest`` write Delta tables that every reader sees whole."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import Writer, write_archive
from plugins.spark import RunSpark

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction import partition_job
from nsqtools.spark.jobs.compaction.stored_output import StoredOutput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21T14:13:20Z
DAYS = ("2026-09-21", "2026-09-22")
MIDNIGHT = 587  # the first message of the second day
TOPICS = ("2026", "clicks#ephemeral")


def messages(first: int, last: int, attempts: int = 1) -> list[WireMessage]:
    """One a minute."""
    return [
        WireMessage(BEGIN + n * 60 * SECOND, attempts, b"%016x" % n, b"body %d\n\xff" % n)
        for n in range(first, last)
    ]


Row = tuple[str, str, int, bytes]


def rows_of(spark: SparkSession, table: Path) -> list[Row]:
    """What a table has, with the partition that it is in."""
    rows = spark.read.format("delta").load(str(table))
    found = rows.where("id is not null").select("topic", "date", "id", "body").collect()
    return sorted((row.topic, str(row.date), int(row.id, 16), bytes(row.body)) for row in found)


def each_is_refused(run_spark: RunSpark, commands: Mapping[str, Sequence[object]]) -> None:
    """Each command must be one that does not fit what is there, for the reason that is its key."""
    for reason, command in commands.items():
        result = run_spark(*command)
        assert (result.status, reason in result.err) == (2, True), result.err


def expected(first: int, last: int, *topics: str) -> list[Row]:
    return sorted(
        (topic, DAYS[n >= MIDNIGHT], n, b"body %d\n\xff" % n)
        for topic in topics
        for n in range(first, last)
    )


@contextmanager
def watched(spark: SparkSession, table: Path) -> Iterator[set[int]]:
    """Count a table's rows again and again meanwhile, as another reader does."""
    counts: set[int] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            counts.add(spark.read.format("delta").load(str(table)).count())
            ended.wait(0.2)  # it shares the processors with what it watches

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        ended.set()
        thread.join()


def test_compaction_merges_late_messages_and_no_reader_sees_half_a_day(
    spark: SparkSession, run_spark: RunSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.functions import lit

    archive, table = tmp_path / "archive", tmp_path / "table"
    archive.mkdir()
    write_archive(archive / "0.gz", messages(500, 600), topic=TOPICS[0])
    write_archive(archive / "1.gz", messages(500, 550), topic=TOPICS[1])
    command = ("compact", archive, "-o", table, "--format", "delta")

    first = run_spark(*command, "--delete-archives", "--yes")
    assert first.status == 0, first.err
    assert not list(archive.glob("*.gz"))
    assert rows_of(spark, table) == expected(500, 600, TOPICS[0]) + expected(500, 550, TOPICS[1])

    write_archive(archive / "late.gz", messages(450, 550, 2), topic=TOPICS[0])
    with watched(spark, table) as counts:
        late = run_spark(*command)
    idle = run_spark(*command)

    assert late.status == 0, late.err
    both = expected(450, 600, TOPICS[0]) + expected(500, 550, TOPICS[1])
    assert rows_of(spark, table) == both
    assert counts <= {150, 200}, "a day was half written"
    assert (idle.status, idle.out) == (0, b""), idle.err

    report = run_spark("report", table, "--json")
    assert report.status == 0, report.err
    totals = json.loads(report.out)["topics"]
    assert {each["topic"]: each["messages"] for each in totals} == {TOPICS[0]: 150, TOPICS[1]: 50}
    query = "select topic, count(*) n from delta where date = '2026-09-22' group by topic"
    found = run_spark("sql", query, table, "--json")
    assert found.status == 0, found.err
    lines = map(json.loads, found.out.splitlines())
    assert {line["topic"]: line["n"] for line in lines} == {TOPICS[0]: 13}

    to_table = ("ingest", archive, "-o", table, "--checkpoint", tmp_path / "checkpoint")
    refused = {
        "is a Delta table\nhint: Add --format delta.": command[:-2],
        "holds files that nsq spark ingest did not write": (*to_table, "--format", "delta"),
    }
    each_is_refused(run_spark, refused)
    with StoredOutput(table, is_delta=True).locked():
        second = run_spark(*command)
    assert (second.status, "another compaction writes to" in second.err) == (1, True), second.err
    assert rows_of(spark, table) == both

    write_archive(archive / "later.gz", messages(540, 560, 2), topic=TOPICS[1])
    write, foreign = partition_job._write_stored, messages(560, 561)[0]

    def after_another(*given: Any) -> dict[str, int]:
        rows = spark.read.format("delta").load(str(table)).where(f"topic = '{TOPICS[1]}'").limit(1)
        changed = rows.withColumn("id", lit(foreign.id.decode())).withColumn(
            "body", lit(foreign.body)
        )
        changed.write.format("delta").mode("append").save(str(table))
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(partition_job, "_write_stored", after_another)
        overtaken = run_spark(*command)
    assert (overtaken.status, "another writer changed" in overtaken.err) == (1, True), overtaken.err
    [version] = re.findall(r"VERSION AS OF (\d+)", overtaken.err)
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {version}")
    assert run_spark(*command).status == 0
    assert rows_of(spark, table) == expected(450, 600, TOPICS[0]) + expected(500, 561, TOPICS[1])


def test_ingestion_takes_each_message_once_wherever_it_was_interrupted(
    spark: SparkSession, run_spark: RunSpark, tmp_path: Path
) -> None:
    archive, table, checkpoint = (tmp_path / name for name in ("archive", "table", "checkpoint"))
    archive.mkdir()
    writer = Writer(archive)
    writer.write(messages(500, 550), messages(550, 600))
    command = ("ingest", archive, "-o", table, "--checkpoint", checkpoint, "--once")
    command += ("--raw", "--max-rows-per-trigger", "60", "--format", "delta")

    first = run_spark(*command)
    assert "100 rows ingested in 2 batches" in first.err, first.err
    # as after a kill between the commit of the table and that of the checkpoint
    for path in (checkpoint / "commits").glob("*1*"):
        path.unlink()
    writer.write(messages(600, 620))
    # what another archiver had, too, and comes late; and what has no identity
    write_archive(archive / "other.gz", messages(590, 610, 2), messages(620, 630))
    (archive / "bare.log").write_bytes(b"bare\n" * 3)
    with watched(spark, table) as counts:
        again = run_spark(*command)

    assert again.status == 0, again.err
    bare = spark.read.format("delta").load(str(table)).where("id is null").count()
    assert (bare, rows_of(spark, table)) == (3, expected(500, 630, "clicks"))
    assert 100 in counts
    assert {path.parent.name for path in table.glob("topic=clicks/date=*/*.parquet")} == {
        f"date={day}" for day in DAYS
    }
    report = run_spark("report", table, "--json")
    totals = {each["topic"]: each for each in json.loads(report.out)["topics"]}
    assert (totals["clicks"]["messages"], totals["clicks"]["duplicates"]) == (130, 0)
    found = run_spark("sql", "select count(distinct id) n from delta", table, "--json")
    assert json.loads(found.out) == {"n": 130}

    refused = {
        "is a Delta table\nhint: Add --format delta.": command[:-2],
        "holds files that compaction did not write": (
            "compact",
            archive,
            "-o",
            table,
            "--format",
            "delta",
        ),
        "was written with the checkpoint": (
            "ingest",
            archive,
            "-o",
            table,
            "--checkpoint",
            tmp_path / "new",
            "--once",
            "--format",
            "delta",
        ),
    }
    each_is_refused(run_spark, refused)
