"""``nsq check`` on real daemons: seeded faults, and a healthy cluster."""

import json
import os
import re
import shlex
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from plugins.archives import to_file, write_archive
from plugins.cli import Result, RunNsq
from plugins.clusters import RunningCluster, ValidJson
from plugins.daemons import EmbeddedLookupServer
from plugins.raw_client import RawClient, RawPeer
from plugins.servers import AnyNsqd, GoNsqd, Nsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import Head
from nsqtools.archive.parquet import read
from nsqtools.archive.table_health import measure_lake
from nsqtools.cluster import check, problems
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
from nsqtools.http import http_server as server
from nsqtools.http.http_api import NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.frames import WireMessage
from nsqtools.protocol.stats import read_stats
from nsqtools.protocol.text import NS


def test_requeued_messages_are_not_growth() -> None:
    queue = {"node": "", "topic": "clicks", "channel": "c", "messages": 60, "paused": False}
    then = QueueRow(**queue, depth=30, disk=30, in_flight=30, clients=1)
    now = replace(then, depth=60, disk=60, in_flight=0, requeued=30)
    sample = Sample(1.0, [], [now], (), ())
    problems_found = find_problems(sample, EarlierTotals([then], 10.0), Bounds(behind_depth=20))
    assert [problem.kind for problem in problems_found] == ["requeues"]


def test_an_nsqd_that_answers_only_the_second_time_is_not_growth() -> None:
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


def test_a_missing_channel_is_named_even_if_a_filter_selects_it_alone() -> None:
    topics = {"a": [{"channel_name": "c"}], "b": []}
    stats = {at: {"topics": [{"topic_name": "t", "channels": has}]} for at, has in topics.items()}
    reports = tuple(NodeReport(at, 0.0, read_stats(each)) for at, each in stats.items())
    rows = [row for at, _, each in reports for row in rows_of_topic(at, (each.topics or ())[0])]
    for wanted in (SampleFilter(), SampleFilter(channels=["c"])):
        selected_rows = wanted.among(rows)
        [problem] = find_problems(Sample(1.0, selected_rows, totals(selected_rows), reports, ()))
        assert (problem.fault, problem.text) == (Fault.CHANNEL_MISSING, "missing on b")


def test_queues_of_an_unresponsive_nsqd_are_not_judged(
    run_nsq: RunNsq, quick_nsqd: Nsqd, dead_address: str
) -> None:
    places = [
        f"--nsqd-http-address={address}" for address in (dead_address, quick_nsqd.http_address)
    ]
    result = run_nsq(["check", "--window=0", "-t", "/a|\udcff/", *places, "--format=nagios"])
    assert b"\nnot judged: no topic matches /a/" in result.out


def test_a_healthy_cluster_has_no_problem(
    run_nsq: RunNsq,
    cluster: RunningCluster,
    valid_json: ValidJson,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (check, problems):
        monkeypatch.setattr(module, "LEAST_WINDOW_S", 0.1)
    for nsqd in cluster.nsqds:
        nsqd.create_channel("orders", "billing")
    cluster.wait_for_topic("orders", 2)
    options = [*cluster.lookupd_options, f"--state={tmp_path / 'state'}", "--window=500ms"]
    with ExitStack() as consumers:
        for nsqd in cluster.nsqds:
            consumer = consumers.enter_context(RawClient(nsqd.tcp_address))
            consumer.subscribe("orders", "billing", ready=1)
        result = run_nsq(["check", *options, "--json"])

    verdict = valid_json("check", result.out)
    assert (result.status, verdict["problems"], verdict["not_judged"]) == (0, [], [])
    assert (verdict["nodes"], verdict["queues"]) == (2, 2)


@pytest.fixture
def check_lake(
    run_nsq: RunNsq, quick_nsqd: Nsqd, valid_json: ValidJson
) -> Callable[..., dict[str, Any]]:
    """Return the verdict about places, after checking the status."""

    def verdict_of(*options: str) -> dict[str, Any]:
        address = f"--nsqd-http-address={quick_nsqd.http_address}"
        result = run_nsq(["check", "--window=0", address, "--json", *options])
        verdict: dict[str, Any] = valid_json("check", result.out)
        severities = {problem["severity"] for problem in verdict["problems"]}
        assert result.status == (2 if "critical" in severities else len(severities))
        return verdict

    return verdict_of


def run_printed(commands: str, run_nsq: RunNsq) -> None:
    """Run a line of commands as a shell does."""
    for command in commands.split(" && "):
        words, _, target = command.partition(" > ")
        assert words.startswith("nsq ")
        result = run_nsq(shlex.split(words)[1:])
        assert result.status == 0, result
        if target:
            Path(*shlex.split(target)).write_bytes(result.out)


@pytest.mark.parametrize(("store", "place"), [("delta", "old lake"), ("parquet", "lake/{topic}")])
def test_the_printed_conversion_removes_the_misfits_of_a_lake(
    store: str,
    place: str,
    run_nsq: RunNsq,
    check_lake: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A column of integers, and fractions in a later log, after many messages."""
    monkeypatch.chdir(tmp_path)
    now_ns = time.time_ns()
    numbers = [*range(10_100), 0.5, 1.5]
    messages = [
        WireMessage(now_ns + at, 1, b"%016x" % at, b'{"n": %s, "country": "ch"}' % str(n).encode())
        for at, n in enumerate(numbers)
    ]
    write_archive(Path("logs/0.log"), messages[:10_100])
    write_archive(Path("logs/1.log"), messages[10_100:])
    schema = Path("first.json")
    schema.write_text('{"properties": {"country": {"type": "string"}}}')
    by = ["--partition-by", "hour", "--partition-by", ".country", "--schema", str(schema)]
    table = ["-o", place, "--store", store, "--body", "json", *by]
    assert run_nsq(["archive", "convert", "logs", *table]).status == 0
    root = place.partition("/")[0]

    verdict = check_lake("--lake", root, "--max-lake-age", "1h")
    [problem] = verdict["problems"]
    assert problem["kind"] == "misfits"
    [rows] = verdict["tables"]
    assert (rows["topic"], rows["rows"], rows["misfits"]) == ("clicks", len(numbers), 2)

    run_printed(problem["remedy"].partition("for them: ")[2], run_nsq)
    assert check_lake("--lake", f"{root}-wide", "--max-lake-age", "1h")["problems"] == []
    files = find_archives([f"{root}-wide"])
    rows_of = [row for file in files for batch in read(file.path) for row in batch.to_pylist()]
    assert sorted(row["n"] for row in rows_of) == sorted(numbers)
    for file in files:
        assert file.table is not None
        assert [*file.table.partition] == ["topic", "date", "hour", "country"]
    assert len(check_lake("--lake", root)["tables"]) == 1  # the new table is not in the lake


def test_waiting_logs_land_after_their_repair(
    run_nsq: RunNsq,
    quick_nsqd: Nsqd,
    check_lake: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    logs, lake = tmp_path / "my logs", tmp_path / "lake"
    quick_nsqd.publish("clicks", b"1")
    archiver = to_file(quick_nsqd.tcp_address, logs, "--store", "parquet", "--upload", str(lake))
    assert run_nsq([*archiver, "--until-empty", "--create"]).status == 0
    messages = [WireMessage(time.time_ns(), 1, b"%016x" % n, b"%d" % n) for n in range(100)]
    late = write_archive(logs / "late.log", messages[:50], messages[50:], head=Head("a" * 32, 1))
    content = late.read_bytes()
    late.write_bytes(content[:-20])
    os.utime(late, (time.time() - 7200,) * 2)
    options = "--lake", str(logs)

    assert run_nsq([*archiver, "--for=500ms"]).status == 6
    [problem] = check_lake(*options)["problems"]
    assert (problem["kind"], problem["text"]) == ("logs wait", "1, the oldest for 2h0m")
    run_printed(problem["remedy"].partition("damaged ones: ")[2].removesuffix("."), run_nsq)
    assert run_nsq([*archiver, "--for=500ms"]).status in (0, 7)
    assert check_lake(*options)["problems"] == []
    [rows] = measure_lake([str(lake)], 0.0, None).topics
    assert 51 <= rows.rows <= 100  # at least the first member of the damaged log


def test_an_old_or_unreadable_table_is_healthy_after_its_archiver_ran(
    run_nsq: RunNsq,
    quick_nsqd: Nsqd,
    check_lake: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    lake, options = tmp_path / "lake", ("--lake", str(tmp_path / "lake"), "--max-lake-age=1h")
    [problem] = check_lake(*options)["problems"]
    assert (problem["kind"], problem["node"]) == ("not readable", str(lake))
    assert problem["remedy"].startswith("Look at the place")
    old_ns = time.time_ns() - 7200 * NS
    write_archive(tmp_path / "old" / "0.log", [WireMessage(old_ns, 1, b"%016x" % 1, b"old")])
    run_nsq(["archive", "convert", str(tmp_path / "old"), "-o", str(lake)])
    [problem] = check_lake(*options)["problems"]
    assert (problem["kind"], problem["text"]) == ("table is old", "newest 2h0m")
    assert "nsq to-file" in problem["remedy"]

    quick_nsqd.publish("clicks", b"new")
    archiver = to_file(quick_nsqd.tcp_address, lake, "--store", "parquet", "--until-empty")
    assert run_nsq([*archiver, "--create"]).status == 0
    assert check_lake(*options)["problems"] == []


class Expected(NamedTuple):
    """A problem, and a part of its text and of its remedy. ``node`` is "" for a whole queue."""

    severity: str
    kind: str
    queue: str
    node: str
    text: str
    remedy: str


class Scene:
    """Two nsqd and two nsqlookupd, and the state of a run that found no problem."""

    def __init__(
        self, cluster: RunningCluster, state: Path, stack: ExitStack, run_nsq: RunNsq
    ) -> None:
        self.cluster = cluster
        self.a, self.b = cluster.nsqds
        self.options = [*cluster.lookupd_options, f"--state={state}"]
        self.state = state
        self.stack = stack
        self._run_nsq = run_nsq

    def check(self) -> Result:
        return self._run_nsq(["check", "--window=0", *self.options, "--json"])

    def nsq(self, command: str) -> None:
        result = self._run_nsq([*command.split(), *self.cluster.lookupd_options])
        assert result.status == 0, result

    def change_state(self, part: str, key: str, seconds: float) -> None:
        document = json.loads(self.state.read_bytes())
        document[part][key] = document[part].get(key, time.time()) + seconds
        self.state.write_text(json.dumps(document))

    def pause_channel(self) -> None:
        self.a.create_channel("clicks", "c")
        self.a.publish("clicks", b"x")
        self.a.post("/channel/pause", topic="clicks", channel="c")

    def tombstone(self) -> str:
        """Hide ``clicks`` on the first nsqd, without deleting it there; return its address."""
        self.a.create_topic("clicks")
        self.cluster.wait_for_topic("clicks", 1)
        for lookupd in self.cluster.lookupds:
            lookupd.post("/topic/tombstone", topic="clicks", node=self.a.http_address)
        return self.a.http_address

    def consume(self, nsqd: Nsqd, count: int = 1) -> None:
        """Finish the messages of ``clicks/c``; the consumer stays."""
        client = self.stack.enter_context(RawClient(nsqd.tcp_address))
        client.subscribe("clicks", "c", ready=count)
        client.finish(client.read_messages(count))


Seeded = Callable[[Scene], Iterator[list[Expected]]]
"""Seeds a fault, yields how it is judged, and applies the remedy."""


def left(scene: Scene) -> Iterator[list[Expected]]:
    scene.b.kill()
    lookupds = scene.cluster.lookupds
    wait_until(lambda: all(len(x.json("/nodes")["producers"]) == 1 for x in lookupds), what="left")
    text = "no longer announced by any nsqlookupd; 0 messages when last seen "
    yield [Expected("critical", "left", "", scene.b.http_address, text, "Start it again")]
    scene.b.start()
    scene.cluster.wait_until_registered()


def no_answer(scene: Scene) -> Iterator[list[Expected]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    scene.options.append(f"--lookupd-http-address={address}")
    yield [Expected("critical", "no answer", "", address, "refused", "Look at its process")]
    scene.options.pop()


def unreachable(scene: Scene) -> Iterator[list[Expected]]:
    nsqds = scene.cluster.nsqds
    nsqds.append(nsqd := scene.cluster.start("-broadcast-address=nsqd.invalid"))
    scene.cluster.wait_until_registered()
    name = nsqd.http_address.replace("127.0.0.1", "nsqd.invalid")
    yield [Expected("critical", "unreachable", "", name, "announced by", "-broadcast-address")]
    nsqds.pop().stop()
    nsqds.append(scene.cluster.start())
    scene.cluster.wait_until_registered()


def not_registered(scene: Scene) -> Iterator[list[Expected]]:
    scene.cluster.nsqds.append(nsqd := scene.cluster.start(registers=1))
    first, second = scene.cluster.lookupds
    wait_until(lambda: len(first.json("/nodes")["producers"]) == 3, what="it is registered")
    text = f"not registered with {second.http_address}"
    remedy = "-lookupd-tcp-address"
    yield [Expected("warning", "not registered", "", nsqd.http_address, text, remedy)]
    addresses = json.dumps([first.tcp_address, second.tcp_address]).encode()
    assert nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", addresses)[0] == 200
    scene.cluster.wait_until_registered()


def restarted(scene: Scene) -> Iterator[list[Expected]]:
    scene.change_state("nsqds", scene.b.http_address, -60)
    yield [Expected("note", "restarted", "", scene.b.http_address, " UTC", "see its log")]


def deep(scene: Scene) -> Iterator[list[Expected]]:
    scene.options.append("--max-depth=2")
    scene.a.create_channel("clicks", "c")
    scene.a.publish("clicks", b"1", b"2", b"3")
    yield [
        Expected("critical", "deep", "clicks/c", "", "3 waiting, limit 2", "Add consumers"),
        Expected("warning", "no consumers", "clicks/c", "", "3 waiting", "Start its consumers"),
    ]
    scene.consume(scene.a, 3)


def no_consumers_there(scene: Scene) -> Iterator[list[Expected]]:
    for nsqd in (scene.a, scene.b):
        nsqd.create_channel("clicks", "c")
    scene.b.publish("clicks", b"x")
    scene.stack.enter_context(RawClient(scene.a.tcp_address)).subscribe("clicks", "c", ready=1)
    text, remedy = "1 waiting, consumers are connected to other", "Consumers have to find it"
    node = scene.b.http_address
    yield [Expected("warning", "no consumers there", "clicks/c", node, text, remedy)]
    scene.consume(scene.b)


def channel_missing(scene: Scene) -> Iterator[list[Expected]]:
    scene.b.create_topic("clicks")  # first: a new topic gets the channels that nsqlookupd has
    scene.a.create_channel("clicks", "c")
    text, remedy = f"missing on {scene.b.http_address}", "nsq channel create"
    yield [Expected("warning", "channel missing", "clicks/c", "", text, remedy)]
    scene.nsq("channel create clicks c")


def tombstoned(scene: Scene) -> Iterator[list[Expected]]:
    node = scene.tombstone()
    text = "hidden by nsqlookupd, and still on this nsqd"
    yield [Expected("note", "tombstoned", "clicks", node, text, "nsq tombstone deletes the topic")]
    scene.nsq(f"tombstone clicks {node} --yes")


def returned(scene: Scene) -> Iterator[list[Expected]]:
    node = scene.tombstone()
    scene.check()
    scene.a.post("/topic/delete", topic="clicks")
    scene.cluster.wait_for_topic("clicks", 0)
    scene.a.create_topic("clicks")  # as its producer would
    scene.cluster.wait_for_topic("clicks", 1)
    text, remedy = "announced again since its tombstone", "Stop the producers"
    yield [Expected("note", "returned", "clicks", node, text, remedy)]
    scene.nsq(f"tombstone clicks {node} --yes")


def paused_long(scene: Scene) -> Iterator[list[Expected]]:
    scene.pause_channel()
    scene.change_state("problems", "paused clicks/c", -7200)
    yield [Expected("warning", "paused long", "clicks/c", "", "1 waiting", "Unpause it")]
    scene.nsq("channel unpause clicks c")
    scene.consume(scene.a)


def hangs(scene: Scene) -> Iterator[list[Expected]]:
    assert isinstance(scene.b, GoNsqd)
    scene.b.publish("clicks", b"1", b"2")
    scene.nsq("channel create clicks c")
    scene.consume(scene.b)  # its consumer keeps the other message in flight
    scene.check()
    scene.b.pause()
    text = "no answer in time; 1 message when last seen "
    yield [Expected("critical", "no answer", "", scene.b.http_address, text, "Look at its process")]
    scene.b.resume()


FAULTS = [left, no_answer, unreachable, not_registered, restarted, deep, no_consumers_there]
FAULTS += [channel_missing, tombstoned, returned, paused_long, hangs]
# Faults of queues on a single nsqd are in tests/cluster/test_problems.py.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_reported_and_its_remedy_ends_it(
    fault: Seeded, run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        scene = Scene(cluster, tmp_path / "state.json", stack, run_nsq)
        if fault is hangs:
            if not isinstance(scene.b, GoNsqd):
                return  # the embedded nsqd runs on a thread of the tests
            scene.options.append(f"--timeout={patience_s(0.5):g}s")
        assert scene.check().status == 0
        seeded = fault(scene)
        expected = next(seeded)
        result = scene.check()
        verdict = valid_json("check", result.out)
        rows = []
        for problem in verdict["problems"]:
            queue = "/".join(filter(None, (problem["topic"], problem["channel"])))
            parts = (queue, problem["node"] or "", problem["text"], problem["remedy"])
            rows.append(Expected(problem["severity"], problem["kind"], *parts))
        assert len(rows) == len(expected), rows
        for row, part in zip(sorted(rows), sorted(expected), strict=True):
            assert row[:4] == part[:4]
            assert (part.text in row.text, part.remedy in row.remedy) == (True, True), row
        worst = {problem.severity for problem in expected}
        assert result.status == (2 if "critical" in worst else 1 if "warning" in worst else 0)
        next(seeded, None)
        wait_until(lambda: not json.loads(scene.check().out)["problems"], what="it has ended")


def test_only_the_worst_of_many_equal_problems_are_listed(
    run_nsq: RunNsq, quick_nsqd: Nsqd
) -> None:
    for number in range(1, 24):
        quick_nsqd.publish(f"t{number}", *[b"x"] * number)
    result = run_nsq(["check", "--window=0", f"--nsqd-http-address={quick_nsqd.http_address}"])
    lines = [line for line in result.out.decode().splitlines() if "not judged" not in line]
    assert lines[0] == "WARNING   no channels t23: 23 waiting for the first channel"
    assert lines[20] == "          and 3 more: no channels"
    assert lines[21].endswith("nsq channel create.")
    assert lines[22:] == ["WARNING: 23 warning; 1 nsqd, 23 topics and channels"]


def test_a_bundle_has_the_verdict_and_the_statistics_of_each_nsqd(
    run_nsq: RunNsq, quick_nsqd: Nsqd, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    address = quick_nsqd.http_address
    run_nsq(["check", "--window=0", f"--nsqd-http-address={address}", f"--bundle={bundle}"])
    with tarfile.open(bundle) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    directory = f"nsqd/{address.replace(':', '_')}"
    assert names >= {"nsqtools", "check.json", f"{directory}/stats.json", f"{directory}/info.json"}


def test_a_bundle_says_why_an_nsqlookupd_has_no_document(
    run_nsq: RunNsq, quick_nsqd: Nsqd, dead_address: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    addresses = (
        f"--nsqd-http-address={quick_nsqd.http_address}",
        f"--lookupd-http-address={dead_address}",
    )
    run_nsq(["check", "--window=0", *addresses, f"--bundle={bundle}"])
    member = f"nsq-check/nsqlookupd/{dead_address.replace(':', '_')}/nodes.error"
    with tarfile.open(bundle) as archive:
        reason = archive.extractfile(member)
        assert reason is not None
        assert b"connection refused" in reason.read()


def test_a_channel_that_grows_on_disk_is_noted() -> None:
    queue = {"node": "", "topic": "t", "channel": "c", "paused": False, "clients": 1}
    then = QueueRow(**queue, depth=50, disk=50, messages=50)
    now = QueueRow(**queue, depth=80, disk=80, messages=90)
    sample = Sample(1.0, [], [now], (), ())
    problems_found = find_problems(sample, EarlierTotals([then], 10.0), Bounds(behind_depth=20))
    assert [problem.kind for problem in problems_found] == ["falls behind", "on disk"]


def test_a_message_that_waits_too_long_is_found_from_counts_alone(
    run_nsq: RunNsq, quick_nsqd: Nsqd, embedded_nsqd: AnyNsqd, tmp_path: Path
) -> None:
    for channel in ("left", "taken"):
        quick_nsqd.create_channel("clicks", channel)
    quick_nsqd.publish("clicks", b"1", b"2")
    other = embedded_nsqd()  # it stops later, which lowers the sums
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

    assert "age of messages" in " ".join(first["not_judged"])
    assert "age of messages" not in " ".join(second["not_judged"])
    old = [problem for problem in second["problems"] if problem["kind"] == "old"]
    assert [(problem["severity"], problem["channel"]) for problem in old] == [("critical", "left")]

    memory = json.loads(state.read_text())
    memory["counts"] = [(time_s + 3600, counts) for time_s, counts in memory["counts"]]
    state.write_text(json.dumps(memory))
    run_nsq(at)  # as if the clock had been set back meanwhile
    assert all(time_s < time.time() for time_s, _ in json.loads(state.read_text())["counts"])
    for entry in ('"nsqds": {"a:1": 1e400}', '"problems": {"left a:1": 1e300}', '"time_s": 1e12'):
        state.write_text(json.dumps(memory)[:-1] + f", {entry}}}")
        result = run_nsq(at)
        assert (result.status, "it is not a file of nsq check" in result.err) == (3, True)
    state.write_text("[" * 100_000)
    assert "it is not a file of nsq check" in run_nsq(at).err


def test_messages_that_stay_in_flight_are_stuck_and_old(
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
    texts = {problem["kind"]: problem["text"] for problem in json.loads(result.out)["problems"]}
    assert (result.status, [*texts]) == (2, ["stuck", "old"])
    assert texts["stuck"].startswith("0 waiting, 500 in flight; 0 finished in ")
    assert texts["old"].startswith("0 waiting, 500 in flight; oldest over ")


def test_the_state_of_a_run_at_other_addresses_is_not_judged(
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
        return {problem["kind"] for problem in verdict["problems"]}, " ".join(verdict["not_judged"])

    content = state.read_bytes()
    for options in (cluster.nsqd_options[:1], [second]):
        state.write_bytes(content)
        kinds, not_judged = judged(*options)
        assert ("left" in kinds, "the run that left --state asked 127.0.0.1:" in not_judged) == (
            False,
            True,
        )
    legacy = json.loads(content)
    del legacy["asked"], legacy["had"]  # as 0.3.0 wrote it
    departed = cluster.nsqds[0]
    departed.stop()
    wait_until(lambda: len(cluster.lookupds[0].json("/nodes")["producers"]) == 1, what="it left")
    for document in (content, json.dumps(legacy).encode()):
        state.write_bytes(document)
        assert "left" in judged(first)[0]
    state.write_bytes(content)
    cluster.lookupds[0].kill()  # it might still announce the departed nsqd
    kinds, not_judged = judged(first, second)
    why = (
        f"departure of {departed.http_address}: {cluster.lookupds[0].http_address} does not respond"
    )
    assert ("left" in kinds, why in not_judged) == (False, True)


def test_queues_of_a_dead_nsqd_are_named_and_not_summed(
    run_nsq: RunNsq, embedded_nsqd: AnyNsqd, tmp_path: Path
) -> None:
    alive, dead = embedded_nsqd(), embedded_nsqd()
    dead.publish("clicks", b"1", b"2")
    at = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in (alive, dead)]
    check = ["check", "--window=0", f"--state={tmp_path / 'state'}", *at]
    run_nsq(check)
    dead.kill()
    report = run_nsq(check).out.decode()
    assert re.search(
        rf"no answer {dead.http_address}: .*; 2 messages when last seen ..:..:.. UTC", report
    )
    assert f"not judged: queues of {dead.http_address}: no response" in report
    assert "; 1 of 2 nsqd respond, 0 topics and channels" in report


def test_a_wrong_clock_and_a_failed_request_are_reported(
    run_nsq: RunNsq, quick_nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ["check", "--window", "0", f"--nsqd-http-address={quick_nsqd.http_address}"]
    assert b"clocks differ" not in run_nsq(at).out

    def hour_later(time_s: float, *, usegmt: bool) -> str:
        return formatdate(time_s + 3600, usegmt=usegmt)

    monkeypatch.setattr(server, "formatdate", hour_later)
    clocks_differ = f"clocks differ {quick_nsqd.http_address}: clock 3,600 s ahead".encode()
    wait_until(lambda: clocks_differ in run_nsq(at).out, what="nsqd has the other time")
    monkeypatch.undo()  # the text of a second is cached
    wait_until(lambda: clocks_differ not in run_nsq(at).out, what="nsqd has its own time")
    for question in ("info", "ping"):
        with monkeypatch.context() as patch:
            cut = Mock(side_effect=ConnectionFailed("it was cut"))
            patch.setattr(NsqdHTTPClient, question, cut)
            result = run_nsq(at)
        failure = f"no answer {quick_nsqd.http_address}: it was cut".encode()
        assert (result.status, result.out.count(failure)) == (2, 1)


def test_an_nsqlookupd_without_an_answer_for_a_topic_is_named(
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
    document = {
        "http": "http://u:p4ss@host:1/x",
        "auth_secret": "s3cret",
        "clients": [{"token": "t"}],
    }
    redacted = {"http": "http://***@host:1/x", "auth_secret": "***", "clients": [{"token": "***"}]}
    assert without_secrets(document) == redacted


def test_a_hanging_nsqd_is_not_reported_as_unreachable(run_nsq: RunNsq, serve: Serve) -> None:
    lookupd = serve(EmbeddedLookupServer())
    at = ["check", "--window=0", f"--timeout={patience_s(0.5):g}s", "--json"]
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.create_server(("127.0.0.1", 0)) as http,
        RawPeer(lookupd.tcp_address) as nsqd,
    ):
        ports = [listener.getsockname()[1] for listener in (tcp, http)]
        nsqd.identify(broadcast_address="127.0.0.1", tcp_port=ports[0], http_port=ports[1])
        result = run_nsq([*at, f"--lookupd-http-address={lookupd.http_address}"])
    faults = [(problem["kind"], problem["node"]) for problem in json.loads(result.out)["problems"]]
    assert faults == [("no answer", f"127.0.0.1:{ports[1]}")]
