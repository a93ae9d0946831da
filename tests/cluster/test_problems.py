"""Seeded faults on a real nsqd: how each is judged, and that its remedy helps and loses nothing."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from plugins.cli import RunNsq
from plugins.raw_client import RawClient, Received
from plugins.servers import AnyNsqd, GoNsqd, Nsqd, Serve
from plugins.waiting import wait_until

from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.cluster.problems import (
    CRITICAL,
    NOTE,
    WARNING,
    Bounds,
    Earlier,
    Kind,
    Past,
    Problem,
    Severity,
    comparable,
    problems_of,
)
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler

COUNT = 30
WINDOW_S = 10.0  # which no test waits for


class Stage:
    """A topic on one nsqd, with `COUNT` messages and a channel or none, and one consumer."""

    def __init__(self, nsqd: Nsqd, stack: ExitStack) -> None:
        self.nsqd, self._stack = nsqd, stack
        self.held: list[Received] = []
        self.finished = 0
        cluster = stack.enter_context(Cluster(ClusterAddresses([nsqd.http_address])))
        self._sampler = Sampler(cluster, SampleFilter())
        self.first = self._sampler.sample()

    def begin(self) -> None:
        """Begin to look."""
        self.first = self._sampler.sample()

    def judge(self, window_s: float = WINDOW_S) -> dict[Kind, Problem]:
        """Judge what happened since `begin`, as if that was ``window_s`` ago."""
        now = self._sampler.sample()
        earlier = Earlier(comparable(self.first, now), window_s)
        return {each.what: each for each in problems_of(now, earlier, Bounds(behind_depth=5))}

    def channel(self, *, paused: bool = False) -> None:
        self.nsqd.create_channel("t", "c")
        if paused:
            self.nsqd.post("/channel/pause", topic="t", channel="c")
        self.publish(COUNT)

    def publish(self, count: int) -> None:
        self.nsqd.publish("t", *[b"x"] * count)

    def consume(self, ready: int = COUNT, take: int | None = None, **identity: object) -> None:
        """Connect a consumer, which takes messages and holds them."""
        self.client = self._stack.enter_context(RawClient(self.nsqd.tcp_address))
        if identity:
            self.client.identify(**identity)
        self.client.subscribe("t", "c", ready=ready)
        self.held += self.client.read_messages(ready if take is None else take)

    def finish(self, count: int | None = None) -> None:
        """Finish what is held, or some of it."""
        done, self.held = self.held[:count], self.held[len(self.held[:count]) :]
        self.finished += len(done)
        self.client.finish(done)

    def requeue(self, times: int) -> None:
        for _ in range(times):
            self.client.send(b"REQ %b 0\n" % self.held.pop(0).id)
            self.held.append(self.client.read_message())

    def wait_for(self, name: str, count: int) -> None:
        """Wait until nsqd counts so many."""
        wait_until(lambda: self.nsqd.channel_stats("t", "c")[name] == count, what=name)

    def consume_all(self) -> None:
        """Finish whatever is delivered, until all of it was."""
        self.client.send(b"RDY 1000\n")
        self.finish()
        while self.finished < self.published:
            self.held.append(self.client.read_message())
            self.finish()
        self.wait_for("in_flight_count", 0)

    @property
    def published(self) -> int:
        return int(self.nsqd.topic_stats("t")["message_count"])


def rdy_0(stage: Stage) -> None:
    stage.channel()
    stage.consume(ready=0)
    stage.begin()


def hangs(stage: Stage) -> None:
    stage.channel()
    stage.consume()
    stage.begin()
    for message in stage.held:
        stage.client.send(b"TOUCH %b\n" % message.id)


def hangs_after_some(stage: Stage) -> None:
    stage.channel()
    stage.consume()
    stage.finish(5)
    stage.wait_for("in_flight_count", COUNT - 5)
    stage.begin()


def collects_a_batch(stage: Stage) -> None:
    hangs_after_some(stage)
    stage.client.send(b"RDY 100\n")
    stage.publish(1)
    stage.held.append(stage.client.read_message())


def answers_nothing(stage: Stage) -> None:
    stage.channel()
    stage.consume(msg_timeout=1000)
    stage.begin()
    stage.client.send(b"RDY 0\n")
    stage.wait_for("timeout_count", COUNT)


def answers_some(stage: Stage) -> None:
    stage.channel()
    stage.consume(msg_timeout=1000)
    stage.begin()
    stage.finish(5)
    stage.client.send(b"RDY 0\n")
    stage.wait_for("timeout_count", COUNT - 5)


def requeues_all(stage: Stage) -> None:
    stage.channel()
    stage.consume()
    stage.begin()
    stage.requeue(COUNT)


def poison_circulates(stage: Stage) -> None:
    stage.nsqd.create_channel("t", "c")
    stage.publish(1)
    stage.consume(1)
    stage.begin()
    stage.requeue(3)


def is_slow(stage: Stage) -> None:
    stage.channel()
    stage.consume(1)
    stage.begin()
    stage.finish()
    stage.held.append(stage.client.read_message())


def is_slower_than_producers(stage: Stage) -> None:
    is_slow(stage)
    stage.publish(10)


def no_consumers(stage: Stage) -> None:
    stage.channel()
    stage.begin()


def grows(stage: Stage) -> None:
    stage.channel()
    stage.begin()
    stage.publish(20)


def no_channels(stage: Stage) -> None:
    stage.nsqd.create_topic("t")
    stage.publish(COUNT)
    stage.begin()


def paused(stage: Stage) -> None:
    stage.channel(paused=True)
    stage.consume(take=0)
    stage.begin()


def paused_topic(stage: Stage) -> None:
    stage.nsqd.create_channel("t", "c")
    stage.nsqd.post("/topic/pause", topic="t")
    stage.publish(COUNT)
    stage.begin()


def start_a_consumer(stage: Stage) -> None:
    stage.consume(take=0)
    stage.consume_all()


def restart_consumers(stage: Stage) -> None:
    stage.client.socket.close()
    stage.held.clear()
    start_a_consumer(stage)


def create_channel(stage: Stage) -> None:
    stage.nsqd.create_channel("t", "c")
    start_a_consumer(stage)


def unpause(stage: Stage) -> None:
    stage.nsqd.post("/channel/unpause", topic="t", channel="c")
    stage.consume_all()


def unpause_topic(stage: Stage) -> None:
    stage.nsqd.post("/topic/unpause", topic="t")
    start_a_consumer(stage)


class Fault(NamedTuple):
    """``words`` are in the text of the problem; ``remedy`` is what the remedy says, applied."""

    seed: Callable[[Stage], None]
    kind: Kind | None
    severity: Severity
    words: str
    remedy: Callable[[Stage], None]


ANSWER, RESTART = Stage.consume_all, restart_consumers
FAULTS = [
    Fault(rdy_0, Kind.STUCK, CRITICAL, "30 waiting; 0 finished in 10 s", ANSWER),
    Fault(hangs, Kind.HANGS, CRITICAL, "0 waiting, 30 in flight; 0 finished in 10 s", ANSWER),
    Fault(hangs_after_some, Kind.MAY_HANG, WARNING, "25 in flight; 0 finished", ANSWER),
    Fault(collects_a_batch, None, NOTE, "", ANSWER),
    Fault(answers_nothing, Kind.TIMES_OUT, CRITICAL, "0 finished, 30 timed out in 10 s", RESTART),
    Fault(answers_some, Kind.TIMEOUTS, WARNING, "2.5/s time out, 25 so far", RESTART),
    Fault(requeues_all, Kind.REQUEUES, WARNING, "100% of deliveries requeued", ANSWER),
    Fault(poison_circulates, Kind.REQUEUES, WARNING, "100% of deliveries requeued", ANSWER),
    Fault(is_slow, None, NOTE, "", ANSWER),
    Fault(
        is_slower_than_producers,
        Kind.FALLS_BEHIND,
        WARNING,
        "38 waiting, +0.9/s: 1.0/s in, 0.1/s finished",
        ANSWER,
    ),
    Fault(no_consumers, Kind.NO_CONSUMERS, WARNING, "30 waiting", start_a_consumer),
    Fault(grows, Kind.GROWS, CRITICAL, "50 waiting, +2.0/s", start_a_consumer),
    Fault(no_channels, Kind.NO_CHANNELS, WARNING, "30 waiting for the first", create_channel),
    Fault(paused, Kind.PAUSED, NOTE, "30 waiting", unpause),
    Fault(paused_topic, Kind.PAUSED, NOTE, "30 waiting", unpause_topic),
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.seed.__name__)
def test_a_fault_is_one_problem_and_its_remedy_ends_it_without_loss(
    fault: Fault, embedded_nsqd: AnyNsqd, stack: ExitStack
) -> None:
    stage = Stage(embedded_nsqd(), stack)
    fault.seed(stage)
    found = stage.judge()
    assert [*found] == [fault.kind] * (fault.kind is not None)
    for problem in found.values():
        assert (problem.severity, fault.words in problem.text) == (fault.severity, True), problem
    if fault.kind is Kind.MAY_HANG:
        assert [*stage.judge(60.0)] == [Kind.HANGS]
    fault.remedy(stage)
    stage.begin()
    assert not stage.judge()
    assert stage.finished == stage.published


def test_what_restarts_an_nsqd_keeps_its_messages(any_nsqd: AnyNsqd, stack: ExitStack) -> None:
    nsqd = any_nsqd()
    stage = Stage(nsqd, stack)
    stage.channel()
    stage.begin()
    nsqd.stop()
    gone = stage.judge()
    assert gone[Kind.GONE].text.endswith("; 30 messages then")
    nsqd.start()
    wait_until(lambda: Kind.GONE not in stage.judge(), what="it answers again")
    assert nsqd.depth("t", "c") == COUNT


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


@pytest.mark.parametrize("small_disk", ["512k"], indirect=True)
def test_nothing_that_loses_messages_is_advised_or_done_on_a_full_disk(
    full_nsqd: GoNsqd, embedded_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    nsqd, other = full_nsqd, embedded_nsqd()
    other.create_channel("t", "c")
    at = f"--nsqd-http-address={nsqd.http_address}"
    (tmp_path / "wanted").write_text('topics."big".channels = ["keep"]\n')
    consume = ["-t", "big", "-c", "keep", *nsqd.options]
    depth = nsqd.depth("big")

    problems = json.loads(run_nsq(["check", at, "--window=0", "--json"]).out)["problems"]
    remedies = {(each["kind"], each["topic"]): each["remedy"] for each in problems}
    assert "do not restart it, create channels or unpause" in remedies["not well", None]
    for key in (("no channels", "big"), ("paused", "held")):
        assert remedies[key].startswith(f"First make room on the disk of {nsqd.http_address}")
    refusals = {
        f"channel create big keep {at}": "make room on its disk first",
        f"channel create big keep --dry-run {at}": "make room on its disk first",
        f"topology apply {tmp_path / 'wanted'} {at}": "make room on its disk first",
        f"topic unpause held {at}": "make room on its disk first",
        f"topic create new {at}": "make room on its disk first",
        f"drain {nsqd.http_address} --to {other.http_address} --dry-run": "big has no channel",
        f"drain {other.http_address} --to {nsqd.http_address} --yes": "make room on its disk",
        f"to-file {' '.join(consume)} --output-dir {tmp_path}": "drop",
        f"to-exec {' '.join(consume)} -- true": "drop",
        f"tail {' '.join(consume)} --force": "drop",
    }
    for command, reason in refusals.items():
        result = run_nsq(command.split())
        assert (result.status != 0, reason in result.err) == (True, True), (command, result)
    assert (nsqd.depth("big"), nsqd.channels("big"), nsqd.depth("held")) == (depth, [], 40)

    # what a remedy does name: consumers, and later, with room, the channel and the topic
    with RawClient(nsqd.tcp_address) as consumer:
        consumer.subscribe("t", "c", ready=40)
        messages = consumer.read_messages(40)
        consumer.finish(messages)
        wait_until(lambda: not nsqd.channel_stats("t", "c")["in_flight_count"], what="finished")
    subprocess.run(["mount", "-o", "remount,size=8m", nsqd.data_path], check=True)
    nsqd.publish("big", b"x")  # the first write that succeeds makes nsqd well again
    problems = json.loads(run_nsq(["check", at, "--window=0", "--json"]).out)["problems"]
    assert Kind.NO_CHANNELS.remedy in {each["remedy"] for each in problems}
    assert run_nsq(f"channel create big keep {at}".split()).status == 0
    assert run_nsq(f"topic unpause held {at}".split()).status == 0
    wait_until(lambda: nsqd.depth("big", "keep") == depth + 1, what="all are in the channel")
    wait_until(lambda: nsqd.depth("held", "c") == 40, what="all are in the channel")
    nsqd.stop()
    nsqd.start()
    assert len({message.id for message in messages}) == 40
    assert (nsqd.depth("big", "keep"), nsqd.depth("held", "c")) == (depth + 1, 40)
    assert "failed to put msg" not in nsqd.log


def test_a_step_of_the_clock_is_no_window() -> None:
    past = Past()
    past.add(Sample(1000.0, [], [], (), (), at_s=5.0))
    earlier = past.before(Sample(1060.0, [], [], (), (), at_s=6.0))
    assert earlier is not None
    assert earlier.ago_s == 1.0
