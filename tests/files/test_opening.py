"""Open files in a directory where another user planted links, devices and FIFOs."""

import fcntl
import importlib.util
import os
from functools import partial
from pathlib import Path

import pytest
from plugins.disks import full

from nsqtools.files import opening
from nsqtools.files.opening import (
    NotRegularError,
    lock_file,
    open_to_append,
    open_to_read,
    open_to_write,
    walk,
)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    return tmp_path / "link"


def test_a_link_is_followed_for_reading_and_not_for_writing(link: Path) -> None:
    with open_to_read(link) as file:
        assert file.read() == b"precious"
    writing = partial(open_to_write, flags=os.O_RDWR | os.O_CREAT)
    for open_it in (writing, open_to_append, lock_file):
        with pytest.raises(NotRegularError, match="a symbolic link"):
            open_it(link)
    assert link.read_text() == "precious"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/"])
def test_a_link_to_a_device_or_a_directory_is_not_read(tmp_path: Path, device: str) -> None:
    (tmp_path / "link").symlink_to(device)
    with pytest.raises(NotRegularError, match="not a regular file"):
        open_to_read(tmp_path / "link")


def test_a_walk_skips_lost_and_found_and_reports_errors(tmp_path: Path) -> None:
    for name in ("lost+found/deep", "clicks"):
        (tmp_path / name).mkdir(parents=True)
    assert [folder for folder, _ in walk(tmp_path)] == [tmp_path, tmp_path / "clicks"]
    errors: list[OSError] = []
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "stat", full)
        assert list(walk(tmp_path, errors.append)) == []
    assert len(errors) == 1


def test_an_appended_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "unsent"
    for line in (b"one\n", b"two\n"):
        with open_to_append(path) as file:
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_file_has_one_owner(tmp_path: Path) -> None:
    descriptor = lock_file(tmp_path / "lock")
    assert lock_file(tmp_path / "lock") is None
    os.close(descriptor)
    os.close(lock_file(tmp_path / "lock"))


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for open_it in (open_to_read, open_to_append):
        with pytest.raises(NotRegularError, match="not a regular file"):
            open_it(fifo)


def test_a_python_without_the_constant_has_locks_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fcntl, "F_OFD_SETLK", raising=False)
    spec = importlib.util.find_spec(opening.__name__)
    spec.loader.exec_module(built := importlib.util.module_from_spec(spec))
    ours, others, later = (built.FolderLocks(tmp_path / "locks") for _ in range(3))
    assert ours.take("clicks")
    assert not others.take("clicks")
    others.close()  # must not release the lock of ours
    assert not later.take("clicks")
