"""/stats is encoded in small pieces, and the joined document is decoded again."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest

from nsqtools.protocol.stats import (
    ChannelStats,
    ClientStats,
    LatencyStats,
    NsqdStats,
    StatsReader,
    TopicStats,
    read_stats,
    read_topic,
)

T = TypeVar("T")


def distinct(kind: type[T], **read: Any) -> T:
    """Create an object whose plain fields all have different values."""
    of_type: dict[str, Callable[[int], object]] = {"int": int, "str": str, "bool": bool}
    for number, field in enumerate(fields(kind), 1):  # type: ignore[arg-type]
        if make := of_type.get(str(field.type)):
            read[field.name] = make(number)
    return kind(**read)


LATENCY = LatencyStats(count=9, percentiles=((0.5, 7.0), (0.99, 8.5)))
CLIENT = distinct(ClientStats, pub_counts=(("t", 1), ("u", 2)))
CHANNELS = tuple(
    distinct(ChannelStats, clients=clients, e2e_processing_latency=latency)
    for clients, latency in ((None, LatencyStats()), ((), LATENCY), ((CLIENT,) * 50, LATENCY))
)
TOPICS = (
    distinct(TopicStats, channels=CHANNELS * 15, e2e_processing_latency=LATENCY),
    distinct(TopicStats, channels=(), e2e_processing_latency=LatencyStats()),
)


@pytest.mark.parametrize(
    "stats",
    [
        distinct(NsqdStats, topics=TOPICS, memory={"heap": 1, "gc": 2}, producers=(CLIENT,)),
        distinct(NsqdStats, topics=(), memory=None, producers=None),
    ],
    ids=["all", "nothing"],
)
def test_stats_written_in_small_pieces_are_decoded_again(stats: NsqdStats) -> None:
    pieces = list(stats.encoded())
    assert max(map(len, pieces)) < 5000
    assert read_stats(json.loads(b"".join(pieces))) == stats


def test_an_invalid_type_counts_as_none_and_old_clients_are_counted() -> None:
    stats = read_stats({"producers": [{"client_id": 3, "state": 3, "deflate": 3}]})
    [client] = stats.producers or ()
    assert (client.client_id, client.state, client.deflate) == ("", 3, False)
    channels = [{"clients": [{}, {}]}, {"clients": [{}, {}], "client_count": 5}]
    [old, new] = read_topic({"channels": channels}).channels
    assert (old.client_count, new.client_count) == (2, 5)


HUGE, NO_PERCENTILES = 10**400, LatencyStats(percentiles=())
ONE_IS_NONE = [{"quantile": "a", "value": 1}, {"quantile": 1, "value": 2}]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], None),
        ({"count": 1.5, "percentiles": None}, LatencyStats()),
        ({"count": 1 << 63, "percentiles": [None, {}]}, NO_PERCENTILES),
        ({"percentiles": ONE_IS_NONE}, LatencyStats(percentiles=((1.0, 2.0),))),
        ({"percentiles": [{"quantile": 1, "value": 1 << 63}]}, NO_PERCENTILES),
        ({"count": HUGE, "percentiles": [{"quantile": HUGE, "value": 1}]}, NO_PERCENTILES),
        ({"percentiles": [{"quantile": 0.5, "value": float("inf")}]}, NO_PERCENTILES),
    ],
)
def test_an_invalid_latency_counts_as_none(document: object, expected: LatencyStats | None) -> None:
    topic = read_topic({"topic_name": "t", "depth": HUGE, "e2e_processing_latency": document})
    assert topic.e2e_processing_latency == (expected or LatencyStats())
    assert (topic.topic_name, topic.depth, topic.channels) == ("t", 0, ())


TOPIC = '{"topic_name":"%s","depth":%d,"channels":[{"channel_name":"c"}]}'
WHOLE = '{"version":"1","topics":[%s],"producers":[{"client_id":"{\\"topic_name\\":"}]}'


@pytest.mark.parametrize(
    "answers",
    [
        [[("a", 1), ("b", 2), ("c", 3)], [("a", 1), ("b", 5), ("c", 3)], [("b", 5), ("c", 3)]],
        [[("a", 1)], [("a", 1)], [], [("a", 1), ("a", 1), ("a", 2)], [("a", 2), ("a", 1)]],
        [[("b", 1), ("c", 1)], [("a", 1), ("b", 1), ("c", 1), ("d", 1)], [("d", 1), ("a", 1)]],
    ],
)
def test_stats_of_a_reader_equal_the_decoded_document(answers: list[list[Any]]) -> None:
    reader = StatsReader()
    for answer in answers:
        body = WHOLE % ",".join(TOPIC % topic for topic in answer)
        stats = reader.read(body.encode(), json.loads)
        complete = read_stats(json.loads(body))
        assert set(stats.topics or ()) == set(complete.topics or ())
        assert replace(stats, topics=()) == replace(complete, topics=())


def test_only_changed_topics_are_decoded() -> None:
    reader, sizes = StatsReader(), []

    def decode(body: bytes) -> Any:
        sizes.append(len(body))
        return json.loads(body)

    for depth in (1, 1, 2):
        topics = [TOPIC % (f"t{number}", depth * (number == 7)) for number in range(1000)]
        stats = reader.read((WHOLE % ",".join(topics)).encode(), decode)
        assert [topic.depth for topic in stats.topics or ()][7] == depth
    assert max(sizes[1:]) < sizes[0] / 100


@pytest.mark.parametrize(
    "body",
    [
        '{"topics":[{"topic_name":"a"}],"others":[{"topic_name":"b"},{"topic_name":"c"}]}',
        '{"topics":[],"others":[{"topic_name":"b"},{"topic_name":"c"}]}',
        '{"topics": [{"topic_name": "a"}, {"topic_name": "b"}]}',
        '{"topics":[{"topic_name":"a","x":{"topic_name":"b"}},{"topic_name":"c"}]}',
        '{"topics":[[{"topic_name":"a"},{"topic_name":"c"}]]}',
        '{"topics":[{"topic_name":"a"},3,{"topic_name":"c"}]}',
        '{"topics":null}',
    ],
)
def test_a_response_of_another_form_is_decoded_completely(body: str) -> None:
    reader = StatsReader()
    for _ in range(2):
        assert reader.read(body.encode(), json.loads) == read_stats(json.loads(body))
