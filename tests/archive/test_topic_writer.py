"""One topic's writer, without an nsqd: what is written, held, FINished and given back, and when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from plugins.archives import finished_files, lines_of, messages_of, parts
from plugins.disk_calls import DiskCalls

from nsqtools.archive.journal import Journal, journals_below, stem_of
from nsqtools.archive.layout import LOCKS, part_of
from nsqtools.archive.part_file import Directories
from nsqtools.archive.topic_archiver import Flush, Quota, TopicArchiver, Turns
from nsqtools.archive.topic_writer import (
    ArchiveSettings,
    ArchiveTotals,
    PartitionBy,
    RecordFormat,
    TopicWriter,
    WriteFailed,
)
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch, Message
from nsqtools.files.locks import FolderLocks
from nsqtools.records.naming import FileNaming, Rotation

NOW = 1_790_000_000.0
DAY_NS = 86_400 * 1_000_000_000


class Source:
    """A connection that notes the answers."""

    msg_timeout_s = 60.0
    received_at = 0.0

    def __init__(self) -> None:
        self.topic = "clicks"
        self.nsqd = "127.0.0.1:4150"
        self.in_flight: dict[bytes, Message] = {}
        self.finished: list[bytes] = []
        self.requeued: list[bytes] = []
        self.touched: list[bytes] = []

    def finish(self, message_id: bytes) -> None:
        self.finished.append(message_id)

    def finish_many(self, ids: list[bytes]) -> None:
        self.finished += ids

    def requeue(
        self, message_id: bytes, delay_s: float | None, attempts: int, backoff: bool
    ) -> None:
        assert backoff
        self.requeued.append(message_id)

    def touch(self, message_id: bytes) -> None:
        self.touched.append(message_id)

    def finish_unseen(self, message_id: bytes) -> None:
        raise AssertionError("an archiver gives nothing up")

    def deliver(self, *numbers: int, attempts: int = 1, days: int = 0) -> Batch:
        timestamp = int(NOW) * 1_000_000_000 + days * DAY_NS
        batch = [Message(self, timestamp, attempts, b"%016d" % n, b"body %d" % n) for n in numbers]
        self.in_flight.update({message.id: message for message in batch})
        return Batch(self, batch)


def ids(*numbers: int) -> list[bytes]:
    return [b"%016d" % number for number in numbers]


NewWriter = Callable[..., TopicWriter]


@pytest.fixture
def settings(tmp_path: Path) -> ArchiveSettings:
    directories = Directories(tmp_path / "out", tmp_path / "out")
    directories.make()
    return ArchiveSettings(directories, FileNaming("<PARTITION><REV>"), format=RecordFormat.raw)


@pytest.fixture
def new_writer(settings: ArchiveSettings, tmp_path: Path) -> Iterator[NewWriter]:
    writers: list[TopicWriter] = []
    locks = FolderLocks(tmp_path / LOCKS)

    def make(changed: ArchiveSettings = settings) -> TopicWriter:
        journal = Journal(
            tmp_path,
            "clicks",
            "archive",
            earlier=journals_below(tmp_path).get(stem_of("clicks", "archive"), ()),
            run=f"{len(writers)}",
            size=100,
            is_durable=lambda name, head, offset, length: True,
            now_s=NOW,
        )
        writers.append(TopicWriter("clicks", changed, journal, lambda path: None, locks))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()
    locks.close()


@pytest.fixture
def source() -> Source:
    return Source()


def test_nothing_is_finished_before_the_flush(new_writer: NewWriter, source: Source) -> None:
    writer = new_writer()
    writer.take(source.deliver(1, 2), NOW)
    assert (writer.held_count, source.finished) == (2, [])

    writer.flush()

    assert (writer.held_count, source.finished) == (0, ids(1, 2))


def test_the_fin_comes_after_the_data_and_the_index_are_on_disk(
    new_writer: NewWriter, source: Source, disk_calls: DiskCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_many = source.finish_many
    monkeypatch.setattr(
        source, "finish_many", lambda ids: (disk_calls.note("FIN"), finish_many(ids))
    )
    writer = new_writer()
    writer.take(source.deliver(1, 2), NOW)
    disk_calls.seen.clear()

    writer.flush()

    (journal, *rest) = disk_calls.seen
    assert journal[0] == "write"
    assert journal[1].endswith(".journal")
    assert [(call, Path(name).suffix) for call, name in rest] == [
        ("write", ".part"),
        ("fdatasync", ".part"),
        ("write", ".index"),
        ("fdatasync", ".index"),
        ("FIN", ""),
    ]
    assert source.finished == ids(1, 2)


def test_a_message_that_is_written_already_is_finished_and_not_written_again(
    new_writer: NewWriter, source: Source, tmp_path: Path
) -> None:
    writer = new_writer()
    writer.take(source.deliver(1), NOW)
    writer.flush()

    writer.take(source.deliver(1, 2, attempts=2), NOW)
    assert source.finished == ids(1, 1)
    writer.rotate(NOW, all_files=True)

    assert source.finished == ids(1, 1, 2)
    assert lines_of(tmp_path / "out") == [b"body 1", b"body 2"]
    assert writer.totals.already_written == 1


def test_a_message_that_is_held_and_comes_again_is_written_once_and_finished_with_the_flush(
    new_writer: NewWriter, source: Source, tmp_path: Path
) -> None:
    writer = new_writer()
    writer.take(source.deliver(1), NOW)

    writer.take(source.deliver(1, attempts=2), NOW)
    assert source.finished == []
    writer.rotate(NOW, all_files=True)

    assert source.finished == ids(1)
    assert lines_of(tmp_path / "out") == [b"body 1"]


def test_a_new_connection_to_an_nsqd_means_that_fins_may_have_been_lost(
    new_writer: NewWriter, source: Source, tmp_path: Path
) -> None:
    writer = new_writer()
    writer.take(source.deliver(1), NOW)
    writer.flush()
    again = Source()
    for number in range(1000, 1500):  # a long backlog before it comes again
        writer.take(again.deliver(number), NOW)
        writer.flush()

    writer.take(again.deliver(1, attempts=2), NOW)

    assert writer.totals.already_written == 1


@pytest.mark.parametrize(("is_refused", "known"), [(True, 1), (False, 0)])
def test_what_nsqd_refused_the_fins_of_as_late_stays_known(
    new_writer: NewWriter, source: Source, is_refused: bool, known: int
) -> None:
    writer = new_writer()
    consumer = SimpleNamespace(stats=SimpleNamespace(late=0))
    flush, quota = Flush(1, 1, 1), Quota(None)
    archiver = TopicArchiver(
        "clicks", lambda *_: cast(Consumer, consumer), 10, writer, flush, quota, Turns(), print
    )
    writer.take(source.deliver(1), NOW)
    writer.flush()
    consumer.stats.late = 1 if is_refused else 0
    archiver._turn()
    for number in range(1000, 1500):  # a long backlog before it comes again
        writer.take(source.deliver(number), NOW)
        writer.flush()

    writer.take(source.deliver(1, attempts=2), NOW)

    assert writer.totals.already_written == known


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)


def test_what_cannot_be_written_goes_back_and_is_written_when_it_comes_again(
    new_writer: NewWriter, source: Source, tmp_path: Path
) -> None:
    writer = new_writer()
    writer.take(source.deliver(1), NOW)
    writer.flush()
    writer.take(source.deliver(2, 3), NOW)
    with pytest.MonkeyPatch.context() as broken:
        failing(broken)
        with pytest.raises(WriteFailed, match=r"No space left on device\): 2 messages are back"):
            writer.flush()
    assert (source.finished, source.requeued) == (ids(1), ids(2, 3))

    writer.take(source.deliver(3, 2, attempts=2), NOW)
    writer.rotate(NOW, all_files=True)

    assert lines_of(tmp_path / "out") == [b"body 1", b"body 3", b"body 2"]


def test_what_failed_is_not_known_to_the_next_run(
    new_writer: NewWriter, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer()
    writer.take(source.deliver(1), NOW)
    with pytest.MonkeyPatch.context() as broken:
        failing(broken)
        with pytest.raises(WriteFailed):
            writer.flush()
    writer.take(source.deliver(2), NOW)
    writer.flush()

    following = new_writer()
    following.take(source.deliver(1, 2, attempts=2), NOW)

    assert (following.held_count, following.totals.already_written) == (1, 1)


def test_partitions_by_message_time_are_written_side_by_side(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, partition_by=PartitionBy.message))
    writer.take(source.deliver(1), NOW)
    writer.take(source.deliver(2, days=-1), NOW)
    writer.take(source.deliver(3), NOW)

    writer.rotate(NOW, all_files=True)

    out = tmp_path / "out"
    assert [path.name for path in finished_files(out)] == ["2026-09-20-000000", "2026-09-21-000000"]
    assert lines_of(out) == [b"body 2", b"body 1", b"body 3"]
    assert sorted(source.finished) == ids(1, 2, 3)


def test_a_partition_that_is_quiet_is_finished(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, partition_by=PartitionBy.message))
    writer.take(source.deliver(1, days=-1), NOW)
    writer.take(source.deliver(2), NOW + 50)

    writer.rotate(NOW + 70)

    assert [path.name for path in finished_files(tmp_path / "out")] == ["2026-09-20-000000"]
    assert len(parts(tmp_path / "out")) == 1


def test_a_file_is_finished_as_soon_as_it_is_full(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, rotation=Rotation(uncompressed_size=20)))
    for number in range(1, 7):
        writer.take(source.deliver(number), NOW)

    assert [path.stat().st_size for path in finished_files(tmp_path / "out")] == [21, 21]
    assert writer.totals == ArchiveTotals(messages=6, bytes=42, files=2)
    assert source.finished == ids(1, 2, 3, 4, 5, 6)


def test_a_file_is_finished_when_its_interval_is_over(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, rotation=Rotation(interval_s=60)))
    writer.take(source.deliver(1), NOW)

    writer.rotate(NOW + 60)

    assert lines_of(tmp_path / "out") == [b"body 1"]


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({}, 40),  # NOW is 20 s past a whole minute
        ({"rotation": Rotation(interval_s=30)}, 10),
        ({"rotation": Rotation(interval_s=3600)}, 40),
        ({"rotation": Rotation(age_s=25)}, 25),
        ({"rotation": Rotation(age_s=0.25)}, 1),
        ({"rotation": Rotation(interval_s=30, age_s=25)}, 10),
        ({"naming": FileNaming("<DATETIME><REV>", datetime_format="%S")}, 1),
    ],
)
def test_files_are_looked_at_again_when_one_may_be_over(
    new_writer: NewWriter,
    source: Source,
    settings: ArchiveSettings,
    changes: dict[str, Any],
    wait_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)  # no time passes between the lines
    writer = new_writer(replace(settings, **changes))
    assert writer.check_in_s(NOW) is None  # there is nothing that could be over
    writer.take(source.deliver(1), NOW)
    assert writer.check_in_s(NOW) == pytest.approx(wait_s, abs=1)


def test_a_finished_file_that_vanished_before_it_was_published_is_left(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, partition_by=PartitionBy.message))
    writer.take(source.deliver(1, days=-1), NOW)
    writer.take(source.deliver(2), NOW)
    writer.flush()
    [file, other] = writer._files._files.values()
    writer._files.finish(file)
    writer._files.mark_dirty()
    part_of(file.part.path).unlink()  # its publishing has failed, and somebody has tidied up
    writer._files.publish_ending()
    writer.take(source.deliver(3), NOW)
    assert list(writer._files._files.values()) == [other]
    writer.rotate(NOW, all_files=True)

    assert lines_of(tmp_path / "out") == [b"body 2", b"body 3"]


def test_jsonl_keeps_what_nsqd_said_of_a_message(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, format=RecordFormat.jsonl))
    writer.take(source.deliver(1, attempts=3), NOW)
    writer.rotate(NOW, all_files=True)

    assert messages_of(tmp_path / "out") == [
        {
            "topic": "clicks",
            "nsqd": "127.0.0.1:4150",
            "id": ids(1)[0].decode(),
            "ts": int(NOW) * 1_000_000_000,
            "attempts": 3,
            "body": b"body 1",
        }
    ]


def test_everything_held_is_touched(new_writer: NewWriter, source: Source) -> None:
    writer = new_writer()
    writer.take(source.deliver(1, 2), NOW)

    writer.touch()

    assert source.touched == ids(1, 2)


def test_a_name_is_not_used_again_when_its_file_was_moved_away(
    new_writer: NewWriter, source: Source, settings: ArchiveSettings, tmp_path: Path
) -> None:
    writer = new_writer(replace(settings, partition_by=PartitionBy.message))
    for number in range(3):
        writer.take(source.deliver(number), NOW)
        writer.take(source.deliver(number + 10, days=-1), NOW)
        writer.rotate(NOW, all_files=True)
        *_, latest = finished_files(tmp_path / "out")
        assert latest.name == f"2026-09-21-{number:06d}"
        for path in (tmp_path / "out").iterdir():
            path.unlink()


def test_the_age_of_a_file_is_that_of_a_clock_that_nobody_sets(
    settings: ArchiveSettings,
    new_writer: NewWriter,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, naming = settings.directories.output, FileNaming("clicks<REV>")
    writer = new_writer(replace(settings, naming=naming, rotation=Rotation(age_s=3600)))
    writer.take(source.deliver(1), NOW)
    writer.rotate(NOW + 7200)
    assert finished_files(out) == []

    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    writer.rotate(NOW - 7200)
    assert len(finished_files(out)) == 1
