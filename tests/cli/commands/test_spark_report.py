"""``nsq spark report``: over archives and Parquet, as table, TSV and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugins.archives import Writer, write_archive
from plugins.clusters import ValidJson
from plugins.spark import RunSpark

from nsqtools.protocol.frames import WireMessage

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21T14:13:20Z


def messages(first: int, last: int, *, attempts: int = 1) -> list[WireMessage]:
    """One a minute, with bodies of 0 to 99 bytes."""
    return [
        WireMessage(BEGIN + n * 60 * SECOND, attempts, b"%016x" % n, b"x" * (n % 100))
        for n in range(first, last)
    ]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two hours of clicks with a gap of half an hour, ten messages twice; some views."""
    directory = tmp_path / "archive"
    directory.mkdir()
    writer = Writer(directory)
    writer.write(messages(0, 60), messages(90, 150))
    writer.finish()
    write_archive(directory / "again.gz", messages(100, 110, attempts=3))
    write_archive(directory / "views.gz", messages(0, 3), topic="views", nsqd="other:4150")
    return directory


def test_a_pipe_gets_a_line_for_each_topic_and_hour(run_spark: RunSpark, archive: Path) -> None:
    result = run_spark("report", archive)

    assert result.status == 0, result.err
    head, *lines = [line.split("\t") for line in result.out.decode().splitlines()]
    assert head[:4] == ["time", "topic", "messages", "bytes"]
    assert [(line[0], line[1], line[2]) for line in lines] == [
        ("2026-09-21T14:00Z", "clicks", "47"),
        ("2026-09-21T14:00Z", "views", "3"),
        ("2026-09-21T15:00Z", "clicks", "37"),
        ("2026-09-21T16:00Z", "clicks", "46"),
    ]
    assert lines[3][-4:] == ["3", "3", "3", "nsqd:4150"]
    assert lines[1][-1] == "other:4150"
    assert "133 messages of 2 topics" in result.err
    assert "gap in clicks: 31m from 2026-09-21T15:12:20Z" in result.err


def test_archives_and_the_parquet_made_of_them_report_the_same(
    run_spark: RunSpark, valid_json: ValidJson, archive: Path, tmp_path: Path
) -> None:
    run_spark("compact", archive, "-o", tmp_path / "parquet")

    of_archive = valid_json("spark-report", run_spark("report", archive, "--json").out)
    of_parquet = valid_json("spark-report", run_spark("report", tmp_path / "parquet", "--json").out)

    clicks = {each["topic"]: each for each in of_archive["topics"]}["clicks"]
    assert (clicks["messages"], clicks["duplicates"], clicks["redeliveries"]) == (130, 10, 10)
    once = {each["topic"]: each for each in of_parquet["topics"]}["clicks"]
    assert (once["messages"], once["duplicates"], once["redeliveries"]) == (120, 0, 0)
    assert (once["first"], once["last"]) == (clicks["first"], clicks["last"])
    assert of_archive["gaps"] == of_parquet["gaps"]
    assert of_archive["gaps"] == [
        {
            "topic": "clicks",
            "begin": "2026-09-21T15:12:20Z",
            "end": "2026-09-21T15:43:20Z",
            "seconds": 1860.0,
        }
    ]


def test_topics_times_steps_and_gaps_are_chosen(run_spark: RunSpark, archive: Path) -> None:
    since, until = "2026-09-21T14:23:20Z", "2026-09-21T14:43:20Z"
    chosen = ["-t", "clicks", "--since", since, "--until", until, "--by", "10m", "--gap", "30s"]

    result = run_spark("report", archive, *chosen, "--json")

    document = json.loads(result.out)
    assert [(each["begin"], each["messages"]) for each in document["intervals"]] == [
        ("2026-09-21T14:20:00Z", 7),
        ("2026-09-21T14:30:00Z", 10),
        ("2026-09-21T14:40:00Z", 3),
    ]
    assert document["gaps_in_all"] == 19


def test_bare_bodies_have_a_line_without_topic_and_time(
    run_spark: RunSpark, tmp_path: Path
) -> None:
    (tmp_path / "a.log").write_bytes(b"one\nthree\nthree\n")

    result = run_spark("report", tmp_path / "a.log")

    assert result.out.decode().splitlines()[1].split("\t")[:8] == (
        ["-", "-", "3", "13", "5", "5", "5", "5"]
    )
