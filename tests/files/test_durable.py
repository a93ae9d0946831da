"""Replace files atomically, without following links or leaving temporary files."""

import os
from pathlib import Path

import pytest

from nsqtools.files import durable
from nsqtools.files.durable import NewestContent, link_file, remove_temporaries, replace_file
from nsqtools.files.opening import NotRegularError, open_to_append, try_lock


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_disk_that_fills_up_leaves_the_old_content(small_disk: Path) -> None:
    path = small_disk / "nsqd.dat"
    replace_file(path, b"old")
    (small_disk / "filler").write_bytes(bytes(52 << 10))
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(path, b"n" * (20 << 10))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert names(small_disk) == ["filler", "nsqd.dat"]


def test_an_append_locks_the_file_against_other_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[bool] = []
    with open_to_append(tmp_path / "unsent") as mine, open_to_append(tmp_path / "unsent") as other:
        monkeypatch.setattr(
            durable, "write_all", lambda *_: locked.append(try_lock(other.fileno()))
        )
        durable.append_whole(mine.fileno(), b"1\n")
        assert (locked, try_lock(other.fileno())) == ([False], True)


def test_a_link_to_an_open_file_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "stdout"
    with (tmp_path / "redirected").open("wb") as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(NotRegularError, match="not a regular file"):
            replace_file(link, b"new")
    assert names(tmp_path) == ["redirected", "stdout"]
    assert link.is_symlink()


def test_older_content_never_replaces_newer_content(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.dat"
    file = NewestContent(path)
    first, second = file.number(), file.number()
    file.write(b"second", second)
    file.write(b"first", first)
    assert path.read_bytes() == b"second"

    late = file.number()
    file.note(b"noted")
    file.remove(file.number())
    file.write(b"late", late)
    assert not path.exists()


def test_the_temporary_files_of_a_kill_are_removed(tmp_path: Path) -> None:
    temporary = f".nsqd.dat.{'0a' * 8}.tmp"
    for name in (temporary, "nsqd.dat", ".other.tmp", "t.diskqueue.000000.dat"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path)
    assert names(tmp_path) == [".other.tmp", "nsqd.dat", "t.diskqueue.000000.dat"]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


def test_links_at_the_name_and_at_the_temporary_name_are_not_followed(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nsqd.dat").symlink_to(victim)
    replace_file(tmp_path / "nsqd.dat", b"new")
    assert not (tmp_path / "nsqd.dat").is_symlink()
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
    (tmp_path / f".nsqd.dat.{'00' * 8}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "nsqd.dat", b"new")
    assert victim.read_text() == "precious"


def test_a_link_in_place_of_the_copy_is_not_followed(tmp_path: Path, victim: Path) -> None:
    """Across file systems a file is copied to the directory of its target first."""
    memory_disk = Path("/dev/shm")
    if not memory_disk.is_dir() or memory_disk.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    source = memory_disk / f"nsqtools-{os.getpid()}"
    source.write_text("archive")
    (tmp_path / ".target.copy").symlink_to(victim)
    source.chmod(0o604)
    try:
        link_file(source, tmp_path / "target")
    finally:
        source.unlink()

    assert victim.read_text() == "precious"
    assert (tmp_path / "target").read_text() == "archive"
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o604
