"""Files of rows that were not published, in a directory and in a bucket: in place once."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from nsqtools.archive.location import Location, parse_place
from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import OutputError
from nsqtools.records.envelope import Envelope, decode
from nsqtools.spark.publishing import row_outcomes
from nsqtools.spark.publishing.row_outcomes import RowDeadLetters


def message(body: bytes) -> Envelope:
    return Envelope("clicks", "n:4150", b"0123456789abcdef", 17, 2, body)


@pytest.fixture(params=["directory", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "directory":
        return tmp_path / "dead"
    return parse_place(f"{request.getfixturevalue('bucket').url}/dead")


def write(folder: Location, *rows: int, done: int | None = None, fails: bool = False) -> None:
    """What a task leaves that ends, or ``fails``, after these rows."""
    with suppress(RuntimeError), RowDeadLetters(folder, "job", 3, done=done) as letters:
        for row in rows:
            letters.write(row, message(b"%d" % row), "too large")
            letters.sync()
        if fails:
            raise RuntimeError


def lines_in(folder: Location) -> list[bytes]:
    storage = open_storage(str(folder))
    names = sorted(entry.name for entry in storage.list())
    return [line for name in names for line in storage.read(name).splitlines()]


def rows_in(folder: Location) -> list[int]:
    return sorted(json.loads(line)["row"] for line in lines_in(folder))


def test_a_line_is_an_envelope_with_a_reason(tmp_path: Path) -> None:
    bodies = [b"text", b"a\nb", b"\0", b"\xff}", b"}", "ü".encode(), b""]
    with RowDeadLetters(tmp_path, "job", 0, done=None) as letters:
        for body in bodies:
            letters.write(17, message(body), 'it "is" so')
        letters.sync()

    lines = lines_in(tmp_path)
    assert [decode(line) for line in lines] == [message(body) for body in bodies]
    assert [json.loads(line)["reason"] for line in lines] == ['it "is" so'] * len(bodies)


def test_without_a_ledger_an_attempt_replaces_the_one_before(folder: Location) -> None:
    write(folder)
    assert lines_in(folder) == []

    write(folder, 1, 2)
    write(folder, 1)
    assert rows_in(folder) == [1]

    write(folder, 4, 5, fails=True)
    assert rows_in(folder) == [1]


def test_an_attempt_beside_another_takes_nothing_from_it(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_outcomes, "OBJECT_BYTES", 1)
    with RowDeadLetters(folder, "job", 3, done=None) as letters:
        letters.write(1, message(b"1"), "too large")
        write(folder, 1, fails=True)
        letters.write(2, message(b"2"), "too large")
    assert rows_in(folder) == [1, 2]


def test_with_a_ledger_what_is_done_is_kept_and_the_rest_is_sent_again(folder: Location) -> None:
    write(folder, 1, 5, 9, done=0, fails=True)
    write(folder, 8, done=6)
    assert rows_in(folder) == [1, 5, 8]

    write(folder, done=10)  # run again when all was done
    assert rows_in(folder) == [1, 5, 8]


def test_many_rows_are_several_files(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_outcomes, "OBJECT_BYTES", 500)
    write(folder, *range(10))

    names = [entry.name for entry in open_storage(str(folder)).list()]
    assert (rows_in(folder), 1 < len(names) < 10) == (list(range(10)), True)


@pytest.mark.parametrize("name", ["dead-job-00003.jsonl", ".dead-job-00003.jsonl.part"])
def test_what_version_0_2_left_is_gone_on_with(tmp_path: Path, name: str) -> None:
    """A line that a kill has cut is of a row that is not done."""
    write(tmp_path, 1, 2, done=0, fails=True)
    [made] = tmp_path.iterdir()
    (tmp_path / name).write_bytes(made.read_bytes()[:-9])
    made.unlink()

    write(tmp_path, 4, done=3)

    assert rows_in(tmp_path) == [1, 4]
    assert not list(tmp_path.glob(".*"))


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match=r"cannot write .*/file"):
        write(tmp_path / "file", 1)
