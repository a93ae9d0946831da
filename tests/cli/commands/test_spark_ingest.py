"""``nsq spark ingest``: a topic or an archive in Parquet, each message once, run after run."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugins.archives import Writer, by_the_minute, unfinished, write_archive
from plugins.cli import RunNsq
from plugins.clusters import ValidJson
from plugins.daemons import GoNsqd
from plugins.spark import RunSpark
from plugins.waiting import wait_until

from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.layout import index_of, part_of
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import decode_dead_letter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ingested(spark: SparkSession, output: Path) -> list[tuple[str, str, str]]:
    """Read topic, date and id with Spark."""
    rows = spark.read.parquet(str(output)).selectExpr("topic", "string(date)", "id").collect()
    return sorted(map(tuple, rows))  # type: ignore[arg-type]


def expected(first: int, last: int) -> list[tuple[str, str, str]]:
    days = ("2026-09-21", "2026-09-22")
    return sorted(("clicks", days[n >= 587], f"{n:016x}") for n in range(first, last))


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    """Ingest an archive once; it is still empty."""
    (tmp_path / "archive").mkdir()
    command = ["ingest", tmp_path / "archive", "-o", tmp_path / "out"]
    return [*command, "--checkpoint", tmp_path / "checkpoint", "--once"]


def test_each_run_ingests_only_the_new_messages_of_an_archive(
    spark: SparkSession,
    run_spark: RunSpark,
    run_nsq: RunNsq,
    valid_json: ValidJson,
    command: list[object],
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path / "archive")
    writer.write(by_the_minute(0, 300), by_the_minute(300, 600))

    metrics = tmp_path / "metrics.prom"
    first = run_spark(*command, "--max-rows-per-trigger", 300, "--metrics-file", metrics)
    broken = tmp_path / "out" / "_ingest" / "of-no-batch"
    broken.touch()
    idle = run_spark(*command)
    writer.write(by_the_minute(600, 700))
    writer.finish()
    write_archive(
        tmp_path / "archive" / "no-head.gz", by_the_minute(700, 750), by_the_minute(750, 800)
    )
    last = run_spark(*command, "--max-rows-per-trigger", 10, "--json")

    assert first.status == 0, first.err
    assert "600 rows ingested in 2 batches" in first.err
    counts = dict(line.split() for line in metrics.read_text().splitlines() if line[0] != "#")
    body_bytes = sum(len(message.body) for message in by_the_minute(0, 600))
    names = ("rows_total", "batches_total", "body_bytes_total", "rows_behind", "bytes_behind")
    values = [int(counts[f"nsq_spark_ingest_{name}"]) for name in names]
    assert values == [600, 2, body_bytes, 0, 0]
    assert float(counts["nsq_spark_ingest_rows_per_second"]) > 0
    assert "0 rows ingested in 0 batches" in idle.err
    assert not broken.exists()
    assert "200 rows ingested in 2 batches" in last.err
    expected_counts = {"rows": 200, "batches": 2, "rows_behind": 0, "damages": 0}
    assert valid_json("spark ingest", last.out).items() >= expected_counts.items()
    assert ingested(spark, tmp_path / "out") == expected(0, 800)
    compacted = run_nsq(["archive", "compact", str(tmp_path / "out"), "--processes", "1"])
    assert "nsq: 800 messages read, 0 duplicates removed" in compacted.err
    again = run_spark(*command)
    assert "0 rows ingested in 0 batches" in again.err
    assert ingested(spark, tmp_path / "out") == expected(0, 800)


@pytest.fixture
def far_zone(spark: SparkSession) -> Iterator[None]:
    """For a third of each day, the date in the session's zone is not the date in UTC."""
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_dates_are_in_utc_in_a_session_with_another_zone(
    far_zone: None,
    run_spark: RunSpark,
    valid_json: ValidJson,
    command: list[object],
    tmp_path: Path,
) -> None:
    path = tmp_path / "archive" / "a.gz"
    write_archive(path, [WireMessage(-1, 1, b"%016x" % 0, b"")], by_the_minute(580, 1000))
    run_spark(*command)

    day = ["--since", "2026-09-22T00:00:00Z", "--until", "2026-09-23T00:00:00Z"]
    report = valid_json("spark report", run_spark("report", tmp_path / "out", *day, "--json").out)
    query = "SELECT date, count(*) AS n FROM parquet GROUP BY date ORDER BY date"
    rows = run_spark("sql", query, tmp_path / "out", "--json").out

    assert [topic["messages"] for topic in report["topics"]] == [1000 - 587]
    assert [tuple(json.loads(row).values()) for row in rows.splitlines()] == [
        ("1969-12-31", 1),
        ("2026-09-21", 7),
        ("2026-09-22", 413),
    ]


def test_lost_data_ends_the_run_or_is_skipped(
    run_spark: RunSpark, command: list[object], tmp_path: Path
) -> None:
    path = Writer(tmp_path / "archive").write(by_the_minute(0, 10))
    run_spark(*command)
    part_of(path).unlink()
    index_of(path).unlink()
    write_archive(path, by_the_minute(10, 15))

    ended = run_spark(*command)
    passed = run_spark(*command, "--no-fail-on-data-loss")

    assert ended.status == 1
    assert "are lost to this stream" in ended.err
    assert "continue without it with --no-fail-on-data-loss" in ended.err
    assert (passed.status, "5 rows ingested" in passed.err) == (0, True), passed.err


def test_a_topic_is_ingested_until_an_interrupt_and_then_to_its_end(
    spark: SparkSession, nsqd: GoNsqd, run_spark: RunSpark, tmp_path: Path
) -> None:
    nsqd.create_topic("clicks")
    output = tmp_path / "out"
    command = ["ingest", "-t", "clicks", "--output", output]
    command += ["--checkpoint", tmp_path / "checkpoint", "--nsqd-tcp-address", nsqd.tcp_address]

    def publish_and_interrupt() -> None:
        try:
            wait_until(lambda: nsqd.stats()["topics"][0]["channels"], what="it", timeout_s=60)
            nsqd.publish("clicks", *(b"%d" % number for number in range(500)))
            wait_until(
                lambda: any(output.rglob("*.parquet")),
                what="rows",
                timeout_s=60,
            )
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Event()
    other = threading.Thread(target=publish_and_interrupt)
    other.start()
    first = run_spark(*command, "--trigger", "200ms")
    ended.set()
    other.join()
    nsqd.publish("clicks", *(b"%d" % number for number in range(500, 700)))
    last = run_spark(*command, "--once")

    assert (first.status, last.status) == (143, 0), first.err + last.err
    rows_of = [int(re.search(r"(\d+) rows ingested", result.err)[1]) for result in (first, last)]
    assert (rows_of[0] > 0, sum(rows_of)) == (True, 700)  # the first batch may have a part of 500
    rows = spark.read.parquet(str(output)).select("body").collect()
    assert sorted(row.body for row in rows) == sorted(map(str, range(700)))
    assert unfinished(nsqd, "clicks", "spark-ingest") == 0


def test_several_topics_become_tables_with_columns_from_bodies(
    run_spark: RunSpark, valid_json: ValidJson, nsqd: GoNsqd, tmp_path: Path
) -> None:
    schema, letters = tmp_path / "schema.json", tmp_path / "dead.jsonl"
    schema.write_text('{"properties": {"n": {"type": "integer"}, "a.b": {"type": "integer"}}}')
    for topic in ("clicks", "views", "web_a", "web_b", "other"):
        nsqd.create_topic(topic)
        nsqd.publish(topic, b"no JSON", *(b'{"n": %d, "x": 1, "a.b": 2}' % n for n in range(20)))
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--nsqd-http-address", nsqd.http_address]
    command = ["ingest", "--once", "--json", "--body", "json", *place]
    command += ["--max-rows-per-trigger", 25]

    for format, topics, chosen in (
        ("parquet", ["clicks", "views"], ["-t", "clicks", "-t", "views", "--schema", schema]),
        (
            "delta",
            ["web_a", "web_b"],
            ["--topic-pattern", "^web_", "--dead-letter-file", letters, "--partition-by", "hour"],
        ),
    ):
        lake, out = tmp_path / format, tmp_path / "compacted"
        places = ["-o", lake, "--checkpoint", tmp_path / f"{format}.cp", "--format", format]
        result = run_spark(*command, *chosen, *places)

        assert result.status == 0, result.err
        document = valid_json("spark ingest", result.out)
        assert (document["rows"], document["misfits"]) == (42, 2)
        assert document["batches"] > 1
        query = "select topic, count(*) m, sum(n) n, count(_error) e, sum(`a.b`) ab"
        query += f" from {format} group by 1"
        rows = [{"topic": topic, "m": 21, "n": 190, "e": 1, "ab": 40} for topic in topics]
        selected = run_spark("sql", f"{query} order by 1", lake, "--json")
        assert [json.loads(line) for line in selected.out.splitlines()] == rows

    assert f"nsq: each topic has its own table and columns: {lake}/{{topic}}" in result.err
    assert [DeltaCatalog(str(lake / topic)).partition_columns for topic in topics] == [
        ["topic", "date", "hour"]
    ] * 2
    errors = [decode_dead_letter(line) for line in letters.read_bytes().splitlines()]
    assert sorted((message.topic, message.body, error) for message, error in errors) == [
        (topic, b"no JSON", "it is not JSON") for topic in topics
    ]
    compacted = run_spark("compact", lake, "-o", out, "--open-days", "--format", format)
    assert compacted.status == 0, compacted.err
    assert "2 bodies did not fit their columns" in compacted.err
    selected = run_spark("sql", f"{query} order by 1", out, "--json")
    assert [json.loads(line) for line in selected.out.splitlines()] == rows
    report = json.loads(run_spark("report", out, "--json").out)
    counts = {row["topic"]: row["messages"] for row in report["topics"]}
    assert counts == dict.fromkeys(topics, 21)
