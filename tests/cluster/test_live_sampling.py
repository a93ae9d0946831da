"""Samples that no slow nsqd delays, and rates of consumers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.servers import Serve
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.cluster.consumer_rows import ConsumerMeter
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.live_sampling import LiveSampler, Question
from nsqtools.cluster.sampling import SampleFilter
from nsqtools.errors import ConnectionFailed, NotFoundError
from nsqtools.protocol.stats import NsqdStats, read_stats

INTERVAL_S = 0.2


@pytest.fixture
def nsqd(serve: Serve, data_path: Callable[[], Path]) -> Nsqd:
    nsqd: Nsqd = serve(EmbeddedServer(data_path()))
    nsqd.create_channel("clicks", "arch")
    return nsqd


@contextmanager
def sampling(*addresses: str, topics: tuple[str, ...] = ()) -> Iterator[LiveSampler]:
    with Cluster(ClusterAddresses(nsqd_http=addresses)) as cluster:
        yield LiveSampler(cluster, SampleFilter(topics), INTERVAL_S)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_who_answers_is_in_every_sample_and_who_does_not_is_named(nsqd: Nsqd, silent: str) -> None:
    with sampling(nsqd.http_address, silent) as sampler:
        first = sampler.first()
        assert {row.topic for row in first.totals} == {"clicks"}

        named = wait_until(
            lambda: next((node for node in sampler.sample().nodes if node.is_silent), None),
            what="the silent one is named",
        )
        assert named.address == silent
        assert named.rows == []
        nsqd.create_topic("views")
        wait_until(
            lambda: {row.topic for row in sampler.sample().totals} == {"clicks", "views"},
            what="the other one is fresh",
        )


def test_a_dead_nsqd_is_left_out_and_comes_back(nsqd: Nsqd) -> None:
    with sampling(nsqd.http_address) as sampler:
        sampler.first()
        nsqd.kill()
        gone = wait_until(
            lambda: (sample := sampler.sample()).nodes[0].error and sample, what="it is missed"
        )
        assert gone.totals == []
        nsqd.start()
        nsqd.create_topic("clicks")  # it may not have noted it yet when it was killed
        wait_until(lambda: sampler.sample().totals, what="it is back")


def test_the_first_sample_raises_what_a_command_would(nsqd: Nsqd) -> None:
    with sampling("127.0.0.1:1") as sampler, pytest.raises(ConnectionFailed):
        sampler.first()
    with sampling(nsqd.http_address, topics=("clikcs",)) as sampler:
        with pytest.raises(NotFoundError, match="clikcs") as raised:
            sampler.first()
        assert "Did you mean clicks?" in raised.value.hint


def test_consumers_and_memory_are_asked_for_where_they_are_shown(nsqd: Nsqd) -> None:
    with (
        Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]) as consumer,
        sampling(nsqd.http_address) as sampler,
    ):
        consumer.start()
        [node] = sampler.first().nodes
        assert node.consumers == []
        for question in (Question(True), Question(True, "clicks", "arch")):
            [row] = wait_until(
                lambda question=question: sampler.sample(question).nodes[0].consumers,
                what="the consumer is there",
            )
            assert (row.topic, row.channel, row.node) == ("clicks", "arch", nsqd.http_address)
        wait_until(
            lambda: (sampler.sample(Question(memory=True)).nodes[0].heap or 0) > 0, what="memory"
        )
        assert sampler.sample(Question(True, "other")).nodes[0].consumers == []


def stats(finished: int, *, connected: int = 1) -> NsqdStats:
    client = {"remote_address": "a:9", "finish_count": finished, "connect_ts": connected}
    channel = {"channel_name": "arch", "clients": [client], "message_count": finished}
    return read_stats({"topics": [{"topic_name": "clicks", "channels": [channel]}]})


def test_consumers_have_rates_from_the_second_answer_on() -> None:
    meter = ConsumerMeter(0.5)

    def rate(at_s: float, counted: NsqdStats) -> float | None:
        [row] = meter.measure("a:1", at_s, counted)
        return row.finish

    assert rate(1.0, stats(10)) is None
    assert rate(2.0, stats(30)) == 20
    assert rate(2.1, stats(90)) == 20  # too early to tell
    assert rate(4.0, stats(90)) == 30
    assert rate(5.0, stats(0, connected=2)) is None
