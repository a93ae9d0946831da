"""``nsq spark sql``: views over archives and Parquet, and every form of output."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import write_archive
from plugins.spark import RunSpark

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.read_settings import MESSAGE_DDL
from nsqtools.spark.jobs.sql import NamedView, cell, columns_of_views, plain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEGIN = 1_790_000_000_123_456_789  # 2026-09-21T14:13:20Z
BODIES = [b"plain", b"a\tb\nc\0", b"\xff\xfe\x80", "ü".encode()]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    directory = tmp_path / "archive"
    directory.mkdir()
    found = [WireMessage(BEGIN + n, 1 + n, b"%016x" % n, body) for n, body in enumerate(BODIES)]
    write_archive(directory / "clicks.gz", found)
    return directory


def test_a_terminal_gets_a_table_and_the_reason_for_the_wait(
    run_spark_on_a_terminal: RunSpark,
) -> None:
    query = "SELECT id AS number, 'x' AS name FROM range(300) ORDER BY id"

    shown = run_spark_on_a_terminal("sql", query).out.decode()

    begin, _, rest = shown.partition("number")
    assert "starting Spark (local[*,4])" in begin
    assert "name" in rest.splitlines()[0]
    assert "these are the first 100 rows; --count 0 prints all" in rest
    assert " 99  x" in rest
    assert "100  x" not in rest


@pytest.mark.parametrize(
    ("value", "for_json", "for_a_table"),
    [
        (None, None, None),
        (True, True, "true"),
        (7, 7, 7),
        (1.5, 1.5, "1.5"),
        (float("nan"), "nan", "nan"),
        (float("-inf"), "-inf", "-inf"),
        (Decimal("1.50"), 1.5, "1.5"),
        (Decimal("0.1234567890123456789"), "0.1234567890123456789", "0.1234567890123456789"),
        (date(2026, 9, 21), "2026-09-21", "2026-09-21"),
        (datetime(2026, 9, 21, 14, 13), "2026-09-21T14:13:00", "2026-09-21T14:13:00"),
        ([1, None], [1, None], "[1, null]"),
        ({"k": b"\xff"}, {"k": {"base64": "/w=="}}, '{"k": {"base64": "/w=="}}'),
        (bytearray(b"\xff"), {"base64": "/w=="}, "\\xff"),
    ],
)
def test_values_as_json_and_in_a_table(value: Any, for_json: Any, for_a_table: Any) -> None:
    assert plain(value) == for_json
    assert cell(value) == for_a_table


EVERYTHING = {column.split()[0] for column in f"{MESSAGE_DDL}, file string, pos bigint".split(", ")}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT count(*) FROM archive", set()),
        ("SELECT topic, count(*) FROM archive GROUP BY 1", {"topic"}),
        ("SELECT id FROM archive WHERE topic = 'a' AND timestamp > '2026-01-01'", None),
        ("SELECT id FROM (SELECT id, body FROM archive) ORDER BY 1", {"id"}),
        ("SELECT a.id FROM archive a JOIN archive b USING (nsqd, id)", {"nsqd", "id"}),
        ("WITH x AS (SELECT * FROM archive) SELECT max(length(body)) FROM x", {"body"}),
        ("SELECT * FROM archive WHERE attempts > 1 ORDER BY ts_ns LIMIT 3", EVERYTHING),
        ("SELECT id FROM archive UNION SELECT nsqd FROM archive", {"id", "nsqd"}),
        ("SELECT count(*) FROM archive WHERE length(body) > 3", {"body"}),
    ],
)
def test_a_query_reads_only_the_columns_that_it_uses(
    spark: SparkSession, archive: Path, query: str, expected: set[str] | None
) -> None:
    views = [NamedView("archive", "archive", (str(archive),))]

    assert columns_of_views(spark, views, query) == {
        "archive": {"id", "topic", "timestamp"} if expected is None else expected
    }


def test_a_query_whose_columns_are_unknown_reads_all(spark: SparkSession, archive: Path) -> None:
    views = [NamedView("archive", "archive", (str(archive),))]
    for query in (
        "SELECT id FROM archive WHERE attempts = (SELECT max(attempts) FROM archive)",
        "SELECT nothing FROM archive",
        "SELEC",
        "CREATE TABLE made AS SELECT topic FROM archive",
    ):
        assert columns_of_views(spark, views, query) == {}


def test_a_statement_is_planned_over_stand_ins_without_being_run(
    run_spark: RunSpark, spark: SparkSession, archive: Path
) -> None:
    statement = "CREATE TABLE made AS SELECT topic, count(*) AS n FROM archive GROUP BY topic"

    made = run_spark("sql", statement, archive)
    read = run_spark("sql", "SELECT * FROM made")

    spark.sql("DROP TABLE made")
    assert (made.status, read.out) == (0, b"topic\tn\nclicks\t4\n")
