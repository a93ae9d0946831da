"""One consumer of several topics: each is looked up, and all share what may be in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, OPTIONS
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.waiting import wait_until

from nsqtools import Consumer
from nsqtools.errors import ConfigurationError

TOPICS = ["clicks", "orders"]


@pytest.fixture
def lookupd(nsqlookupd: Callable[..., GoNsqlookupd]) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def nsqds(go_nsqd: Callable[..., GoNsqd], lookupd: GoNsqlookupd) -> list[GoNsqd]:
    """Two, each with 50 messages of each topic."""
    both = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2)]
    for nsqd in both:
        for topic in TOPICS:
            nsqd.create_channel(topic, CHANNEL)
            nsqd.publish(topic, *[f"{topic} {number}".encode() for number in range(50)])
    return both


def in_flight(nsqds: list[GoNsqd]) -> int:
    stats = [nsqd.channel_stats(topic, CHANNEL) for nsqd in nsqds for topic in TOPICS]
    return sum(int(each["in_flight_count"]) for each in stats)


def test_topics_are_found_and_share_what_may_be_in_flight(
    nsqds: list[GoNsqd], lookupd: GoNsqlookupd
) -> None:
    bodies: list[bytes] = []
    options = replace(OPTIONS, max_in_flight=8)
    with Consumer(
        TOPICS, CHANNEL, lookupd_http_addresses=lookupd.http_address, options=options
    ) as consumer:
        addresses = {nsqd.tcp_address for nsqd in nsqds}
        wait_until(
            lambda: all(
                set(each) == addresses for each in consumer.connections_by_topic().values()
            ),
            what="both nsqd for both topics",
        )
        assert sorted(consumer.connections) == sorted(addresses)
        for message in consumer:
            assert message.body.startswith(message.topic.encode())
            if not len(bodies) % 20:
                assert in_flight(nsqds) <= 8
            bodies.append(message.body)
            message.finish()
            if len(bodies) == 200:
                break
    assert {bodies.count(body) for body in bodies} == {2}  # of the two nsqd
    assert {unfinished(nsqd, topic, CHANNEL) for nsqd in nsqds for topic in TOPICS} == {0}


def test_a_topic_counts_once_and_there_must_be_one() -> None:
    assert Consumer(["a", "b", "a"], "c", nsqd_tcp_addresses="127.0.0.1:1").topics == ["a", "b"]
    for topics in ([], ["a", "b!"]):
        with pytest.raises(ConfigurationError):
            Consumer(topics, "c", nsqd_tcp_addresses="127.0.0.1:1")
