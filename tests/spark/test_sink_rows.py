"""Which rows can be published, how many in a batch, and how far a task has come."""

from __future__ import annotations

import pytest

from nsqtools.spark.publishing.ledger import LedgerEntry
from nsqtools.spark.publishing.publish_task import Prefix, fitting, refusal


@pytest.mark.parametrize(
    ("body", "topic", "defer_ms", "reason"),
    [
        (b"x", "clicks", None, ""),
        (b"x" * 10, "clicks#ephemeral", 3_600_000, ""),
        (None, "clicks", None, "the body is null"),
        (b"", "clicks", None, "the body is empty, which NSQ cannot carry"),
        (b"x" * 11, "clicks", None, "11 bytes are above the limit of 10"),
        (b"x", None, None, "the topic is null"),
        (b"x", "a b", None, "'a b' is not a valid topic"),
        (b"x", "clicks", 3_600_001, "a delay of 3600001 ms is not within 0 and 1h"),
        (b"x", "clicks", -1, "a delay of -1 ms is not within 0 and 1h"),
    ],
)
def test_a_row_is_refused_with_the_reason(
    body: bytes | None, topic: str | None, defer_ms: int | None, reason: str
) -> None:
    assert refusal(body, topic, defer_ms, 10) == reason


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
    first.topics, second.topics = {"a": 3, "b": 1}, {"b": 5}
    first.rejected = second.unknown = 1

    prefix.advance()
    assert prefix.entry == LedgerEntry(done=5, topics={"a": 4}, rejected=1)

    first.pending = 0
    prefix.advance()
    expected = LedgerEntry(done=15, topics={"a": 7, "b": 6}, rejected=2, unknown=1)
    assert prefix.entry == expected
