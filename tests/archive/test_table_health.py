"""``nsq check --lake``: misfits, freshness and pending logs, without reading the rows."""

import os
from pathlib import Path

import pytest
from plugins.archives import write_archive

from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import Head
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.table import convert
from nsqtools.archive.table_health import measure_lake
from nsqtools.archive.table_writer import TablePlan
from nsqtools.cluster.lake import TopicRows, find_lake_problems
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind

NOW_S = 1_790_000_000.0
DAY_S = 86_400


def messages(age_s: float, *bodies: bytes) -> list[WireMessage]:
    time_ns = int((NOW_S - age_s) * 1e9)
    return [WireMessage(time_ns + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]


@pytest.mark.parametrize("is_delta", [False, True])
def test_misfits_of_the_last_day_and_old_tables_are_problems(
    tmp_path: Path, *, is_delta: bool
) -> None:
    logs, lake = tmp_path / "logs", str(tmp_path / "lake")
    old, new = messages(3 * DAY_S, b"no JSON", b'{"n": 1}'), messages(60, b'{"n": 2}', b'{"n": ""}')
    write_archive(logs / "0.log", old, head=Head("a" * 32, 0), topic="clicks")
    write_archive(logs / "1.log", new, head=Head("a" * 32, 1), topic="clicks")
    write_archive(logs / "2.log", old, head=Head("a" * 32, 2), topic="views")
    plan = TablePlan(f"{lake}/{{topic}}", is_delta, "h", BodyKind.json)
    (drafts := tmp_path / "drafts").mkdir()
    list(convert(find_archives([str(logs)]), plan, drafts))

    measured = measure_lake([lake, f"{lake}/nothing"], NOW_S, max_age_s=DAY_S)

    clicks, views = (str(parse_place(lake) / topic) for topic in ("clicks", "views"))
    newest_s = [max(message.timestamp_ns for message in batch) / 1e9 for batch in (new, old)]
    assert measured.topics == [
        TopicRows(clicks, "clicks", 4, newest_s[0], 1, is_delta, [], f"{lake}-wide/clicks"),
        TopicRows(views, "views", 2, newest_s[1], 0, is_delta, [], f"{lake}-wide/views"),
    ]
    problems = [
        (problem.kind, problem.where, problem.text)
        for problem in find_lake_problems(measured, NOW_S)
    ]
    assert problems[0][:2] == ("not readable", f"{lake}/nothing")
    assert problems[1:] == [
        ("misfits", f"clicks on {clicks}", "1 in files of the last day"),
        ("table is old", f"views on {views}", "newest 3d0h"),
    ]


def test_finished_logs_that_have_not_landed_for_an_hour_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / ".nsq-landing").mkdir()
    for number, age_s in enumerate((7200, 60)):
        log = write_archive(tmp_path / f"{number}.log", messages(0, b"x"), topic="clicks")
        os.utime(log, (NOW_S - age_s, NOW_S - age_s))
    (tmp_path / ".2.log.part").write_bytes(b"")

    [problem] = find_lake_problems(measure_lake([str(tmp_path)], NOW_S, None), NOW_S)

    assert (problem.kind, problem.where) == ("logs wait", str(tmp_path))
    assert problem.text == "1, the oldest for 2h0m"
