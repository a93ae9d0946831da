"""One topic's writer, without nsqd: when messages are written, held, finished and requeued."""

import errno
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from plugins.archives import NOW_S, FakeConnection, finished_files, journal_in, lines_of, parts
from plugins.disks import full

from nsqtools.archive import part_file
from nsqtools.archive.journal import TopicLock
from nsqtools.archive.layout import LOCKS, part_of
from nsqtools.archive.part_file import Directories
from nsqtools.archive.topic_archiver import (
    RECOVERED_AFTER_S,
    Flush,
    Quota,
    TopicArchiver,
    WorkerPool,
)
from nsqtools.archive.topic_writer import ArchiveSettings, ArchiveTotals, TopicWriter, WriteFailed
from nsqtools.client.consumer import Consumer
from nsqtools.files.opening import FolderLocks
from nsqtools.records.naming import FileFormat, FileNaming, Rotation


def ids(*numbers: int) -> list[bytes]:
    return [b"%016d" % number for number in numbers]


class Topic:
    """Successive writers of a topic, and the connection that delivers its messages."""

    def __init__(self, folder: Path) -> None:
        self.source = FakeConnection()
        self.out = folder / "out"
        directories = Directories(self.out, self.out)
        directories.make()
        self.settings = ArchiveSettings(
            directories, FileNaming("<PARTITION><REV>"), format=FileFormat.raw
        )
        self.writers: list[TopicWriter] = []
        self.locks = FolderLocks(folder / LOCKS)
        self._folder = folder

    def writer(self, **changes: Any) -> TopicWriter:
        journal = journal_in(self._folder, run=f"{len(self.writers)}", now_s=NOW_S)
        settings = replace(self.settings, **changes)
        lock = TopicLock(self.locks, self._folder, f"clicks{len(self.writers)}", "archive")
        self.writers.append(TopicWriter("clicks", settings, journal, lambda path: None, lock))
        return self.writers[-1]


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    topic = Topic(tmp_path)
    yield topic
    for writer in topic.writers:
        writer.close()
    topic.locks.close()


def test_a_redelivered_message_is_written_once_and_finished_when_durable(topic: Topic) -> None:
    writer = topic.writer()
    writer.take(topic.source.deliver(1), NOW_S)

    writer.take(topic.source.deliver(1, attempts=2), NOW_S)  # It is not flushed yet.
    assert topic.source.finished == []
    writer.flush()
    assert topic.source.finished == ids(1)
    writer.take(topic.source.deliver(1, 2, attempts=3), NOW_S)  # It is already written.
    assert topic.source.finished == ids(1, 1)
    writer.touch()
    assert topic.source.touched == ids(2)
    writer.rotate(NOW_S, all_files=True)

    assert topic.source.finished == ids(1, 1, 2)
    assert lines_of(topic.out) == [b"body 1", b"body 2"]
    assert writer.totals.already_written == 2


class Consumption:
    """The part of a consumer that an archiver uses."""

    def __init__(self) -> None:
        self.stats = SimpleNamespace(late=0)
        self.is_starved = False

    def _gather(self, who: object, size: int) -> None:
        pass


def archiver_of(writer: TopicWriter, consumer: Consumption) -> TopicArchiver:
    flush, quota = Flush(1, 1, 1), Quota(None)
    client = cast(Consumer, consumer)
    return TopicArchiver("clicks", lambda _: client, 10, writer, flush, quota, WorkerPool(), print)


@pytest.mark.parametrize(("why", "known"), [("late", 1), ("on another one", 1), ("never", 0)])
def test_a_message_whose_fin_may_be_lost_stays_known(topic: Topic, why: str, known: int) -> None:
    writer, consumer = topic.writer(), Consumption()
    archiver = archiver_of(writer, consumer)
    writer.take(topic.source.deliver(1), NOW_S)
    writer.flush()
    consumer.stats.late = 1 if why == "late" else 0  # the number of refused FINs
    archiver._run()
    source = FakeConnection() if why == "on another one" else topic.source
    for number in range(1000, 1250):  # a long backlog before it is redelivered
        writer.take(source.deliver(number), NOW_S)
        writer.flush()

    writer.take(source.deliver(1, attempts=2), NOW_S)

    assert writer.totals.already_written == known


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "on another connection"])
def test_a_message_whose_fin_may_be_lost_stays_known_if_the_disk_is_full(
    topic: Topic, is_late: bool
) -> None:
    writer, source = topic.writer(), topic.source if is_late else FakeConnection()
    writer.take(topic.source.deliver(1), NOW_S)
    writer.flush()
    writer.take(topic.source.deliver(2), NOW_S)
    write = writer.on_late_finish if is_late else partial(writer.take, source.deliver(3), NOW_S)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "fdatasync", full)
        with pytest.raises(WriteFailed):
            write()
    for number in range(1000, 1250):  # a long backlog before they are redelivered
        writer.take(source.deliver(number), NOW_S)
        writer.flush()

    writer.take(source.deliver(1, 2, attempts=2), NOW_S)

    assert writer.totals.already_written == 1
    writer.flush()
    writer.rotate(NOW_S, all_files=True)
    assert lines_of(topic.out).count(b"body 2") == 1


def test_a_rotation_is_retried_when_the_disk_has_room(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    archiver = archiver_of(topic.writer(), Consumption())
    archiver._take(topic.source.deliver(0))
    archiver._attempt(archiver.writer.flush)
    archiver._take(topic.source.deliver(1))
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "fdatasync", full)
        archiver._rotate_all()
    due = archiver._run()
    assert archiver.writer.totals.files == 0

    now = due
    archiver._run()

    assert archiver.writer.totals.files == 1
    assert archiver.last_error is not None  # The requeued message is not written yet.


def test_a_disk_that_is_full_now_and_then_is_reported_once(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    archiver = archiver_of(topic.writer(), Consumption())
    for number in range(10):  # Each second a write fails, and half a second later one succeeds.
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(os, "fdatasync", full)
            archiver._take(topic.source.deliver(2 * number))
            archiver._attempt(archiver.writer.flush)
        assert archiver.last_error is not None
        now += 0.5
        archiver._take(topic.source.deliver(2 * number + 1))
        archiver._attempt(archiver.writer.flush)
        assert archiver.last_error is None
        archiver._run()
        now += 0.5
    [warning] = caplog.messages
    assert "No space left on device" in warning
    now += RECOVERED_AFTER_S
    archiver._run()
    archiver._run()

    assert caplog.messages == [warning, "topic clicks: writing works again"]


@pytest.mark.parametrize(("number", "files"), [(errno.ENOSPC, 1), (errno.EFBIG, 2)])
def test_messages_that_cannot_be_written_are_requeued_and_written_later(
    topic: Topic, number: int, files: int
) -> None:
    writer = topic.writer()
    writer.take(topic.source.deliver(1), NOW_S)
    writer.flush()
    writer.take(topic.source.deliver(2, 3), NOW_S)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "fdatasync", Mock(side_effect=OSError(number, "no room")))
        with pytest.raises(WriteFailed, match=r"\(no room\): 2 messages back"):
            writer.flush()
    assert (topic.source.finished, topic.source.requeued) == (ids(1), ids(2, 3))

    writer.take(topic.source.deliver(3, attempts=2), NOW_S)
    writer.rotate(NOW_S, all_files=True)
    assert writer.totals.files == files  # A file that cannot grow any more is finished.
    following = topic.writer()  # Its journal does not have the failed messages either.
    following.take(topic.source.deliver(1, 2, 3, attempts=3), NOW_S)
    following.rotate(NOW_S, all_files=True)

    assert lines_of(topic.out) == [b"body 1", b"body 3", b"body 2"]
    assert following.totals.already_written == 2


def test_bodies_with_the_delimiter_are_counted_and_a_full_file_is_finished(topic: Topic) -> None:
    writer = topic.writer(delimiter=b"1")
    writer.take(topic.source.deliver(1, 2, 11), NOW_S)
    assert writer.totals.ambiguous == 2
    writer = topic.writer(rotation=Rotation(uncompressed_size=20))
    for number in range(1, 7):
        writer.take(topic.source.deliver(number), NOW_S)
    assert [path.stat().st_size for path in finished_files(topic.out)] == [21, 21]
    assert writer.totals == ArchiveTotals(messages=6, bytes=42, files=2)
    assert topic.source.finished == ids(1, 2, 3, 4, 5, 6)


def test_an_idle_partition_is_finished(topic: Topic) -> None:
    writer = topic.writer(by_message_time=True)
    writer.take(topic.source.deliver(1, days=-1), NOW_S)
    writer.take(topic.source.deliver(2), NOW_S + 50)
    writer.rotate(NOW_S + 70)
    assert [path.name for path in finished_files(topic.out)] == ["2026-09-20-000000"]
    assert len(parts(topic.out)) == 1
    writer.rotate(NOW_S - 3600)  # the clock was set back
    assert parts(topic.out) == []
    assert lines_of(topic.out) == [b"body 1", b"body 2"]


def test_a_file_that_is_due_for_rotation_keeps_its_known_messages(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = topic.writer(rotation=Rotation(age_s=25))
    writer.take(topic.source.deliver(1), NOW_S)
    clock = itertools.count(time.monotonic() + 24.9, 0.2)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    writer.rotate(NOW_S)
    writer.take(topic.source.deliver(1, attempts=2), NOW_S)
    writer.rotate(NOW_S, all_files=True)
    assert lines_of(topic.out) == [b"body 1"]


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({}, 40),  # NOW_S is 20 s past a whole minute
        ({"rotation": Rotation(interval_s=3600)}, 40),
        ({"rotation": Rotation(age_s=25)}, 25),
        ({"rotation": Rotation(age_s=0.25)}, 1),
        ({"rotation": Rotation(interval_s=30, age_s=25)}, 10),
        ({"naming": FileNaming("<DATETIME><REV>", datetime_format="%S")}, 1),
    ],
)
def test_the_next_check_of_files_is_when_a_rotation_may_be_due(
    topic: Topic, changes: dict[str, Any], wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)  # no time passes between the lines
    writer = topic.writer(**changes)
    assert writer.check_in_s(NOW_S) is None  # There is no file to rotate.
    writer.take(topic.source.deliver(1), NOW_S)
    assert writer.check_in_s(NOW_S) == pytest.approx(wait_s, abs=1)


def test_a_finished_file_that_vanished_before_publishing_is_dropped(topic: Topic) -> None:
    writer = topic.writer(by_message_time=True)
    writer.take(topic.source.deliver(1, days=-1), NOW_S)
    writer.take(topic.source.deliver(2), NOW_S)
    writer.flush()
    [file, other] = writer._files._files.values()
    writer._files.finish([file])
    writer._files.mark_dirty()
    part_of(file.part.path).unlink()  # Its publishing has failed, and then the file was removed.
    writer._files.publish_ending()
    writer.take(topic.source.deliver(3), NOW_S)
    assert list(writer._files._files.values()) == [other]
    writer.rotate(NOW_S, all_files=True)

    assert lines_of(topic.out) == [b"body 2", b"body 3"]


def test_a_file_counts_as_finished_once_it_is_published(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the last step was mistaken for a removed file, which was then not uploaded."""
    writer = topic.writer()
    writer.take(topic.source.deliver(1), NOW_S)
    writer.flush()
    monkeypatch.setattr(part_file, "sync_folder", lambda at: None if parts(at) else full())
    writer.rotate(NOW_S, all_files=True)
    assert writer.totals.files == 1


def test_a_name_is_not_used_again_when_its_file_was_moved_away(topic: Topic) -> None:
    writer = topic.writer(by_message_time=True)
    for number in range(3):
        writer.take(topic.source.deliver(number), NOW_S)
        writer.take(topic.source.deliver(number + 10, days=-1), NOW_S)
        writer.rotate(NOW_S, all_files=True)
        *_, latest = finished_files(topic.out)
        assert latest.name == f"2026-09-21-{number:06d}"
        for path in (topic.out).iterdir():
            path.unlink()


def test_the_age_of_files_is_monotonic(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    out, naming = topic.out, FileNaming("clicks<REV>")
    writer = topic.writer(naming=naming, rotation=Rotation(age_s=1000, interval_s=4 * 3600))
    writer.take(topic.source.deliver(1), NOW_S)
    writer.rotate(NOW_S + 3000)
    assert finished_files(out) == []
    writer.rotate(NOW_S + 4 * 3600)  # Its interval has ended.
    writer.take(topic.source.deliver(2), NOW_S)
    assert len(finished_files(out)) == 1

    later = time.monotonic() + 1000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    writer.rotate(NOW_S - 3000)
    assert len(finished_files(out)) == 2
