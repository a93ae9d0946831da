"""How partitions change places, through a kill at any moment, and when archives may go."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from plugins.archives import write_archive

from nsqtools.archive.layout import index_of
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction import compacted_output
from nsqtools.spark.jobs.compaction.compacted_output import (
    CompactionOutput,
    Input,
    Manifest,
    folder_of,
    read_manifest,
    read_manifests,
    summarise,
    write_manifest,
)
from nsqtools.spark.jobs.compaction.compaction_job import deletable, delete
from nsqtools.spark.jobs.compaction.compaction_plan import DaySelection
from nsqtools.spark.jobs.compaction.inventory import CountedFile, Slot, begin_ns, take_inventory

DAY = date(2026, 9, 21)
CLICKS = Slot("clicks", DAY)


def manifest(slot: Slot = CLICKS, *inputs: Input, rows: int = 1) -> Manifest:
    day = slot.day.isoformat() if slot.day else None
    files = {"part-0.zstd.parquet": 3}
    return Manifest(slot.topic, day, "2026-09-22T01:00:00Z", inputs, rows, 0, rows, 9, "7", files)


def make(folder: Path, content: str, written: Manifest | None) -> None:
    """A partition that holds three letters."""
    folder.mkdir(parents=True)
    (folder / "part-0.zstd.parquet").write_text(content)
    if written is not None:
        write_manifest(folder, written)


def held(output: CompactionOutput) -> str:
    return (output.final(CLICKS) / "part-0.zstd.parquet").read_text()


def no_exchange(one: Path, other: Path) -> bool:
    """A file system that cannot exchange."""
    return False


class Killed(BaseException):
    """Stands for a kill -9: nothing handles it."""


@pytest.mark.parametrize("exchange", [compacted_output.exchange, no_exchange])
@pytest.mark.parametrize("there_before", [False, True])
def test_a_partition_takes_the_place_of_the_one_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Callable[[Path, Path], bool],
    there_before: bool,
) -> None:
    monkeypatch.setattr(compacted_output, "exchange", exchange)
    output = CompactionOutput(tmp_path)
    if there_before:
        make(output.final(CLICKS), "old", manifest())
    make(output.staged(CLICKS), "new", manifest(rows=2))

    output.take_place(CLICKS)

    assert held(output) == "new"
    assert read_manifests(output) == {CLICKS: manifest(rows=2)}
    assert not list(tmp_path.glob("_staging/*/*"))


@pytest.mark.parametrize("exchange", [compacted_output.exchange, no_exchange])
@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("step", range(12))
def test_killed_at_any_step_a_partition_is_the_old_or_the_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Callable[[Path, Path], bool],
    there_before: bool,
    step: int,
) -> None:
    output = CompactionOutput(tmp_path)
    if there_before:
        make(output.final(CLICKS), "old", manifest())
    make(output.staged(CLICKS), "new", manifest(rows=2))
    steps = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal steps
            steps += 1
            if steps > step:
                raise Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(compacted_output, "exchange", counted(exchange))
        patch.setattr(compacted_output, "sync_folder", counted(compacted_output.sync_folder))
        patch.setattr(compacted_output.shutil, "rmtree", counted(compacted_output.shutil.rmtree))
        patch.setattr(Path, "rename", counted(Path.rename))
        try:
            output.take_place(CLICKS)
        except Killed:
            pass
    output.recover()

    assert held(output) in (("old", "new") if there_before else ("new",))
    assert read_manifest(output.final(CLICKS)) is not None
    assert not list(tmp_path.glob("_staging/*/*"))


def test_a_partition_that_was_not_verified_is_thrown_away(tmp_path: Path) -> None:
    output = CompactionOutput(tmp_path)
    make(output.staged(CLICKS), "new", None)

    output.recover()

    assert not output.final(CLICKS).exists()
    assert not output.staged(CLICKS).exists()


def test_an_exchange_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    with pytest.raises(OSError) as caught:
        compacted_output.exchange(tmp_path / "a", tmp_path / "missing")

    assert caught.value.errno == errno.ENOENT


def test_partitions_are_called_as_spark_calls_them() -> None:
    assert folder_of(CLICKS) == Path("topic=clicks/date=2026-09-21")
    assert folder_of(Slot("a#ephemeral", DAY)).parent == Path("topic=a%23ephemeral")
    null = "__HIVE_DEFAULT_PARTITION__"
    assert folder_of(Slot(None, None)) == Path(f"topic={null}/date={null}")


def test_only_one_compaction_writes_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(OutputError, match="another compaction")

    with (
        CompactionOutput(tmp_path / "out").locked(),
        refused,
        CompactionOutput(tmp_path / "out").locked(),
    ):
        pass


@pytest.mark.parametrize("name", ["something.csv", "_spark_metadata"])
def test_an_output_that_is_not_ours_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()

    with pytest.raises(ConfigurationError, match="compaction did not write"):
        CompactionOutput(tmp_path).check()


def test_a_partition_without_manifest_is_refused(tmp_path: Path) -> None:
    output = CompactionOutput(tmp_path)
    make(output.final(CLICKS), "old", None)

    with pytest.raises(OutputError, match="compaction did not write it"):
        read_manifests(output)


def test_a_torn_manifest_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    output = CompactionOutput(tmp_path)
    make(output.final(CLICKS), "old", manifest())
    (output.final(CLICKS) / compacted_output.MANIFEST).write_text("{")

    with pytest.raises(OutputError, match="cannot read"):
        read_manifests(output)


def test_the_manifests_of_a_day_are_gathered(tmp_path: Path) -> None:
    output = CompactionOutput(tmp_path)
    others = [manifest(), manifest(Slot("views", DAY)), manifest(Slot(None, None))]

    with output.locked():
        summarise(output, others)

    names = sorted(path.name for path in (tmp_path / "_compaction").glob("*.json"))
    assert names == ["2026-09-21.json", "undated.json"]
    assert (tmp_path / "_compaction" / "2026-09-21.json").read_text().count('"topic"') == 2


@pytest.fixture
def archived(tmp_path: Path) -> list[CountedFile]:
    """One file with ten messages of clicks."""
    messages = [WireMessage(begin_ns(DAY) + n, 1, b"%016x" % n, b"x") for n in range(10)]
    write_archive(tmp_path / "in.gz", messages)
    return take_inventory(tmp_path / "in.gz")


def taken(content: CountedFile, *, is_damaged: bool = False) -> Input:
    place = (str(content.path), content.key, content.size, content.mtime_ns)
    return Input(*place, content.members, content.total, is_damaged)


def test_an_archive_goes_when_all_of_it_is_in_verified_partitions(
    tmp_path: Path, archived: list[CountedFile]
) -> None:
    output = CompactionOutput(tmp_path / "out")
    done = manifest(CLICKS, taken(archived[0]))
    make(output.final(CLICKS), "new", done)

    plan = deletable(archived, {CLICKS: done}, output, DaySelection())
    changed = delete(plan.contents)

    assert (plan.contents, plan.kept, changed) == (tuple(archived), {}, [])
    assert not archived[0].path.exists()
    assert not index_of(archived[0].path).exists()


def test_an_archive_stays_for_every_reason_there_is(
    tmp_path: Path, archived: list[CountedFile]
) -> None:
    output = CompactionOutput(tmp_path / "out")
    [content] = archived
    good = manifest(CLICKS, taken(content))
    make(output.final(CLICKS), "new", good)

    def reason(done: Manifest | None, content: CountedFile = content) -> str:
        manifests = {} if done is None else {CLICKS: done}
        plan = deletable([content], manifests, output, DaySelection())
        assert plan.contents == ()
        return plan.kept[str(content.path)]

    assert "not all of it is compacted: clicks on 2026-09-21" in reason(None)
    assert "not all of it is compacted" in reason(manifest(CLICKS))
    assert "not all of it is compacted" in reason(good, replace(content, size=1))
    assert "damage" in reason(manifest(CLICKS, taken(content, is_damaged=True)))
    assert "torn" in reason(good, replace(content, damage="it is torn"))
    other = {CLICKS: 10, Slot("clicks", date(2026, 9, 22)): 1}
    assert "2026-09-22" in reason(good, replace(content, messages=other))
    (output.final(CLICKS) / "part-0.zstd.parquet").write_text("shorter" * 2)
    assert "is missing" in reason(good)


def test_a_file_that_may_be_anything_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "README").write_bytes(b"one\n")
    [content] = take_inventory(tmp_path / "README")
    undated = Slot(None, None)
    output = CompactionOutput(tmp_path / "out")
    done = manifest(undated, taken(content))
    make(output.final(undated), "new", done)

    plan = deletable([content], {undated: done}, output, DaySelection())

    assert plan.contents == ()
    assert "so it may not be an archive" in plan.kept[str(content.path)]


def test_an_archive_outside_of_the_selection_is_not_looked_at(
    tmp_path: Path, archived: list[CountedFile]
) -> None:
    plan = deletable(
        archived, {}, CompactionOutput(tmp_path / "out"), DaySelection(topics=("views",))
    )

    assert (plan.contents, plan.kept) == ((), {})


def test_an_archive_that_changed_since_stays(archived: list[CountedFile]) -> None:
    with archived[0].path.open("ab") as file:
        file.write(b"more")

    assert delete(archived) == [str(archived[0].path)]
    assert archived[0].path.exists()
