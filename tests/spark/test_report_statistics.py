"""Statistics and gaps compared with a plain count, on random messages."""

import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plugins.spark import DataFrame, SparkSession
from pyspark.errors import PySparkException

from nsqtools.archive.finding import find_inputs
from nsqtools.archive.layout import TimeRange
from nsqtools.archive.place import LocalPlace
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.read_settings import BYTES
from nsqtools.spark.jobs import reporting
from nsqtools.spark.jobs.inputs import Choice, select_messages
from nsqtools.spark.jobs.reporting import collect_figures, collect_gaps, moment
from nsqtools.spark.pyspark_internals import struct_of

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21T14:13:20Z
STEP = 600 * SECOND

Row = tuple[Any, ...]


def random_rows(count: int) -> list[Row]:
    """Three topics, two nsqd with the same ids, some duplicate messages, and bare bodies."""
    draw = random.Random(7)
    rows: list[Row] = []
    for number in range(count):
        at = BEGIN + draw.randrange(5 * 3600) * SECOND + draw.randrange(SECOND)
        topic, nsqd = draw.choice(("a", "b", "2026")), ("x:1", "y:1")[number % 2]
        body = b"x" * draw.choice((0, 1, 10, 100, 5000))
        row = (topic, nsqd, f"{number // 2:016x}", None, at, 1, body)
        rows.append(row)
        if draw.random() < 0.1:
            rows.append((*row[:5], 2, body))
    return rows + [(None, None, None, None, None, None, b"bare"[:n]) for n in (1, 4, 4)]


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, struct_of(BYTES.message_schema())).repartition(3)


def test_statistics_equal_a_plain_count(spark: SparkSession) -> None:
    rows = random_rows(2000)
    groups: dict[tuple[str | None, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[0], moment(row[4] and row[4] // STEP * STEP)].append(row)

    intervals, topics = collect_figures(frame(spark, rows), STEP)

    assert {(interval["topic"], interval["begin"]) for interval in intervals} == set(groups)
    for interval in intervals:
        group = groups[interval["topic"], interval["begin"]]
        sizes = sorted(len(row[6]) for row in group)
        identities = {row[:3] for row in group if row[2] is not None}
        times = [row[4] for row in group if row[4] is not None]
        assert interval["messages"] == len(group)
        assert interval["bytes"] == sum(sizes)
        assert interval["size_max"] == sizes[-1]
        assert sizes[(len(sizes) - 1) // 2] <= interval["size_p50"] <= sizes[len(sizes) // 2]
        assert (
            interval["size_p50"]
            <= interval["size_p95"]
            <= interval["size_p99"]
            <= interval["size_max"]
        )
        assert interval["redeliveries"] == sum(row[5] == 2 for row in group)
        assert interval["duplicates"] == (len(group) - len(identities) if interval["topic"] else 0)
        assert interval["nsqd"] == sorted({row[1] for row in group if row[1]})
        bounds = (min(times), max(times)) if times else (None, None)
        assert (interval["first"], interval["last"]) == tuple(map(moment, bounds))
    assert {topic["topic"]: topic["messages"] for topic in topics} == {
        name: sum(row[0] == name for row in rows) for name in ("a", "b", "2026", None)
    }


def test_too_many_rows_are_refused_and_times_have_only_needed_digits(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "MAX_ROWS", 10)

    with pytest.raises(ConfigurationError, match="more than 10 rows"):
        collect_figures(frame(spark, random_rows(100)), 60 * SECOND)
    assert moment(BEGIN) == "2026-09-21T14:13:20Z"
    assert moment(BEGIN + 1_500_000) == "2026-09-21T14:13:20.001500Z"


@pytest.mark.parametrize("longer_than_s", [40, 600])
def test_gaps_are_pauses_beyond_the_given_length(spark: SparkSession, longer_than_s: int) -> None:
    rows = random_rows(1500)
    times: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row[0] is not None:
            times[row[0]].append(row[4])
    pauses = [
        (topic, *pair)
        for topic, topic_times in times.items()
        for pair in pairwise(sorted(topic_times))
    ]
    expected = [pause for pause in pauses if pause[2] - pause[1] > longer_than_s * SECOND]
    expected.sort(key=lambda gap: gap[1] - gap[2])
    longest = sorted(expected[: reporting.MAX_GAPS], key=lambda gap: (gap[1], gap[0]))

    gaps, count = collect_gaps(frame(spark, rows), longer_than_s * SECOND)

    assert count == len(expected)
    assert [tuple(gap.values()) for gap in gaps] == [
        (topic, moment(begin), moment(end), (end - begin) / SECOND) for topic, begin, end in longest
    ]


def test_parquet_is_recognized_or_refused_and_topics_are_text(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [("2026", "x:1", f"{n:016x}", None, BEGIN + n * SECOND, 1, b"b") for n in range(10)]
    (tmp_path / "data").mkdir()
    written = frame(spark, rows).selectExpr("*", "date '2026-09-21' AS date")
    written.write.partitionBy("topic", "date").mode("overwrite").parquet(str(tmp_path / "data"))
    inputs = find_inputs([LocalPlace(tmp_path / "data")])
    within = TimeRange(BEGIN + 2 * SECOND, BEGIN + 5 * SECOND)

    messages = select_messages(spark, inputs, Choice(("2026",), within)).collect()
    a_day = find_inputs([LocalPlace(tmp_path / "data/topic=2026/date=2026-09-21")])

    assert (inputs.archives, inputs.parquet) == ((), (LocalPlace(tmp_path / "data"),))
    assert {row.topic for row in messages} == {"2026"}
    assert sorted(row.ts_ns - BEGIN for row in messages) == [2 * SECOND, 3 * SECOND, 4 * SECOND]
    assert {row.topic for row in select_messages(spark, a_day, Choice()).collect()} == {"2026"}
    ever = TimeRange(-(2**70), 2**70)  # beyond the range of nsqd and Java
    assert select_messages(spark, a_day, Choice(within=ever)).count() == 10
    (tmp_path / "odd").mkdir()
    (tmp_path / "data/topic=2026/date=2026-09-21").rename(tmp_path / "odd/date=2026_39")
    with pytest.raises(PySparkException, match="Failed to cast value '2026_39'"):
        select_messages(spark, find_inputs([LocalPlace(tmp_path / "odd")]), Choice(within=within))
    spark.range(3).write.parquet(str(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="without the columns ts_ns, body"):
        select_messages(spark, find_inputs([LocalPlace(tmp_path / "other")]), Choice())
