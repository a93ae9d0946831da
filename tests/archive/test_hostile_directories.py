"""Directories that others can write to: no link of theirs is followed, and no FIFO stops us."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nsqtools.archive.finishing import Directories, recover
from nsqtools.archive.journal import Journal
from nsqtools.archive.part_file import PartFile, Plain
from nsqtools.archive.topic_lock import TopicLock


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_recovery_empties_no_file_that_a_link_names(victim: Path, output: Path) -> None:
    (output / ".clicks.log.part").symlink_to(victim)
    (output / ".clicks.log.index").write_text("")

    assert recover(Directories(output, output)) == []
    assert victim.read_text() == "precious\n"


def test_recovery_writes_no_index_through_a_link(victim: Path, output: Path) -> None:
    (output / ".clicks.log.part").write_text("line\n")
    (output / ".clicks.log.index").symlink_to(victim)

    recover(Directories(output, output))
    assert victim.read_text() == "precious\n"


def test_recovery_is_not_stopped_by_a_fifo(output: Path) -> None:
    os.mkfifo(output / ".clicks.log.part")
    (output / ".more.log.part").write_text("line\n")

    assert recover(Directories(output, output)) == [output / "more.log"]


def test_the_lock_is_not_written_through_a_link(victim: Path, output: Path) -> None:
    (output / ".clicks@archive.lock").symlink_to(victim)

    with pytest.raises(OSError, match="symbolic link"):
        TopicLock(output, "clicks", "archive")
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("name", [".clicks.log.part", ".clicks.log.index"])
def test_a_new_file_is_not_written_through_a_link(victim: Path, output: Path, name: str) -> None:
    (output / name).symlink_to(victim)

    with pytest.raises(FileExistsError):
        PartFile(output / "clicks.log", 0o640, Plain, 0.0)
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_journal_that_is_not_a_file_is_not_read(
    output: Path, make: Callable[[Path], None]
) -> None:
    make(output / ".clicks@archive@1-000000.journal")

    Journal(
        output,
        "clicks",
        "archive",
        run="2",
        size=10,
        is_durable=lambda name, offset, length: True,
        now_s=0.0,
    ).close()
