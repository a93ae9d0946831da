"""Plans and what comes of them: where a change goes, in which order, and what fails alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.clusters import RunningCluster
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.cluster.admin import (
    Action,
    DaemonKind,
    apply,
    plan_channels,
    plan_tombstone,
    plan_topics,
)
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.errors import ConfigurationError, ConnectionFailed, NotFoundError


def places(cluster: RunningCluster) -> ClusterAddresses:
    return ClusterAddresses(lookupd_http=[each.http_address for each in cluster.lookupds])


def topics(nsqd: Nsqd) -> set[str]:
    return {topic["topic_name"] for topic in nsqd.stats()["topics"] or ()}


def test_create_registers_with_every_nsqlookupd_as_nsqadmin_does(cluster: RunningCluster) -> None:
    with Cluster(places(cluster)) as asked:
        plan = plan_topics(asked, Action.CREATE, ["clicks"])
        outcomes = apply(asked, plan)

    assert [step.daemon for step in plan.steps] == [DaemonKind.NSQLOOKUPD] * 2
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [each.json("/topics")["topics"] for each in cluster.lookupds] == [["clicks"]] * 2
    assert [topics(nsqd) for nsqd in cluster.nsqds] == [set(), set()]


def test_a_channel_is_created_where_its_topic_is_and_found_by_pattern(
    cluster: RunningCluster,
) -> None:
    first, second = cluster.nsqds
    first.create_topic("web.a")
    cluster.wait_for_topic("web.a", 1)

    with Cluster(places(cluster)) as asked:
        apply(asked, plan_channels(asked, Action.CREATE, ["web.*"], ["arch"]))
        plan = plan_channels(asked, Action.PAUSE, ["web.*"], ["a*"])
        apply(asked, plan)

    assert [step.address for step in plan.steps] == [first.http_address]
    assert first.channel_stats("web.a", "arch")["paused"]
    assert topics(second) == set()


def test_delete_goes_to_nsqlookupd_first_and_then_to_every_nsqd_that_has_it(
    cluster: RunningCluster,
) -> None:
    for nsqd in cluster.nsqds:
        nsqd.create_channel("clicks", "arch")
        nsqd.publish("clicks", b"a", b"b")
        nsqd.create_topic("views")
    cluster.wait_for_topic("clicks", 2)

    with Cluster(places(cluster)) as asked:
        plan = plan_topics(asked, Action.DELETE, ["clicks"])
        outcomes = apply(asked, plan)

    assert [step.daemon for step in plan.steps] == [DaemonKind.NSQLOOKUPD] * 2 + [
        DaemonKind.NSQD
    ] * 2
    assert [step.messages for step in plan.steps] == [0, 0, 2, 2]
    assert plan.is_destructive
    assert all(outcome.error is None for outcome in outcomes)
    assert [topics(nsqd) for nsqd in cluster.nsqds] == [{"views"}, {"views"}]
    for lookupd in cluster.lookupds:
        assert "clicks" not in lookupd.json("/topics")["topics"]


def test_consumers_that_would_create_it_again_are_in_the_plan(
    any_nsqd: Callable[..., Nsqd],
) -> None:
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


def test_emptying_a_topic_leaves_its_channels_and_says_so(any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a", b"b")
    with Cluster(ClusterAddresses([nsqd.http_address])) as asked:
        wait_until(lambda: nsqd.depth("clicks", "arch") == 2, what="messages in the channel")
        alone = plan_topics(asked, Action.EMPTY, ["clicks"])
        apply(asked, alone)
        kept = nsqd.depth("clicks", "arch")
        whole = plan_topics(asked, Action.EMPTY, ["clicks"], with_channels=True)
        apply(asked, whole)

    assert alone.notes == (
        "the channels of clicks keep their 2 messages; --channels empties them too",
    )
    assert kept == 2
    assert whole.notes == ()
    assert [step.messages for step in whole.steps] == [0, 2]
    assert nsqd.depth("clicks", "arch") == 0


def test_one_that_is_down_is_named_and_stops_no_other(cluster: RunningCluster) -> None:
    first, second = cluster.nsqds
    for nsqd in cluster.nsqds:
        nsqd.create_topic("clicks")
    with Cluster(ClusterAddresses([first.http_address, second.http_address])) as asked:
        plan = plan_topics(asked, Action.PAUSE, ["clicks"])
        first.kill()
        outcomes = {outcome.step.address: outcome.error for outcome in apply(asked, plan)}
        late = plan_topics(asked, Action.DELETE, ["clicks"])

    assert isinstance(outcomes[first.http_address], ConnectionFailed)
    assert outcomes[second.http_address] is None
    assert second.topic_stats("clicks")["paused"]
    assert [step.address for step in late.steps] == [second.http_address]
    assert [failure.address for failure in late.failures] == [first.http_address]


def test_a_tombstone_hides_the_node_and_deletes_the_topic_there_alone(
    cluster: RunningCluster,
) -> None:
    first, second = cluster.nsqds
    for nsqd in cluster.nsqds:
        nsqd.create_topic("clicks")
    cluster.wait_for_topic("clicks", 2)

    with Cluster(places(cluster)) as asked:
        plan = plan_tombstone(asked, "clicks", first.http_address)
        outcomes = apply(asked, plan)
        with pytest.raises(NotFoundError, match="no nsqlookupd knows the nsqd nowhere:1"):
            plan_tombstone(asked, "clicks", "nowhere:1")
        with pytest.raises(NotFoundError, match="does not have the topic clicks"):
            plan_tombstone(asked, "clicks", first.http_address)

    assert [outcome.error for outcome in outcomes] == [None, None, None]
    assert topics(first) == set()
    assert topics(second) == {"clicks"}
    for lookupd in cluster.lookupds:
        assert lookupd.producers("clicks") == [second.tcp_address]


def test_names_that_are_not_there_or_not_allowed_are_refused(any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    with Cluster(ClusterAddresses([nsqd.http_address])) as asked:
        with pytest.raises(NotFoundError, match="topic click does not exist"):
            plan_topics(asked, Action.DELETE, ["click"])
        with pytest.raises(NotFoundError, match="channel arhc does not exist"):
            plan_channels(asked, Action.EMPTY, ["clicks"], ["arhc"])
        with pytest.raises(ConfigurationError, match="invalid topic name"):
            plan_topics(asked, Action.CREATE, ["a b"])
        with pytest.raises(ConfigurationError, match="invalid channel name"):
            plan_channels(asked, Action.CREATE, ["clicks"], ["*"])
