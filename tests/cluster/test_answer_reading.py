"""Answers that are read only where they changed have the rows and rates of those read whole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nsqtools.cluster.answer_reading import AnswerReader, SumReader
from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.queue_rows import QueueRow, RateMeter, totals
from nsqtools.protocol.stats import read_stats


def answer(start_time: int = 1, **topics: Any) -> dict[str, Any]:
    """An answer with these topics, each with so many messages in itself and its channel."""
    return {
        "start_time": start_time,
        "topics": [
            {
                "topic_name": name,
                "message_count": count,
                "channels": [{"channel_name": "arch", "message_count": count, "depth": count // 2}],
            }
            for name, count in topics.items()
        ],
    }


COUNTS = st.integers(0, 3).map(lambda count: count * 10)
ANSWERS = st.lists(
    st.tuples(st.integers(1, 2), st.dictionaries(st.sampled_from("abc"), COUNTS)), max_size=6
)


@given(ANSWERS)
def test_it_reads_what_reading_everything_would(sequence: list[tuple[int, dict[str, int]]]) -> None:
    reader, meter = AnswerReader("a:1", 0.5), RateMeter()
    for at_s, (start_time, topics) in enumerate(sequence):
        document = answer(start_time, **topics)
        report = NodeReport("a:1", float(at_s), read_stats(document))
        assert reader.read(document, float(at_s)) == meter.measure([report])


def rate(rows: list[QueueRow]) -> float | None:
    [row] = [row for row in rows if row.channel]
    return row.rates and row.rates.ingress


def test_a_topic_that_does_not_change_is_not_read_again() -> None:
    reader = AnswerReader("a:1", 0.5)
    for at_s in (0.0, 1.0):
        rows = reader.read(answer(a=10), at_s)
    assert rate(rows) == 0
    again = reader.read(answer(a=10), 2.0)
    assert all(one is other for one, other in zip(rows, again, strict=True))
    assert rate(reader.read(answer(a=40), 4.0)) == 15


def test_answers_close_together_keep_the_rates_they_had() -> None:
    reader = AnswerReader("a:1", 0.5)
    assert rate(reader.read(answer(a=10), 1.0)) is None
    assert rate(reader.read(answer(a=500), 1.1)) is None
    assert rate(reader.read(answer(a=20), 2.0)) == 10
    assert rate(reader.read(answer(a=500), 2.1)) == 10
    assert rate(reader.read(answer(a=500), 2.2)) == 10
    assert rate(reader.read(answer(a=40), 3.0)) == 20


def test_sums_are_those_of_totals_and_made_again_only_where_a_row_changed() -> None:
    sums = SumReader()
    one, other = AnswerReader("a:1", 0.5), AnswerReader("b:1", 0.5)
    before: list[QueueRow] = []
    now: list[QueueRow] = []
    for at_s in range(4):
        rows = [
            *one.read(answer(a=10, b=at_s), float(at_s)),
            *other.read(answer(a=5), float(at_s)),
        ]
        before, now = now, sums.totals(rows)
        assert now == totals(rows)
    same = {row.key for row, earlier in zip(now, before, strict=True) if row is earlier}
    assert same == {("", "a", ""), ("", "a", "arch")}


def test_what_is_no_topic_is_left_out() -> None:
    reader = AnswerReader("a:1", 0.5)
    for topics in (None, "x", [1, None, {}], [{"topic_name": 7}]):
        rows = reader.read({"topics": topics}, 1.0)
        assert all(row.topic == "" for row in rows)
