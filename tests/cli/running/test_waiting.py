"""Messages on a terminal while it waits: new nsqd of a topic are found within seconds."""

import io
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.cli import TerminalNsq
from plugins.clusters import RunningCluster
from plugins.daemons import EmbeddedLookupServer
from plugins.servers import GoNsqd, Serve
from plugins.waiting import wait_for_threads

from nsqtools.cli.running import channel_watch
from nsqtools.cli.running.channel_watch import ChannelWatch, is_empty
from nsqtools.cli.running.consuming import FAST_DISCOVERY_S, ConnectionNotice, StopLimits
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import open_cluster
from nsqtools.cluster.topics import TopicReport
from nsqtools.errors import ConnectionFailed


def test_a_new_nsqd_of_a_topic_is_found_long_before_the_poll_interval(
    cluster: RunningCluster, nsq_on_a_terminal: TerminalNsq
) -> None:
    first, second = cluster.nsqds
    first.create_channel("events", "c")
    cluster.wait_for_topic("events", 1)
    # Longer than the test: the other nsqd is found only by a lookup in between.
    interval = "--consumer-opt=lookupd_poll_interval=300s"
    tail = ["tail", "-t", "events", "-c", "c", interval, *cluster.lookupd_options]

    child = nsq_on_a_terminal(tail, columns=120)
    child.expect_exact(f"nsq: events/c on {first.tcp_address}: waiting (Ctrl-C ends it)")
    second.publish("events", b"from the second")
    both = {f"nsq: events/c: now on {second.tcp_address} too", "from the second"}
    while both:  # the message may be printed before its nsqd is named
        child.expect_exact(list(both))
        both.discard(str(child.after))
    child.sendintr()

    assert "nsq: 1 message in " in child.read()


def test_after_fast_discovery_the_configured_interval_applies() -> None:
    clock = SimpleNamespace(now=100.0)
    runtime = Runtime(io.StringIO(), io.StringIO(), monotonic=lambda: clock.now)
    looks: list[float] = []
    tail: Any = SimpleNamespace(
        connections={"events": ["127.0.0.1:4150"]}, look_up_soon=lambda: looks.append(clock.now)
    )
    notice = ConnectionNotice(runtime, "c")
    for clock.now in (100.0, 130.0, 100.0 + FAST_DISCOVERY_S - 1, 100.0 + FAST_DISCOVERY_S, 1000.0):
        notice(tail)
    assert looks == [100.0, 130.0, 100.0 + FAST_DISCOVERY_S - 1]


def test_an_idle_report_prints_nothing_while_the_program_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = ConnectionFailed("no daemon can be asked (cannot schedule new futures)")
    cannot_ask = Mock(side_effect=fault)
    monkeypatch.setattr("nsqtools.cluster.topics.inspect_topic", cannot_ask)
    monkeypatch.setattr(channel_watch, "IDLE_REPORT_S", (0.0,))
    stderr, place = io.StringIO(), ConnectionSettings(("127.0.0.1:1",))
    watch = ChannelWatch(["events"], "c", place, Runtime(io.StringIO(), stderr), force=False)
    with watch.idle_report(lambda: 0):
        wait_for_threads("waiting")
    assert stderr.getvalue() == ""


def test_a_shorter_exit_idle_overrides_that_of_until_empty() -> None:
    limits = StopLimits(count=None, until_empty=True, exit_idle=0.5, for_=None)
    assert limits.run_limits().idle_s == 0.5


def test_a_channel_is_not_empty_while_nsqlookupd_lists_no_nsqd(serve: Serve) -> None:
    lookupd = serve(EmbeddedLookupServer())
    with open_cluster(ConnectionSettings((), (lookupd.http_address,))) as cluster:
        assert not is_empty(cluster, "archive", {"clicks": ["127.0.0.1:4150"]})


def test_an_unresponsive_nsqd_is_queried_only_for_the_first_topic(
    nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query takes two seconds if packets are dropped."""
    queried: list[str] = []

    def inspect(cluster: object, topic: str) -> TopicReport:
        queried.append(topic)
        return TopicReport(topic, failed=[ConnectionFailed("no answer in time")])

    monkeypatch.setattr("nsqtools.cluster.topics.inspect_topic", inspect)
    stderr, place = io.StringIO(), ConnectionSettings((nsqd.tcp_address,))
    runtime = Runtime(io.StringIO(), stderr)
    ChannelWatch(["a", "b"], "c", place, runtime, force=False).check_topics(create=False)

    assert queried == ["a"]
    assert [line[:36] for line in stderr.getvalue().splitlines()] == [
        f"nsq: cannot check whether topic {topic} ex" for topic in "ab"
    ]
