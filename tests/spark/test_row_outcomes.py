"""The outcomes of rows: counts, dead letters in a directory and in a bucket, and the ledger."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.archives import dead_letters, dead_rows
from plugins.object_store import Bucket
from plugins.power_cut import PowerCut
from plugins.waiting import patience_s

from nsqtools.archive.place import LocalPlace, Place
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing import row_outcomes
from nsqtools.spark.publishing.row_outcomes import (
    AHEAD_ROWS,
    LedgerEntry,
    LedgerPart,
    PublishReport,
    RowDeadLetters,
    StoredLedgerPart,
    prepare_ledger,
    read_entries,
    require_all,
    sum_of_reports,
    summary,
)


def test_counts_of_tasks_add_up_and_unpublished_rows_fail_with_their_reason() -> None:
    first = PublishReport({"a": 1, "b": 2}, rejected=1, retried=3, seconds=2.0, reasons=["r1"] * 4)
    second = PublishReport({"b": 4}, unknown=1, repeated=5, before=6, seconds=1, reasons=["r2"] * 4)

    report = sum_of_reports([first, second])

    reasons = ["r1", "r1", "r1", "r1", "r2"]
    assert report == PublishReport({"a": 1, "b": 6}, 1, 1, 0, 3, 5, 6, 2.0, reasons)
    line = "7 confirmed, 1 rejected, 1 unknown, 0 dead-lettered"
    assert summary(report) == f"{line}, 6 done before, 3 retried, up to 5 twice"
    assert summary(PublishReport({"a": 3})) == "3 confirmed, 0 rejected, 0 unknown, 0 dead-lettered"
    require_all(PublishReport({"a": 3}, rejected=2, dead_lettered=2))
    refused = PublishReport({"a": 3}, rejected=2, dead_lettered=1, reasons=["row 7: too large"])
    with pytest.raises(NsqError, match=r"1 rows were refused .*: row 7: too large"):
        require_all(refused)
    with pytest.raises(NsqError, match=r"1 rows have an unknown fate .* by an earlier run"):
        require_all(PublishReport(unknown=1))


def message(body: bytes) -> Envelope:
    return Envelope("clicks", "n:4150", b"0123456789abcdef", 17, 2, body)


@pytest.fixture
def folder(lake_url: str) -> Place:
    return parse_place(lake_url)


def write(folder: Place, *rows: int, done: int | None = None, fails: bool = False) -> None:
    """Write the dead letters of a task that ends, or ``fails``, after these rows."""
    with suppress(RuntimeError), RowDeadLetters(folder, "job", 3, done=done) as letters:
        for row in rows:
            letters.write(row, message(b"%d" % row), "too large")
            letters.sync()
        if fails:
            raise RuntimeError


def test_without_a_ledger_an_attempt_replaces_the_previous_one(folder: Place) -> None:
    write(folder)
    assert dead_letters(folder) == []

    write(folder, 1, 2)
    write(folder, 1)
    assert dead_rows(folder) == [1]

    write(folder, 4, 5, fails=True)
    assert dead_rows(folder) == [1]


def test_with_a_ledger_done_rows_are_kept_and_the_others_sent_again(folder: Place) -> None:
    write(folder, 1, 5, 9, done=0, fails=True)
    write(folder, 8, done=6)
    assert dead_rows(folder) == [1, 5, 8]

    write(folder, done=10)  # a repetition when all rows were done
    assert dead_rows(folder) == [1, 5, 8]


def test_many_rows_are_several_files_and_attempts_do_not_interfere(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_outcomes, "OBJECT_BYTES", 500)
    write(folder, *range(10))

    names = [entry.name for entry in folder.list()]
    assert (dead_rows(folder), 1 < len(names) < 10) == (list(range(10)), True)
    monkeypatch.setattr(row_outcomes, "OBJECT_BYTES", 1)
    with RowDeadLetters(folder, "job", 3, done=None) as letters:
        letters.write(1, message(b"1"), "too large")
        write(folder, 1, fails=True)
        letters.write(2, message(b"2"), "too large")
    assert dead_rows(folder) == [1, 2]


@pytest.mark.parametrize("name", ["dead-job-00003.jsonl", ".dead-job-00003.jsonl.part"])
def test_dead_letters_of_version_0_2_are_continued(tmp_path: Path, name: str) -> None:
    """A line that a kill has truncated belongs to a row that is not done."""
    write(LocalPlace(tmp_path), 1, 2, done=0, fails=True)
    [path] = tmp_path.iterdir()
    (tmp_path / name).write_bytes(path.read_bytes()[:-9])
    path.unlink()

    write(LocalPlace(tmp_path), 4, done=3)

    assert dead_rows(tmp_path) == [1, 4]
    assert not list(tmp_path.glob(".*"))


def noted(folder: Path, *entries: LedgerEntry, partition: int = 0) -> Path:
    """Write these entries to the file of a partition, and return it."""
    with LedgerPart(LocalPlace(folder), partition) as part:
        for entry in entries:
            part.entry = entry
            part.note()
    return part.path


def last_entry(folder: Path, partition: int = 0) -> LedgerEntry:
    with LedgerPart(LocalPlace(folder), partition) as part:
        return part.entry


def test_the_last_complete_line_counts_and_an_invalid_ledger_is_refused(tmp_path: Path) -> None:
    entry = LedgerEntry(done=500, sent=1000, checksum=7, repeated=3, topics={"clicks": 497})
    path = noted(tmp_path, LedgerEntry(sent=500), entry)
    assert last_entry(tmp_path) == entry
    assert read_entries(LocalPlace(tmp_path)) == {0: entry}

    complete = path.read_bytes()
    for cut in range(1, 40, 6):  # truncated by a kill
        path.write_bytes(complete[:-cut])
        assert last_entry(tmp_path) == LedgerEntry(sent=500)
        noted(tmp_path, LedgerEntry(done=3, sent=4))
        assert last_entry(tmp_path) == LedgerEntry(done=3, sent=4)
    for content in (b"", b'{"done": 1', b"\0\0\0"):
        path.write_bytes(content)
        assert last_entry(tmp_path) == LedgerEntry()
    for line in (b"hello", b"[]", b'{"done": -1}', b'{"colour": 1}', b'{"done": "x"}'):
        path.write_bytes(line + b"\n")
        with pytest.raises(ConfigurationError, match=r"part-00000.jsonl is not the ledger of"):
            last_entry(tmp_path)
        with pytest.raises(ConfigurationError, match="is not the ledger of a job"):
            read_entries(LocalPlace(tmp_path))


def test_a_second_attempt_waits_for_the_first_and_fails_if_it_does_not_end(tmp_path: Path) -> None:
    first = LedgerPart(LocalPlace(tmp_path), 3)
    with pytest.raises(NsqError, match="partition 3 is being published by another task"):
        LedgerPart(LocalPlace(tmp_path), 3, wait_s=0.1)
    with LedgerPart(LocalPlace(tmp_path), 4):
        pass
    first.entry.done = 5
    first.note()
    threading.Timer(0.2, first.__exit__).start()

    with LedgerPart(LocalPlace(tmp_path), 3, wait_s=patience_s(10)) as second:
        assert second.entry == LedgerEntry(done=5)


def test_a_ledger_belongs_to_a_job_and_an_unusable_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_ledger(LocalPlace(tmp_path / "new" / "ledger"), "job 1")
    prepare_ledger(LocalPlace(tmp_path / "new" / "ledger"), "job 1")
    noted(tmp_path, LedgerEntry(done=1))
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigurationError, match="new/ledger is the ledger of another job"):
        prepare_ledger(LocalPlace(tmp_path / "new" / "ledger"), "job 2")
    with pytest.raises(ConfigurationError, match=r"parts of a ledger and no job.json"):
        prepare_ledger(LocalPlace(tmp_path), "job")
    with pytest.raises(OutputError, match=r"cannot write the ledger .*/file .*"):
        prepare_ledger(LocalPlace(tmp_path / "file"), "job")
    with pytest.raises(OutputError, match=r"cannot write .*/file"):
        write(LocalPlace(tmp_path / "file"), 1)
    with pytest.raises(OutputError, match=r"nowhere/part-00000.jsonl .No such file"):
        LedgerPart(LocalPlace(tmp_path / "nowhere"), 0)
    part = LedgerPart(LocalPlace(tmp_path / "new"), 0)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match=r"part-00000.jsonl .No space"), part:
        part.note(is_last=True)


def test_a_power_cut_keeps_synced_entries_and_their_dead_letters(tmp_path: Path) -> None:
    ledger, dead = tmp_path / "ledger", tmp_path / "dead"
    row = Envelope("clicks", "", b"0" * 16, 1, 1, b"body")
    with PowerCut(tmp_path) as record:
        prepare_ledger(LocalPlace(ledger), "job")
        with (
            LedgerPart(LocalPlace(ledger), 0) as part,
            RowDeadLetters(LocalPlace(dead), "job", 0, done=0) as letters,
        ):
            for number in range(4):
                letters.write(number, row, "refused")
                letters.sync()
                part.entry = LedgerEntry(done=number + 1, dead_lettered=number + 1)
                part.note(is_last=True)
                record.note(number)

    cuts = list(record.cuts())
    assert len(cuts[-1][0]) == 4
    for promised, cut in cuts:
        cut.restore(tmp_path)
        entries = read_entries(LocalPlace(ledger))
        done = entries[0].done if entries else 0
        assert done >= len(promised)
        files = [*dead.glob("*"), *dead.glob(".*")]
        assert len({line for path in files for line in path.read_bytes().splitlines()}) >= done
        if cut.files.get("ledger/job.json"):
            prepare_ledger(LocalPlace(ledger), "job")


@pytest.fixture
def place(bucket: Bucket) -> Place:
    return parse_place(f"{bucket.url}/progress")


def test_entries_are_stored_in_few_objects_ahead_of_sent_rows(bucket: Bucket, place: Place) -> None:
    with StoredLedgerPart(place, 3) as part:
        assert part.entry == LedgerEntry()
        part.entry.sent = 500
        part.note()
        part.entry.done, part.entry.sent = 500, 1000
        part.note()  # Nothing is written: the last entry already allows for more sent rows.

    assert read_entries(place) == {3: LedgerEntry(sent=500 + AHEAD_ROWS)}
    with StoredLedgerPart(place, 3) as part:
        part.entry.done, part.entry.topics = 700, {"clicks": 700}
        part.note(is_last=True)
    entries = {3: LedgerEntry(done=700, sent=500 + AHEAD_ROWS, topics={"clicks": 700})}
    assert read_entries(place) == entries
    with StoredLedgerPart(place, 3) as part:
        for part.entry.sent in range(500, 3 * AHEAD_ROWS, 500):
            part.note()
    [name] = bucket.names()
    assert int(name.rpartition("/")[2].removesuffix(".json")) <= 7  # each part starts with 1


def test_an_earlier_attempt_that_still_runs_cannot_write_entries(place: Place) -> None:
    first = StoredLedgerPart(place, 0)
    first.entry.sent = 500
    first.note()
    with StoredLedgerPart(place, 0) as second:
        for done in (1, 2, 3):  # so that the next number of the first attempt has been deleted
            second.entry.done = done
            second.note(is_last=True)

        with pytest.raises(NsqError, match="partition 0 is being published by another task"):
            first.note(is_last=True)

    assert read_entries(place)[0].done == 3
