"""``nsq nodes``, ``lookup``, ``ping``, ``info``, ``tombstone`` and ``config`` as processes."""

from __future__ import annotations

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster, ValidJson

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch


def test_nodes_are_those_of_every_nsqlookupd_with_their_tombstones(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson
) -> None:
    first, second = cluster.nsqds
    first.create_topic("clicks")
    cluster.wait_for_topic("clicks", 1)
    for lookupd in cluster.lookupds:
        lookupd.post("/topic/tombstone", topic="clicks", node=first.http_address)

    nodes = valid_json("nodes", run_nsq(["nodes", "--json", *cluster.lookupd_options]).out)

    lookupds = sorted(each.http_address for each in cluster.lookupds)
    found = [(each["node"], each["tombstoned"], sorted(each["lookupds"])) for each in nodes]
    tombstoned = [(first.http_address, ["clicks"]), (second.http_address, [])]
    assert sorted(found) == sorted((*each, lookupds) for each in tombstoned)


def test_a_silent_nsqd_is_drained_until_nothing_waits_there(
    run_nsq: RunNsq, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one says nothing for a while, too."""
    silences = iter([True])
    next_batch = Consumer.next_batch

    def silent_first(consumer: Consumer, timeout_s: float) -> Batch | None:
        return None if next(silences, False) else next_batch(consumer, timeout_s)

    monkeypatch.setattr(Consumer, "next_batch", silent_first)
    source, target = cluster.nsqds
    source.create_channel("clicks", "archive")
    source.publish("clicks", b"one", b"two")  # the first is in flight alone

    result = run_nsq(["drain", source.http_address, "--to", target.http_address, "--yes"])

    assert result.status == 0, result.err
    assert "2 messages moved, 0 left" in result.err


def test_the_channel_of_a_drain_that_nsqlookupd_goes_on_naming_is_said(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    first, second = cluster.nsqds
    first.publish("bare", b"waits for a channel")
    cluster.wait_for_topic("bare", 1)

    drained = run_nsq(["drain", first.http_address, "--to", second.http_address, "--yes"])

    assert drained.status == 0, drained.err
    assert "nsq channel delete bare nsq-drain\n" in drained.err
