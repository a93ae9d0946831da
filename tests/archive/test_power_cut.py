"""A power cut at any moment of archiving: finished messages are in the archive after recovery."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.archives import NOW_S, FakeConnection, journal_in, lines_of, messages_of, parts
from plugins.disks import link_within
from plugins.power_cut import PowerCut

from nsqtools.archive.journal import TopicLock
from nsqtools.archive.members import arrow_members, members_of
from nsqtools.archive.part_file import Directories, recover_parts
from nsqtools.archive.topic_writer import ArchiveSettings, TopicWriter
from nsqtools.records.naming import EXTENSIONS, Codec, FileFormat, FileNaming, Rotation


class Connection(FakeConnection):
    """Notes each FIN: its message must survive."""

    def __init__(self, record: PowerCut) -> None:
        super().__init__()
        self._record = record

    def finish_many(self, ids: list[bytes]) -> None:
        self._record.note(*[b"body %d" % int(message_id) for message_id in ids])


FORMS = ["raw", "raw gzip", "raw zstd", "jsonl", "jsonl gzip", "jsonl zstd", "arrow arrow"]
PLACES = ["out", "work", "elsewhere"]  # of files in progress; the last is on another file system
BRIEF = [("raw", "work"), ("raw gzip", "elsewhere"), ("jsonl gzip", "out"), ("arrow arrow", "work")]


def archive(directories: Directories, record: PowerCut, form: str) -> None:
    format, _, packed = form.partition(" ")
    codec = Codec(packed or "none")
    settings = ArchiveSettings(
        directories,
        FileNaming("clicks-<DATETIME><REV>", extension=EXTENSIONS.get(codec, "")),
        Rotation(uncompressed_size=150),
        format=FileFormat(format),
        compressor=arrow_members if codec is Codec.ARROW else members_of(codec),
    )
    locks = directories.locks()
    lock = TopicLock(locks, directories.work, "clicks", "archive")
    journal = journal_in(directories.work, is_durable=directories.have_member, now_s=NOW_S)
    writer = TopicWriter("clicks", settings, journal, lambda path: None, lock)
    source = Connection(record)
    for number in range(0, 12, 2):
        writer.take(source.deliver(number, number + 1), NOW_S)
        writer.flush()
    writer.rotate(NOW_S, all_files=True)
    writer.close()
    locks.close()


def assert_all_is_there(promised: list[object], directories: Directories, form: str) -> None:
    """Assert that finished files have each promised message once, and no file is in progress."""
    assert parts(directories.work) == []
    if "raw" in form:
        archived = Counter(lines_of(directories.output))
    else:
        archived = Counter(message["body"] for message in messages_of(directories.output))
    assert set(promised) - set(archived) == set()
    assert max(archived.values(), default=1) == 1


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> Directories:
    if work == "elsewhere":
        monkeypatch.setattr(os, "link", link_within)
    directories = Directories(tmp_path / "disk" / "out", tmp_path / "disk" / work)
    directories.make()
    return directories


def long_form(*parameters: object) -> Iterator[object]:
    combinations = itertools.product(FORMS, PLACES)
    return (
        pytest.param(*combination, *parameters, marks=pytest.mark.slow)
        for combination in combinations
    )


@pytest.mark.parametrize(("form", "work"), [*BRIEF, *long_form()])
def test_finished_messages_survive_a_power_cut(directories: Directories, form: str) -> None:
    root = directories.output.parent
    with PowerCut(root) as record:
        archive(directories, record, form)

    cuts = list(record.cuts())
    assert len(cuts) > 30
    # An external process reads zstd, which is slow.
    for promised, cut in cuts[:: 5 if "zstd" in form else 1]:
        cut.restore(root)
        directories.make()
        recover_parts(directories)
        assert_all_is_there(promised, directories, form)
        if directories.work != directories.output:
            assert list(directories.work.glob(".*.index")) == []


@pytest.mark.parametrize(
    ("form", "work", "every"), [("arrow arrow", "out", 7), ("raw", "elsewhere", 7), *long_form(1)]
)
def test_a_power_cut_during_recovery_loses_no_message(
    directories: Directories, form: str, every: int
) -> None:
    root = directories.output.parent
    with PowerCut(root) as record:
        archive(directories, record, form)

    recovered = 0
    unfinished = [
        (promised, cut)
        for promised, cut in record.cuts()
        if any(content and name.endswith(".part") for name, content in cut.files.items())
    ]
    for promised, first in unfinished[::every]:
        first.restore(root)
        directories.make()
        with PowerCut(root) as recovery:
            recovered += len(recover_parts(directories))
        for _, second in recovery.cuts():
            second.restore(root)
            directories.make()
            recover_parts(directories)
            assert_all_is_there(promised, directories, form)
    assert recovered
