"""Reading records: prompt where they trickle, in full batches where they pour."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from plugins.clients import InBackground
from plugins.waiting import patience_s

from nsqtools.publish.input import BATCH_BYTES, BATCH_RECORDS, RecordSource, repeated


def batches_of(*paths: Path) -> list[list[bytes]]:
    source = RecordSource(list(map(str, paths)), b"\n", lambda: False)
    return [list(batch.records) for batch in source.batches()]


def test_a_file_becomes_full_batches_and_large_records_small_ones(tmp_path: Path) -> None:
    lines = [b"line %d" % n for n in range(3 * BATCH_RECORDS + 7)]
    (tmp_path / "log").write_bytes(b"\n".join(lines) + b"\n")
    batches = batches_of(tmp_path / "log")
    assert [record for batch in batches for record in batch] == lines
    assert [len(batch) for batch in batches] == [BATCH_RECORDS] * 3 + [7]
    (tmp_path / "large").write_bytes((b"x" * 100_000 + b"\n") * 20)
    batches = batches_of(tmp_path / "large")
    assert sum(map(len, batches)) == 20
    assert max(sum(map(len, batch)) for batch in batches) < BATCH_BYTES + (1 << 18)


@pytest.mark.parametrize(
    ("texts", "records"),
    [
        ([b"abc\nlast"], [b"abc", b"last"]),
        ([b"one,two"], [b"one,two"]),
        ([b"a\n\nb\n"], [b"a", b"", b"b"]),
        ([b"a\r\nb\r\n"], [b"a\r", b"b\r"]),
        ([b""], []),
        ([b"one\ntwo", b"three\n"], [b"one", b"two", b"three"]),
    ],
)
def test_the_last_record_is_whole(tmp_path: Path, texts: list[bytes], records: list[bytes]) -> None:
    paths = [tmp_path / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    assert [record for batch in batches_of(*paths) for record in batch] == records


def test_a_fifo_waits_for_its_writer_or_a_stop(tmp_path: Path, in_background: InBackground) -> None:
    os.mkfifo(path := tmp_path / "fifo")
    stopped = threading.Event()
    batches = RecordSource([str(path)], b"\n", stopped.is_set).batches()
    first = in_background(next, batches)
    with path.open("wb") as writer:
        writer.write(b"one\n")
        writer.flush()
        assert first.result(patience_s(5)).records == [b"one"]
    assert list(batches) == []
    waiting = in_background(list, RecordSource([str(path)], b"\n", stopped.is_set).batches())
    stopped.set()
    assert waiting.result(patience_s(5)) == []


def test_rounds_that_were_held_up_are_not_made_up_for_in_a_burst() -> None:
    rounds = repeated([b"{n}"], 3, 0.2, lambda: False)
    assert next(rounds).records == [b"1"]
    time.sleep(0.5)
    assert next(rounds).records == [b"2"]
    began = time.monotonic()
    assert next(rounds).records == [b"3"]
    assert time.monotonic() - began > 0.15
