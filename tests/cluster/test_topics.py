"""Looking a topic up before subscribing: who is asked, and who is not believed.

What is refused then is in the transcript of tail.
"""

from __future__ import annotations

import pytest
from plugins.daemons import GoNsqd
from plugins.servers import MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.topics import TopicReport, check_subscription, inspect_topic
from nsqtools.errors import ConfigurationError
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


def test_an_nsqd_is_not_overlooked_because_another_one_has_an_http_address(nsqd: GoNsqd) -> None:
    tcp = [nsqd.tcp_address, "127.0.0.1:1"]

    report = inspect("clicks", ClusterAddresses([nsqd.http_address], nsqd_tcp=tcp))

    [failure] = report.failed  # none for the HTTP port beside the TCP address of the other
    assert "127.0.0.1:1: no answer at its usual HTTP port" in str(failure)


def test_lookupd_leads_to_the_nsqd_and_a_dead_one_is_noted(
    go_nsqd: MakeNsqd, nsqlookupd: MakeLookupd, unreachable_address: str
) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.publish("clicks", b"a", b"b", b"c")

    other = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    other.create_channel("clicks", "archive")  # which says nothing of the first one

    wait_until(lambda: len(lookupd.producers("clicks")) == 2, what="both have registered it")
    addresses = ClusterAddresses(lookupd_http=[lookupd.http_address, unreachable_address])
    report = inspect("clicks", addresses, HTTPAccess(timeout_s=patience_s(0.5)))

    assert report.backlog == 3
    assert len(report.failed) == 1
    assert unreachable_address in str(report.failed[0])
    with pytest.raises(ConfigurationError, match="3 messages waiting on an nsqd"):
        check_subscription(report, "mine#ephemeral")
