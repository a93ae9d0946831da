"""``nsq check`` on real daemons: faults that were made on purpose, and a cluster without any."""

import json
import re
import socket
import tarfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.cli import RunNsq
from plugins.clients import InBackground
from plugins.clusters import RunningCluster, ValidJson
from plugins.daemons import EmbeddedLookupServer
from plugins.raw_client import RawClient, RawPeer
from plugins.servers import AnyNsqd, Nsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.cluster import problems
from nsqtools.cluster.check import without_secrets
from nsqtools.cluster.problems import (
    Bounds,
    EarlierTotals,
    Fault,
    Problem,
    RecentTotals,
    comparable_totals,
    find_problems,
)
from nsqtools.cluster.queue_rows import NodeReport, QueueRow, rows_of_topic, totals
from nsqtools.cluster.sampling import Sample, SampleFilter
from nsqtools.errors import ConnectionFailed, DeadlineExceeded
from nsqtools.http.http_api import NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.stats import read_stats
from nsqtools.server import http_server as server


def test_messages_that_come_back_to_their_queue_are_no_growth() -> None:
    queue = {"node": "", "topic": "clicks", "channel": "c", "messages": 60, "paused": False}
    then = QueueRow(**queue, depth=30, disk=30, in_flight=30, clients=1)
    now = replace(then, depth=60, disk=60, in_flight=0, requeued=30)
    sample = Sample(1.0, [], [now], (), ())
    found = find_problems(sample, EarlierTotals([then], 10.0), Bounds(behind_depth=20))
    assert [each.kind for each in found] == ["requeues"]


def test_an_nsqd_that_answers_the_second_time_alone_is_no_growth() -> None:
    def sample_of(time_s: float = 1.0, started: int = 1, **depths: int) -> Sample:
        rows = [
            QueueRow(node=at, topic="t", channel="c", depth=n, disk=0, messages=n, paused=False)
            for at, n in depths.items()
        ]
        reports = [NodeReport(at, 0.0, read_stats({"start_time": started})) for at in depths]
        return Sample(time_s, rows, totals(rows), tuple(reports), (), at_s=time_s)

    def found(then: Sample, now: Sample, ago_s: float = 10.0) -> list[Problem]:
        return find_problems(now, EarlierTotals(comparable_totals(then, now), ago_s))

    [later] = found(sample_of(a=1), sample_of(a=1, b=2000))
    [grows] = found(sample_of(a=1, b=1), sample_of(a=1, b=2), 60.0)
    assert (later.fault, grows.fault) == (Fault.NO_CONSUMERS, Fault.GROWS)
    assert grows.text == "3 waiting, +<0.1/s"
    (past := RecentTotals()).add(sample_of(a=1))
    assert past.before(sample_of(61.0, a=1)) == EarlierTotals(sample_of(a=1).totals, 60.0)
    assert past.before(sample_of(61.0, started=2, a=1)) == EarlierTotals([], 60.0)


def test_a_channel_that_an_nsqd_lacks_is_named_where_it_is_asked_for_alone() -> None:
    topics = {"a": [{"channel_name": "c"}], "b": []}
    stats = {at: {"topics": [{"topic_name": "t", "channels": has}]} for at, has in topics.items()}
    reports = tuple(NodeReport(at, 0.0, read_stats(each)) for at, each in stats.items())
    rows = [row for at, _, each in reports for row in rows_of_topic(at, (each.topics or ())[0])]
    for wanted in (SampleFilter(), SampleFilter(channels=["c"])):
        kept = wanted.among(rows)
        [problem] = find_problems(Sample(1.0, kept, totals(kept), reports, ()))
        assert (problem.fault, problem.text) == (Fault.CHANNEL_MISSING, "not on b")


def test_what_a_daemon_that_does_not_answer_may_have_is_not_judged(
    run_nsq: RunNsq, quick_nsqd: Nsqd, dead_address: str
) -> None:
    places = [f"--nsqd-http-address={each}" for each in (dead_address, quick_nsqd.http_address)]
    result = run_nsq(["check", "--window=0", "-t", "/a|\udcff/", *places, "--format=nagios"])
    assert b"\nnot judged: no topic matches /a/" in result.out


def test_a_healthy_cluster_has_no_problem_and_each_of_twenty_faults_is_named(
    in_background: InBackground,
    run_nsq: RunNsq,
    cluster: RunningCluster,
    valid_json: ValidJson,
    dead_address: str,
    tmp_path: Path,
) -> None:
    b, c = cluster.nsqds
    a, killed = cluster.start("-mem-queue-size=0"), cluster.start()
    cluster.nsqds[:] = a, b, c, killed
    cluster.wait_until_registered()
    cluster.nsqds.remove(killed)
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "billing")
    cluster.wait_for_topic("orders", 3)
    state, bundle = tmp_path / "state.json", tmp_path / "bundle.tar.gz"
    options = [*cluster.lookupd_options, f"--state={state}"]
    with ExitStack() as consumers:
        for nsqd in cluster.nsqds:
            consumer = consumers.enter_context(RawClient(nsqd.tcp_address))
            consumer.subscribe("orders", "billing", ready=1)
        result = run_nsq(["check", *options, "--window", "5s", "--json"])

    verdict = valid_json("check", result.out)
    assert (result.status, verdict["problems"], verdict["not_judged"]) == (0, [], [])
    assert (verdict["nodes"], verdict["queues"]) == (4, 2)

    # what happened since the last run
    killed.kill()
    b.stop()
    b.start()
    half_known = cluster.start(registers=1)
    unreachable = cluster.start("-broadcast-address=nsqd.invalid")
    # queues
    for topic in ("lonely", "grows", "deep", "stuck", "hangs", "behind", "requeued", "slow"):
        a.create_channel(topic, "c")
        a.publish(topic, *[b"x"] * (600 if topic == "deep" else 60))
    a.create_topic("unread")
    a.publish("unread", b"x")
    for nsqd in (a, c):
        nsqd.create_channel("uneven", "c")
    c.publish("uneven", b"x")
    c.create_topic("half")  # before the other: a new topic gets the channels nsqlookupd knows
    a.create_channel("half", "c")
    for topic in ("short", "long"):
        a.create_channel(topic, "c")
        a.publish(topic, b"x")
        a.post("/channel/pause", topic=topic, channel="c")
    cluster.wait_for_topic("uneven", 2)
    cluster.lookupds[0].post("/topic/tombstone", topic="uneven", node=c.http_address)
    memory = json.loads(state.read_bytes())
    memory["problems"]["paused long/c"] = time.time() - 7200
    state.write_text(json.dumps(memory))

    def raw(topic: str, ready: int, **identity: object) -> RawClient:
        client: RawClient = clients.enter_context(RawClient(a.tcp_address))
        if identity:
            client.identify(**identity)
        client.subscribe(topic, "c", ready=ready)
        return client

    with ExitStack() as clients:
        raw("stuck", 0)
        raw("hangs", 1)
        raw("uneven", 1)
        raw("slow", 5, msg_timeout=1000)
        requeuing, falling_behind = raw("requeued", 1), raw("behind", 1)
        ended = threading.Event()

        def requeue() -> None:
            while not ended.wait(0.01):
                requeuing.send(b"REQ " + requeuing.read_message().id + b" 0\n")

        def publish() -> None:
            while not ended.wait(0.05):
                for topic in ("grows", "behind"):
                    a.publish(topic, b"x", b"x")
                falling_behind.finish([falling_behind.read_message()])  # one of two

        meanwhile = [in_background(each) for each in (requeue, publish)]
        bounds = ["--window", "5s", "--max-depth", "500", "--behind-depth", "20"]
        options += [f"--lookupd-http-address={dead_address}", *bounds, f"--bundle={bundle}"]
        try:
            result = run_nsq(["check", *options, "--json"], timeout=patience_s(60))
        finally:
            ended.set()
        for each in meanwhile:
            each.result(patience_s(10))

    verdict = valid_json("check", result.out)
    names = ("severity", "kind", "topic", "channel", "node")
    found = {tuple(each[name] for name in names) for each in verdict["problems"]}
    node = unreachable.http_address.replace("127.0.0.1", "nsqd.invalid")
    expected = {
        ("critical", "left", None, None, killed.http_address),
        ("critical", "no answer", None, None, dead_address),
        ("critical", "unreachable", None, None, node),
        ("critical", "stuck", "stuck", "c", None),
        ("critical", "stuck", "hangs", "c", None),
        ("critical", "deep", "deep", "c", None),
        ("critical", "no consumers", "grows", "c", None),
        ("warning", "no consumers", "lonely", "c", None),
        ("warning", "falls behind", "behind", "c", None),
        ("warning", "no consumers there", "uneven", "c", c.http_address),
        ("warning", "no channels", "unread", None, None),
        ("warning", "channel missing", "half", "c", None),
        ("warning", "requeues", "requeued", "c", None),
        ("critical", "stuck", "slow", "c", None),
        ("warning", "paused long", "long", "c", None),
        ("warning", "not registered", None, None, half_known.http_address),
        ("note", "restarted", None, None, b.http_address),
        ("note", "tombstoned", "uneven", None, c.http_address),
        ("note", "paused", "short", "c", None),
        ("note", "on disk", "grows", "c", None),
    }
    assert (result.status, len(expected)) == (2, 20)
    assert expected <= found
    # what follows from the same faults, and nothing else
    assert {(kind, topic) for _, kind, topic, _, _ in found - expected} <= {
        *(("no consumers", topic) for topic in ("deep", "half", "orders")),
        ("paused", "long"),
        ("on disk", "behind"),
        ("stuck", "uneven"),
    }
    assert all(each["remedy"] for each in verdict["problems"])
    with tarfile.open(bundle) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"nsqtools", "check.json"} <= files
    assert sum(name.endswith("stats.json") for name in files) == 4


def test_a_message_that_waits_for_too_long_is_found_without_a_look_at_any(
    run_nsq: RunNsq, quick_nsqd: Nsqd, embedded_nsqd: AnyNsqd, tmp_path: Path
) -> None:
    for channel in ("left", "taken"):
        quick_nsqd.create_channel("clicks", channel)
    quick_nsqd.publish("clicks", b"1", b"2")
    other = embedded_nsqd()  # without which the sums are less
    other.create_channel("clicks", "taken")
    other.publish("clicks", b"0")
    at = ["check", "--window", "0", f"--nsqd-http-address={quick_nsqd.http_address}", "--json"]
    at.append(f"--nsqd-http-address={other.http_address}")
    state = tmp_path / "state"
    at += ["--max-age", "1s", f"--state={state}"]

    first = json.loads(run_nsq(at).out)
    other.stop()
    began_s = time.time()
    with RawClient(quick_nsqd.tcp_address) as consumer:
        consumer.subscribe("clicks", "taken", ready=2)
        consumer.finish([consumer.read_message(), consumer.read_message()])
        wait_until(lambda: not quick_nsqd.depth("clicks", "taken"), what="all are taken")
    quick_nsqd.publish("clicks", b"3", b"4")
    wait_until(lambda: time.time() - began_s > 1.1, what="a second has passed")
    second = json.loads(run_nsq(at).out)

    assert "how old messages are" in " ".join(first["not_judged"])
    assert "how old messages are" not in " ".join(second["not_judged"])
    old = [each for each in second["problems"] if each["kind"] == "old"]
    assert [(each["severity"], each["channel"]) for each in old] == [("critical", "left")]

    memory = json.loads(state.read_text())
    memory["counts"] = [(time_s + 3600, counts) for time_s, counts in memory["counts"]]
    state.write_text(json.dumps(memory))
    run_nsq(at)  # the clock was set back meanwhile
    assert all(time_s < time.time() for time_s, _ in json.loads(state.read_text())["counts"])
    for each in ('"nsqds": {"a:1": 1e400}', '"problems": {"left a:1": 1e300}', '"time_s": 1e12'):
        state.write_text(json.dumps(memory)[:-1] + f", {each}}}")
        result = run_nsq(at)
        assert (result.status, "it is not a file of nsq check" in result.err) == (3, True)


def test_messages_that_a_consumer_holds_are_stuck_and_grow_old(
    run_nsq: RunNsq, embedded_nsqd: AnyNsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "LEAST_WINDOW_S", 0.1)
    nsqd = embedded_nsqd()
    nsqd.create_channel("clicks", "c")
    nsqd.publish("clicks", *[b"x"] * 500)
    at = ["check", f"--nsqd-http-address={nsqd.http_address}", f"--state={tmp_path / 'state'}"]
    with RawClient(nsqd.tcp_address) as consumer:
        consumer.subscribe("clicks", "c", ready=2000)
        consumer.read_messages(500)
        run_nsq([*at, "--window=0", "--max-age=100ms"])
        result = run_nsq([*at, "--window=200ms", "--max-age=100ms", "--json"])
    found = {each["kind"]: each["text"] for each in json.loads(result.out)["problems"]}
    assert (result.status, [*found]) == (2, ["stuck", "old"])
    assert found["stuck"].startswith("0 waiting, 500 in flight; 0 finished in ")
    assert found["old"].startswith("0 waiting, 500 in flight; one since before ")


def test_what_a_run_at_other_addresses_left_is_not_judged(
    run_nsq: RunNsq, cluster: RunningCluster, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    check = ["check", "--window=0", f"--state={state}", "--json"]
    first, second = cluster.lookupd_options
    for nsqd in cluster.nsqds:
        nsqd.publish("clicks", b"x")
    run_nsq([*check, first])

    def judged(*options: str) -> tuple[set[str], str]:
        verdict = json.loads(run_nsq([*check, *options]).out)
        return {each["kind"] for each in verdict["problems"]}, " ".join(verdict["not_judged"])

    kept = state.read_bytes()
    for options in (cluster.nsqd_options[:1], [second]):
        state.write_bytes(kept)
        kinds, not_judged = judged(*options)
        assert ("left" in kinds, "the run that left --state asked 127.0.0.1:" in not_judged) == (
            False,
            True,
        )
    legacy = json.loads(kept)
    del legacy["asked"], legacy["had"]  # as 0.3.0 wrote it
    left = cluster.nsqds[0]
    left.stop()
    wait_until(lambda: len(cluster.lookupds[0].json("/nodes")["producers"]) == 1, what="it left")
    for document in (kept, json.dumps(legacy).encode()):
        state.write_bytes(document)
        assert "left" in judged(first)[0]
    state.write_bytes(kept)
    cluster.lookupds[0].kill()  # which may announce it still, as far as anybody knows
    kinds, not_judged = judged(first, second)
    why = f"whether {left.http_address} left: {cluster.lookupds[0].http_address} does not respond"
    assert ("left" in kinds, why in not_judged) == (False, True)


def test_what_a_dead_nsqd_had_is_named_and_left_out_of_sums(
    run_nsq: RunNsq, embedded_nsqd: AnyNsqd, tmp_path: Path
) -> None:
    alive, dead = embedded_nsqd(), embedded_nsqd()
    dead.publish("clicks", b"1", b"2")
    at = [f"--nsqd-http-address={each.http_address}" for each in (alive, dead)]
    check = ["check", "--window=0", f"--state={tmp_path / 'state'}", *at]
    run_nsq(check)
    dead.kill()
    said = run_nsq(check).out.decode()
    assert re.search(rf"no answer {dead.http_address}: .*; 2 messages when last seen 20", said)
    assert f"not judged: the queues of {dead.http_address}: no response" in said
    assert "; 1 of 2 nsqd respond, 0 topics and channels" in said


def test_a_clock_that_is_wrong_and_one_question_without_an_answer_are_named(
    run_nsq: RunNsq, quick_nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ["check", "--window", "0", f"--nsqd-http-address={quick_nsqd.http_address}"]
    assert b"clocks differ" not in run_nsq(at).out

    def hour_later(time_s: float, *, usegmt: bool) -> str:
        return formatdate(time_s + 3600, usegmt=usegmt)

    monkeypatch.setattr(server, "formatdate", hour_later)
    told = f"clocks differ {quick_nsqd.http_address}: its clock is 3,600 s ahead".encode()
    wait_until(lambda: told in run_nsq(at).out, what="nsqd has the other time")
    monkeypatch.undo()  # each second has the text that it got first
    wait_until(lambda: told not in run_nsq(at).out, what="nsqd has its own time")
    for question in ("info", "ping"):
        with monkeypatch.context() as patch:
            cut = Mock(side_effect=ConnectionFailed("it was cut"))
            patch.setattr(NsqdHTTPClient, question, cut)
            result = run_nsq(at)
        said = f"no answer {quick_nsqd.http_address}: it was cut".encode()
        assert (result.status, result.out.count(said)) == (2, 1)


def test_an_nsqlookupd_that_does_not_answer_for_a_topic_is_named(
    run_nsq: RunNsq, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Mock(side_effect=DeadlineExceeded("no answer in time"))
    monkeypatch.setattr(NsqlookupdHTTPClient, "channels", late)
    lookupd = serve(EmbeddedLookupServer())
    lookupd.post("/topic/create", topic="clicks")
    (tmp_path / "wanted").write_text('topics."clicks".channels = ["archive"]\n')
    at = ["check", "--window", "0", f"--lookupd-http-address={lookupd.http_address}"]
    result = run_nsq([*at, f"--expect={tmp_path / 'wanted'}"])

    assert f"no answer {lookupd.http_address}: no answer in time".encode() in result.out


def test_a_bundle_has_no_secret() -> None:
    said = {"http": "http://u:p4ss@host:1/x", "auth_secret": "s3cret", "clients": [{"token": "t"}]}
    told = {"http": "http://***@host:1/x", "auth_secret": "***", "clients": [{"token": "***"}]}
    assert without_secrets(said) == told


def test_an_nsqd_that_hangs_is_not_said_to_be_out_of_reach(run_nsq: RunNsq, serve: Serve) -> None:
    lookupd = serve(EmbeddedLookupServer())
    at = ["check", "--window=0", f"--timeout={patience_s(2):g}s", "--json"]
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.create_server(("127.0.0.1", 0)) as http,
        RawPeer(lookupd.tcp_address) as nsqd,
    ):
        ports = [each.getsockname()[1] for each in (tcp, http)]
        nsqd.identify(broadcast_address="127.0.0.1", tcp_port=ports[0], http_port=ports[1])
        result = run_nsq([*at, f"--lookupd-http-address={lookupd.http_address}"])
    found = [(each["kind"], each["node"]) for each in json.loads(result.out)["problems"]]
    assert found == [("no answer", f"127.0.0.1:{ports[1]}")]
