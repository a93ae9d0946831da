"""Which files there are: looked at again and again, while they come, move and go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from plugins.archives import Writer, write_archive

from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import TimeRange, index_of, owner_of, part_of
from nsqtools.archive.part_file import Directories, recover
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives import archive_files
from nsqtools.spark.archives.archive_files import Listing
from nsqtools.spark.archives.damage import ArchiveDamage
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings

MESSAGE = WireMessage(10**18, 1, b"%016x" % 1, b"x")


def listing_of(*roots: Path) -> Listing:
    return Listing(lambda: list(roots), None)


def paths(listing: Listing) -> list[str]:
    return [file.path.name for file in listing.files([].append).values()]


def test_a_directory_that_did_not_change_is_not_read_again_and_one_that_did_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[Path] = []
    scandir = os.scandir
    monkeypatch.setattr(
        archive_files.os, "scandir", lambda path: scanned.append(path) or scandir(path)
    )
    write_archive(tmp_path / "a.log.gz", [MESSAGE])
    os.utime(tmp_path, (time.time() - 60,) * 2)  # nothing has changed for a minute
    listing = listing_of(tmp_path)

    assert paths(listing) == ["a.log.gz"]
    assert paths(listing) == ["a.log.gz"]
    assert len(scanned) == 1

    write_archive(tmp_path / "b.log.gz", [MESSAGE])
    assert paths(listing) == ["a.log.gz", "b.log.gz"]
    (tmp_path / "a.log.gz").unlink()
    assert paths(listing) == ["b.log.gz"]

    for change in ((tmp_path / "old").mkdir, (tmp_path / "old").rmdir):
        change()
        assert paths(listing) == ["b.log.gz"]
    assert set(listing._folders) == {tmp_path}


def test_a_directory_that_changed_just_now_is_read_again(tmp_path: Path) -> None:
    listing = listing_of(tmp_path)
    os.utime(tmp_path, (time.time() + 60,) * 2)  # just now, also for a listing that is late
    assert paths(listing) == []
    changed_ns = tmp_path.stat().st_mtime_ns

    (tmp_path / "a.log").touch()
    os.utime(tmp_path, ns=(changed_ns, changed_ns))  # within the clock's grain

    assert paths(listing) == ["a.log"]


def test_links_to_directories_are_followed_and_each_directory_is_read_once(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "day", root / "z", other, tmp_path / "b"):
        write_archive(folder / "x.log.gz", [MESSAGE], is_finished=False)
    (root / "a-other").symlink_to(other)
    (root / "b").symlink_to(tmp_path / "b")
    (root / "b" / "cycle").symlink_to(root)
    (root / "day" / "self").symlink_to(".")
    (root / "latest").symlink_to("day")
    (root / "nowhere").symlink_to("nothing")
    (root / "loop").symlink_to("loop")
    expected = [root / name / "x.log.gz" for name in ("a-other", "b", "day", "z")]

    for step in ("in progress", "finished"):
        told: list[ArchiveDamage] = []
        listed = listing_of(root).files(told.append).values()
        assert [Path(file.shown) for file in listed] == expected
        found = [each.path for each in find_archives([root])]
        assert sorted(map(owner_of, found) if step == "in progress" else found) == expected
        assert not told
        if step == "in progress":
            assert sorted(recover(Directories(root, root))) == expected


def test_while_a_file_is_being_finished_it_is_there_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    path = writer.write([MESSAGE])
    os.link(part_of(path), path)

    (file,) = listing_of(tmp_path).files([].append).values()

    assert file.path == path


def test_a_name_in_progress_that_another_file_took_over_is_noticed(tmp_path: Path) -> None:
    listing = listing_of(tmp_path)
    first = Writer(tmp_path)
    path = first.write([MESSAGE], name="a.log.gz")
    inode = part_of(path).stat().st_ino
    assert list(listing.files([].append)) == [(first.writer, 1)]

    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    second = Writer(elsewhere)
    other = second.write([MESSAGE, MESSAGE], name="a.log.gz")
    part_of(path).write_bytes(part_of(other).read_bytes())  # the same inode, as it may happen
    index_of(path).write_bytes(index_of(other).read_bytes())
    assert part_of(path).stat().st_ino == inode

    files = listing.files([].append)

    assert list(files) == [(second.writer, 1)]
    (file,) = files.values()
    assert [member.messages for member in file.members()] == [2]


def test_a_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a.log").touch()
    locked = tmp_path / "locked"
    locked.mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(archive_files.os, "scandir", refuse)
    told: list[ArchiveDamage] = []

    [file] = listing_of(tmp_path).files(told.append).values()
    assert file.path.name == "a.log"
    assert set(told) == {ArchiveDamage(str(locked), 0, "cannot be listed (Permission denied)")}


def test_files_of_other_topics_and_times_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    decode = archive_files.decode_index
    monkeypatch.setattr(
        archive_files,
        "decode_index",
        lambda data, *rest: decoded.append(data) or decode(data, *rest),
    )
    for topic in ("clicks", "orders"):
        for hour in range(4):
            times = [10**18 + (3600 * hour + n) * 10**9 for n in range(60)]
            members = [[WireMessage(ns, 1, b"%016x" % ns, b"x")] for ns in times]
            write_archive(tmp_path / f"topic={topic}" / f"{hour}.gz", *members, topic=topic)
    hour_3 = TimeRange(10**18 + 3 * 3600 * 10**9, 10**18 + 3 * 3600 * 10**9 + 10**9)
    settings = ReadSettings((str(tmp_path),), topics=frozenset(["clicks"]), within=hour_3)

    [partition] = plan_batch(settings)

    [wanted] = partition
    assert (wanted.shown, len(wanted.members)) == (str(tmp_path / "topic=clicks" / "3.gz"), 1)
    assert sum(len(data) > 1000 for data in decoded) == 1


def test_a_file_that_grew_after_its_total_is_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.log.gz", [MESSAGE])
    path.write_bytes(2 * path.read_bytes())
    late = ReadSettings((str(tmp_path),), within=TimeRange(MESSAGE.timestamp_ns + 1))

    assert [len(each) for each in plan_batch(late)] == [1]
