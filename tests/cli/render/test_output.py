"""Output: whole writes, what happens when they fail, and the three forms of a listing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from plugins.waiting import patience_s

from nsqtools.cli.running.runtime import ReaderGone, write_whole
from nsqtools.errors import OutputError


@pytest.mark.parametrize("blocking", [True, False])
def test_more_than_the_pipe_holds_is_written_whole_until_the_reader_goes(blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    data = os.urandom(1 << 20)
    got: list[bytes] = []

    def read() -> None:
        with open(reader, "rb") as file:
            got.append(file.read(len(data)))

    thread = threading.Thread(target=read)
    thread.start()
    write_whole(writer, data)
    thread.join(patience_s(30))
    assert got == [data]
    with pytest.raises(ReaderGone):
        write_whole(writer, b"x")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error() -> None:
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(OutputError, match=r"cannot write to stdout .No space left") as caught,
    ):
        write_whole(full.fileno(), b"x")

    assert not isinstance(caught.value, ReaderGone)
