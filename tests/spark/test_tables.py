"""``nsq spark`` compacts, ingests and reads tables; Delta needs only delta-rs and no jar."""

import json
import shutil
from pathlib import Path

import pytest
from plugins.archives import Writer, by_the_minute, content, write_archive
from plugins.spark import RunSpark

from nsqtools.archive.finding import table_files
from nsqtools.archive.place import LocalPlace

DAYS = ("2026-09-21", "2026-09-22")
MIDNIGHT = 587  # the first message of the second day
TOPICS = ("2026", "clicks#ephemeral")
Row = tuple[str, str, int, bytes]


def expected(first: int, last: int, *topics: str) -> list[Row]:
    messages = [(int(message.id, 16), message.body) for message in by_the_minute(first, last)]
    return sorted((topic, DAYS[n >= MIDNIGHT], n, body) for topic in topics for n, body in messages)


def rows_of(table: Path) -> list[Row]:
    """The rows with an id in a table, with their partition."""
    rows = content(table)
    return sorted((topic, day, int(id, 16), body) for topic, day, id, _, body in rows if id)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_tasks_compact_an_archive_into_a_table_that_sql_reads(
    run_spark: RunSpark, tmp_path: Path, format: str
) -> None:
    archive, table = tmp_path / "archive", tmp_path / "table[1]"  # not a pattern
    archive.mkdir()
    write_archive(archive / "0.gz", by_the_minute(500, 600), topic=TOPICS[0])
    write_archive(archive / "1.gz", by_the_minute(500, 550), topic=TOPICS[1])
    command = ("compact", archive, "-o", table, "--format", format)

    first = run_spark(*command, "--delete-archives", "--yes")
    write_archive(archive / "late.gz", by_the_minute(450, 550, 2), topic=TOPICS[0])
    late = run_spark(*command)
    idle = run_spark(*command)

    assert (first.status, late.status, idle.status) == (0, 0, 0), first.err + late.err + idle.err
    assert idle.out == b""
    assert [path.name for path in archive.glob("*.gz")] == ["late.gz"]
    both = expected(450, 600, TOPICS[0]) + expected(500, 550, TOPICS[1])
    assert rows_of(table) == both

    report = run_spark("report", table, "--json", "--since", "2026-09-22T00:00:00Z")
    assert report.status == 0, report.err
    totals = json.loads(report.out)["topics"]
    assert {total["topic"]: (total["messages"], total["bytes"]) for total in totals} == {
        TOPICS[0]: (13, sum(len(row[3]) for row in both if row[1] == DAYS[1]))
    }
    sql = f"select topic, count(body) n, count(*) m from {format} where date={DAYS[1]!r} group by 1"
    result = run_spark("sql", sql, table, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out) == {"topic": TOPICS[0], "n": 6, "m": 13}


def test_delta_has_each_message_once_despite_interruptions(
    run_spark: RunSpark, tmp_path: Path
) -> None:
    archive, table, checkpoint = (tmp_path / name for name in ("archive", "table{1}", "checkpoint"))
    archive.mkdir()
    writer = Writer(archive)
    writer.write(by_the_minute(500, 550), by_the_minute(550, 600))
    command = ("ingest", archive, "-o", table, "--checkpoint", checkpoint, "--once")
    command += ("--raw", "--max-rows-per-trigger", "60", "--format", "delta")

    first = run_spark(*command)
    assert "100 rows ingested in 2 batches" in first.err, first.err
    copy = shutil.copytree(table / "_delta_log", tmp_path / "copy")
    # as after a kill between the commits of the table and of the checkpoint
    for path in (checkpoint / "commits").glob("*1*"):
        path.unlink()
    writer.write(by_the_minute(600, 620))
    # late messages that another archiver also has, and bodies without an identity
    write_archive(archive / "other.gz", by_the_minute(590, 610, 2), by_the_minute(620, 630))
    (archive / "bare.log").write_bytes(b"bare\n" * 3)
    second = run_spark(*command)

    assert second.status == 0, second.err
    assert rows_of(table) == expected(500, 630, "clicks")
    result = run_spark("sql", "select count(*) n, count(id) m from delta", table, "--json")
    assert json.loads(result.out) == {"n": 133, "m": 130}
    files = table_files([LocalPlace(table)])[LocalPlace(table)]
    compacted = run_spark("compact", table)
    assert compacted.status == 0, compacted.err
    assert len(table_files([LocalPlace(table)])[LocalPlace(table)]) < len(files)
    assert rows_of(table) == expected(500, 630, "clicks")

    without_format = run_spark(*command[:-2])
    assert "is a Delta table\nhint: Add --format delta." in without_format.err
    other_output = (*command[:5], tmp_path / "new", *command[6:])
    assert "was written with the checkpoint" in run_spark(*other_output).err
    shutil.rmtree(table / "_delta_log")
    shutil.copytree(copy, table / "_delta_log")
    assert f"{table} is older than {checkpoint}" in run_spark(*command).err
