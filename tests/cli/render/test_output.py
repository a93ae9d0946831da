"""Output: whole writes, what happens when they fail, and the three forms of a listing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.waiting import patience_s

from nsqtools.cli.running.runtime import ReaderGone, write_whole
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

    write_whole(writer, data)

    thread.join(patience_s(30))
    assert got == [data]


def test_a_reader_that_went_away_is_distinguished(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)

    with pytest.raises(ReaderGone):
        write_whole(writer, b"x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error() -> None:
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(OutputError, match=r"cannot write to stdout .No space left") as caught,
    ):
        write_whole(full.fileno(), b"x")

    assert not isinstance(caught.value, ReaderGone)
