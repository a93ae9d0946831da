"""What archives hold, which days are closed, and which files are new: no Spark in here."""

from __future__ import annotations

import gzip
import os
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from plugins.archives import write_archive

from nsqtools.archive.layout import Head, index_of, part_of
from nsqtools.errors import NotFoundError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.spark.jobs.compaction.compacted_output import Input, Manifest
from nsqtools.spark.jobs.compaction.compaction_plan import (
    DaySelection,
    PlannedPartition,
    State,
    plan_partitions,
)
from nsqtools.spark.jobs.compaction.inventory import (
    UNDATED,
    CountedFile,
    Slot,
    begin_ns,
    day_of,
    end_ns,
    take_inventory,
)

DAY = date(2026, 9, 21)
NEXT = DAY + timedelta(days=1)
CLICKS = Slot("clicks", DAY)
MINUTE = 60_000_000_000
HOUR_S = 3600.0


def messages(first: int, last: int, *, begin: int | None = None) -> list[WireMessage]:
    """One a minute, from the middle of the day on."""
    begin = begin_ns(DAY) + 720 * MINUTE if begin is None else begin
    return [
        WireMessage(begin + number * MINUTE, 1, b"%016x" % number, b"body %d" % number)
        for number in range(first, last)
    ]


def at(day: date, hour: float) -> float:
    """Seconds since 1970."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + hour * HOUR_S


def planned(
    contents: list[CountedFile],
    manifests: dict[Slot, Manifest] | None = None,
    selection: DaySelection | None = None,
    *,
    now_s: float | None = None,
) -> list[PlannedPartition]:
    now_s = at(NEXT, 12) if now_s is None else now_s
    return plan_partitions(
        contents, manifests or {}, selection or DaySelection(), grace_s=HOUR_S, now_s=now_s
    )


def manifest(slot: Slot, *contents: CountedFile) -> Manifest:
    """A manifest that says these files are in a partition."""
    inputs = tuple(
        Input(str(each.path), each.key, each.size, each.mtime_ns, each.members, each.total)
        for each in contents
    )
    day = slot.day.isoformat() if slot.day else None
    return Manifest(slot.topic, day, "", inputs, 0, 0, 0, 0, "0", {})


@pytest.mark.parametrize(
    "timestamp_ns", [0, -1, begin_ns(DAY), end_ns(DAY) - 1, -(2**63), 2**63 - 1]
)
def test_every_time_is_on_one_day(timestamp_ns: int) -> None:
    day = day_of(timestamp_ns)

    assert begin_ns(day) <= timestamp_ns < end_ns(day)


def test_an_index_tells_what_is_in_a_file(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10), messages(10, 30))

    [content] = take_inventory(tmp_path)

    assert content.messages == {CLICKS: 30}
    assert (content.members, content.is_in_progress, content.damage) == (2, False, "")


def test_a_member_with_a_midnight_in_it_is_counted_by_day(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10), messages(715, 725), messages(800, 803))

    [content] = take_inventory(tmp_path)

    assert content.messages == {CLICKS: 15, Slot("clicks", NEXT): 8}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_without_index_is_read(tmp_path: Path, name: str) -> None:
    text = encode_many("clicks", "a:4150", messages(700, 730)) + encode_many(
        "views", "a:4150", messages(0, 5)
    )
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)

    [content] = take_inventory(tmp_path)

    assert content.messages == {CLICKS: 20, Slot("clicks", NEXT): 10, Slot("views", DAY): 5}


def test_what_stands_after_the_index_counts_too(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.gz", messages(0, 10))
    with path.open("ab") as file:
        file.write(gzip.compress(encode_many("clicks", "a:4150", messages(10, 15))))

    [content] = take_inventory(tmp_path)

    assert content.messages == {CLICKS: 15}


def test_bare_bodies_are_of_no_topic_and_no_day(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\n\ntwo\n")

    [content] = take_inventory(tmp_path)

    assert content.messages == {UNDATED: 3}


def test_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(encode_many("clicks", "a:4150", messages(0, 10)))[:-20])

    [content] = take_inventory(tmp_path)

    assert content.damage


def test_a_copy_of_a_file_is_not_counted_twice(tmp_path: Path) -> None:
    head = Head("ab" * 16, 1)
    (tmp_path / "copy").mkdir()
    path = write_archive(tmp_path / "a.gz", messages(0, 10))
    index_of(path).write_bytes(head.encode() + index_of(path).read_bytes())
    for source in (path, index_of(path)):
        shutil.copy(source, tmp_path / "copy" / source.name)

    [content] = take_inventory(tmp_path)

    assert content.total == 10
    assert content.key == f"writer {head.writer} 1"


def test_files_in_progress_may_be_elsewhere(tmp_path: Path) -> None:
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    write_archive(tmp_path / "out" / "a.gz", messages(0, 10))
    write_archive(tmp_path / "work" / "b.gz", messages(10, 20), is_finished=False)
    write_archive(tmp_path / "work" / "c.gz", messages(20, 30))

    contents = take_inventory(tmp_path / "out", tmp_path / "work")
    [partition] = planned(contents)

    assert [(each.total, each.is_in_progress) for each in contents] == [(10, False), (10, True)]
    assert partition.state is State.OPEN


def test_an_archive_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        take_inventory(tmp_path / "nowhere")


@pytest.mark.parametrize(("hour", "state"), [(-1, State.OPEN), (0.9, State.OPEN), (1, State.NEW)])
def test_a_day_closes_when_the_grace_is_over(tmp_path: Path, hour: float, state: State) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10))

    [partition] = planned(take_inventory(tmp_path), now_s=at(NEXT, hour))

    assert partition.state is state
    assert (state is State.OPEN) == ("2026-09-22T01:00:00Z" in partition.reason)


def test_a_file_in_progress_keeps_its_days_and_those_before_open(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10), messages(800, 810))
    path = write_archive(tmp_path / "b.gz", messages(720, 730), is_finished=False)
    write_archive(tmp_path / "c.gz", messages(0, 10), topic="views")

    states = {each.slot: each.state for each in planned(take_inventory(tmp_path))}
    later = planned(take_inventory(tmp_path), now_s=at(NEXT, 26))

    assert states[CLICKS] is State.NEW  # the file in progress begins on the next day
    assert states[Slot("views", DAY)] is State.NEW
    reason = next(each.reason for each in later if each.slot == Slot("clicks", NEXT))
    assert str(part_of(path)) in reason


def test_an_empty_file_in_progress_keeps_the_days_before_it_open(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10))
    part_of(tmp_path / "b.gz").touch()

    def state(begun_s: float) -> State:
        os.utime(part_of(tmp_path / "b.gz"), (begun_s, begun_s))
        [partition] = planned(take_inventory(tmp_path))
        return partition.state

    assert state(at(DAY, 23)) is State.OPEN
    assert state(at(NEXT, 2)) is State.NEW


def test_what_is_in_a_partition_is_not_new(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.gz", messages(0, 10))
    done = {CLICKS: manifest(CLICKS, *take_inventory(tmp_path))}
    [before] = planned(take_inventory(tmp_path), done)
    late = write_archive(tmp_path / "b.gz", messages(10, 20))

    [after] = planned(take_inventory(tmp_path), done)

    assert before.state is State.DONE
    assert after.state is State.MERGE
    assert [content.path for content in after.contents] == [late]
    assert after.messages == 10


def test_a_file_that_changed_is_new_unless_its_bodies_are_bare(tmp_path: Path) -> None:
    (tmp_path / "bare.log").write_bytes(b"one\n")
    (tmp_path / "a.jsonl").write_bytes(encode_many("clicks", "a:4150", messages(0, 10)))
    contents = {slot: each for each in take_inventory(tmp_path) for slot in each.messages}
    done = {slot: manifest(slot, content) for slot, content in contents.items()}
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() * 2)

    states = {each.slot: each.state for each in planned(take_inventory(tmp_path), done)}

    assert states == {CLICKS: State.MERGE, UNDATED: State.DONE}


def test_a_file_with_a_head_may_move(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.gz", messages(0, 10))
    index_of(path).write_bytes(Head("ab" * 16, 1).encode() + index_of(path).read_bytes())
    done = {CLICKS: manifest(CLICKS, *take_inventory(tmp_path))}
    (tmp_path / "elsewhere").mkdir()
    for source in (path, index_of(path)):
        source.rename(tmp_path / "elsewhere" / source.name)

    [partition] = planned(take_inventory(tmp_path), done)

    assert partition.state is State.DONE


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (DaySelection(), {CLICKS, Slot("clicks", NEXT), Slot("views", DAY), UNDATED}),
        (DaySelection(topics=("clicks",)), {CLICKS, Slot("clicks", NEXT)}),
        (DaySelection(first=NEXT, last=NEXT), {Slot("clicks", NEXT)}),
        (DaySelection(last=DAY), {CLICKS, Slot("views", DAY)}),
    ],
)
def test_topics_and_days_select(
    tmp_path: Path, selection: DaySelection, expected: set[Slot]
) -> None:
    write_archive(tmp_path / "a.gz", messages(700, 730))
    write_archive(tmp_path / "b.gz", messages(0, 5), topic="views")
    (tmp_path / "bare.log").write_bytes(b"one\n")

    partitions = planned(take_inventory(tmp_path), None, selection)

    assert {partition.slot for partition in partitions} == expected
