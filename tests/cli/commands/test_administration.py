"""``nsq topic`` and ``nsq channel`` as processes: what they show, ask, change and refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.http_api import Nsqd


@pytest.fixture
def nsqd(any_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd with two messages in clicks/arch, and an empty topic views."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a", b"b")
    nsqd.create_topic("views")
    return nsqd


def topics(nsqd: Nsqd) -> list[str]:
    return [topic["topic_name"] for topic in nsqd.stats()["topics"]]


def at(nsqd: Nsqd, *arguments: str) -> list[str]:
    return [*arguments, f"--nsqd-http-address={nsqd.http_address}"]


def test_pausing_asks_nobody(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    for command, paused in (("pause", True), ("unpause", False)):
        assert run_nsq(at(nsqd, "topic", command, "clicks")).status == 0
        assert run_nsq(at(nsqd, "channel", command, "clicks", "arch")).status == 0
        assert nsqd.topic_stats("clicks")["paused"] is paused
        assert nsqd.channel_stats("clicks", "arch")["paused"] is paused


def test_what_is_partly_done_is_reported_node_by_node(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    first, second = cluster.nsqds
    second.create_topic("clicks")
    first.kill()

    result = run_nsq(["topic", "pause", "clicks", *cluster.nsqd_options])

    assert result.status == 6
    assert f"left out: cannot connect to http://{first.http_address}" in result.err
    assert "nsq: pause topic clicks: done on 1 nsqd" in result.err
    assert second.topic_stats("clicks")["paused"]
