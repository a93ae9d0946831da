"""The lock of a topic and channel, and the numbers of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsqtools.archive.journal import TopicLock
from nsqtools.archive.layout import LOCKS
from nsqtools.errors import ConfigurationError
from nsqtools.files.locks import FolderLocks

NAME = ".clicks@archive.lock"


def lock_of(folder: Path, topic: str, channel: str) -> TopicLock:
    """As another process would."""
    return TopicLock(FolderLocks(folder / LOCKS), folder, topic, channel)


def test_numbers_go_on_where_the_last_run_ended(tmp_path: Path) -> None:
    first = lock_of(tmp_path, "clicks", "archive")
    heads = [first.next_head(), first.next_head()]
    first.release()
    second = lock_of(tmp_path, "clicks", "archive")
    heads.append(second.next_head())
    second.release()

    assert [head.number for head in heads] == [1, 2, 3]
    assert len({head.writer for head in heads}) == 1


@pytest.mark.parametrize("content", [None, b"", b"4711", b"4711 writer ab 7\n"])
def test_without_a_count_there_is_a_new_writer(tmp_path: Path, content: bytes | None) -> None:
    first = lock_of(tmp_path, "clicks", "archive")
    before = first.next_head()
    first.release()
    if content is None:
        (tmp_path / NAME).unlink()
    else:
        (tmp_path / NAME).write_bytes(content)

    again = lock_of(tmp_path, "clicks", "archive")
    head = again.next_head()
    again.release()

    assert head.number == 1
    assert head.writer != before.writer


def test_a_number_that_could_not_be_kept_names_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    lock = lock_of(tmp_path, "clicks", "archive")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            lock.next_head()
    head = lock.next_head()
    lock.release()

    assert caught.value.filename == str(tmp_path / NAME)
    assert head.number == 2  # one may be left out, none may be given twice


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "clicks", "archive")
    lock.next_head()

    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} archives channel archive"):
        lock_of(tmp_path, "clicks", "archive")

    lock.release()
