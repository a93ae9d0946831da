"""Files of rows that were not published: whole, in place once, and readable by everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsqtools.errors import OutputError
from nsqtools.records.envelope import Envelope, decode
from nsqtools.spark.publishing.row_outcomes import LocalDeadLetters


def message(body: bytes) -> Envelope:
    return Envelope("clicks", "n:4150", b"0123456789abcdef", 17, 2, body)


def write(folder: Path, *rows: int, attempt: int = 0, done: int | None = None) -> Path:
    with LocalDeadLetters(folder, "job", 3, attempt=attempt, done=done) as letters:
        for row in rows:
            letters.write(row, message(b"%d" % row), "too large")
        letters.finish()
    return letters.path


def fail(letters: LocalDeadLetters, *rows: int) -> None:
    """What a task leaves that ends in an error after these rows."""
    for row in rows:
        letters.write(row, message(b"x"), "too large")
    letters.sync()
    letters.__exit__(RuntimeError, RuntimeError(), None)


def rows_in(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("body", [b"text", b"a\nb", b"\0", b"\xff}", b"}", "ü".encode(), b""])
def test_a_line_is_an_envelope_with_a_reason(tmp_path: Path, body: bytes) -> None:
    with LocalDeadLetters(tmp_path, "job", 0) as letters:
        letters.write(17, message(body), 'it "is" so')
        letters.finish()

    [line] = letters.path.read_bytes().splitlines()
    assert decode(line) == message(body)
    assert json.loads(line) | {"reason": 'it "is" so', "row": 17} == json.loads(line)


def test_without_dead_letters_there_is_no_file(tmp_path: Path) -> None:
    write(tmp_path / "new")

    assert not (tmp_path / "new").exists()


def test_the_file_appears_at_the_end_and_replaces_that_of_another_attempt(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 2)
    with LocalDeadLetters(tmp_path, "job", 3, attempt=1) as letters:
        letters.write(1, message(b"1"), "too large")
        assert rows_in(path) == [1, 2]
        letters.finish()

    assert rows_in(path) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    fail(LocalDeadLetters(tmp_path, "job", 0), 1)

    assert list(tmp_path.iterdir()) == []


def test_with_a_ledger_what_is_done_with_is_kept_and_the_rest_is_sent_again(tmp_path: Path) -> None:
    fail(LocalDeadLetters(tmp_path, "job", 3, done=0), 1, 5, 9)

    path = write(tmp_path, 8, done=6)

    assert rows_in(path) == [1, 5, 8]
    assert rows_in(write(tmp_path, done=10)) == [1, 5, 8]  # run again when all was done
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    fail(LocalDeadLetters(tmp_path, "job", 3, done=0), 1, 2)
    [part] = tmp_path.iterdir()
    part.write_bytes(part.read_bytes()[:-9])

    assert rows_in(write(tmp_path, done=3)) == [1]


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match=r"cannot write .*/file"):
        write(tmp_path / "file", 1)
