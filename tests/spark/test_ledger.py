"""The ledger: what a partition's file says after any end, and whose it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from plugins.power_cut import PowerCut
from plugins.waiting import patience_s

from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.row_outcomes import (
    LedgerEntry,
    LedgerPart,
    RowDeadLetters,
    part_path,
    prepare_ledger,
    read_entries,
)


def noted(folder: Path, *entries: LedgerEntry, partition: int = 0) -> Path:
    """A partition's file after these entries were noted."""
    with LedgerPart(folder, partition) as part:
        for entry in entries:
            part.entry = entry
            part.note()
    return part_path(folder, partition)


def last_entry(folder: Path, partition: int = 0) -> LedgerEntry:
    with LedgerPart(folder, partition) as part:
        return part.entry


def test_the_last_whole_line_holds(tmp_path: Path) -> None:
    entry = LedgerEntry(done=500, sent=1000, checksum=7, repeated=3, topics={"clicks": 497})
    path = noted(tmp_path, LedgerEntry(sent=500), entry)
    assert last_entry(tmp_path) == entry
    assert read_entries(tmp_path) == [entry]

    whole = path.read_bytes()
    for cut in range(1, 40, 6):  # by a kill
        path.write_bytes(whole[:-cut])
        assert last_entry(tmp_path) == LedgerEntry(sent=500)
        noted(tmp_path, LedgerEntry(done=3, sent=4))
        assert last_entry(tmp_path) == LedgerEntry(done=3, sent=4)
    for content in (b"", b'{"done": 1', b"\0\0\0"):
        path.write_bytes(content)
        assert last_entry(tmp_path) == LedgerEntry()


@pytest.mark.parametrize(
    "line", [b"hello\n", b"[]\n", b'{"done": -1}\n', b'{"colour": 1}\n', b'{"done": "x"}\n']
)
def test_what_is_no_ledger_is_refused(tmp_path: Path, line: bytes) -> None:
    part_path(tmp_path, 0).write_bytes(line)

    with pytest.raises(ConfigurationError, match=r"part-00000.jsonl is not the ledger of a job"):
        last_entry(tmp_path)
    with pytest.raises(ConfigurationError, match="is not the ledger of a job"):
        read_entries(tmp_path)


def test_a_second_attempt_waits_for_one_that_is_ending_and_fails_beside_one_that_is_not(
    tmp_path: Path,
) -> None:
    first = LedgerPart(tmp_path, 3)
    with pytest.raises(NsqError, match="partition 3 is being published by another task"):
        LedgerPart(tmp_path, 3, wait_s=0.1)
    with LedgerPart(tmp_path, 4):
        pass
    first.entry.done = 5
    first.note()
    threading.Timer(0.2, first.__exit__).start()

    with LedgerPart(tmp_path, 3, wait_s=patience_s(10)) as second:
        assert second.entry == LedgerEntry(done=5)


def test_a_ledger_belongs_to_one_job_and_a_directory_that_cannot_be_is_named(
    tmp_path: Path,
) -> None:
    prepare_ledger(tmp_path / "new" / "ledger", "job 1")
    prepare_ledger(tmp_path / "new" / "ledger", "job 1")
    noted(tmp_path, LedgerEntry(done=1))
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigurationError, match="new/ledger is the ledger of another job"):
        prepare_ledger(tmp_path / "new" / "ledger", "job 2")
    with pytest.raises(ConfigurationError, match=r"parts of a ledger and no job.json"):
        prepare_ledger(tmp_path, "job")
    with pytest.raises(OutputError, match=r"cannot write the ledger .*/file .*"):
        prepare_ledger(tmp_path / "file", "job")
    with pytest.raises(OutputError, match=r"nowhere/part-00000.jsonl .No such file"):
        LedgerPart(tmp_path / "nowhere", 0)


def test_a_power_cut_leaves_what_was_synced_and_every_dead_letter_that_counts(
    tmp_path: Path,
) -> None:
    ledger, dead = tmp_path / "ledger", tmp_path / "dead"
    row = Envelope("clicks", "", b"0" * 16, 1, 1, b"body")
    with PowerCut(tmp_path) as record:
        prepare_ledger(ledger, "job")
        with LedgerPart(ledger, 0) as part, RowDeadLetters(dead, "job", 0, done=0) as letters:
            for number in range(4):
                letters.write(number, row, "refused")
                letters.sync()
                part.entry = LedgerEntry(done=number + 1, dead_lettered=number + 1)
                part.note()
                part.sync()
                record.note(number)

    cuts = list(record.cuts())
    assert len(cuts[-1][0]) == 4
    for promised, cut in cuts:
        cut.restore(tmp_path)
        entries = read_entries(ledger)
        done = entries[0].done if entries else 0
        assert done >= len(promised)
        files = [*dead.glob("*"), *dead.glob(".*")]
        assert len({line for path in files for line in path.read_bytes().splitlines()}) >= done
        if cut.files.get("ledger/job.json"):
            prepare_ledger(ledger, "job")
