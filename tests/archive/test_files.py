"""Files of an archive on disk: members, index, crashes at every step, finishing, durability."""

import errno
import fcntl
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from plugins.archives import bodies_at, numbered, parts, text_of, write_archive
from plugins.disks import full, link_within
from plugins.power_cut import PowerCut

from nsqtools.archive import reader
from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import Head, Member, index_of, load_index, part_of
from nsqtools.archive.members import members_of
from nsqtools.archive.part_file import Directories, PartFile, finish_part, recover_parts
from nsqtools.archive.reader import repair, verify
from nsqtools.errors import OutputError
from nsqtools.files import durable
from nsqtools.records.naming import Codec

NAME = "clicks.log.gz"


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    directories = Directories(tmp_path / "out", tmp_path / "work")
    directories.make()
    return directories


def flush(file: PartFile, text: bytes, count: int = 1, ts: int = 7) -> Member:
    file.append(text)
    member = file.end_member(count, ts, ts)
    file.flush(member)
    return member


HEAD = Head("0123456789abcdef" * 2, 17)


def begun(directories: Directories, head: Head | None = None) -> PartFile:
    return PartFile(directories.work / NAME, 0o640, members_of(Codec.GZIP, 6), 0.0, head)


def crashed(directories: Directories) -> tuple[Path, list[Member]]:
    """A file with two durable members whose writer is gone."""
    file = begun(directories)
    members = [flush(file, b"one\n"), flush(file, b"two\nthree\n", count=2)]
    return file.path, members


@pytest.mark.parametrize("above", [0, 1, None])
def test_a_file_that_another_process_uses_is_not_recovered(
    directories: Directories, above: int | None
) -> None:
    """The process locks its folder, a folder above it, or only has the file open for writing."""
    file = begun(directories)
    flush(file, b"one\n")
    (directories.work / ".caf\udce9.log.part").touch()  # a file of another program
    if above is None:
        with file._opened():
            assert recover_parts(directories) == []
    else:
        locks = replace(directories, work=(at := file.path.parents[above])).locks()
        assert locks.take(str(file.path.relative_to(at)))
        for place in file.path.parents[:2]:
            assert recover_parts(replace(directories, work=place)) == []
        locks.close()

    assert len(recover_parts(directories)) == 1


def test_a_file_that_another_process_finished_is_not_appended_to(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = begun(directories)
    flush(file, b"one\n")
    (final,) = recover_parts(directories)
    with pytest.raises(OSError, match="another process has removed or finished it"):
        flush(file, b"two\n")
    (directories.work / part_of(final).name).write_bytes(b"another file of this name")
    assert file.has_vanished
    assert text_of(final) == b"one\n"
    part_of(file.path).unlink()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=BlockingIOError))
    with pytest.raises(FileExistsError, match="is being recovered by another process"):
        begun(directories)


def test_a_finished_file_never_replaces_another_and_a_lost_index_is_rebuilt(
    directories: Directories,
) -> None:
    path, members = crashed(directories)
    index_of(path).unlink()
    (directories.output / NAME).write_bytes(b"somebody else's")
    (directories.output / "clicks-000001.log.gz").symlink_to("nowhere")
    (final,) = recover_parts(directories)
    assert final.name == "clicks-000002.log.gz"
    assert text_of(final) == b"one\ntwo\nthree\n"
    assert (directories.output / NAME).read_bytes() == b"somebody else's"
    assert not index_of(directories.output / NAME).exists()
    index = load_index(index_of(final))
    assert [member[:3] for member in index.members] == [member[:3] for member in members]
    assert parts(directories.work) == []


def test_a_directory_of_another_user_is_refused_with_a_remedy_that_helps(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
    with pytest.raises(OutputError, match=r"cannot create files in .* \(denied\)") as refused:
        directories.try_out()
    assert refused.value.hint == "Give a directory in which this user may create files."


def test_a_full_disk_while_a_lost_index_is_rebuilt_costs_no_message(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = crashed(directories)
    index_of(path).unlink()
    monkeypatch.setattr(os, "write", full)
    assert recover_parts(directories) == []
    monkeypatch.undo()

    (final,) = recover_parts(directories)
    assert text_of(final) == b"one\ntwo\nthree\n"
    assert parts(directories.work) == []


def test_a_file_that_does_not_fit_on_the_disk_keeps_its_name(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = crashed(directories)
    copy, final = durable.copy_file, directories.output / NAME

    def copy_index(source: Path, *args: Path) -> None:
        (full if source == part_of(path) else copy)(source, *args)

    monkeypatch.setattr(os, "link", link_within)
    monkeypatch.setattr(durable, "copy_file", copy_index)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            finish_part(path, directories)
    monkeypatch.undo()

    assert finish_part(path, directories) == final
    assert sorted(directories.output.iterdir()) == [index_of(final), final]


def test_the_head_survives_a_failure_recovery_and_repair(directories: Directories) -> None:
    file = begun(directories, HEAD)
    members = [flush(file, b"one\n")]
    with part_of(file.path).open("ab") as data, index_of(file.path).open("ab") as index:
        data.write(b"half of a member")
        index.write(b"half of a line")
    file.roll_back()
    members.append(flush(file, b"two\n"))
    with index_of(file.path).open("ab") as index:
        index.write(b"%d 99 1 7 7\nand half of another line" % file.size)  # a line without a member

    (final,) = recover_parts(directories)

    assert load_index(index_of(final)) == (HEAD, members)
    assert text_of(final) == b"one\ntwo\n"
    with final.open("ab") as data:
        data.write(b"\x1f\x8brubbish")
    assert repair(*find_archives([final])) == 2
    index = load_index(index_of(final))
    assert (index.head, len(index.members)) == (HEAD, 2)


@pytest.mark.parametrize("suffix", ["gz", "arrow"])
@pytest.mark.parametrize(("where", "step"), [(Path, "rename"), (reader, "replace_file")])
def test_a_killed_repair_can_be_repeated(
    tmp_path: Path, where: object, step: str, suffix: str
) -> None:
    path = write_archive(
        tmp_path / f"a.{suffix}", *([message, message] for message in numbered(1, 6))
    )
    data = path.read_bytes()
    second = find_archives([path])[0].members[1]  # type: ignore[index]
    path.write_bytes(data[: second.offset] + bytes(second.length) + data[second.end :])
    damaged = path.read_bytes()
    killed = patch.object(where, step, side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        repair(find_archives([path])[0])

    assert repair(find_archives([path])[0]) == 8
    assert verify(find_archives([path])[0], lambda *problem: pytest.fail(str(problem))) == 8
    assert damaged in [path.read_bytes() for path in tmp_path.glob(".a*.damaged")]


@pytest.mark.parametrize("index", [b"", b"wri", b"writer 0123", HEAD.encode()[:-1]])
def test_a_file_without_members_is_removed(directories: Directories, index: bytes) -> None:
    for call in ("write", "fsync"):
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left"):
                begun(directories, HEAD)
        assert list(directories.work.iterdir()) == []
    begun(directories)
    index_of(directories.work / NAME).write_bytes(index)
    assert recover_parts(directories) == []
    assert list(directories.work.iterdir()) == []


def test_the_second_of_two_concurrent_repairs_changes_nothing(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.log", numbered(0, 2), numbered(2, 4))
    path.write_bytes(path.read_bytes()[:-10])
    [archive] = find_archives([path])
    assert repair(archive) == 3

    with pytest.raises(OutputError, match="it changed while it was read"):
        repair(archive)
    assert len(bodies_at(path)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"a.log", ".a.log.index", ".a.log.damaged"}


def test_a_power_cut_during_a_repair_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\nthr")
    (archive,) = find_archives([path])
    with PowerCut(tmp_path) as record:
        assert repair(archive) == 2
        record.note("repaired")
    for promised, cut in record.cuts():
        assert cut.files["a.log"] in [b"one\ntwo\n"] + [b"one\ntwo\nthr"] * (not promised)
        index = [index_of(path).read_bytes()] + [None] * (not promised)
        assert cut.files.get(".a.log.index") in index


def test_bare_bodies_with_another_delimiter_are_not_removed_by_a_repair(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\0two\0thr")
    (archive,) = find_archives([path])
    with pytest.raises(OutputError, match=r"cannot repair .*it has no b'\\n'"):
        repair(archive)
    assert path.read_bytes() == b"one\0two\0thr"
    assert repair(archive, b"\0") == 2
    assert find_archives([path])[0].messages == 2  # counted by its index


def test_a_repair_that_the_disk_refuses_names_the_file(small_disk: Path) -> None:
    path = small_disk / "a.log"
    path.write_bytes(b"one\ntwo\nthr")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OutputError) as caught:
        repair(*find_archives([path]))
    assert str(caught.value) == f"cannot repair {path} (Read-only file system)"
