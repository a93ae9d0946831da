"""Rows of a partition as lists, how far a task has come, and the counts of a job."""

from __future__ import annotations

import pytest

from nsqtools.errors import NsqError
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.publish_task import Prefix, byte_strings, chunk_of, fitting
from nsqtools.spark.publishing.row_outcomes import (
    LedgerEntry,
    PublishReport,
    RowCounts,
    require_all,
    summary,
    total,
)

pyarrow = pytest.importorskip("pyarrow")

KINDS = [b"a\nb", b"\0", b"\xff\xfe\x80", b"x", bytes(range(256)) * 4096, "ü".encode(), b" ", b""]


@pytest.mark.parametrize("type", ["binary", "large_binary", "string", "large_string"])
def test_values_are_bytes_whatever_their_layout(type: str) -> None:
    expected = ["ü".encode(), b"", None] if "string" in type else [*KINDS, None, b"last"]
    for values in (expected, [None, None], []):
        array = pyarrow.array(values, type=pyarrow.large_binary()).cast(getattr(pyarrow, type)())

        assert byte_strings(array) == byte_strings(array.dictionary_encode()) == values
        assert byte_strings(array.slice(1)) == values[1:]
        assert byte_strings(array.slice(1, 2)) == values[1:3]


def test_a_row_is_known_by_where_it_came_from_and_what_it_lacks_is_empty() -> None:
    id = "0123456789abcdef"
    batch = pyarrow.RecordBatch.from_pydict(
        {"topic": ["a"], "nsqd": ["n:1"], "id": [id], "ts_ns": [9], "attempts": [2], "body": [b"x"]}
    )
    chunk = chunk_of(batch, has_topic=True)
    assert (chunk.bodies, chunk.topics, chunk.defers_ms) == ([b"x"], None, None)
    assert chunk.message(0, "b") == Envelope("b", "n:1", id.encode(), 9, 2, b"x")

    batch = pyarrow.RecordBatch.from_pydict({"body": ["x"], "topic": ["a"], "defer_ms": [5]})
    chunk = chunk_of(batch, has_topic=False)
    assert (chunk.topics, chunk.defers_ms) == (["a"], [5])
    assert chunk.message(0, "a") == Envelope("a", "", b"0" * 16, 0, 0, b"x")


def test_a_batch_ends_before_it_is_too_large_for_nsqd() -> None:
    half = b"x" * (1 << 18)

    assert fitting([half] * 5, 1 << 19) == 2
    assert fitting([b"x" * (1 << 20), half], 1 << 19) == 1
    assert fitting([None, b"", b"x"], 1 << 19) == 3
    assert fitting([b"x", b"y"], 0) == 1


def test_done_and_counted_is_what_comes_before_the_first_span_that_is_under_way() -> None:
    prefix = Prefix(LedgerEntry(done=5, topics={"a": 4}, rejected=1))
    first, second, third = (prefix.begin(stop, stop * 7) for stop in (10, 20, 30))
    first.counts = RowCounts({"a": 3, "b": 1}, rejected=1)
    second.counts = RowCounts({"b": 5}, unknown=1)
    for span in (first, second, third):
        span.pending = 1

    counts = {"topics": {"a": 7, "b": 6}, "rejected": 2, "unknown": 1}
    for ended, entry in (
        (second, LedgerEntry(done=5, topics={"a": 4}, rejected=1)),
        (first, LedgerEntry(done=20, checksum=140, **counts)),
        (third, LedgerEntry(done=30, checksum=210, **counts)),
    ):
        ended.pending = 0
        prefix.advance()
        assert prefix.entry == entry


def test_the_counts_of_tasks_add_up_and_a_line_says_what_there_is_to_say() -> None:
    one = PublishReport({"a": 1, "b": 2}, rejected=1, retried=3, seconds=2.0, reasons=["r1"] * 4)
    other = PublishReport({"b": 4}, unknown=1, repeated=5, before=6, seconds=1, reasons=["r2"] * 4)

    report = total([one, other])

    reasons = ["r1", "r1", "r1", "r1", "r2"]
    assert report == PublishReport({"a": 1, "b": 6}, 1, 1, 0, 3, 5, 6, 2.0, reasons)
    line = "7 confirmed, 1 rejected, 1 unknown, 0 dead-lettered"
    assert summary(report) == f"{line}, 6 done before, 3 retried, up to 5 twice"
    assert summary(PublishReport({"a": 3})) == "3 confirmed, 0 rejected, 0 unknown, 0 dead-lettered"


def test_rows_that_are_left_over_fail_the_job_with_their_reason() -> None:
    require_all(PublishReport({"a": 3}, rejected=2, dead_lettered=2))
    refused = PublishReport({"a": 3}, rejected=2, dead_lettered=1, reasons=["row 7: too large"])
    with pytest.raises(NsqError, match=r"1 rows were refused .*: row 7: too large"):
        require_all(refused)
    with pytest.raises(NsqError, match=r"1 rows have an unknown fate .* by an earlier run"):
        require_all(PublishReport(unknown=1))
