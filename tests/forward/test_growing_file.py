"""Files as nsq_to_file writes them, without its faults: torn tails, full disks, two writers."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from nsqtools.forward.growing_file import (
    GrowingFile,
    GrowingFileSettings,
    publish_orphans,
)
from nsqtools.records.naming import FileNaming


def settings(output: Path, work: Path | None = None, **more: object) -> GrowingFileSettings:
    naming = FileNaming("<TOPIC><REV>.log", extension=".gz" if more.get("gzip_level") else "")
    return GrowingFileSettings(output, work or output, naming, **more)  # type: ignore[arg-type]


def write(file: GrowingFile, *bodies: bytes) -> None:
    file.write(list(bodies), 0.0)
    file.sync()


def test_a_torn_line_is_cut_off_before_anything_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "t.log"
    path.write_bytes(b"whole\n" + b"x" * 100_000)
    file = GrowingFile("t", settings(tmp_path))
    write(file, b"next")
    file.close()

    assert path.read_bytes() == b"whole\nnext\n"


def test_what_was_not_synced_is_taken_back_after_an_error(tmp_path: Path) -> None:
    file = GrowingFile("t", settings(tmp_path))
    write(file, b"synced")
    file.write([b"half of a li"], 0.0)
    file.roll_back()
    write(file, b"after it")
    file.close()

    assert (tmp_path / "t.log").read_bytes() == b"synced\nafter it\n"


@pytest.mark.parametrize("level", [0, 6])
def test_a_second_writer_takes_the_next_rev(tmp_path: Path, level: int) -> None:
    both = [GrowingFile("t", settings(tmp_path, gzip_level=level)) for _ in range(2)]
    for number, file in enumerate(both):
        write(file, b"%d" % number)
    for file in both:
        file.close()

    assert len(list(tmp_path.iterdir())) == 2


def test_each_sync_is_a_whole_gzip_member(tmp_path: Path) -> None:
    file = GrowingFile("t", settings(tmp_path, gzip_level=6))
    write(file, b"one")
    write(file, b"two")
    path = tmp_path / "t-000000.log.gz"

    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"  # while it is open
    file.close()


def test_size_is_of_text_and_overshot_by_one_message(tmp_path: Path) -> None:
    file = GrowingFile("t", settings(tmp_path, rotate_size=5))
    write(file, *(b"%d" % number for number in range(6)))
    file.close()

    texts = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert texts == [b"0\n1\n2\n", b"3\n4\n5\n"]


def test_files_of_the_work_dir_appear_whole_and_replace_nothing(tmp_path: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "work"
    for folder in (output, work):
        folder.mkdir()
    (output / "t-000000.log").write_text("another\n")
    file = GrowingFile("t", settings(output, work))
    write(file, b"one")
    assert [path.name for path in output.iterdir()] == ["t-000000.log"]
    file.close()

    assert (output / "t-000001.log").read_bytes() == b"one\n"
    assert (output / "t-000000.log").read_text() == "another\n"
    assert list(work.iterdir()) == []


def test_what_a_crash_left_in_the_work_dir_is_recovered(tmp_path: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "work"
    for folder in (output, work):
        folder.mkdir()
    (work / "t-000000.log").write_bytes(b"finished\ntor")
    member = gzip.compress(b"finished\n")
    (work / "u-000000.log.gz").write_bytes(member + gzip.compress(b"torn")[:-3])
    (output / "t-000000.log").write_text("another\n")
    in_use = GrowingFile("v", settings(output, work))
    write(in_use, b"of a running process")

    placed = publish_orphans(settings(output, work))
    assert [path.name for path in placed] == ["t-000001.log", "u-000000.log.gz"]
    assert placed[0].read_bytes() == b"finished\n"
    assert placed[1].read_bytes() == member
    assert [path.name for path in work.iterdir()] == ["v-000000.log"]
    in_use.close()


def test_a_symlink_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("precious\n")
    output = tmp_path / "out"
    output.mkdir()
    os.symlink(target, output / "t.log")
    file = GrowingFile("t", settings(output))

    with pytest.raises(OSError, match="symbolic link"):
        file.write([b"x"], 0.0)
    assert target.read_text() == "precious\n"
