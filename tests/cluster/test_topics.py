"""Topics by name: looked up before a subscription, reported, and given up.

The transcripts show the refusals.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from plugins.cli import RunNsq
from plugins.daemons import EmbeddedLookupServer
from plugins.http_server import MakeScripted, ScriptedLookupd
from plugins.servers import AnyNsqd, GoNsqd, GoNsqlookupd, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.running import consuming
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster import topics
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.topics import (
    ChangeLog,
    TopicReport,
    UnlistedTopics,
    check_subscription,
    inspect_topic,
)
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.http.http_api import HTTPAccess


def inspect(addresses: ClusterAddresses, access: HTTPAccess | None = None) -> TopicReport:
    with Cluster(addresses, access) as cluster:
        return inspect_topic(cluster, "clicks")


def test_each_of_two_nsqd_is_asked_at_its_own_http_port(nsqd: GoNsqd) -> None:
    tcp = [nsqd.tcp_address, "127.0.0.1:1"]
    [failure] = inspect(ClusterAddresses([nsqd.http_address], nsqd_tcp=tcp)).failed
    # no failure for the HTTP port next to the TCP address of the other nsqd
    assert "127.0.0.1:1: no answer at its usual HTTP port" in str(failure)

    http_port = int(nsqd.http_address.rpartition(":")[2])
    beside = f"127.0.0.1:{http_port - 1}"  # the TCP address whose usual HTTP port this is
    if beside == nsqd.tcp_address:
        pytest.skip("the ports happen to stand side by side")
    report = inspect(ClusterAddresses(nsqd_tcp=[beside]))
    assert not report.answered
    assert "is not the HTTP port of" in str(report.failed[0])


def test_nsqlookupd_leads_to_the_nsqd_and_an_unreachable_one_is_reported(
    go_nsqd: MakeNsqd, lookupd: GoNsqlookupd, unreachable_address: str
) -> None:
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    nsqd.publish("clicks", b"a", b"b", b"c")
    second = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    second.create_channel("clicks", "archive")  # this consumes nothing of the first nsqd

    wait_until(lambda: len(lookupd.producers("clicks")) == 2, what="both have registered it")
    addresses = ClusterAddresses(lookupd_http=[lookupd.http_address, unreachable_address])
    report = inspect(addresses, HTTPAccess(timeout_s=patience_s(0.5)))

    [failure] = report.failed
    assert (report.backlog, unreachable_address in str(failure)) == (3, True)
    with pytest.raises(ConfigurationError, match="3 messages waiting on an nsqd"):
        check_subscription(report, "mine#ephemeral")


def test_a_problem_is_logged_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_log = ChangeLog()
    for _ in range(3):
        change_log.report("a:4161", "a:4161 refuses")
        change_log.report("b:4161", "b:4161 is slow")
    change_log.report("a:4161", "a:4161 is slow")
    change_log.retain(["b:4161"], "{} answers again")
    change_log.resolve("a:4161", "never reported")
    change_log.resolve("b:4161")

    reported = ["a:4161 refuses", "b:4161 is slow", "a:4161 is slow", "a:4161 answers again"]
    assert caplog.messages == reported


# -- --until-empty does not wait for a topic that no nsqd has


def listing(lookupd: ScriptedLookupd, *topics: str) -> None:
    lookupd.list_nsqd("127.0.0.1:4150")
    lookupd.answer["producers"][0]["topics"] = [*topics]


def test_a_topic_that_no_nsqd_has_for_long_is_given_up(
    scripted_lookupd: MakeScripted,
) -> None:
    lookupd = scripted_lookupd()
    listing(lookupd, "other")
    clock = SimpleNamespace(now_s=1000.0)
    unlisted = UnlistedTopics(ConnectionSettings((), (lookupd.address,)), lambda: clock.now_s)
    assert unlisted.among({"ghost", "other"}) == set()
    clock.now_s += 19
    assert unlisted.among({"ghost", "other"}) == set()

    listing(lookupd, "ghost")  # its nsqd was restarted: the time begins again
    clock.now_s += 2
    assert unlisted.among({"ghost"}) == set()
    listing(lookupd)
    clock.now_s += 2
    assert unlisted.among({"ghost"}) == set()
    clock.now_s += 10
    unlisted.among(set())  # the topic had a connection, so the time begins again
    for _ in range(2):
        assert unlisted.among({"ghost"}) == set()
        clock.now_s += 10
    assert unlisted.among({"ghost"}) == {"ghost"}
    with pytest.raises(NotFoundError, match="no nsqd has topic ghost"):
        unlisted.refuse(["ghost", "other"])
    unlisted.refuse(["other"])

    lookupd.status = 500  # no nsqlookupd answers, so no topic counts as unlisted
    clock.now_s += 2
    assert unlisted.among({"ghost"}) == set()

    lookupd.requests.clear()
    settings = ConnectionSettings(("127.0.0.1:4150",), (lookupd.address,))
    unlisted = UnlistedTopics(settings, lambda: clock.now_s)
    for _ in range(3):
        assert unlisted.among({"ghost"}) == set()
        clock.now_s += 100
    assert not lookupd.requests


def test_until_empty_exits_with_3_for_a_topic_that_only_nsqlookupd_has(
    serve: Serve,
    run_nsq: RunNsq,
    tmp_path: Path,
    embedded_nsqd: AnyNsqd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "UNLISTED_S", 0.1)
    monkeypatch.setattr(topics, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(consuming, "EMPTY_AFTER_S", 0.3)
    lookupd = serve(EmbeddedLookupServer())
    lookupd.post("/topic/create", topic="ghost")
    flags = ["-t", "ghost", "--until-empty", "--lookupd-http-address", lookupd.http_address]
    to_file = ["to-file", "--output-dir", str(tmp_path / "out")]
    target = embedded_nsqd().tcp_address
    to_nsq = ["to-nsq", "-c", "copies", "--destination-nsqd-tcp-address", target]
    for command in (to_file, ["tail"], to_nsq):
        result = run_nsq([*command, *flags])
        assert (result.status, result.err.count("no nsqd has topic ghost")) == (3, 1), result.err
    result = run_nsq(
        ["to-file", "--topic-pattern", "^gh", *flags[2:], "--output-dir", str(tmp_path)]
    )
    assert result.status == 0, result.err  # an old name in nsqlookupd is no error


def test_a_hanging_request_for_topics_delays_no_command(
    nsqd: GoNsqd, run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def hang(*_: object) -> None:
        assert is_over.wait(patience_s(10))

    monkeypatch.setattr(UnlistedTopics, "among", hang)
    nsqd.create_channel("clicks", "c")
    place = ["-t", "clicks", "-c", "c", "--nsqd-tcp-address", nsqd.tcp_address]
    for command in (["to-file", "--output-dir", str(tmp_path)], ["to-exec", "--", "/bin/cat"]):
        nsqd.publish("clicks", b"1")
        result = run_nsq([command[0], *place, "-n", "1", "--until-empty", *command[1:]])
        assert result.status == 0, result.err
    is_over.set()
