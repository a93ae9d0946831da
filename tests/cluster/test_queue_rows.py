"""Rows and rates: sums, the interval of a rate, and queues without a rate."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.cluster.queue_rows import (
    NodeReport,
    QueueRow,
    RateMeter,
    SumReader,
    rates_between,
    rows_of_topic,
    totals,
)
from nsqtools.cluster.stats_documents import sort_rows
from nsqtools.errors import ProtocolError
from nsqtools.protocol.stats import StatsReader, read_stats

COUNTS_OF_ROW = {"depth": 10, "disk": 4, "in_flight": 5, "messages": 100, "clients": 1}
ROW = QueueRow(node="a:1", topic="clicks", channel="arch", paused=False, **COUNTS_OF_ROW)
IDLE = replace(ROW, clients=0, in_flight=0)
MOVED = {"messages": 300, "depth": 60, "in_flight": 15, "deferred": 20, "requeued": 30}
MOVED["timed_out"] = 10


@pytest.mark.parametrize(
    ("before", "changed", "expected"),
    [
        # in 2 s: 200 published, 40 returned, 70 more pending, so 170 sent; 10 more in flight
        (ROW, MOVED, (100, 85, 60, 20)),
        # messages that return to the queue make no rate negative
        (ROW, {"depth": 15, "in_flight": 0, "timed_out": 5}, (0, 0, 0, 2.5)),
        # messages of a queue emptied without consumers are not finished
        (IDLE, {"depth": 0, "messages": 110}, (5, 0, 0, 0)),
        # a counter that decreased has no rate
        (ROW, {"messages": 99}, None),
        (ROW, {"requeued": -1}, None),
    ],
)
def test_rates_cover_the_elapsed_time_and_count_finished_messages(
    before: QueueRow, changed: dict[str, Any], expected: tuple[float, ...] | None
) -> None:
    rates = rates_between(before, replace(before, **changed), 2.0)

    values = rates and (rates.ingress, rates.egress, rates.finish, rates.requeue)
    assert values == expected


def answer(start_time: int = 1, **topics: Any) -> dict[str, Any]:
    """Statistics of topics with the given numbers of messages, each with one channel."""
    entries = []
    for name, count in topics.items():
        channel = {"channel_name": "arch", "message_count": count, "depth": count // 2}
        entries.append({"topic_name": name, "message_count": count, "channels": [channel]})
    return {"start_time": start_time, "topics": entries}


def as_sent(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


COUNTS = st.integers(0, 3).map(lambda count: count * 10)
ANSWERS = st.lists(
    st.tuples(st.integers(1, 2), st.dictionaries(st.sampled_from("abc"), COUNTS)), max_size=6
)


@given(ANSWERS)
def test_parsing_only_changed_topics_gives_the_same_rows_and_rates(
    sequence: list[tuple[int, dict[str, int]]],
) -> None:
    reader, meter, full_meter = StatsReader(), RateMeter(0.5), RateMeter()
    for at_s, (start_time, topics) in enumerate(sequence):
        document = answer(start_time, **topics)
        full = NodeReport("a:1", float(at_s), read_stats(document))
        quick = NodeReport("a:1", float(at_s), reader.read(as_sent(document), json.loads))
        assert meter.measure(quick) == full_meter.measure(full)


class Reading:
    """Answers of one nsqd, read one after the other."""

    def __init__(self, address: str = "a:1") -> None:
        self._address = address
        self._reader, self._meter = StatsReader(), RateMeter(0.5)

    def read(self, document: dict[str, Any], at_s: float) -> list[QueueRow]:
        stats = self._reader.read(as_sent(document), json.loads)
        return self._meter.measure(NodeReport(self._address, at_s, stats))

    def rate(self, document: dict[str, Any], at_s: float) -> float | None:
        [row] = [row for row in self.read(document, at_s) if row.channel]
        return row.rates and row.rates.ingress


def test_a_restart_is_noticed_even_if_the_counters_are_higher() -> None:
    reading = Reading()
    reading.read(answer(a=100), 10.0)

    restarted = reading.read(answer(2, a=500), 12.0)
    later = reading.read(answer(2, a=600), 14.0)

    assert [row.rates for row in restarted] == [None, None]
    assert [row.rates.ingress for row in later if row.rates] == [50, 50]


def test_an_unchanged_topic_keeps_its_rows_until_it_is_deleted() -> None:
    reading = Reading()
    for at_s in (0.0, 1.0):
        rows = reading.read(answer(a=10, last=0), at_s)  # the last topic is always read
    assert all(row.rates is not None and row.rates.ingress == 0 for row in rows)
    unchanged = reading.read(answer(a=10, last=0), 2.0)
    assert all(one is other for one, other in zip(rows, unchanged, strict=True))
    assert reading.rate(answer(a=40), 4.0) == 15
    assert list(reading._meter._topics) == ["a"]


def test_answers_in_quick_succession_keep_the_previous_rates() -> None:
    reading = Reading()
    assert reading.rate(answer(a=10), 1.0) is None
    assert reading.rate(answer(a=500), 1.1) is None
    assert reading.rate(answer(a=20), 2.0) == 10
    assert reading.rate(answer(a=500), 2.1) == 10
    assert reading.rate(answer(a=500), 2.2) == 10
    assert reading.rate(answer(a=40), 3.0) == 20
    assert reading.rate(answer(a=40), 3.1) == 20


def test_sums_equal_totals_and_are_renewed_only_for_changed_rows() -> None:
    sums = SumReader()
    first, second = Reading("a:1"), Reading("b:1")
    previous: list[QueueRow] = []
    current: list[QueueRow] = []
    for at_s in range(4):
        rows = first.read(answer(a=10, b=at_s), at_s) + second.read(answer(a=5), at_s)
        previous, current = current, sums.totals(rows)
        assert current == totals(rows)
    same = {row.key for row, earlier in zip(current, previous, strict=True) if row is earlier}
    assert same == {("", "a", ""), ("", "a", "arch")}


def test_totals_have_summed_counts_and_rates_and_the_worst_latency() -> None:
    rates = rates_between(ROW, replace(ROW, messages=150), 1.0)
    rows = [
        replace(ROW, rates=rates, latency=((0.99, 2.0), (0.5, 0.1))),
        replace(ROW, node="b:1", paused=True, latency=((0.99, 1.0), (0.5, 0.3))),
    ]

    [total] = totals(rows)

    assert (total.node, total.depth, total.memory, total.clients) == ("", 20, 12, 2)
    assert total.paused
    assert total.latency == ((0.99, 2.0), (0.5, 0.3))
    assert total.rates == rates


def test_an_incomplete_answer_is_read_and_a_malformed_one_refused() -> None:
    stats = read_stats({"topics": [{"topic_name": "clicks", "depth": "many", "channels": None}]})

    [topic] = stats.topics or ()
    [row] = rows_of_topic("a:1", topic)
    assert (row.topic, row.depth, row.latency) == ("clicks", 0, ())
    [row] = rows_of_topic("a:1", replace(topic, depth=-1, backend_depth=2))
    assert (row.depth, row.memory) == (0, 0)
    assert not read_stats({"topics": None}).topics
    for topics in ("x", [1, None, {}], [{"topic_name": 7}]):
        assert all(
            topic_stats.topic_name == ""
            for topic_stats in read_stats({"topics": topics}).topics or ()
        )
    with pytest.raises(ProtocolError):
        read_stats(["clicks"])


def test_rows_are_sorted_by_descending_numbers_with_unknown_ones_last() -> None:
    measured = replace(ROW, topic="b", rates=rates_between(ROW, ROW, 1.0))
    deep = replace(ROW, topic="c", depth=11)

    assert [row.topic for row in sort_rows([ROW, measured, deep], "depth")] == ["c", "b", "clicks"]
    assert sort_rows([ROW, measured, deep], "ingress")[0].topic == "b"
    assert [row.topic for row in sort_rows([deep, ROW, measured], "topic")] == ["b", "c", "clicks"]
