"""Plans of changes: which daemons get a change, in which order, and failures of single daemons.

The transcripts of topic, channel and nodes show the changes, questions and refusals of one nsqd.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from plugins.clusters import RunningCluster
from plugins.servers import AnyNsqd
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.cluster.admin import (
    Action,
    AdminPlan,
    apply,
    plan_channels,
    plan_tombstone,
    plan_topics,
)
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.inventory import AT_ONCE, registered_channels, take_inventory
from nsqtools.cluster.topology import Topology, idle_steps
from nsqtools.errors import ConnectionFailed, DeadlineExceeded, NotFoundError
from nsqtools.http.http_api import NsqlookupdHTTPClient


def places(cluster: RunningCluster, nsqds: Sequence[str] = ()) -> ClusterAddresses:
    return ClusterAddresses(nsqds, [lookupd.http_address for lookupd in cluster.lookupds])


def test_a_change_goes_to_nsqlookupd_first_then_to_the_nsqd_with_the_topic(
    cluster: RunningCluster,
) -> None:
    first, second = cluster.nsqds
    to_lookupds = ["nsqlookupd"] * 2

    def planned(plan: AdminPlan) -> list[tuple[str, str, int]]:
        outcomes = apply(client, plan)
        assert [outcome.error for outcome in outcomes] == [None] * len(plan.steps)
        return [(step.daemon, step.address, step.messages) for step in plan.steps]

    with Cluster(places(cluster)) as client:
        created = planned(plan_topics(client, Action.CREATE, ["clicks"]))
        assert [daemon for daemon, _, _ in created] == to_lookupds
        assert [lookupd.json("/topics")["topics"] for lookupd in cluster.lookupds] == [
            ["clicks"]
        ] * 2
        assert [nsqd.topics() for nsqd in cluster.nsqds] == [[], []]

        first.create_topic("web.a")
        cluster.wait_for_topic("web.a", 1)
        planned(plan_channels(client, Action.CREATE, ["web.*"], ["arch"]))
        paused = planned(plan_channels(client, Action.PAUSE, ["web.*"], ["a*"]))
        assert paused == [("nsqd", first.http_address, 0)]
        assert first.channel_stats("web.a", "arch")["paused"]
        assert second.topics() == []

        for nsqd in cluster.nsqds:
            nsqd.create_channel("clicks", "arch")
            nsqd.publish("clicks", b"a", b"b")
        cluster.wait_for_topic("clicks", 2)
        plan = plan_topics(client, Action.DELETE, ["clicks"])
        assert plan.is_destructive
        deleted = planned(plan)
    assert [daemon for daemon, _, _ in deleted] == to_lookupds + ["nsqd"] * 2
    assert [messages for _, _, messages in deleted] == [0, 0, 2, 2]
    assert [nsqd.topics() for nsqd in cluster.nsqds] == [["web.a"], []]
    assert not any("clicks" in lookupd.json("/topics")["topics"] for lookupd in cluster.lookupds)


def test_the_plan_lists_consumers_that_would_recreate_the_topic(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    with (
        Cluster(ClusterAddresses([nsqd.http_address])) as client,
        Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]),
    ):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["client_count"], what="a client")
        [of_topic] = plan_topics(client, Action.DELETE, ["clicks"]).steps
        [of_channel] = plan_channels(client, Action.DELETE, ["clicks"], ["*"]).steps

    assert len(of_topic.clients) == 1
    assert "nsqtools/" in of_topic.clients[0]
    assert of_channel.clients == of_topic.clients


def test_an_unreachable_nsqd_is_reported_and_stops_no_other_step(cluster: RunningCluster) -> None:
    first, second = cluster.nsqds
    for nsqd in cluster.nsqds:
        nsqd.create_topic("clicks")
    addresses = [first.http_address, second.http_address]
    with (
        Cluster(ClusterAddresses(addresses)) as direct,
        Cluster(places(cluster, addresses)) as discovered,
    ):
        plan = plan_topics(direct, Action.PAUSE, ["clicks"])
        discovered.nsqds()
        first.kill()
        with pytest.raises(ConnectionFailed, match=first.http_address):
            plan_tombstone(discovered, "clicks", first.http_address)
        outcomes = {outcome.step.address: outcome.error for outcome in apply(direct, plan)}
        late = plan_topics(direct, Action.DELETE, ["clicks"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_topics(direct, Action.DELETE, ["views"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_channels(direct, Action.DELETE, ["clicks"], ["archive"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_tombstone(discovered, "clicks", "nowhere:1")

    assert isinstance(outcomes[first.http_address], ConnectionFailed)
    assert outcomes[second.http_address] is None
    assert second.topic_stats("clicks")["paused"]
    assert [step.address for step in late.steps] == [second.http_address]
    assert [failure.address for failure in late.failures] == [first.http_address]


def test_no_topic_is_judged_idle_after_an_nsqd_has_left(cluster: RunningCluster) -> None:
    cluster.nsqds[0].create_topic("clicks")
    with Cluster(places(cluster)) as client:
        inventory = take_inventory(client)
        assert {step.topic for step in idle_steps(client, inventory, Topology())} == {"clicks"}
        with_another = inventory._replace(nodes={**inventory.nodes, "nsqd-3:4151": ()})
        with pytest.raises(ConnectionFailed, match="nsqd-3:4151 has left"):
            idle_steps(client, with_another, Topology())


def test_channels_of_thousands_of_topics_take_several_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[str] = []
    ask = Cluster.ask

    def begin(self: Cluster, clients: Any, question: Any) -> Any:
        requested.clear()
        return ask(self, clients, question)

    def channels(_: object, topic: str) -> list[str]:
        requested.append(topic)
        if len(requested) > AT_ONCE or topic == "broken":
            raise DeadlineExceeded("no answer in time")
        return ["c"]

    monkeypatch.setattr(Cluster, "ask", begin)
    monkeypatch.setattr(NsqlookupdHTTPClient, "channels", channels)
    topics = [f"t{number}" for number in range(3 * AT_ONCE)]
    with Cluster(ClusterAddresses(lookupd_http=["127.0.0.1:1"])) as cluster:
        [(address, channels_of_topics)] = registered_channels(cluster, cluster.lookupds, topics)[
            0
        ].items()
        assert channels_of_topics == {topic: {"c"} for topic in topics}
        nothing, [failure] = registered_channels(cluster, [address], ["broken", *topics])
    assert (nothing, failure.address) == ({}, address)
