"""The history of a cluster: what is kept how long, how coarse, where the gaps are, and the file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nsqtools.cluster.history import QUANTITIES, History
from nsqtools.cluster.history_file import HistoryFile
from nsqtools.cluster.history_frames import Frame, Place, Places, average, pack, unpack
from nsqtools.cluster.queue_rows import QueueRow, Rates
from nsqtools.cluster.sampling import Sample
from nsqtools.errors import ConfigurationError

START_S = 1_800_000_000.0
CHANNEL = ("", "clicks", "archive")


def row(**changed: Any) -> QueueRow:
    rates = Rates(ingress=5.0, egress=4.0, finish=3.0, requeue=2.0, timed_out=1.0)
    given = {"node": "a:1", "topic": "clicks", "channel": "archive", "depth": 7, "disk": 0}
    return QueueRow(**{**given, "messages": 9, "paused": False, "rates": rates, **changed})


def sample(at_s: float, *rows: QueueRow) -> Sample:
    return Sample(int((START_S + at_s) * 1e9), list(rows), (), (), True)


def filled(history: History, seconds: int, step_s: int = 2, begin_s: int = 0) -> None:
    for at_s in range(begin_s, begin_s + seconds, step_s):
        history.add(sample(at_s, row(depth=at_s)))


def test_every_quantity_is_kept_for_the_queue_on_a_node_and_on_all() -> None:
    history = History()
    there = row(in_flight=1, deferred=2, clients=3, latency=((0.5, 0.1), (0.99, 0.25)))
    history.add(sample(0, there, row(node="b:1", depth=1)))

    def now(key: tuple[str, str, str]) -> dict[str, float | None]:
        found = {name: history.series(key, name, since_s=START_S - 1) for name in QUANTITIES}
        return {name: points[0][1] for name, points in found.items()}

    expected = dict(zip(QUANTITIES, (7, 1, 2, 3, 5, 4, 3, 2, 1, 0.25), strict=True))
    assert now(("a:1", "clicks", "archive")) == expected
    assert now(CHANNEL)["depth"] == 8
    assert now(CHANNEL)["finish"] == 6
    assert now(("b:1", "", ""))["depth"] == 1
    assert now(("", "", ""))["timed_out"] == 2


def test_what_came_in_is_counted_at_topics_and_what_left_at_channels() -> None:
    history = History()
    history.add(sample(0, row(channel="", depth=1), row(), row(channel="other")))

    everything = ("", "", "")
    assert history.series(everything, "ingress", since_s=0)[0][1] == 5
    assert history.series(everything, "finish", since_s=0)[0][1] == 6
    assert history.series(everything, "depth", since_s=0)[0][1] == 15


def test_what_is_older_is_kept_in_coarser_points() -> None:
    history = History(interval_s=5)
    filled(history, 5400, step_s=5)
    now_s = START_S + 5400

    minute = history.series(CHANNEL, "depth", since_s=now_s - 60)
    hour = history.series(CHANNEL, "depth", since_s=now_s - 3500)
    whole = history.series(CHANNEL, "depth", since_s=now_s - 5400)

    assert [at_s - START_S for at_s, _ in minute] == list(range(5340, 5400, 5))
    assert hour[1][0] - hour[0][0] == 10
    assert whole[1][0] - whole[0][0] == 60
    assert len(whole) < 110
    # a mean lies in the middle of its time, up to where finer points go on
    assert all(abs((at_s - START_S) - (value or 0)) <= 2.5 for at_s, value in whole)
    assert [at_s for at_s, _ in whole] == sorted({at_s for at_s, _ in whole})
    assert whole[-1][0] == now_s - 5


def test_a_queue_on_one_node_is_kept_for_two_minutes() -> None:
    history = History()
    filled(history, 600)

    points = history.series(("a:1", "clicks", "archive"), "depth", since_s=START_S)

    assert points[0][0] == START_S + 598 - 120


def test_a_queue_that_was_gone_and_a_pause_leave_gaps() -> None:
    history = History()
    history.add(sample(0, row()))
    history.add(sample(2))
    history.add(sample(4, row()))
    history.add(sample(100, row()))

    points = history.series(CHANNEL, "depth", since_s=START_S)

    assert [(at_s - START_S, value) for at_s, value in points] == [
        *((0, 7), (2, None), (4, 7), (52, None), (100, 7))
    ]


def test_a_clock_that_was_set_back_goes_on_from_there() -> None:
    history = History()
    filled(history, 60)
    history.add(sample(10, row(depth=1)))

    points = history.series(CHANNEL, "depth", since_s=START_S + 7)

    assert [value for _, value in points] == [8, 1]


def test_an_unknown_series_is_empty_and_an_unknown_quantity_an_error() -> None:
    history = History()
    history.add(sample(0, row()))

    assert history.series(("", "nothing", ""), "depth", since_s=0) == []
    assert set(history.keys()) >= {CHANNEL, ("a:1", "", ""), ("", "", "")}
    with pytest.raises(ValueError):
        history.series(CHANNEL, "color", since_s=0)


def test_a_full_history_gives_the_place_of_the_longest_gone_to_the_new() -> None:
    places: Places[str] = Places(2)
    places.assign(["old", "stays"], 1.0)
    places.assign(["stays"], 2.0)

    assert places.assign(["stays", "new", "newer"], 3.0) == ["new"]
    assert "old" not in places
    assert places.left_out == 1
    place = places.get("new")
    assert place is not None
    assert (place.number, place.since_s) == (0, 3.0)


def test_means_leave_out_what_is_not_known() -> None:
    nan = float("nan")

    means = unpack(average([pack([1, nan, nan]), pack([3, 5])]))

    assert list(means[:2]) == [2, 5]
    assert means[2] != means[2]


def test_the_file_has_days_and_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.cluster.history_file.FINE_KEEP_S", 7200)
    path = tmp_path / "history"
    first = HistoryFile(path)
    first.add_places([(CHANNEL, Place(0, START_S))])
    day_s = 86400
    for at_s in range(30, day_s, 60):
        first.add(Frame(START_S + at_s, (pack([at_s]),) * len(QUANTITIES)))
    first.close()

    again = History(interval_s=20, file=HistoryFile(path))
    filled(again, 600, step_s=20, begin_s=day_s)
    long = again.series(CHANNEL, "depth", since_s=START_S)
    short = again.series(CHANNEL, "depth", since_s=START_S + day_s - 3600)
    again.close()

    moments = [at_s - START_S for at_s, _ in long]
    # samples at 0, 20 and 40 s: their mean is 10 s before the middle of the minute
    assert all(abs((value or 0) - (at_s - START_S)) <= 10 for at_s, value in long)
    assert moments == sorted(set(moments))
    assert moments[:2] == [300, 900]
    assert moments[-1] == day_s + 580
    assert short[1][0] - short[0][0] == 60
    assert len(short) == 60 + 30


def test_the_file_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.cluster.history_file.FINE_KEEP_S", 600)
    monkeypatch.setattr("nsqtools.cluster.history_file.COARSE_KEEP_S", 1800)
    file = HistoryFile(tmp_path / "history")
    for at_s in range(30, 7200, 60):
        file.add(Frame(START_S + at_s, (pack([at_s]),) * len(QUANTITIES)))
    file.close()

    database = sqlite3.connect(tmp_path / "history")
    counts = dict(
        database.execute(
            "SELECT step_s, count(*) FROM points WHERE quantity = 'depth' GROUP BY step_s"
        ).fetchall()
    )
    database.close()
    assert counts == {60: 11, 600: 2}


@pytest.mark.parametrize("content", [b"not a database, but a log file\n" * 100, b"S"])
def test_a_foreign_file_is_one_error_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)

    with pytest.raises(ConfigurationError, match="foreign is damaged, or not a history of nsq"):
        HistoryFile(path)

    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE mail (body TEXT)")
    database.commit()
    database.close()

    with pytest.raises(ConfigurationError, match="a database of another program"):
        HistoryFile(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history"
    file = HistoryFile(path)
    file.add_places([(CHANNEL, Place(0, START_S))])
    for at_s in range(30, 1800, 60):
        file.add(Frame(START_S + at_s, (pack([at_s]),) * len(QUANTITIES)))
    file.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)

    with pytest.raises(ConfigurationError, match="is damaged"):
        HistoryFile(path)


def test_two_processes_cannot_have_one_file(tmp_path: Path) -> None:
    path = tmp_path / "history"
    first = HistoryFile(path)

    with pytest.raises(ConfigurationError, match="in use by another process"):
        HistoryFile(path)

    first.close()


def test_a_directory_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "history"):
        with pytest.raises(ConfigurationError, match="unable to open"):
            HistoryFile(path)
