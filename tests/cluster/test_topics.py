"""Looking a topic up before subscribing: what a SUB would create, and what it would destroy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.waiting import patience_s, wait_until

from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.topics import TopicReport, check_subscription, inspect_topic
from nsqtools.errors import ConfigurationError, ConnectionFailed, NotFoundError
from nsqtools.http.http_api import HTTPAccess


def inspect(
    topic: str, addresses: ClusterAddresses, access: HTTPAccess | None = None
) -> TopicReport:
    with Cluster(addresses, access) as cluster:
        return inspect_topic(cluster, topic)


def test_an_http_port_of_another_nsqd_is_not_believed(nsqd: GoNsqd) -> None:
    http_port = int(nsqd.http_address.rpartition(":")[2])
    beside = f"127.0.0.1:{http_port - 1}"  # whose HTTP port this would be

    report = inspect("clicks", ClusterAddresses(nsqd_tcp=[beside]))

    if beside == nsqd.tcp_address:
        pytest.skip("the ports happen to stand side by side")
    assert not report.asked
    assert "is not the HTTP port of" in str(report.failed[0])


def test_the_backlog_is_what_waits_in_a_topic_without_channels(nsqd: GoNsqd) -> None:
    nsqd.publish("clicks", b"a", b"b")
    nsqd.create_topic("views")
    nsqd.create_channel("views", "archive")
    nsqd.publish("views", b"a")
    ask = ClusterAddresses([nsqd.http_address])

    clicks, views = inspect("clicks", ask), inspect("views", ask)

    assert (clicks.exists, clicks.asked, clicks.failed) == (True, [nsqd.http_address], [])
    assert (clicks.backlog, clicks.channels) == (2, set())
    assert (views.backlog, views.channels) == (0, {"archive"})


def test_lookupd_leads_to_the_nsqd_and_a_dead_one_is_noted(
    go_nsqd: Callable[..., GoNsqd],
    nsqlookupd: Callable[..., GoNsqlookupd],
    unreachable_address: str,
) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.publish("clicks", b"a", b"b", b"c")

    wait_until(lambda: lookupd.producers("clicks"), what="nsqd has registered the topic")
    addresses = ClusterAddresses(lookupd_http=[lookupd.http_address, unreachable_address])
    report = inspect("clicks", addresses, HTTPAccess(timeout_s=patience_s(0.5)))

    assert report.backlog == 3
    assert len(report.failed) == 1
    assert unreachable_address in str(report.failed[0])


def test_a_misspelt_topic_is_refused_with_a_suggestion_unless_nobody_can_be_asked() -> None:
    unasked = TopicReport("clicks", failed=[ConnectionFailed("connection refused")])
    warning = check_subscription(unasked, "c")
    assert "cannot check whether topic clicks exists (connection refused)" in warning
    report = TopicReport("click", asked=["http://n"], known_topics={"clicks", "views"})

    with pytest.raises(NotFoundError, match="topic click does not exist") as caught:
        check_subscription(report, "c")
    assert caught.value.hint.startswith("Did you mean clicks?")
    assert check_subscription(report, "c", create=True) == ""


def test_a_backlog_is_not_given_to_an_ephemeral_channel() -> None:
    report = TopicReport("clicks", exists=True, backlog=1000, asked=["http://n"])

    with pytest.raises(ConfigurationError, match="no channel and 1000 messages waiting"):
        check_subscription(report, "tail1#ephemeral")
    assert check_subscription(report, "tail1#ephemeral", force=True) == ""
    assert check_subscription(report, "archive") == ""
    report.channels.add("archive")
    assert check_subscription(report, "tail1#ephemeral") == ""
