"""Columns of record batches as lists: every value, whatever the layout in memory."""

from __future__ import annotations

import pytest

from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.publish_task import byte_strings, chunk_of

pyarrow = pytest.importorskip("pyarrow")

KINDS = [b"a\nb", b"\0", b"\xff\xfe\x80", b"x", bytes(range(256)) * 4096, "ü".encode(), b" ", b""]


@pytest.mark.parametrize("type", ["binary", "large_binary"])
@pytest.mark.parametrize("begin", [0, 3])
def test_bodies_of_every_kind(type: str, begin: int) -> None:
    values = [*KINDS, None, b"last"]
    array = pyarrow.array(values, type=getattr(pyarrow, type)())

    assert byte_strings(array.slice(begin)) == values[begin:]
    assert byte_strings(array.slice(begin, 2)) == values[begin : begin + 2]


@pytest.mark.parametrize("type", ["string", "large_string"])
def test_texts_are_utf_8(type: str) -> None:
    array = pyarrow.array(["ü", "", None], type=getattr(pyarrow, type)())

    assert byte_strings(array) == ["ü".encode(), b"", None]


def test_layouts_that_are_rare() -> None:
    array = pyarrow.array([b"a", b"b", b"a", None]).dictionary_encode()

    assert byte_strings(array) == [b"a", b"b", b"a", None]
    assert byte_strings(pyarrow.array([], type=pyarrow.binary())) == []
    assert byte_strings(pyarrow.array([None, None], type=pyarrow.binary())) == [None, None]


def test_a_row_is_known_by_where_it_came_from() -> None:
    id = "0123456789abcdef"
    batch = pyarrow.RecordBatch.from_pydict(
        {"topic": ["a"], "nsqd": ["n:1"], "id": [id], "ts_ns": [9], "attempts": [2], "body": [b"x"]}
    )

    chunk = chunk_of(batch, has_topic=True)

    assert (chunk.bodies, chunk.topics, chunk.defers_ms) == ([b"x"], None, None)
    assert chunk.message(0, "b") == Envelope("b", "n:1", id.encode(), 9, 2, b"x")


def test_what_a_row_lacks_is_empty() -> None:
    batch = pyarrow.RecordBatch.from_pydict({"body": ["x"], "topic": ["a"], "defer_ms": [5]})

    chunk = chunk_of(batch, has_topic=False)

    assert (chunk.topics, chunk.defers_ms) == (["a"], [5])
    assert chunk.message(0, "a") == Envelope("a", "", b"0" * 16, 0, 0, b"x")
