"""Seeded faults on a real nsqd: the diagnosis of each, and a remedy that loses no message."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.raw_client import RawClient, Received
from plugins.servers import AnyNsqd, GoNsqd, Nsqd, Serve
from plugins.waiting import wait_until

from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.problems import (
    CRITICAL,
    NOTE,
    WARNING,
    Bounds,
    EarlierTotals,
    Fault,
    Problem,
    RecentTotals,
    Severity,
    comparable_totals,
    find_problems,
)
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.http.http_api import HTTPAccess

COUNT = 30


class Stage:
    """A topic ``t`` and its channel ``c`` on one nsqd, and a consumer with its messages.

    Each step of a fault or of a remedy is a method, with numbers.
    """

    def __init__(self, nsqd: Nsqd, stack: ExitStack) -> None:
        self.nsqd, self._stack = nsqd, stack
        self.held: list[Received] = []
        self.finished = 0
        self._channel = "c"
        cluster = stack.enter_context(Cluster(ClusterAddresses([nsqd.http_address])))
        self._sampler = Sampler(cluster, SampleFilter())
        nsqd.create_topic("t")
        self.look()

    def do(self, steps: str) -> None:
        for step in steps.split(", "):
            name, *numbers = step.split()
            getattr(self, name)(*map(int, numbers))

    def look(self) -> None:
        self._first = self._sampler.sample()

    def judge(self, window_s: float = 10.0) -> dict[Fault, Problem]:
        """Diagnose the changes since `look`, as if that was ``window_s`` ago."""
        now = self._sampler.sample()
        earlier = EarlierTotals(comparable_totals(self._first, now), window_s)
        return {
            problem.fault: problem
            for problem in find_problems(now, earlier, Bounds(behind_depth=5))
        }

    def channel(self) -> None:
        self.nsqd.create_channel("t", self._channel)

    def ephemeral(self) -> None:
        self._channel = "c#ephemeral"
        self.channel()

    def delete(self) -> None:
        self.nsqd.post("/topic/delete", topic="t")

    def publish(self, count: int = COUNT) -> None:
        self.nsqd.publish("t", *[b"x"] * count)

    def pause(self, is_paused: int = 1) -> None:
        self.nsqd.post(
            f"/channel/{'' if is_paused else 'un'}pause", topic="t", channel=self._channel
        )

    def pause_topic(self, is_paused: int = 1) -> None:
        self.nsqd.post(f"/topic/{'' if is_paused else 'un'}pause", topic="t")

    def consume(self, ready: int, msg_timeout: int = 0) -> None:
        """Connect a consumer; it cannot answer messages of the previous one."""
        self.held.clear()
        self.client = self._stack.enter_context(RawClient(self.nsqd.tcp_address))
        if msg_timeout:
            self.client.identify(msg_timeout=msg_timeout)
        self.client.subscribe("t", self._channel, ready=ready)

    def hold(self, count: int = COUNT) -> None:
        self.held += self.client.read_messages(count)

    def ready(self, count: int) -> None:
        self.client.send(b"RDY %d\n" % count)

    def finish(self, count: int = COUNT) -> None:
        done, self.held = self.held[:count], self.held[count:]
        self.finished += len(done)
        self.client.finish(done)

    def requeue(self, times: int) -> None:
        for _ in range(times):
            self.client.send(b"REQ %b 0\n" % self.held.pop(0).id)
            self.hold(1)

    def wait(self) -> None:
        """Wait until nsqd has processed all finished messages."""
        self._wait_for("in_flight_count", len(self.held))

    def time_out(self, count: int) -> None:
        self.ready(0)
        self._wait_for("timeout_count", count)

    def answer(self) -> None:
        """Finish deliveries until all messages are finished."""
        self.ready(1000)
        self.finish()
        while self.finished < self.published:
            self.hold(1)
            self.finish()
        self.wait()

    def stop(self) -> None:
        self.client.socket.close()

    def _wait_for(self, name: str, count: int) -> None:
        wait_until(lambda: self.nsqd.channel_stats("t", self._channel)[name] == count, what=name)

    @property
    def published(self) -> int:
        return int(self.nsqd.topic_stats("t")["message_count"])


HOLDS = "channel, publish, consume 30, hold"
START = "consume 30, answer"
RESTART = "stop, consume 30, answer"
SLOW = "channel, publish, consume 1, hold 1, look, finish, hold 1"
S, W, N = CRITICAL, WARNING, NOTE
# the fault, its diagnosis, and the steps of its remedy
FAULTS = {
    "RDY 0": ("channel, publish, consume 0, look", Fault.STUCK, S, "30 waiting; 0 finished", START),
    "hangs": (f"{HOLDS}, look", Fault.HANGS, S, "0 waiting, 30 in flight; 0 finished", "answer"),
    "hangs later": (f"{HOLDS}, finish 5, wait, look", Fault.MAY_HANG, W, "25 in flight", "answer"),
    "collects a batch": (
        f"{HOLDS}, finish 5, wait, look, ready 99, publish 1, hold 1",
        None,
        N,
        "",
        "answer",
    ),
    "answers nothing": (
        "channel, publish, consume 30 1000, hold, look, time_out 30",
        *(Fault.TIMES_OUT, S, "30 waiting; 0 finished, 30 timed out in 10 s", RESTART),
    ),
    "answers some": (
        "channel, publish, consume 30 1000, hold, look, finish 5, time_out 25",
        *(Fault.TIMEOUTS, W, "2.5/s time out, 25 so far", RESTART),
    ),
    "requeues all": (f"{HOLDS}, look, requeue 30", Fault.REQUEUES, W, "100% of deliv", "answer"),
    "one circulates": (
        "channel, publish 1, consume 1, hold 1, look, requeue 3",
        *(Fault.REQUEUES, W, "100% of deliveries requeued", "answer"),
    ),
    "backs off": (
        "channel, publish, consume 1, hold 1, look, requeue 1",
        *(Fault.REQUEUES, W, "100% of deliveries requeued", "answer"),
    ),
    "slow": (SLOW, None, N, "", "answer"),
    "slower than producers": (
        f"{SLOW}, publish 10",
        *(Fault.FALLS_BEHIND, W, "38 waiting, +0.9/s: 1.0/s in, 0.1/s finished", "answer"),
    ),
    "no consumers": ("channel, publish, look", Fault.NO_CONSUMERS, W, "30 waiting", START),
    "grows": ("channel, look, publish 20", Fault.GROWS, S, "20 waiting, +2.0/s", START),
    "created again": (
        "channel, publish, look, delete, channel, publish 20",
        *(Fault.NO_CONSUMERS, W, "20 waiting", START),
    ),
    "ephemeral": (
        "ephemeral, look, publish 20",
        *(Fault.LEFTOVER, N, "20 waiting, in memory only", START),
    ),
    "no channels": ("publish", Fault.NO_CHANNELS, W, "30 waiting for the", f"channel, {START}"),
    "paused": ("channel, pause, publish, consume 9", Fault.PAUSED, N, "30 wait", "pause 0, answer"),
    "topic paused": (
        "channel, pause_topic, publish",
        Fault.PAUSED,
        N,
        "30 waiting",
        f"pause_topic 0, {START}",
    ),
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("seed", "kind", "severity", "words", "remedy"), FAULTS.values(), ids=FAULTS
)
def test_the_remedy_of_a_fault_fixes_it_without_losing_messages(
    seed: str,
    kind: Fault | None,
    severity: Severity,
    words: str,
    remedy: str,
    any_nsqd: AnyNsqd,
    stack: ExitStack,
) -> None:
    stage = Stage(any_nsqd(), stack)
    stage.do(seed)
    problems = stage.judge()
    assert [*problems] == [kind] * (kind is not None)
    for problem in problems.values():
        assert (problem.severity, words in problem.text) == (severity, True), problem
    if kind is Fault.MAY_HANG:
        assert [*stage.judge(60.0)] == [Fault.HANGS]
    stage.do(remedy)
    stage.look()
    assert not stage.judge()
    assert stage.finished == stage.published


def test_a_restart_of_nsqd_keeps_its_messages(any_nsqd: AnyNsqd, stack: ExitStack) -> None:
    nsqd = any_nsqd()
    stage = Stage(nsqd, stack)
    stage.do("channel, publish, look")
    nsqd.stop()
    problems = stage.judge()
    assert re.search("; 30 messages when last seen ..:..:.. UTC$", problems[Fault.GONE].text)
    nsqd.start()
    wait_until(lambda: Fault.GONE not in stage.judge(), what="it answers again")
    assert nsqd.depth("t", "c") == COUNT


def test_a_tcp_port_used_for_http_is_reported(embedded_nsqd: AnyNsqd) -> None:
    nsqd = embedded_nsqd()
    addresses = ClusterAddresses([nsqd.http_address], [nsqd.tcp_address])
    with Cluster(addresses, HTTPAccess()) as cluster:
        sample = Sampler(cluster, SampleFilter(), required=False).sample()
    [problem] = find_problems(sample)
    assert (problem.fault, problem.kind) == (Fault.WRONG_PORT, "no answer")
    assert "nsqlookupd's 4161" in problem.remedy


@pytest.fixture
def full_nsqd(small_disk: Path, serve: Serve) -> GoNsqd:
    """An nsqd whose disk is full: ``big`` has no channel, ``held`` is paused."""
    nsqd: GoNsqd = serve(GoNsqd(small_disk, "-mem-queue-size=10"))
    for topic in ("t", "held"):
        nsqd.create_channel(topic, "c")
    nsqd.post("/topic/pause", topic="held")
    for topic in ("t", "held"):
        nsqd.publish(topic, *[b"x"] * 40)
    nsqd.create_topic("big")
    while nsqd.request("POST", "/pub?topic=big", b"x" * 9000)[0] == 200:
        pass
    return nsqd


@pytest.mark.real_nsqd
@pytest.mark.parametrize("small_disk", ["512k"], indirect=True)
def test_a_full_disk_allows_no_change_that_loses_messages(
    full_nsqd: GoNsqd, embedded_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd, second = full_nsqd, embedded_nsqd()
    second.create_channel("t", "c")
    at = f"--nsqd-http-address={nsqd.http_address}"
    (tmp_path / "wanted").write_text('topics."big".channels = ["keep"]\n')
    consume = ["-t", "big", "-c", "keep", *nsqd.options]
    depth = nsqd.depth("big")

    problems = json.loads(run_nsq(["check", at, "--window=0", "--json"]).out)["problems"]
    remedies = {(problem["kind"], problem["topic"]): problem["remedy"] for problem in problems}
    assert "do not restart it, create channels or unpause" in remedies["not well", None]
    for key in (("no channels", "big"), ("paused", "held")):
        assert remedies[key].startswith(f"First make room on the disk of {nsqd.http_address}")
    refusals = {
        f"channel create big keep {at}": "make room on its disk first",
        f"channel create big keep --dry-run {at}": "make room on its disk first",
        f"topology apply {tmp_path / 'wanted'} {at}": "make room on its disk first",
        f"topic unpause held {at}": "make room on its disk first",
        f"topic create new {at}": "make room on its disk first",
        f"drain {nsqd.http_address} --to {second.http_address} --dry-run": "big has no channel",
        f"drain {second.http_address} --to {nsqd.http_address} --yes": "make room on its disk",
        f"to-file {' '.join(consume)} --output-dir {tmp_path}": "drop",
        f"to-exec {' '.join(consume)} -- true": "drop",
        f"tail {' '.join(consume)} --force": "drop",
    }
    for command, reason in refusals.items():
        result = run_nsq(command.split())
        assert (result.status != 0, reason in result.err) == (True, True), (command, result)
    assert (nsqd.depth("big"), nsqd.channels("big"), nsqd.depth("held")) == (depth, [], 40)

    # remedies that are safe: consumers, and later, with free space, the channel and the topic
    with RawClient(nsqd.tcp_address) as consumer:
        consumer.subscribe("t", "c", ready=40)
        messages = consumer.read_messages(40)
        consumer.finish(messages)
        wait_until(lambda: not nsqd.channel_stats("t", "c")["in_flight_count"], what="finished")
    subprocess.run(["mount", "-o", "remount,size=8m", nsqd.data_path], check=True)
    nsqd.publish("big", b"x")  # the first write that succeeds makes nsqd well again
    problems = json.loads(run_nsq(["check", at, "--window=0", "--json"]).out)["problems"]
    assert Fault.NO_CHANNELS.remedy in {problem["remedy"] for problem in problems}
    assert run_nsq(f"channel create big keep {at}".split()).status == 0
    assert run_nsq(f"topic unpause held {at}".split()).status == 0
    wait_until(lambda: nsqd.depth("big", "keep") == depth + 1, what="all are in the channel")
    wait_until(lambda: nsqd.depth("held", "c") == 40, what="all are in the channel")
    nsqd.stop()
    nsqd.start()
    assert len({message.id for message in messages}) == 40
    assert (nsqd.depth("big", "keep"), nsqd.depth("held", "c")) == (depth + 1, 40)
    assert "failed to put msg" not in nsqd.log


def test_a_step_of_the_clock_does_not_change_the_window() -> None:
    past = RecentTotals()
    past.add(Sample(1000.0, [], [], (), (), at_s=5.0))
    earlier = past.before(Sample(1060.0, [], [], (), (), at_s=6.0))
    assert earlier is not None
    assert earlier.ago_s == 1.0


def test_a_channel_missing_on_one_nsqd_gets_the_messages_of_the_topic(
    cluster: RunningCluster, run_nsq: RunNsq, tmp_path: Path
) -> None:
    first, second = cluster.nsqds
    topology = tmp_path / "wanted"
    topology.write_text('topics."t".channels = ["c"]\n')
    second.create_topic("t")  # before nsqlookupd lists a channel of it
    second.publish("t", *[b"x"] * COUNT)
    first.create_channel("t", "c")

    def judge(*options: str) -> dict[str, str]:
        result = run_nsq(["check", "--window=0", "--json", *cluster.nsqd_options, *options])
        return {
            problem["kind"]: problem["remedy"] for problem in json.loads(result.out)["problems"]
        }

    assert "nsq topology apply" in judge(f"--expect={topology}")["lacking"]
    assert "nsq channel create" in judge()["channel missing"]
    run_nsq(["topology", "apply", str(topology), *cluster.nsqd_options])
    with RawClient(first.tcp_address) as elsewhere, RawClient(second.tcp_address) as consumer:
        elsewhere.subscribe("t", "c", ready=1)
        remedies = judge(f"--expect={topology}")
        assert {*remedies} == {"no consumers there"}
        consumer.subscribe("t", "c", ready=COUNT)
        consumer.finish(consumer.read_messages(COUNT))
        wait_until(lambda: not judge(), what="all are finished")
