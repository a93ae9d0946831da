"""Vacuum and erasure remove exactly what they should from a table, despite any failure."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from plugins.archives import BEGIN_NS, bodies_at, killing, write_archive
from plugins.cli import RunNsq
from plugins.object_store import Bucket

from nsqtools.archive import erasure
from nsqtools.archive.compaction import Compaction
from nsqtools.archive.compaction_jobs import in_parallel
from nsqtools.archive.compaction_plan import Selection
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.erasure import Erasure
from nsqtools.archive.finding import find_archives, find_inputs
from nsqtools.archive.layout import Head, index_of, part_of
from nsqtools.archive.lease import NumberedObjects
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import verify
from nsqtools.archive.replacements import LOCK
from nsqtools.archive.slices import Settings
from nsqtools.archive.table import convert
from nsqtools.archive.table_writer import TablePlan
from nsqtools.archive.vacuum import Vacuum, day_before
from nsqtools.errors import OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many

DAY_S = 86_400
BEGIN_S = BEGIN_NS // 10**9


def land(archive: Path, output: str, *, delta: bool = True) -> None:
    plan = TablePlan(output, delta, "h")
    drafts = archive if archive.is_dir() else archive.parent
    assert all(not problem for *_, problem, _ in convert(find_archives([archive]), plan, drafts))


def write_days(folder: Path, days: int) -> None:
    """Write two archives of the same days, each with one message a day."""
    for part in range(2):
        messages = [
            [WireMessage(BEGIN_NS + day * DAY_S * 10**9 + part, 1, b"%016x" % part, b"%d" % day)]
            for day in range(days)
        ]
        write_archive(folder / f"{part}.gz", *messages)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: Bucket) -> Place:
    return parse_place(str(tmp_path / "t") if request.param == "local" else f"{bucket.url}/t")


def vacuum(place: Place, keep_s: float, now_s: float, drop_s: float | None = None) -> Vacuum:
    first_day = None if drop_s is None else day_before(now_s, drop_s)
    vacuum = Vacuum(place, keep_s, now_s, first_day)
    vacuum.run()
    return vacuum


def counts(vacuum: Vacuum) -> tuple[int, int]:
    return len(vacuum.dropped), len(vacuum.deletable)


def test_vacuum_deletes_only_files_that_were_removed_long_ago(tmp_path: Path, place: Place) -> None:
    write_days(tmp_path / "a", 3)
    for archive in sorted((tmp_path / "a").glob("*.gz")):
        land(archive, str(place))
    compaction = Compaction(
        find_inputs([place]), None, Selection(open_days=True), Settings(), is_delta=True
    )
    with compaction.locked():
        compaction.plan()
        compaction.run(in_parallel(1))
    # A landing has written this file but not committed it.
    place.put("topic=clicks/date=2026-09-21/later.parquet", b"PAR1")
    everything = bodies_at(place.url)
    now_s = time.time()

    assert counts(vacuum(place, DAY_S, now_s)) == (0, 0)
    assert len(DeltaTable(place.url, storage_options=place.for_delta_rs()).history()) > 1
    later = vacuum(place, DAY_S, now_s + 2 * DAY_S)
    assert counts(later) == (0, 6)
    assert later.log
    assert bodies_at(place.url) == everything
    assert "topic=clicks/date=2026-09-21/later.parquet" in {entry.name for entry in place.list()}
    land(tmp_path / "a", str(place))  # The log still has their commits.
    assert bodies_at(place.url) == everything

    days = vacuum(place, DAY_S, BEGIN_S + 400 * DAY_S, 399 * DAY_S)
    assert counts(days) == (1, 1)  # By then the file without a commit is old as well.
    assert bodies_at(place.url) == [b"1", b"1", b"2", b"2"]
    # Readers that use only the checkpoint, and later writers, see the same files.
    assert len(DeltaCatalog(place.url).files()) == 2
    assert counts(vacuum(place, 0, time.time() + 1)) == (0, 1)
    assert bodies_at(place.url) == [b"1", b"1", b"2", b"2"]


def test_days_of_a_folder_of_parquet_stay_dropped(tmp_path: Path, place: Place) -> None:
    write_days(tmp_path / "a", 3)
    land(tmp_path / "a", str(place), delta=False)

    result = vacuum(place, 0, BEGIN_S + 400 * DAY_S, 399 * DAY_S)
    assert counts(result) == (2, 0)
    # As by an archiver that was killed before it recorded the landing.
    land(tmp_path / "a", str(place), delta=False)
    assert bodies_at(place.url) == [b"1", b"1", b"2", b"2"]


STEPS = """
from nsqtools.archive import vacuum
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.place import LocalPlace

around(DeltaCatalog, "commit", "add_checkpoint")
around(LocalPlace, "put", "delete")
"""


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    "steps", [(3, 7), pytest.param(range(60), marks=pytest.mark.slow, id="all")]
)
def test_a_vacuum_killed_at_any_step_can_be_repeated(
    tmp_path: Path, delta: bool, steps: tuple[int, ...]
) -> None:
    write_days(tmp_path / "a", 2)
    table = tmp_path / "t"
    for archive in sorted((tmp_path / "a").glob("*.gz")):
        land(archive, str(table), delta=delta)
    command = ["archive", "vacuum", table, "--yes", "--keep", "0s", "--drop-older-than"]
    command.append(f"{int(time.time() - BEGIN_S - DAY_S)}s")
    with killing(STEPS) as killed_at:
        for step in steps:
            if not killed_at(step, *command):
                break
            assert bodies_at(table) in ([b"0", b"0", b"1", b"1"], [b"1", b"1"])
        for _ in range(2):
            assert not killed_at(10_000, *command)
            assert bodies_at(table) == [b"1", b"1"]
    assert len(list(table.rglob("[!.]*.parquet"))) == 2 + delta


def test_a_table_whose_files_are_not_listed_is_left_alone(tmp_path: Path) -> None:
    """The log may have other names for the files than the disk, or files of another table."""
    write_days(tmp_path / "a", 1)
    land(tmp_path / "a", str(tmp_path / "t"))
    next((tmp_path / "t").rglob("h-*.parquet")).unlink()
    with pytest.raises(OutputError, match=r"lacks the file .* of its log"):
        vacuum(parse_place(str(tmp_path / "t")), 0, time.time())


def test_vacuum_confirms_prints_its_plan_and_refuses_archives(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    write_days(tmp_path / "a", 1)
    land(tmp_path / "a", str(tmp_path / "t"))
    for entry in (tmp_path / "t" / "_delta_log").iterdir():
        os.utime(entry, (0, 0))
    table = ["archive", "vacuum", str(tmp_path / "t")]
    assert "no terminal to ask on" in run_nsq(table).err
    plan = run_nsq([*table, "--dry-run", "--json", "--keep", "1d"])
    assert b'"log_entries": 2' in plan.out
    assert run_nsq([*table, "--yes"]).status == 0
    assert bodies_at(tmp_path / "t") == [b"0", b"0"]
    refused = run_nsq(["archive", "vacuum", str(tmp_path / "a"), "--yes"])
    assert (refused.status, "is no table" in refused.err) == (2, True)


# -- erasure ------------------------------------------------------------------------------------


def users(*numbers: int) -> list[WireMessage]:
    return [
        WireMessage(BEGIN_NS + n * 10**9, 1, b"%016x" % n, b'{"user": %d}' % (n % 5))
        for n in numbers
    ]


def make_places(folder: Path) -> list[Path]:
    """The same messages as archives of several kinds, a folder of Parquet and a Delta table."""
    archives, places = folder / "a", [folder / name for name in ("a", "parquet", "delta")]
    first, second = users(*range(2, 12)), users(*range(12, 20))
    write_archive(archives / "x.log.gz", first, second, head=Head("a" * 32, 1))
    write_archive(archives / "y.log.arrow", users(*range(20, 30)), head=Head("a" * 32, 2))
    (archives / "plain.log").write_bytes(encode_many("clicks", "n:1", users(2, 4)))
    (archives / "bare.txt").write_bytes(b'{"user": 2}\n{"user": 3}\n')
    for place in places[1:]:
        land(archives / "x.log.gz", str(place), delta=place.name == "delta")
    return places


ERASE = ["archive", "erase", "--where", ".user == 2", "--yes"]
ERASURE_STEPS = """
from nsqtools.archive import erasure
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.place import LocalPlace

around(erasure, "_finish_archive", "_put_alike", "publish_file")
around(DeltaCatalog, "commit", "add_checkpoint")
around(LocalPlace, "put", "delete", "move")
"""


@pytest.mark.parametrize(
    "steps", [(1, 9, 20), pytest.param(range(90), marks=pytest.mark.slow, id="all")]
)
def test_an_erasure_killed_at_any_step_can_be_repeated(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    places = make_places(tmp_path)
    bodies_of_places = [bodies_at(place) for place in places]
    remaining = [[body for body in bodies if b"2" not in body] for bodies in bodies_of_places]
    inode = (tmp_path / "a" / "x.log.gz").stat().st_ino
    with killing(ERASURE_STEPS) as killed_at:
        for step in steps:
            if not killed_at(step, *ERASE, *places):
                break
        assert not killed_at(10_000, *ERASE, *places)

    assert [bodies_at(place) for place in places] == remaining
    [archive] = find_archives([tmp_path / "a" / "x.log.gz"])
    assert archive.head is not None
    assert verify(archive, lambda *problem: pytest.fail(str(problem))) == 14
    assert (tmp_path / "a" / "x.log.gz").stat().st_ino != inode
    # No earlier version is left, and no landing restores it.
    assert len(list(tmp_path.rglob("*.parquet"))) == 2 + 1  # two data files, and the checkpoint
    assert not list(tmp_path.rglob("*.erase"))
    for place in places[1:]:
        list(convert(find_archives([archive.path]), plan_of(place), tmp_path))
    assert [bodies_at(place) for place in places] == remaining


@pytest.mark.parametrize("command", [["convert", "--topic", "raw"], ["compact", "--open-days"]])
def test_what_an_erasure_leaves_of_a_file_without_an_index_does_not_count_as_new(
    tmp_path: Path, run_nsq: RunNsq, command: list[str]
) -> None:
    archives, table = tmp_path / "a", tmp_path / "t"
    archives.mkdir()
    (archives / "messages.log").write_bytes(encode_many("clicks", "n:1", users(1, 2, 3, 4)))
    (archives / "bare.log").write_bytes(b"".join(b'{"user": %d}\n' % n for n in (1, 2, 3, 4)))
    to_table = ["archive", *command, str(archives), "-o", str(table)]
    assert run_nsq(to_table).status == 0

    for number in (2, 3):  # The second time, the file has already been replaced.
        erase = ["archive", "erase", "--where", f".user == {number}", "--yes"]
        assert run_nsq([*erase, str(archives), str(table)]).status == 0

    assert run_nsq(to_table).status == 0
    assert bodies_at(table) == [b'{"user": 1}'] * 2 + [b'{"user": 4}'] * 2
    # A file that another program writes under the name is new.
    (archives / "messages.log").write_bytes(encode_many("clicks", "n:1", users(6)))
    assert run_nsq(to_table).status == 0
    assert bodies_at(table) == [b'{"user": 1}'] * 3 + [b'{"user": 4}'] * 2


def test_an_erasure_reaches_the_files_of_a_killed_compaction(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    table, compact = tmp_path / "t", ["archive", "compact", "--open-days"]
    for n in (2, 7):
        land(write_archive(tmp_path / f"{n}.gz", users(n, n + 1)), str(table))
    steps = 'from nsqtools.archive import compaction, slices\naround(slices, "publish_file")'
    with killing(steps) as killed_at:
        assert killed_at(1, *compact, table)
    [of_compaction] = table.rglob("compacted-*.parquet")
    # A landing that is not complete yet.
    landing = of_compaction.with_name("web1-1-0.parquet")
    landing.write_bytes(of_compaction.read_bytes())

    erased = run_nsq([*ERASE, str(table)])

    assert not of_compaction.exists()
    assert (erased.status, f"{landing} may keep messages: a writer may" in erased.err) == (6, True)
    landing.unlink()
    assert run_nsq([*ERASE, str(table)]).status == 0
    assert bodies_at(table) == [b'{"user": 3}'] * 2


def plan_of(place: Path) -> TablePlan:
    return TablePlan(str(place), place.name == "delta", "h")


def test_messages_are_erased_from_a_bucket(tmp_path: Path, bucket: Bucket, run_nsq: RunNsq) -> None:
    archive, *_ = make_places(tmp_path)
    for path in (archive / "x.log.gz", index_of(archive / "x.log.gz")):
        bucket.storage.put_file(f"a/{path.name}", path)
    places = [f"{bucket.url}/{name}" for name in ("a", "parquet", "delta")]
    for place in places[1:]:
        land(archive / "x.log.gz", place, delta=place.endswith("delta"))
    bodies = bodies_at(places[0])

    result = run_nsq([*ERASE, *places])
    assert (result.status, b"12 messages erased of" in result.err.encode()) == (0, True)
    for place in places:
        assert bodies_at(place) == [body for body in bodies if b"2" not in body]
    assert len([name for name in bucket.names() if name.endswith(".parquet")]) == 3


@pytest.mark.parametrize("delta", [False, True])
def test_an_erasure_and_a_vacuum_that_lost_the_lock_change_nothing(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    place = parse_place(f"{bucket.url}/t")
    write_days(tmp_path / "a", 2)
    land(tmp_path / "a", str(place), delta=delta)
    everything = bodies_at(place.url)
    erasure_run = Erasure(find_inputs([place]), lambda message: message.body == b"1")
    erasure_run.plan()

    def then_another_run_takes_the_lock(step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*arguments: Any) -> Any:
            result = step(*arguments)
            numbers = NumberedObjects(place / LOCK)
            numbers.number = numbers.latest()
            numbers.append(b'{"released": true}')
            return result

        return taken

    steps: list[tuple[Any, str, Callable[[], object]]] = [
        (erasure, "draft_for", erasure_run.run),
        (Vacuum, "plan", lambda: vacuum(place, 0, BEGIN_S + 400 * DAY_S, 399 * DAY_S)),
    ]
    for owner, name, run in steps:
        step = then_another_run_takes_the_lock(getattr(owner, name))
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, step)
            with pytest.raises(OutputError, match="another run writes to"):
                run()
        assert bodies_at(place.url) == everything


def test_nothing_is_erased_unless_every_message_can_be_evaluated(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    archive, *_ = make_places(tmp_path)
    everything = bodies_at(archive)
    assert "no terminal to ask on" in run_nsq([*ERASE[:-1], str(archive)]).err
    odd = archive / "odd.log"
    odd.write_bytes(encode_many("orders", "n:1", [WireMessage(1, 1, b"%016x" % 1, b"no JSON")]))
    refused = run_nsq([*ERASE, str(archive)])
    assert (refused.status, f"cannot judge message 1 {1:016x} of {odd}" in refused.err) == (
        1,
        True,
    )
    odd.unlink()
    assert bodies_at(archive) == everything

    part = part_of(archive / "now.log")
    part.write_bytes(encode_many("clicks", "n:1", users(7)))
    index_of(archive / "now.log").write_bytes(b"0 %d 1 1 1\n" % part.stat().st_size)
    (archive / ".x.log.gz.damaged").write_bytes(b"x")
    write_archive(tmp_path / "delta/.nsq-log/x.log", users(2))
    partly = run_nsq([*ERASE, str(archive), str(tmp_path / "delta")])
    assert partly.status == 6
    assert ".nsq-log/x.log may keep messages: it may land" in partly.err
    assert f"{part} may keep messages: it is in progress" in partly.err
    assert ".x.log.gz.damaged may keep messages: it is a copy" in partly.err
