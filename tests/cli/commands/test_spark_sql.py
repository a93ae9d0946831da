"""``nsq spark sql``: views over archives and Parquet, and every form of output."""

from __future__ import annotations

import json
import time
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import write_archive
from plugins.in_process import run_in_process
from plugins.spark import RunSpark
from plugins.waiting import patience_s
from pyspark.sql.types import StructType

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.read_settings import BYTES
from nsqtools.spark.jobs.sql import cell, plain, used_columns
from nsqtools.spark.pyspark_internals import struct_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_terminal_gets_a_table_and_the_reason_for_the_wait(
    shared_session: None, nsq_env: dict[str, str]
) -> None:
    query = "SELECT id AS number, 'x' AS name FROM range(300) ORDER BY id"
    words = ["spark", "sql", query]

    shown = run_in_process(words, b"", nsq_env, patience_s(60.0), terminal=True).out.decode()

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


def test_moments_are_in_utc_in_structures_too(
    run_spark: RunSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = """SELECT t, array(t) AS a, map('k', struct(t, X'FF' AS b)) AS m, array(n) AS n
        FROM (SELECT timestamp_seconds(1790000000) AS t, timestamp_ntz'2026-01-02 03:04:05' AS n)"""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        found = run_spark("sql", query, "--json")
    time.tzset()

    t = "2026-09-21T14:13:20Z"
    values = {"t": t, "a": [t], "m": {"k": {"t": t, "b64": "/w=="}}, "n": ["2026-01-02T03:04:05"]}
    assert json.loads(found.out) == values, found.err


COLUMNS = struct_of(BYTES.archived_schema())


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT count(*) FROM archive", set()),
        ("SELECT topic, count(*) FROM archive GROUP BY 1", {"topic"}),
        ("SELECT id FROM archive WHERE topic = 'a' AND ts_ns > 17", {"id", "topic", "ts_ns"}),
        ("SELECT pos FROM archive WHERE pos = (SELECT max(ts_ns) FROM archive)", {"pos", "ts_ns"}),
        ("SELECT id FROM (SELECT id, body FROM archive) ORDER BY 1", {"id"}),
        ("SELECT a.id FROM archive a JOIN archive b USING (nsqd, id)", {"nsqd", "id"}),
        ("WITH x AS (SELECT * FROM archive) SELECT max(length(body)) FROM x", {"body"}),
        ("SELECT * FROM archive WHERE attempts > 1 ORDER BY ts_ns LIMIT 3", set(COLUMNS.names)),
        ("SELECT id FROM archive UNION SELECT nsqd FROM archive", {"id", "nsqd"}),
        ("SELECT count(*) FROM archive WHERE length(body) > 3", {"body"}),
    ],
)
def test_a_query_reads_only_the_columns_that_it_uses(
    spark: SparkSession, query: str, expected: set[str]
) -> None:
    assert used_columns(spark, ["other", "archive"], COLUMNS, query) == {"archive": expected}


def test_a_query_whose_columns_are_unknown_reads_all(spark: SparkSession) -> None:
    odd = StructType().add("a: int, b", "string")
    for columns, query in (
        (COLUMNS, "SELECT nothing FROM archive"),
        (COLUMNS, "SELEC"),
        (COLUMNS, "CREATE TABLE made AS SELECT topic FROM archive"),
        (COLUMNS, "SELECT id FROM archive WHERE id = '\n\n'"),
        (odd, "SELECT `a: int, b` FROM archive"),
    ):
        assert used_columns(spark, ["archive"], columns, query) == {}


def test_more_rows_and_years_than_java_and_python_count_to(run_spark: RunSpark) -> None:
    all = run_spark("sql", "SELECT 1 AS a", "-n", 2**31 - 1)
    year = run_spark("sql", "SELECT timestamp_seconds(1000000000000)")

    assert (all.status, all.out) == (0, b"a\n1\n"), all.err
    assert (year.status, "Spark failed: year 33658 is out of range" in year.err) == (1, True)


def test_a_statement_is_planned_over_stand_ins_without_being_run(
    run_spark: RunSpark, spark: SparkSession, tmp_path: Path
) -> None:
    some = [WireMessage(1, 1, b"%016x" % n, b"x") for n in range(4)]
    archive = write_archive(tmp_path / "clicks.gz", some)
    statement = "CREATE TABLE made AS SELECT topic, count(*) AS n FROM archive GROUP BY topic"

    made = run_spark("sql", statement, archive)
    read = run_spark("sql", "SELECT * FROM made")

    spark.sql("DROP TABLE made")
    assert (made.status, read.out) == (0, b"topic\tn\nclicks\t4\n")
