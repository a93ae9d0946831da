"""``nsq spark sql``: views over archives and Parquet, and every form of output."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import write_archive
from plugins.spark import RunSpark

from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import decode
from nsqtools.spark.archives.read_settings import MESSAGE_DDL
from nsqtools.spark.jobs.sql import NamedView, cell, columns_of_views, named_views, plain

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


def write_parquet(spark: SparkSession, path: Path, *topics: str) -> Path:
    frame = spark.createDataFrame(
        [(topic, "2026-09-21", n) for n, topic in enumerate(topics)],
        "topic string, date string, n int",
    )
    frame.write.partitionBy("topic", "date").parquet(str(path))
    return path


def test_a_pipe_gets_tab_separated_text_with_a_head(run_spark: RunSpark, archive: Path) -> None:
    query = "SELECT id, timestamp, body, attempts FROM archive ORDER BY ts_ns"

    result = run_spark("sql", query, archive)

    assert (result.status, result.err) == (0, "")
    assert result.out.decode().splitlines() == [
        "id\ttimestamp\tbody\tattempts",
        "0000000000000000\t2026-09-21T14:13:20.123456Z\tplain\t1",
        "0000000000000001\t2026-09-21T14:13:20.123456Z\ta\\tb\\nc\\x00\t2",
        "0000000000000002\t2026-09-21T14:13:20.123456Z\t\\xff\\xfe\\x80\t3",
        "0000000000000003\t2026-09-21T14:13:20.123456Z\tü\t4",
    ]


def test_json_has_the_forms_of_the_envelope(
    run_spark: RunSpark, archive: Path, tmp_path: Path
) -> None:
    """Of a query from a file."""
    query = "SELECT topic, nsqd, id, ts_ns AS ts, attempts, body FROM archive ORDER BY ts_ns"

    (file := tmp_path / "query.sql").write_text(f"-- all of them\n{query};\n")
    result = run_spark("sql", "-f", file, archive, "--json")

    lines = result.out.splitlines(keepends=True)
    assert [decode(line).body for line in lines] == BODIES  # what other commands read
    assert json.loads(lines[2])["body64"] == "//6A"


def test_damage_fails_or_is_left_out_and_told(run_spark: RunSpark, archive: Path) -> None:
    path = archive / "torn.gz"
    path.write_bytes((archive / "clicks.gz").read_bytes()[:-20])
    query = "SELECT count(*) AS n FROM archive"

    refused = run_spark("sql", query, archive)
    taken = run_spark("sql", query, archive, "--skip-damaged")

    assert refused.status == 1
    assert str(path) in refused.err
    assert "--skip-damaged" in refused.err
    assert taken.status == 6
    head, count = taken.out.decode().split()
    assert head == "n"
    assert len(BODIES) <= int(count) < 2 * len(BODIES)  # what is readable before the tear, too
    assert str(path) in taken.err


def test_views_have_names_and_bare_paths_are_known_by_their_kind(
    run_spark: RunSpark, spark: SparkSession, archive: Path, tmp_path: Path
) -> None:
    """Topics stay text."""
    parquet = write_parquet(spark, tmp_path / "parquet", "clicks", "007", "8")
    query = "SELECT count(*) AS n FROM old JOIN days USING (topic) WHERE date = DATE'2026-09-21'"
    named = run_spark("sql", query, "--archive", f"old={archive}", "--parquet", f"days={parquet}")
    query = "SELECT topic, date + INTERVAL 1 DAY AS d, (SELECT count(*) FROM archive) FROM parquet"
    bare = run_spark("sql", query, archive, parquet)

    assert named == (0, b"n\n4\n", "")
    lines = sorted(bare.out.decode().splitlines())
    assert lines[:2] == ["007\t2026-09-22\t4", "8\t2026-09-22\t4"]
    (other := tmp_path / "other").mkdir()
    both = NamedView("a", "archive", (str(archive), str(other)))
    assert named_views([f"a={archive}", f"a={other}"], [], []) == [both]


def test_rows_come_in_their_order_and_in_the_form_that_is_asked_for(run_spark: RunSpark) -> None:
    many = run_spark("sql", "SELECT id FROM range(0, 2500, 1, 3)")
    assert many.out.decode().split() == ["id", *map(str, range(2500))]
    some = run_spark("sql", "SELECT id FROM range(5) ORDER BY id", "-n", 2)
    told = "nsq: these are the first 2 rows; --count 0 prints all\n"
    assert (some.out, some.err) == (b"id\n0\n1\n", told)
    none = "SELECT id FROM range(5) WHERE id > 9"
    assert run_spark("sql", none).out == b"id\n"
    assert run_spark("sql", none, "--json").out == b""
    for form, shown in (
        (["-o", "csv", "--columns", "b,a"], b'b,a\n"x,y",1\n'),
        (["-o", "jsonl", "--columns", "a"], b'{"a": 1}\n'),
        (["-o", "json"], b'{"a": 1, "b": "x,y"}\n'),
        (["-o", "wide"], b"a  b  \n1  x,y\n"),
    ):
        result = run_spark("sql", "SELECT 1 AS a, 'x,y' AS b", *form)
        assert (result.status, result.out) == (0, shown)


def test_what_is_wrong_is_one_line(run_spark: RunSpark, archive: Path) -> None:
    for arguments, status, text in (
        (["SELEC 1"], 2, "Syntax error at or near 'SELEC'"),
        (["SELECT nix FROM archive", str(archive)], 2, "`nix` cannot be resolved"),
        (["SELECT * FROM nix", "--archive", f"old={archive}"], 3, "`nix` cannot be found"),
        (["SELECT 1", "/nowhere"], 3, "there is no /nowhere"),
        (["SELECT 1", "--archive", "a=/nowhere"], 3, "there is no /nowhere"),
        (["SELECT 1", "--archive", str(archive)], 2, "has no name"),
        (["SELECT 1", "--archive", f"a b={archive}"], 2, "has no name"),
        (
            ["SELECT 1", "--archive", f"a={archive}", "--parquet", f"A={archive}"],
            2,
            "names archives and Parquet",
        ),
        ([], 2, "missing query"),
        (["-f", "/nowhere.sql"], 3, "there is no /nowhere.sql"),
    ):
        result = run_spark("sql", *arguments)
        assert (result.status, result.out) == (status, b""), arguments
        assert text in result.err.splitlines()[0]
        assert len(result.err.splitlines()) <= 2
        assert ("hint: Known here: old." in result.err) is ("cannot be found" in text)


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


def test_bodies_are_columns_by_a_schema(run_spark: RunSpark, tmp_path: Path) -> None:
    archive, schema = tmp_path / "clicks", tmp_path / "clicks.json"
    archive.mkdir()
    bodies = [b'{"user": 7}', b'{"user": "seven"}', b'{"user": 8}']
    some = [WireMessage(10**18 + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]
    write_archive(archive / "a.log.gz", some)
    query = "SELECT sum(user) AS users, max(_error) AS error FROM archive"
    schema.write_text('{"properties": {"user": {"type": "integer"}}}')

    typed = run_spark("sql", query, archive, "--body", "json", "--schema", schema)
    without = run_spark("sql", query, archive, "--body", "json")

    assert (typed.status, typed.out) == (0, b"users\terror\n15\tuser is not int64\n")
    assert "--body json needs --schema here\nhint: nsq archive schema" in without.err
