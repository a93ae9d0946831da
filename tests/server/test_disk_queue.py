"""The files of a disk queue: formats, rotation, syncs, and reading after a crash."""

import errno
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.power_cut import PowerCut

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queue_files import (
    Block,
    DiskWork,
    Done,
    Work,
    encode_length,
    queues_with_files,
)

RECORD = b"r" * 26  # the smallest allowed size
ON_DISK = len(RECORD) + 4
ALL = 1 << 30


def record(number: int) -> bytes:
    return b"%026d" % number


def queue(path: Path, max_bytes: int = 10 * ON_DISK, **more: Any) -> DiskQueue:
    bounds: dict[str, Any] = {"max_bytes_per_file": max_bytes, "max_msg_size": 100}
    bounds |= {"sync_every": 2500, "existing": queues_with_files(path), "log": DaemonLog(None, "")}
    return DiskQueue("t:ch", path, **(bounds | more))


def put_records(disk: DiskQueue, records: Sequence[bytes]) -> None:
    encoded = [encode_length(len(data)) + data for data in records]
    disk.put([Block(b"".join(encoded), list(map(len, encoded)))] if records else [])


class Later(DiskWork):
    """Runs the work of the disk thread in ``catch_up``."""

    def __init__(self) -> None:
        self._given: list[tuple[Work, Done]] = []

    def run(self, work: Work, done: Done) -> None:
        self._given.append((work, done))

    @property
    def count(self) -> int:
        return len(self._given)

    def catch_up(self) -> None:
        while self._given:
            work, done = self._given.pop(0)
            work()
            done(None)


def meta(path: Path) -> str:
    return (path / "t:ch.diskqueue.meta.dat").read_text()


def data_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.0*.dat"))


def test_a_failed_put_keeps_no_record(tmp_path: Path) -> None:
    disk = queue(tmp_path, max_bytes=2 * ON_DISK)
    for size in (25, 127):
        with pytest.raises(OSError, match=rf"invalid message write size \({size}\)"):
            put_records(disk, [RECORD, b"x" * size])
        assert disk.get(9, ALL) == []
    put_records(disk, [record(0)])
    (tmp_path / "t:ch.diskqueue.000001.dat").mkdir()  # so that the file cannot be created
    with pytest.raises(IsADirectoryError):
        put_records(disk, [record(1), record(2)])
    put_records(disk, [record(3)])
    assert (disk.depth, disk.get(9, ALL)) == (2, [record(0), record(3)])


def test_private_files_are_synced_after_sync_every_operations(tmp_path: Path) -> None:
    disk = queue(tmp_path, sync_every=3)
    put_records(disk, [RECORD, RECORD])
    assert data_files(tmp_path) == [path.name for path in tmp_path.iterdir()]
    assert disk.needs_sync
    disk.get(1, ALL)
    assert meta(tmp_path) == f"1\n0,{ON_DISK}\n0,{2 * ON_DISK}\n"
    assert not disk.needs_sync
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    for depth, sync_every in ((2, 0), (3, -1)):  # after each operation
        disk = queue(tmp_path, sync_every=sync_every)
        put_records(disk, [RECORD])
        expected = f"{depth}\n0,{ON_DISK}\n0,{(depth + 1) * ON_DISK}\n"
        assert (meta(tmp_path), disk.needs_sync) == (expected, False)


def test_records_after_the_last_sync_are_read(tmp_path: Path) -> None:
    disk = queue(tmp_path)
    put_records(disk, [record(0), record(1)])
    disk.sync()
    put_records(disk, [record(2)])  # killed after this

    reopened = queue(tmp_path)
    assert reopened.depth == 3
    put_records(reopened, [record(3)])
    assert data_files(tmp_path)[-1] == "t:ch.diskqueue.000001.dat"
    assert reopened.get(9, ALL) == [record(number) for number in range(4)]
    assert (reopened.depth, reopened.has_unread) == (0, False)


@pytest.mark.parametrize("read_count", [0, 25])
def test_files_after_the_write_position_are_read(tmp_path: Path, read_count: int) -> None:
    disk = queue(tmp_path)
    put_records(disk, [record(number) for number in range(10)])
    disk.sync()
    older = meta(tmp_path)
    put_records(disk, [record(number) for number in range(10, 40)])
    disk.get(read_count, ALL)
    # killed after a sync replaced newer positions by older ones
    (tmp_path / "t:ch.diskqueue.meta.dat").write_text(older)
    reopened = queue(tmp_path)
    assert reopened.get(99, ALL) == [record(number) for number in range(read_count // 10 * 10, 40)]
    assert (reopened.depth, reopened.has_unread) == (0, False)


DAMAGED = (b"\0\0\0\x1acut off", b"\xff" * 40)
NO_POSITIONS = (None, b"", b"nonsense", b"1\n2,3\n", b"1\n2,3\n4,x\n")


@pytest.mark.parametrize(
    ("name", "content"),
    [("meta", content) for content in NO_POSITIONS]
    + [("000001", content) for content in (None, *DAMAGED)],
)
def test_a_missing_or_damaged_file_costs_only_its_own_records(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    disk = queue(tmp_path)
    put_records(disk, [record(number) for number in range(30)])
    disk.close()
    path = tmp_path / f"t:ch.diskqueue.{name}.dat"
    intact = 4 if content in DAMAGED else 0
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: intact * ON_DISK] + content)

    reopened = queue(tmp_path)
    assert reopened.depth == 30
    lost = range(10 + intact, 20) if name == "000001" else ()
    assert reopened.get(99, ALL) == [record(n) for n in range(30) if n not in lost]
    assert (reopened.depth, reopened.has_unread) == (0, False)
    assert path.with_name(f"{path.name}.bad").exists() == bool(intact)


@pytest.mark.parametrize("end", ["20,0", "1000000,0", "1000000,7", f"{10**17},0"])
def test_missing_files_are_skipped_in_one_step(tmp_path: Path, end: str) -> None:
    (tmp_path / "t:ch.diskqueue.meta.dat").write_text(f"5\n0,0\n{end}\n")
    kept = tmp_path / "t:ch.diskqueue.000012.dat"
    kept.write_bytes(encode_length(len(RECORD)) + RECORD)
    log, later = Mock(), Later()

    disk = queue(tmp_path, log=log, background=later)

    assert disk.depth == 1
    assert disk.get(9, ALL) == [RECORD]
    put_records(disk, [record(1)])
    assert disk.get(9, ALL) == [record(1)]
    assert (disk.depth, disk.has_unread) == (0, False)
    disk.empty()
    warnings = [call.args[0] for call in log.warn.call_args_list if "are gone" in call.args[0]]
    assert len(warnings) == 2
    assert "files 0 to 11 are gone" in warnings[0]
    assert later.count < 20


def test_a_depth_without_files_becomes_0(tmp_path: Path) -> None:
    (tmp_path / "t:ch.diskqueue.meta.dat").write_text("376793\n2239,0\n2239,0\n")
    disk = queue(tmp_path)
    assert (disk.depth, disk.has_unread) == (0, False)
    disk.close()
    assert meta(tmp_path).startswith("0\n")


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param("30\n9,0\n9,0", id="all files are before the read position"),
        pytest.param("30\n1,0\n2,300", id="one is"),
        pytest.param("30\n0,9999\n2,300", id="the read position is past the end of the file"),
        pytest.param("30\n0,7\n2,300", id="it is within a message"),
        pytest.param("30\n0,9999\n0,300", id="it is past the write position"),
        pytest.param("30\n5,0\n2,300", id="it is in a later file"),
        pytest.param(f"30\n0,0\n{1 << 63},0", id="no program can count so far"),
    ],
)
def test_wrong_positions_remove_no_file(tmp_path: Path, positions: str) -> None:
    """Files that were moved aside earlier already have the next names."""
    disk = queue(tmp_path)
    put_records(disk, [record(number) for number in range(30)])
    disk.close()
    (tmp_path / "t:ch.diskqueue.meta.dat").write_text(positions)
    for number in range(3):
        for name in ("bad", "bad.1"):
            (tmp_path / f"t:ch.diskqueue.00000{number}.dat.{name}").write_bytes(b"older")

    disk = queue(tmp_path)
    contents = disk.get(99, ALL)
    put_records(disk, [record(99)])

    assert disk.get(99, ALL) == [record(99)]
    contents += [path.read_bytes() for path in tmp_path.glob("*.bad.2")]
    assert all(record(number) in b"".join(contents) for number in range(30))
    assert len(list(tmp_path.glob("*.bad"))) == len(list(tmp_path.glob("*.bad.1"))) == 3


@pytest.mark.parametrize("failures", [1, 4, 9])
def test_a_transient_read_error_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    disk = queue(tmp_path)
    put_records(disk, [record(1), record(2)])
    errors, read = [OSError(errno.EIO, "I/O error")] * failures, os.pread

    def pread(*args: int) -> bytes:
        if errors:
            raise errors.pop()
        return read(*args)

    monkeypatch.setattr(os, "pread", pread)
    assert disk.get(9, ALL) == ([record(1), record(2)] if failures < 5 else [])
    assert len(list(tmp_path.glob("*.bad"))) == (failures >= 5)


SIZES = st.lists(st.sampled_from([26, 27, 40, 100]), min_size=1, max_size=15)


@given(
    st.lists(
        st.one_of(SIZES, st.integers(1, 15), st.sampled_from(["reopen", "empty"])), max_size=20
    ),
    st.integers(ON_DISK, 10 * ON_DISK),
)
def test_records_keep_their_order_and_read_files_are_removed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[int] | int | str], max_bytes: int
) -> None:
    """A list puts records of these sizes, and a number gets that many."""
    path = tmp_path_factory.mktemp("queue")
    disk = queue(path, max_bytes=max_bytes)
    largest = max(max_bytes, 4 + 100)  # a record larger than a file gets its own file
    numbers, waiting = count(), list[bytes]()
    for step in steps:
        if isinstance(step, list):
            records = [record(next(numbers)).ljust(size, b"x") for size in step]
            put_records(disk, records)
            waiting += records
        elif isinstance(step, int):
            assert disk.get(step, ALL) == waiting[:step]
            del waiting[:step]
        elif step == "reopen":
            disk.close()
            disk = queue(path, max_bytes=max_bytes)
        else:
            disk.empty()
            assert list(path.iterdir()) == []
            waiting.clear()
        assert (disk.depth, disk.has_unread) == (len(waiting), bool(waiting))
        sizes = [(path / name).stat().st_size for name in data_files(path)]
        assert max(sizes, default=0) <= largest
        assert all(sizes[:-1])
        assert sum(sizes) <= sum(4 + len(data) for data in waiting) + largest
    assert disk.get(1000, ALL) == waiting
    assert list(path.glob("*.bad")) == []
    disk.close()


def test_a_background_sync_does_not_affect_later_operations(tmp_path: Path) -> None:
    later = Later()
    disk = queue(tmp_path, background=later)
    put_records(disk, [record(1)])
    disk.start_sync()
    put_records(disk, [record(2)])
    disk.sync()
    later.catch_up()
    assert meta(tmp_path).startswith("2\n")

    disk.start_sync()
    put_records(disk, [record(3)])
    later.catch_up()
    assert disk.needs_sync
    disk.sync()
    assert meta(tmp_path).startswith("3\n")

    put_records(disk, [record(4), record(5)])
    disk.start_sync()
    disk.empty()
    put_records(disk, [record(6)])
    later.catch_up()
    assert disk.needs_sync
    disk.start_sync()
    disk.empty()
    later.catch_up()
    assert list(tmp_path.iterdir()) == []


def test_reads_and_syncs_without_descriptors_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty: list[DiskQueue] = []
    disk = queue(tmp_path, on_dirty=dirty.append)
    put_records(disk, [RECORD])
    with monkeypatch.context() as patch:
        for name in ("open", "dup"):
            patch.setattr(os, name, Mock(side_effect=OSError(errno.EMFILE, "no descriptor left")))
        assert disk.get(1, ALL) == []
        disk.start_sync()
    assert (dirty, disk.needs_sync) == ([disk, disk], True)
    assert disk.get(1, ALL) == [RECORD]


def test_an_error_of_close_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, close: Callable[[int], None] = os.close) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "some write has failed")

    disk = queue(tmp_path, ON_DISK)
    put_records(disk, [record(0), record(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        disk.undo((1, 0, 1))
        assert disk.get(1, ALL) == [record(0)]
    put_records(disk, [record(2)])
    assert disk.get(1, ALL) == [record(2)]
    disk.close()


def test_a_queued_sync_is_left_to_the_close(tmp_path: Path) -> None:
    ending = Later()
    ending.is_ending = True
    disk = queue(tmp_path, sync_every=1, background=ending)
    put_records(disk, [RECORD])
    ending.catch_up()
    assert disk.needs_sync


@pytest.mark.parametrize(
    ("sync_each", "background"),
    [(1, None), (7, None), (7, Later())],
    ids=["often", "now", "thread"],
)
def test_power_failures_spare_synced_records(
    tmp_path: Path, sync_each: int, background: Later | None
) -> None:
    """As in the Go nsqd, the journal of the file system makes the names of files durable."""
    put: list[bytes] = []
    got: list[bytes] = []
    read_counts: list[int] = []  # the number of records read, after each promise
    with PowerCut(tmp_path, names_with_files=True) as record:
        disk = queue(tmp_path, max_bytes=4 * ON_DISK, sync_every=5, background=background)
        for number in range(40):
            put.append(b"%026d" % number)
            put_records(disk, put[-1:])
            if number % 3 == 2:
                got += disk.get(2, ALL)
            if number % sync_each == sync_each - 1:
                if background is None:
                    disk.sync()
                else:
                    disk.start_sync()
                    background.catch_up()
                assert not disk.needs_sync
                read_counts.append(len(got))
                record.note(len(put))
        disk.close()
        read_counts.append(len(got))

    for promised, cut in record.cuts():
        cut.restore(tmp_path)
        disk = queue(tmp_path, max_bytes=4 * ON_DISK)
        records = disk.get(99, ALL)
        disk.abandon()
        first = f"t:ch.diskqueue.{disk._read_file:06d}.dat"
        assert all(name >= first for name in data_files(tmp_path)), "read files are removed"
        assert records == sorted(records), "each record once, in order"
        assert set(records) <= set(put)
        if promised:  # records that were read before the next promise may be missing
            kept = set(put[: promised[-1]])  # type: ignore[misc]
            missing = kept - set(got[: read_counts[len(promised)]]) - set(records)
            assert not missing, (promised[-1], sorted(missing))
