"""Output: whole writes, what happens when they fail, and the three forms of a listing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.cli import RunNsq, TerminalNsq

from nsqtools.cli.render.output import ByteWriter, ReaderGone, cell_text
from nsqtools.errors import OutputError


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fileno in (reader, writer):
        try:
            os.close(fileno)
        except OSError:
            pass  # closed by the test


def read_all(fileno: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(fileno, 65536)):
        data += part
    return data


@pytest.mark.parametrize("blocking", [True, False])
def test_more_than_the_pipe_holds_is_written_whole(pipe: tuple[int, int], blocking: bool) -> None:
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    data = os.urandom(1 << 20)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read_all(reader, len(data))))
    thread.start()

    ByteWriter(writer).write(data)

    thread.join(30)
    assert got == [data]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\x9b1m", r"\x9b1m"),
        ("Zürich 東京", "Zürich 東京"),
    ],
)
def test_nothing_in_a_cell_steers_the_terminal(cell: str, shown: str) -> None:
    assert cell_text(cell) == shown


def test_a_reader_that_went_away_is_distinguished(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)

    with pytest.raises(ReaderGone):
        ByteWriter(writer).write(b"x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error() -> None:
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(OutputError, match=r"cannot write to stdout .No space left") as caught,
    ):
        ByteWriter(full.fileno()).write(b"x")

    assert not isinstance(caught.value, ReaderGone)


def test_on_a_pipe_a_listing_is_tab_separated_with_a_head(run_nsq: RunNsq) -> None:
    lines = run_nsq(["schema"]).out.decode().splitlines()

    assert lines[0] == "command\tschema\tprints"
    assert {line.count("\t") for line in lines} == {2}
    assert "topic list\ttopic-list\tTopics" in lines


def test_json_is_one_document(run_nsq: RunNsq) -> None:
    listing = json.loads(run_nsq(["schema", "--json"]).out)

    assert {"command": "topic list", "schema": "topic-list", "prints": "Topics"} in listing


def test_on_a_terminal_a_listing_is_a_table_of_its_width(nsq_on_a_terminal: TerminalNsq) -> None:
    lines = nsq_on_a_terminal(["schema"], env={"NO_COLOR": "1"}, columns=120).read().splitlines()

    assert lines[0].split() == ["command", "schema", "prints"]
    assert "\t" not in "".join(lines)
    assert max(map(len, lines)) <= 120
    assert len({line.find(" What") for line in lines if line.startswith("archive ver")}) == 1
