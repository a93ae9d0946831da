"""Plans and what comes of them: where a change goes, in which order, and what fails alone.

What is emptied, asked and refused on one nsqd is in the transcripts of topic, channel and nodes.
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
    return ClusterAddresses(nsqds, [each.http_address for each in cluster.lookupds])


def test_a_change_goes_to_nsqlookupd_first_and_then_to_every_nsqd_that_has_it(
    cluster: RunningCluster,
) -> None:
    first, second = cluster.nsqds
    to_lookupds = ["nsqlookupd"] * 2

    def planned(plan: AdminPlan) -> list[tuple[str, str, int]]:
        outcomes = apply(asked, plan)
        assert [outcome.error for outcome in outcomes] == [None] * len(plan.steps)
        return [(step.daemon, step.address, step.messages) for step in plan.steps]

    with Cluster(places(cluster)) as asked:
        created = planned(plan_topics(asked, Action.CREATE, ["clicks"]))
        assert [daemon for daemon, _, _ in created] == to_lookupds
        assert [each.json("/topics")["topics"] for each in cluster.lookupds] == [["clicks"]] * 2
        assert [nsqd.topics() for nsqd in cluster.nsqds] == [[], []]

        first.create_topic("web.a")
        cluster.wait_for_topic("web.a", 1)
        planned(plan_channels(asked, Action.CREATE, ["web.*"], ["arch"]))
        paused = planned(plan_channels(asked, Action.PAUSE, ["web.*"], ["a*"]))
        assert paused == [("nsqd", first.http_address, 0)]
        assert first.channel_stats("web.a", "arch")["paused"]
        assert second.topics() == []

        for nsqd in cluster.nsqds:
            nsqd.create_channel("clicks", "arch")
            nsqd.publish("clicks", b"a", b"b")
        cluster.wait_for_topic("clicks", 2)
        plan = plan_topics(asked, Action.DELETE, ["clicks"])
        assert plan.is_destructive
        deleted = planned(plan)
    assert [daemon for daemon, _, _ in deleted] == to_lookupds + ["nsqd"] * 2
    assert [messages for _, _, messages in deleted] == [0, 0, 2, 2]
    assert [nsqd.topics() for nsqd in cluster.nsqds] == [["web.a"], []]
    assert not any("clicks" in each.json("/topics")["topics"] for each in cluster.lookupds)


def test_consumers_that_would_create_it_again_are_in_the_plan(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    with (
        Cluster(ClusterAddresses([nsqd.http_address])) as asked,
        Consumer("clicks", "arch", nsqd_tcp_addresses=[nsqd.tcp_address]),
    ):
        wait_until(lambda: nsqd.channel_stats("clicks", "arch")["client_count"], what="a client")
        [of_topic] = plan_topics(asked, Action.DELETE, ["clicks"]).steps
        [of_channel] = plan_channels(asked, Action.DELETE, ["clicks"], ["*"]).steps

    assert len(of_topic.clients) == 1
    assert "nsqtools/" in of_topic.clients[0]
    assert of_channel.clients == of_topic.clients


def test_one_that_is_down_is_named_and_stops_no_other(cluster: RunningCluster) -> None:
    first, second = cluster.nsqds
    for nsqd in cluster.nsqds:
        nsqd.create_topic("clicks")
    given = [first.http_address, second.http_address]
    with Cluster(ClusterAddresses(given)) as asked, Cluster(places(cluster, given)) as announced:
        plan = plan_topics(asked, Action.PAUSE, ["clicks"])
        announced.nsqds()
        first.kill()
        with pytest.raises(ConnectionFailed, match=first.http_address):
            plan_tombstone(announced, "clicks", first.http_address)
        outcomes = {outcome.step.address: outcome.error for outcome in apply(asked, plan)}
        late = plan_topics(asked, Action.DELETE, ["clicks"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_topics(asked, Action.DELETE, ["views"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_channels(asked, Action.DELETE, ["clicks"], ["archive"])
        with pytest.raises(NotFoundError, match=f"left out: .*{first.http_address}"):
            plan_tombstone(announced, "clicks", "nowhere:1")

    assert isinstance(outcomes[first.http_address], ConnectionFailed)
    assert outcomes[second.http_address] is None
    assert second.topic_stats("clicks")["paused"]
    assert [step.address for step in late.steps] == [second.http_address]
    assert [failure.address for failure in late.failures] == [first.http_address]


def test_what_an_nsqd_that_left_meanwhile_had_is_not_judged_idle(cluster: RunningCluster) -> None:
    cluster.nsqds[0].create_topic("clicks")
    with Cluster(places(cluster)) as asked:
        before = take_inventory(asked)
        assert {step.topic for step in idle_steps(asked, before, Topology())} == {"clicks"}
        with_another = before._replace(nodes={**before.nodes, "nsqd-3:4151": ()})
        with pytest.raises(ConnectionFailed, match="nsqd-3:4151 has left"):
            idle_steps(asked, with_another, Topology())


def test_channels_of_thousands_of_topics_take_more_than_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ask = Cluster.ask

    def begin(self: Cluster, clients: Any, question: Any) -> Any:
        asked.clear()
        return ask(self, clients, question)

    def channels(_: object, topic: str) -> list[str]:
        asked.append(topic)
        if len(asked) > AT_ONCE or topic == "broken":
            raise DeadlineExceeded("no answer in time")
        return ["c"]

    monkeypatch.setattr(Cluster, "ask", begin)
    monkeypatch.setattr(NsqlookupdHTTPClient, "channels", channels)
    topics = [f"t{number}" for number in range(3 * AT_ONCE)]
    with Cluster(ClusterAddresses(lookupd_http=["127.0.0.1:1"])) as cluster:
        [(address, found)] = registered_channels(cluster, cluster.lookupds, topics)[0].items()
        assert found == {topic: {"c"} for topic in topics}
        nothing, [failure] = registered_channels(cluster, [address], ["broken", *topics])
    assert (nothing, failure.address) == ({}, address)
