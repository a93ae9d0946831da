"""What an archive relies on after a power failure: the order of writes, syncs, names and FINs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plugins.archives import Writer
from plugins.disk_calls import DiskCalls

from nsqtools.archive.codecs import Plain
from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import part_of
from nsqtools.archive.part_file import Directories, PartFile, recover
from nsqtools.archive.repair import repair
from nsqtools.protocol.message import WireMessage

MESSAGES = [WireMessage(1, 1, b"%016x" % number, b"body") for number in range(3)]
PART, INDEX = ".a.log.part", ".a.log.index"


def test_the_index_names_only_bytes_that_are_on_disk(tmp_path: Path, disk_calls: DiskCalls) -> None:
    """A member, its sync, its line in the index, and the sync of that: in this order."""
    file = PartFile(tmp_path / "a.log", 0o640, Plain, now_s=0.0)
    file.append(b"line\n")
    member = file.end_member(1, 1, 1)
    disk_calls.seen.clear()
    file.flush(member)

    assert disk_calls.seen == [
        ("write", PART),
        ("fdatasync", PART),
        ("write", INDEX),
        ("fdatasync", INDEX),
    ]


def test_a_new_file_has_a_durable_name_before_it_is_used(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    PartFile(tmp_path / "a.log", 0o640, Plain, now_s=0.0)

    assert disk_calls.seen[-1] == ("fsync", tmp_path.name)


def test_a_finished_file_is_named_after_its_index_and_its_hidden_names_go_last(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    writer = Writer(tmp_path)
    final = writer.write(MESSAGES, name="a.log.gz")
    disk_calls.seen.clear()
    writer.finish()

    assert disk_calls.seen[:3] == [
        ("link", f".{final.name}.index"),  # there already, in the same directory
        ("link", final.name),
        ("fsync", tmp_path.name),
    ]
    assert disk_calls.seen.index(("unlink", part_of(final).name)) > 2


def test_a_file_from_another_file_system_is_on_disk_before_it_has_its_name(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    work = Path("/dev/shm") / f"nsqtools-{os.getpid()}"
    if not work.parent.is_dir() or work.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    work.mkdir()
    try:
        writer = Writer(work, output=tmp_path)
        writer.write(MESSAGES, name="a.log.gz")
        disk_calls.seen.clear()
        writer.finish()
    finally:
        for path in work.iterdir():
            path.unlink()
        work.rmdir()

    copy, name = ".a.log.gz.copy", "a.log.gz"
    index = ".a.log.gz.index"
    for wanted in (
        [("fsync", copy), ("link", name), ("fsync", tmp_path.name), ("unlink", f".{name}.part")],
        [("fsync", f".{index}.copy"), ("link", index), ("fsync", copy)],
    ):
        calls = [call for call in disk_calls.seen if call in wanted]
        at = [len(calls) - 1 - calls[::-1].index(call) for call in wanted]
        assert at == sorted(at), (wanted, disk_calls.seen)


def test_what_is_recovered_is_on_disk_before_it_has_its_name(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    file = PartFile(tmp_path / "a.log", 0o640, Plain, now_s=0.0)
    file.append(b"line\n")
    file.flush(file.end_member(1, 1, 1))
    with part_of(file.path).open("ab") as torn:
        torn.write(b"torn")
    disk_calls.seen.clear()

    assert recover(Directories(tmp_path, tmp_path)) == [tmp_path / "a.log"]
    wanted = [("ftruncate", PART), ("fsync", PART), ("fsync", INDEX), ("link", "a.log")]
    assert disk_calls.order(*wanted) == wanted


def test_a_repaired_file_is_on_disk_before_it_replaces_the_damaged_one(
    tmp_path: Path, disk_calls: DiskCalls
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n")
    (archive,) = find_archives([path])
    disk_calls.seen.clear()
    assert repair(archive) == 2

    wanted = [("fsync", ".a.log.copy"), ("rename", "a.log"), ("fsync", tmp_path.name)]
    calls = [call for call in disk_calls.seen if call in wanted]
    assert calls[0] == wanted[0]
    assert calls[-2:] == wanted[1:]
