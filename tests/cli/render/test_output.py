"""Output: whole writes, what happens when they fail, and the three forms of a listing."""

from __future__ import annotations

import os
import threading

import pytest
from plugins.waiting import patience_s

from nsqtools.cli.running.runtime import ReaderGone, write_whole


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
