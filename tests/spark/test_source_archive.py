"""``format("nsq-archive")`` in Spark; its decisions are tested without Spark in other files."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from plugins.archives import Writer, write_archive
from plugins.spark import SparkSession

from nsqtools.archive.layout import Head, index_of
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.read_settings import ReadSettings

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from nsqtools.spark.archive_format import ONE_SCAN, PruningReader

BASE_NS = 1_700_000_000_000_000_000


def messages(begin: int, end: int) -> list[WireMessage]:
    bodies = {3: b"", 4: b"\xff\x00\x80", 5: "\u2028 caf\u00e9 \n\0".encode()}
    return [
        WireMessage(BASE_NS + n, 1 + n % 3, b"%016x" % n, bodies.get(n % 10, b"body %d" % n))
        for n in range(begin, end)
    ]


CLICKS = [
    (b'{"user": 7, "at": {"x": 1.5}, "more": "new"}', 7, 1.5, None),
    (b'{"user": "seven"}', None, None, "user is not int64"),
    (b"no JSON", None, None, "it is not JSON"),
    (b"\xff", None, None, "it is not UTF-8"),
    (b'{"at": null, "user": 8}', 8, None, None),
]


@pytest.fixture
def clicks(tmp_path: Path) -> tuple[Path, Path]:
    """An archive of JSON and other bodies, and a schema."""
    archive, schema = tmp_path / "clicks", tmp_path / "clicks.json"
    archive.mkdir()
    messages = [WireMessage(BASE_NS + n, 1, b"%016x" % n, c[0]) for n, c in enumerate(CLICKS)]
    write_archive(archive / "a.log.gz", messages)
    (archive / "b.log").write_bytes(b'{"user": 9}\n')
    number = {"type": "number"}
    at = {"type": "object", "properties": {"x": number}}
    schema.write_text(json.dumps({"properties": {"user": {"type": "integer"}, "at": at}}))
    return archive, schema


@pytest.mark.parametrize("is_text", [False, True])
def test_bodies_have_columns_by_a_schema_and_errors_of_misfits(
    spark: SparkSession, clicks: tuple[Path, Path], is_text: bool
) -> None:
    archive, schema = clicks
    reader = spark.read.format("nsq-archive").option("body", "json").option("format", "raw")
    frame = reader.option("schema", schema.read_text() if is_text else str(schema))
    frame = frame.load(str(archive))

    rows = sorted(frame.collect(), key=lambda row: row.ts_ns or 0)

    assert rows[0].asDict(recursive=True) | {"file": ""} == {
        **dict.fromkeys(("topic", "nsqd", "id", "timestamp", "ts_ns", "attempts", "body_bytes")),
        "body": '{"user": 9}',
        "user": 9,
        "at": None,
        "_error": None,
        "file": "",
        "pos": 0,
    }
    values = [
        (bytes(r.body_bytes or r.body.encode()), r.user, r.at.x if r.at else None, r["_error"])
        for r in rows[1:]
    ]
    assert values == CLICKS
    typed = reader.option("schema", str(schema)).schema("user bigint").load(str(archive))
    assert sorted(row.user for row in typed.collect() if row.user) == [7, 8, 9]


def test_text_stays_text_and_invalid_options_are_refused(
    spark: SparkSession, clicks: tuple[Path, Path]
) -> None:
    reader = spark.read.format("nsq-archive").option("body", "string")
    rows = reader.load(str(clicks[0] / "a.log.gz")).orderBy("ts_ns").collect()
    assert (rows[2].body, rows[2].body_bytes) == ("no JSON", None)
    assert (rows[3].body, rows[3].body_bytes) == (None, b"\xff")

    for options, schema, complaint in (
        ({"body": "json"}, None, "body=json needs the option schema"),
        ({"body": "json", "schema": str(clicks[1])}, "user string", "unknown column user:string"),
        ({"topicss": "a"}, None, "Did you mean topics"),
        ({"maxRowsPerTrigger": "5"}, None, "has no option 'maxrowspertrigger'"),
    ):
        reader = spark.read.format("nsq-archive").options(path=str(clicks[0]), **options)
        with pytest.raises(Exception, match=complaint):
            (reader.schema(schema) if schema else reader).load().count()


def test_a_batch_has_each_message_with_all_its_columns(spark: SparkSession, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.log.gz", messages(0, 30), messages(30, 50))
    write_archive(tmp_path / "b.log.gz", messages(50, 60), is_finished=False)

    frame = spark.read.format("nsq-archive").option("minPartitions", 3).load(str(tmp_path))
    rows = sorted(frame.collect(), key=lambda row: row.ts_ns)

    assert [bytes(row.body) for row in rows] == [message.body for message in messages(0, 60)]
    first = rows[0].asDict()
    assert first.pop("timestamp").timestamp() == BASE_NS // 1_000_000_000
    origin = {"topic": "clicks", "nsqd": "nsqd:4150", "id": "0" * 16, "ts_ns": BASE_NS}
    assert first == {**origin, "attempts": 1, "body": b"body 0", "file": str(path), "pos": 0}
    assert {row.file for row in rows} == {str(path), str(tmp_path / "b.log.gz")}
    narrow = spark.read.format("nsq-archive").schema("body binary, id string").load(str(tmp_path))
    assert narrow.where("id = '000000000000000a'").first() == (b"body 10", "000000000000000a")


AFTER = datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC)  # a second after BASE_NS


@pytest.mark.parametrize(
    ("filters", "members"),
    [
        ([EqualTo(("topic",), "a")], 3),
        ([In(("topic",), ("b", "c")), EqualTo(("attempts",), 1)], 1),
        ([EqualTo(("topic",), "a"), GreaterThan(("ts_ns",), BASE_NS + 19)], 1),
        ([GreaterThanOrEqual(("ts_ns",), BASE_NS + 10), LessThan(("ts_ns",), BASE_NS + 20)], 1),
        ([LessThanOrEqual(("timestamp",), AFTER)], 4),
        ([GreaterThan(("timestamp",), AFTER)], 0),
        ([EqualTo(("topic",), "a"), EqualTo(("topic",), "b")], 0),
        ([EqualTo(("topic",), None)], 0),
        ([EqualTo(("body",), b"x"), IsNull(("topic",))], 4),
    ],
)
def test_query_filters_skip_members(tmp_path: Path, filters: list[Filter], members: int) -> None:
    Writer(tmp_path, topic="a").write(*(messages(n, n + 10) for n in (0, 10, 20)))
    Writer(tmp_path, topic="b").write(messages(0, 10))
    reader = PruningReader(ReadSettings((str(tmp_path),)), ["body"])

    assert reader.pushFilters(filters) is filters

    ranges = [
        file_range for partition in reader.partitions() for file_range in partition.value or ()
    ]
    assert sum(len(file_range.members) for file_range in ranges) == members


def test_rows_of_other_nsqd_are_not_passed_to_spark(tmp_path: Path) -> None:
    for number, nsqd in enumerate(("one:4150", "two:4150")):
        sent, head = messages(number, number + 1), Head(f"{7:032x}", number)
        write_archive(tmp_path / f"{number}.log.gz", sent, nsqd=nsqd, topic="a", head=head)
    one, both = EqualTo(("nsqd",), "one:4150"), In(("nsqd",), ("one:4150", "two:4150"))
    filters: list[Filter]
    for filters, expected in (
        ([one], [b"body 0"]),
        ([both], [b"body 0", b"body 1"]),
        ([both, EqualTo(("nsqd",), "two:4150")], [b"body 1"]),
        ([EqualTo(("nsqd",), "three:4150")], []),
        ([one, EqualTo(("topic",), "b")], []),
    ):
        reader = PruningReader(ReadSettings((str(tmp_path),)), ["body"])
        assert reader.pushFilters(filters) is filters
        batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
        assert [body.as_py() for batch in batches for body in batch.column("body")] == expected


def test_spark_pushes_filters_for_one_scan_only(spark: SparkSession, tmp_path: Path) -> None:
    write_archive(tmp_path / "a.log.gz", messages(0, 30), topic="a")
    head = Head(f"{7:032x}", 1)
    other_path = write_archive(tmp_path / "b.log.gz", messages(0, 30), topic="b", head=head)
    data = other_path.read_bytes()
    other_path.write_bytes(data[:-12] + bytes(4) + data[-8:])  # so that reading it would fail
    reader = spark.read.format("nsq-archive").option("filterPushdown", ONE_SCAN)
    rows = reader.load(str(tmp_path)).where(f"topic = 'a' AND ts_ns >= {BASE_NS + 10}")

    assert rows.count() == 20
    assert rows.where("timestamp < timestamp'2023-11-14T22:13:20.000001Z'").count() == 20
    with pytest.raises(Exception, match="cannot read"):
        reader.load(str(tmp_path)).count()
    (tmp_path / "empty").mkdir()
    assert reader.load(str(tmp_path / "empty")).count() == 0
    other_path.unlink()
    index_of(other_path).unlink()
    loaded = reader.option("filterPushdown", "true").load(str(tmp_path))
    assert loaded.where(f"ts_ns >= {BASE_NS + 10}").count() == 20
    assert loaded.count() == 30  # without the filter of the previous query
