"""Samples that no slow nsqd delays and that lose no nsqd, and rates of consumers."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import Mock

import pytest
from plugins.clusters import RunningCluster
from plugins.http_server import MakeScripted
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.cluster import sampling as live
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.inventory import take_inventory
from nsqtools.cluster.queue_rows import ConsumerMeter, NodeReport
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler, SampleScope
from nsqtools.errors import DeadlineExceeded
from nsqtools.http.http_api import HTTPAccess
from nsqtools.protocol.stats import NsqdStats, read_stats
from nsqtools.server import EmbeddedNsqd

INTERVAL_S = 0.2


@pytest.fixture
def nsqd(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel("clicks", "arch")
    return nsqd


@contextmanager
def sampling(*addresses: str) -> Iterator[Sampler]:
    with Cluster(ClusterAddresses(nsqd_http=addresses)) as cluster:
        yield Sampler(cluster, SampleFilter(), interval_s=INTERVAL_S)


def test_every_sample_has_responsive_nsqd_and_reports_hanging_ones(
    nsqd: Nsqd, deaf_address: str
) -> None:
    with sampling(nsqd.http_address, deaf_address) as sampler:
        first = sampler.sample()
        assert {row.topic for row in first.totals} == {"clicks"}
        slow = Mock(side_effect=DeadlineExceeded("no answer in time"))  # for a further request
        assert sampler._cluster.ask({nsqd.http_address: nsqd}, slow)[1]
        assert nsqd.http_address not in failed(sampler.sample())

        [silent] = wait_until(
            lambda: [node for node in sampler.sample().nodes if node.is_silent],
            what="the silent one is named",
        )
        assert (silent.address, silent.rows) == (deaf_address, [])
        nsqd.create_topic("views")
        wait_until(
            lambda: {row.topic for row in sampler.sample().totals} == {"clicks", "views"},
            what="the other one is fresh",
        )


def test_an_nsqd_with_too_many_topics_is_reported_and_left_out(
    nsqd: Nsqd, embedded_nsqd: AnyNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four nsqd with 250,000 topics each took 1.5 GB."""
    loud = embedded_nsqd()
    for number in range(20):
        loud.create_topic(f"t{number}")
    monkeypatch.setattr(live, "MAX_ENTRIES_OF_NODE", 20)

    with sampling(nsqd.http_address, loud.http_address) as sampler:
        sample = wait_until(
            lambda: (sample := sampler.sample()).failures and sample, what="it is named"
        )
        assert [failure.address for failure in sample.failures] == [loud.http_address]
        assert "there is room for 20" in str(sample.failures[0].error)
        assert {row.topic for row in sample.totals} == {"clicks"}
        monkeypatch.setattr(live, "MAX_ENTRIES_OF_NODE", 1000)
        monkeypatch.setattr(live, "OVER_BUDGET_S", 0.0)
        wait_until(lambda: not sampler.sample().failures, what="there is room for it again")
        monkeypatch.setattr(live, "MAX_ENTRIES", 40)
        wait_until(lambda: sampler.sample().failures, what="all together have a budget, too")


def test_consumers_and_memory_are_requested_only_where_shown(nsqd: Nsqd) -> None:
    with (
        Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]),
        sampling(nsqd.http_address) as sampler,
    ):
        [node] = sampler.sample().nodes
        assert node.consumers == []
        for question in (SampleScope(True), SampleScope(True, "clicks", "arch")):
            [row] = wait_until(
                lambda question=question: sampler.sample(question).nodes[0].consumers,
                what="the consumer is there",
            )
            assert (row.topic, row.channel, row.node) == ("clicks", "arch", nsqd.http_address)
        wait_until(
            lambda: (sampler.sample(SampleScope(memory=True)).nodes[0].heap or 0) > 0, what="memory"
        )
        assert sampler.sample(SampleScope(True, "other")).nodes[0].consumers == []


@contextmanager
def watching(*lookupds: str, timeout_s: float) -> Iterator[Sampler]:
    """A sampler that asks the nsqlookupd at every sample which nsqd they announce."""
    with (
        pytest.MonkeyPatch.context() as patch,
        Cluster(ClusterAddresses((), lookupds), HTTPAccess(timeout_s=timeout_s)) as cluster,
    ):
        patch.setattr(live, "LOOKUP_S", 0.0)
        yield Sampler(cluster, SampleFilter(), required=False, interval_s=INTERVAL_S)


def failed(sample: Sample) -> set[str]:
    return {failure.address for failure in sample.failures}


def test_an_unreachable_nsqd_that_is_not_announced_is_forgotten(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = cluster.nsqds[0]
    lookupds = [lookupd.http_address for lookupd in cluster.lookupds]
    with watching(*lookupds, timeout_s=0.5) as sampler:
        wait_until(lambda: len(sampler.sample().reports) == 2, what="both answer")
        monkeypatch.setattr(live, "FORGOTTEN_S", 0.0)
        for lookupd in cluster.lookupds:
            lookupd.kill()
        dead.kill()
        wait_until(lambda: dead.http_address in failed(sampler.sample()), what="it is missed")
        for _ in range(5):
            assert dead.http_address in failed(sampler.sample()), "nobody says that it has left"

        cluster.lookupds[0].start()  # nsqlookupd lists no nsqd for a moment
        wait_until(lambda: len(sampler.sample().nodes) == 1, what="it is forgotten")
        assert sampler.sample().nodes[0].address == cluster.nsqds[1].http_address


def test_short_lived_nsqd_leave_no_descriptors_and_threads(
    scripted_lookupd: MakeScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods get a new address each time."""
    monkeypatch.setattr(live, "FORGOTTEN_S", 0.0)
    lookupd = scripted_lookupd()
    descriptors, threads = [], threading.active_count()
    with watching(lookupd.address, timeout_s=patience_s(5)) as sampler:

        def answering() -> set[str]:
            return {report.address for report in sampler.sample().reports}

        for _ in range(6):
            with ExitStack() as pods:
                nsqds = [pods.enter_context(EmbeddedNsqd()) for _ in range(5)]
                lookupd.list_nsqd(*(nsqd.tcp_address for nsqd in nsqds))
                names = {nsqd.http_address for nsqd in nsqds}
                for producer, nsqd in zip(lookupd.answer["producers"], nsqds, strict=True):
                    producer["http_port"] = int(nsqd.http_address.rpartition(":")[2])
                wait_until(lambda: answering() == names, what="these answer")  # noqa: B023
                lookupd.list_nsqd()
                assert take_inventory(sampler._cluster).nodes.keys() == names
            wait_until(lambda: not sampler.sample().nodes, what="those that left are forgotten")
            descriptors.append(len(os.listdir("/proc/self/fd")))
            assert not sampler._cluster._clients
        assert descriptors[-1] <= descriptors[0] + 5, descriptors
    wait_until(lambda: threading.active_count() <= threads, what="no thread is left")


def stats(finished: int, *, connected: int = 1) -> NsqdStats:
    client = {"remote_address": "a:9", "finish_count": finished, "connect_ts": connected}
    channel = {"channel_name": "arch", "clients": [client], "message_count": finished}
    return read_stats({"topics": [{"topic_name": "clicks", "channels": [channel]}]})


def test_consumers_have_rates_since_the_second_answer() -> None:
    meter = ConsumerMeter(0.5)

    def rate(at_s: float, counted: NsqdStats) -> float | None:
        [row] = meter.measure(NodeReport("a:1", at_s, counted))
        return row.finish

    assert rate(1.0, stats(10)) is None
    assert rate(2.0, stats(30)) == 20
    assert rate(2.1, stats(90)) == 20  # too early for another rate
    assert rate(4.0, stats(90)) == 30
    assert rate(5.0, stats(0, connected=2)) is None
