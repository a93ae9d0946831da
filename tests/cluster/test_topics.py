"""Topics by name: looked up before a subscription, selected, reported, and given up.

What is refused is in the transcripts.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from plugins.archives import messages_of
from plugins.cli import RunNsq
from plugins.clients import InBackground
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedLookupServer, EmbeddedServer
from plugins.http_server import MakeScripted, ScriptedLookupd
from plugins.servers import DataPath, MakeLookupd, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.running import consuming
from nsqtools.client import discovery
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster import topics
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.topics import (
    TopicReport,
    Troubles,
    UnlistedTopics,
    check_subscription,
    inspect_topic,
    is_pattern,
    matches,
    select,
)
from nsqtools.errors import ConfigurationError, ConnectionFailed, NotFoundError
from nsqtools.http.http_api import HTTPAccess


def inspect(addresses: ClusterAddresses, access: HTTPAccess | None = None) -> TopicReport:
    with Cluster(addresses, access) as cluster:
        return inspect_topic(cluster, "clicks")


def test_of_two_nsqd_each_is_asked_at_its_own_http_port(nsqd: GoNsqd) -> None:
    tcp = [nsqd.tcp_address, "127.0.0.1:1"]
    [failure] = inspect(ClusterAddresses([nsqd.http_address], nsqd_tcp=tcp)).failed
    # none for the HTTP port beside the TCP address of the other
    assert "127.0.0.1:1: no answer at its usual HTTP port" in str(failure)

    http_port = int(nsqd.http_address.rpartition(":")[2])
    beside = f"127.0.0.1:{http_port - 1}"  # whose HTTP port this would be
    if beside == nsqd.tcp_address:
        pytest.skip("the ports happen to stand side by side")
    report = inspect(ClusterAddresses(nsqd_tcp=[beside]))
    assert not report.asked
    assert "is not the HTTP port of" in str(report.failed[0])


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
    report = inspect(addresses, HTTPAccess(timeout_s=patience_s(0.5)))

    [failure] = report.failed
    assert (report.backlog, unreachable_address in str(failure)) == (3, True)
    with pytest.raises(ConfigurationError, match="3 messages waiting on an nsqd"):
        check_subscription(report, "mine#ephemeral")


# -- patterns: globs, and regular expressions between slashes

TOPICS = {"orders", "orders-eu", "orders.us", "web_1", "web_2", "app"}


def test_a_pattern_is_a_glob_or_a_regular_expression_between_slashes() -> None:
    matching = {
        "orders": "orders",
        "orders*": "orders orders-eu orders.us",
        "orders.*": "orders.us",
        "web_?": "web_1 web_2",
        "web_[2-9]": "web_2",
        "/^orders/": "orders orders-eu orders.us",
        "/^(web|app)/": "app web_1 web_2",
        "/eu$/": "orders-eu",
    }
    for pattern, names in matching.items():
        assert select("topic", [pattern], TOPICS) == names.split()
        assert {name for name in TOPICS if matches(name, [pattern])} == set(names.split())


def test_what_matches_nothing_or_cannot_match_is_an_error_that_helps() -> None:
    with pytest.raises(NotFoundError, match=r"no topic matches web\.\*") as caught:
        select("topic", ["web.*"], TOPICS)

    assert caught.value.hint == "This is a glob; write '/web.*/' for a regular expression."
    with pytest.raises(NotFoundError, match="no topic matches /nothing/"):
        select("topic", ["/nothing/"], TOPICS)

    with pytest.raises(ConfigurationError, match=r"invalid regular expression /\(/"):
        select("topic", ["/(/"], TOPICS)
    assert not is_pattern("orders.us_1-2#ephemeral")


# -- what is tried again every few seconds is reported when it changes, and not each time


def test_each_trouble_is_reported_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    troubles = Troubles()
    for _ in range(3):
        troubles.has("a:4161", "a:4161 refuses")
        troubles.has("b:4161", "b:4161 is slow")
    troubles.has("a:4161", "a:4161 is slow")
    troubles.only(["b:4161"], "{} answers again")
    troubles.over("a:4161", "never reported")
    troubles.over("b:4161")

    reported = ["a:4161 refuses", "b:4161 is slow", "a:4161 is slow", "a:4161 answers again"]
    assert caplog.messages == reported


def test_a_thousand_topics_report_an_nsqlookupd_that_is_away_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_said", {})
    caplog.set_level(logging.INFO)
    for _ in range(1000):
        discovery._report_failure("http://a:4161", ConnectionFailed("refused"))
    discovery._report_failure("http://a:4161", ConnectionFailed("slow"))

    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["lookup failed: refused", "lookup failed: slow"]


# -- who waits for a channel to be empty does not wait for a topic that no nsqd has


class Clock:
    """Stands still until the test turns it."""

    now_s = 1000.0

    def turn(self, seconds: float) -> None:
        self.now_s += seconds


def listing(lookupd: ScriptedLookupd, *topics: str) -> None:
    lookupd.list_nsqd("127.0.0.1:4150")
    lookupd.answer["producers"][0]["topics"] = [*topics]


def test_a_topic_is_given_up_when_no_nsqd_was_named_for_it_for_long_and_none_is_given(
    scripted_lookupd: MakeScripted,
) -> None:
    lookupd = scripted_lookupd()
    listing(lookupd, "other")
    clock = Clock()
    asked = UnlistedTopics(ConnectionSettings((), (lookupd.address,)), lambda: clock.now_s)
    assert asked.among({"ghost", "other"}) == set()
    clock.turn(19)
    assert asked.among({"ghost", "other"}) == set()

    listing(lookupd, "ghost")  # its nsqd was restarted: the time begins again
    clock.turn(2)
    assert asked.among({"ghost"}) == set()
    listing(lookupd)
    clock.turn(2)
    assert asked.among({"ghost"}) == set()
    clock.turn(10)
    asked.among(set())  # it had a connection meanwhile: again
    for _ in range(2):
        assert asked.among({"ghost"}) == set()
        clock.turn(10)
    assert asked.among({"ghost"}) == {"ghost"}
    with pytest.raises(NotFoundError, match="no nsqd has topic ghost"):
        asked.refuse(["ghost", "other"])
    asked.refuse(["other"])

    lookupd.status = 500  # nobody answers: nothing is known
    clock.turn(2)
    assert asked.among({"ghost"}) == set()

    lookupd.requests.clear()
    given = ConnectionSettings(("127.0.0.1:4150",), (lookupd.address,))
    asked = UnlistedTopics(given, lambda: clock.now_s)
    for _ in range(3):
        assert asked.among({"ghost"}) == set()
        clock.turn(100)
    assert not lookupd.requests


def test_waiting_for_the_end_of_a_topic_that_only_nsqlookupd_knows_ends_with_status_3(
    serve: Serve,
    run_nsq: RunNsq,
    tmp_path: Path,
    data_path: DataPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", 0.1)
    monkeypatch.setattr(topics, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(consuming, "EMPTY_AFTER_S", 0.3)
    lookupd = serve(EmbeddedLookupServer())
    lookupd.post("/topic/create", topic="ghost")
    asked = ["-t", "ghost", "--until-empty", "--lookupd-http-address", lookupd.http_address]
    to_file = ["to-file", "--output-dir", str(tmp_path / "out")]
    target = serve(EmbeddedServer(data_path())).tcp_address
    to_nsq = ["to-nsq", "-c", "copies", "--destination-nsqd-tcp-address", target]
    for command in (to_file, ["tail"], to_nsq):
        result = run_nsq([*command, *asked])
        assert (result.status, result.err.count("no nsqd has topic ghost")) == (3, 1), result.err
    result = run_nsq(
        ["to-file", "--topic-pattern", "^gh", *asked[2:], "--output-dir", str(tmp_path)]
    )
    assert result.status == 0, result.err  # that nsqlookupd keeps old names is no fault


def test_an_nsqd_that_is_restarted_is_waited_for(
    nsqlookupd: MakeLookupd,
    go_nsqd: MakeNsqd,
    in_background: InBackground,
    tmp_path: Path,
    run_nsq: RunNsq,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", patience_s(60))
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", b"one")
    wait_until(lambda: lookupd.producers("clicks"), what="its nsqd is registered")
    nsqd.stop()
    wait_until(lambda: not lookupd.producers("clicks"), what="its nsqd is gone")
    asked = lookupd.log.count("GET /lookup")

    def start_once_asked() -> None:
        wait_until(lambda: lookupd.log.count("GET /lookup") > asked, what="it is asked")
        nsqd.start()

    started = in_background(start_once_asked)
    place = ["--lookupd-http-address", lookupd.http_address, "--output-dir", str(tmp_path / "out")]
    often = ["-X", "lookupd_poll_interval=200ms"]

    result = run_nsq(["to-file", "-t", "clicks", "-c", "archive", "--until-empty", *place, *often])

    started.result()
    assert result.status == 0, result.err
    assert [message["body"] for message in messages_of(tmp_path / "out")] == [b"one"]
