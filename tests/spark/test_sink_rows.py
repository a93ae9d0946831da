"""Rows of a partition as lists, how far a task has come, and the counts of a job.

Which rows are refused, and why, is tried with an nsqd in `test_sink_task`.
"""

from __future__ import annotations

import pytest

from nsqtools.errors import NsqError
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.ledger import LedgerEntry
from nsqtools.spark.publishing.publish_task import Prefix, byte_strings, chunk_of, fitting
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    RowCounts,
    require_all,
    summary,
    total,
)

pyarrow = pytest.importorskip("pyarrow")

KINDS = [b"a\nb", b"\0", b"\xff\xfe\x80", b"x", bytes(range(256)) * 4096, "ü".encode(), b" ", b""]


@pytest.mark.parametrize(
    ("values", "type"),
    [
        ([*KINDS, None, b"last"], "binary"),
        ([*KINDS, None, b"last"], "large_binary"),
        (["ü", "", None], "string"),
        (["ü", "", None], "large_string"),
        ([None, None], "binary"),
        ([], "binary"),
    ],
)
@pytest.mark.parametrize("begin", [0, 3])
def test_values_are_bytes_whatever_their_layout(
    values: list[bytes | str | None], type: str, begin: int
) -> None:
    array = pyarrow.array(values, type=getattr(pyarrow, type)())
    expected = [each.encode() if isinstance(each, str) else each for each in values]

    assert byte_strings(array.slice(begin)) == expected[begin:]
    assert byte_strings(array.slice(begin, 2)) == expected[begin : begin + 2]
    assert byte_strings(array.dictionary_encode()) == expected


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


def test_a_batch_ends_before_it_is_too_large_for_nsqd() -> None:
    half = b"x" * (1 << 18)

    assert fitting([half] * 5, 1 << 19) == 2
    assert fitting([b"x" * (1 << 20), half], 1 << 19) == 1
    assert fitting([None, b"", b"x"], 1 << 19) == 3
    assert fitting([b"x", b"y"], 0) == 1


def test_the_prefix_ends_before_the_first_span_that_is_under_way() -> None:
    prefix = Prefix(LedgerEntry())
    first, second, third = (prefix.begin(stop, stop * 7) for stop in (10, 20, 30))
    for span in (first, second, third):
        span.pending = 1

    second.pending = 0
    prefix.advance()
    assert prefix.entry == LedgerEntry()

    first.pending = 0
    prefix.advance()
    assert (prefix.entry.done, prefix.entry.checksum) == (20, 140)

    third.pending = 0
    prefix.advance()
    assert prefix.entry.done == 30


def test_only_what_is_in_the_prefix_is_counted() -> None:
    prefix = Prefix(LedgerEntry(done=5, topics={"a": 4}, rejected=1))
    first, second = prefix.begin(10, 0), prefix.begin(15, 0)
    first.pending = 1
    first.counts = RowCounts({"a": 3, "b": 1}, rejected=1)
    second.counts = RowCounts({"b": 5}, unknown=1)

    prefix.advance()
    assert prefix.entry == LedgerEntry(done=5, topics={"a": 4}, rejected=1)

    first.pending = 0
    prefix.advance()
    expected = LedgerEntry(done=15, topics={"a": 7, "b": 6}, rejected=2, unknown=1)
    assert prefix.entry == expected


def test_the_counts_of_tasks_add_up() -> None:
    report = total(
        [
            PublishReport({"a": 1, "b": 2}, rejected=1, retried=3, seconds=2.0, reasons=["r1"] * 4),
            PublishReport(
                {"b": 4}, unknown=1, repeated=5, before=6, seconds=1.0, reasons=["r2"] * 4
            ),
        ]
    )

    assert report == PublishReport(
        {"a": 1, "b": 6}, 1, 1, 0, 3, 5, 6, 2.0, ["r1", "r1", "r1", "r1", "r2"]
    )
    assert report.confirmed == 7


def test_a_line_says_what_there_is_to_say() -> None:
    assert summary(PublishReport({"a": 3})) == "3 confirmed, 0 rejected, 0 unknown, 0 dead-lettered"
    more = PublishReport({"a": 3}, before=2, retried=1, repeated=1)
    assert summary(more).endswith("dead-lettered, 2 done before, 1 retried, up to 1 twice")


def test_rows_that_are_left_over_fail_the_job_with_their_reason() -> None:
    require_all(PublishReport({"a": 3}, rejected=2, dead_lettered=2))

    with pytest.raises(NsqError, match=r"1 rows were refused .*: row 7: too large"):
        require_all(
            PublishReport({"a": 3}, rejected=2, dead_lettered=1, reasons=["row 7: too large"])
        )
    with pytest.raises(NsqError, match=r"1 rows have an unknown fate .* by an earlier run"):
        require_all(PublishReport(unknown=1))
