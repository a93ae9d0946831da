"""The journal of written messages, and the lock of a topic with the numbers of its files."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from plugins.archives import journal_in
from plugins.disks import full

from nsqtools.archive.journal import RETENTION_S, Journal, TopicLock
from nsqtools.archive.layout import LOCKS, Head, Member
from nsqtools.archive.members import Plain
from nsqtools.archive.part_file import Directories, PartFile, recover_parts
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import FolderLocks

Open = Callable[..., Journal]

NSQD = "127.0.0.1:4150"
NOW = 1_800_000_000.0

_runs = itertools.count()


def ids(*numbers: int) -> list[bytes]:
    return [b"%016x" % number for number in numbers]


@pytest.fixture
def journal_of(tmp_path: Path) -> Open:
    """Open the journal as a new run does; ``durable`` has the offsets in the index."""

    def open_journal(durable: set[int] | None = None, size: int = 4, **more: Any) -> Journal:
        more["is_durable"] = lambda name, head, at, length: durable is None or at in durable
        return journal_in(tmp_path, run=f"{next(_runs):04d}", size=size, **more)

    return open_journal


def write(journal: Journal, offset: int, *numbers: int, confirm: bool = True) -> None:
    journal.add(NSQD, ids(*numbers))
    member = Member(offset, 10, len(numbers), 0, 0)
    journal.record("a name.log", None, member, {NSQD: ids(*numbers)})
    if confirm:
        journal.confirm()


def known(journal: Journal, *numbers: int) -> list[bool]:
    return [journal.has_message(NSQD, message_id) for message_id in ids(*numbers)]


def test_a_written_message_is_known_for_its_nsqd_unless_its_member_is_lost(
    journal_of: Open,
) -> None:
    journal = journal_of()
    write(journal, 0, 1)
    assert known(journal, 1, 2) == [True, False]
    assert not journal.has_message("other:4150", ids(1)[0])
    first = journal_of()
    write(first, 0, 1)
    write(first, 10, 2, confirm=False)
    assert known(journal_of(durable={0}), 1, 2) == [True, False]
    first.close()  # Recovery may find the member, as its file was not cut back.
    assert known(journal_of(durable={0, 10}), 1, 2) == [True, True]


def test_a_torn_end_is_overwritten_by_the_next_run(journal_of: Open, tmp_path: Path) -> None:
    """A full disk may have no other room, and `nsq to-file` did not start again then."""
    write(journal_of(), 0, 1)
    [path] = tmp_path.glob(".*.journal")
    content = path.read_bytes()
    path.write_bytes(content + b"10 10 torn")
    assert known(journal_of(), 1) == [True]
    assert path.read_bytes() == content + b"proved\n"


def test_a_later_file_of_the_same_name_does_not_prove_a_member(tmp_path: Path) -> None:
    """Recovery removes a file without members, and the next run uses its name again."""
    directories = Directories(tmp_path, tmp_path)

    def crash(number: int, name: str = "t.log", *, has_member: bool = False) -> Journal:
        recover_parts(directories)
        journal = journal_in(tmp_path, run=f"{number:04d}", is_durable=directories.have_member)
        file = PartFile(tmp_path / name, 0o640, Plain, 0.0, Head("a" * 32, number))
        file.append(b"a message\n")
        member = file.end_member(1, 0, 0)
        journal.add(NSQD, ids(number))
        journal.record(name, file.head, member, {NSQD: ids(number)})
        if has_member:
            file.flush(member)
        return journal

    crash(1)
    crash(2, has_member=True)

    assert known(crash(3, "u.log"), 1, 2) == [False, True]


def test_a_discarded_message_is_not_known_in_this_or_a_later_run(journal_of: Open) -> None:
    first = journal_of()
    write(first, 0, 1, confirm=False)
    first.discard(NSQD, ids(1))
    assert known(first, 1) == [False]
    write(first, 0, 2)
    assert known(journal_of(), 1, 2) == [False, True]
    write(journal_of(), 20, 3)
    assert known(journal_of(durable={20}), 3) == [True]
    # It was found once, so the fate of its file does not matter.
    assert known(journal_of(durable=set()), 3) == [True]


def test_the_two_youngest_generations_and_pinned_messages_are_kept(journal_of: Open) -> None:
    journal = journal_of(size=2)
    for number in range(5):
        write(journal, number, number)
    assert known(journal, 0, 1, 2, 3, 4) == [False, False, True, True, True]
    assert known(journal_of(), 1, 2, 4) == [False, True, True]
    journal._number = 999_999  # reached after billions of messages
    journal.pin_recent()
    with patch.object(Path, "unlink", full):  # Only the file remains.
        for number in range(5, 20):
            write(journal, number, number)
    assert known(journal, 4) == [True]
    assert known(journal_of(), 4, 18, 19) == [True, True, True]


def test_old_journals_are_removed_and_damaged_lines_skipped(
    journal_of: Open, tmp_path: Path
) -> None:
    write(journal_of(), 0, 1)
    later = max(path.stat().st_mtime for path in tmp_path.iterdir()) + RETENTION_S + 1
    assert known(journal_of(now_s=later), 1) == [False]
    assert list(tmp_path.iterdir()) == []
    write(journal_of(), 0, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"\0" * 50 + b"\n" + path.read_bytes() + b"10 10 half")
    assert known(journal_of(), 1) == [True]


def test_the_youngest_journals_are_kept(
    journal_of: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        write(journal_of(), number, number)
    # The newest file has the first name.
    for number, path in enumerate(sorted(tmp_path.iterdir()), 1):
        os.utime(path, (NOW - number, NOW - number))
    monkeypatch.setattr("nsqtools.archive.journal.MAX_EARLIER_FILES", 2)
    assert known(journal_of(now_s=NOW), 1, 2, 3) == [True, True, False]


NAME = ".clicks@archive.lock"


def lock_of(folder: Path) -> TopicLock:
    """Take the lock as another process would."""
    return TopicLock(FolderLocks(folder / LOCKS), folder, "clicks", "archive")


@pytest.mark.parametrize("content", [None, b"", b"4711", b"4711 writer ab 7\n"])
def test_numbers_continue_unless_a_lost_lock_makes_a_new_writer(
    tmp_path: Path, content: bytes | None
) -> None:
    heads = []
    for _ in range(2):
        lock = lock_of(tmp_path)
        heads += [lock.next_head(), lock.next_head()]
        lock.release()
    (tmp_path / NAME).unlink()
    if content is not None:
        (tmp_path / NAME).write_bytes(content)
    lock = lock_of(tmp_path)
    next_head = lock.next_head()
    lock.release()

    assert heads == [Head(heads[0].writer, number) for number in (1, 2, 3, 4)]
    assert (next_head.number, next_head.writer == heads[0].writer) == (1, False)


def test_a_number_that_was_not_stored_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            lock.next_head()
    head = lock.next_head()
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} archives channel archive"):
        lock_of(tmp_path)
    lock.release()

    assert caught.value.filename == str(tmp_path / NAME)
    assert head.number == 2  # A number may be skipped, but never used twice.
