"""Everything at once for a long time: every message accounted for, nothing grows.

A Go and an embedded nsqd announce themselves at a nsqlookupd; numbered messages are published to
both. An archiver, a tail, a forwarder and an archiver of what it forwards, and a Consumer of the
library take them, each from a channel of its own, while daemons are restarted and paused and topics
come and go. At the end every number must have come through each of them. Memory, descriptors and
threads of each process are read now and then; those of the last quarter must not exceed those of
the second, when all had come up.

``-m slow`` runs it for two hours, or ``NSQTOOLS_SOAK_S`` seconds. Daemons end by SIGTERM: the Go
nsqd promises nothing for kill -9, which other tests of this folder are about.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from plugins.archives import messages_of, unfinished
from plugins.cli import NSQ
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd, GoNsqlookupd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Message

TOPIC, COPY = "soak", "soak.copy"
CHANNELS = ("archive", "tailed", "mirror", "library")
RATE = 200  # messages a second to each nsqd
SAMPLES = 40
GROWTH_MB = 8.0  # and a tenth: what a heap may do without a leak
GROWTH_DESCRIPTORS = 8  # connections of a moment: a lookup, a connection that is replaced
WITHOUT_FAULTS_S = 3.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process has at a moment."""

    memory_mb: float
    descriptors: int
    threads: int


def cost_of(pid: int) -> Cost | None:
    """None for a process that is not running."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in status.splitlines())
    if "VmRSS" not in values:
        return None
    return Cost(int(values["VmRSS"].split()[0]) / 1000, descriptors, int(values["Threads"]))


@dataclass
class Soak:
    """The cluster, the commands on it, and what has been published."""

    lookupd: GoNsqlookupd
    nsqds: list[GoNsqd]
    environment: dict[str, str]
    directory: Path
    over: threading.Event = field(default_factory=threading.Event)
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    faults: int = 0
    seen: bytearray = field(default_factory=bytearray)
    """1 at each number that the Consumer was given: a set of millions would be what grows."""
    doubles: int = 0
    published: int = 0

    def start(self, name: str, *arguments: str, lookup: bool = True) -> subprocess.Popen[bytes]:
        place = ("--lookupd-http-address", self.lookupd.http_address) if lookup else ()
        log = (self.directory / f"{name}.log").open("wb")
        out = (self.directory / f"{name}.out").open("wb")
        with log, out:
            process = subprocess.Popen(
                [*NSQ, *arguments, *place],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                env=self.environment,
            )
        self.commands[name] = process
        return process

    def start_commands(self) -> None:
        consume = "-X lookupd_poll_interval=1s -X reconnect_base=50ms"
        to_file = f"--format jsonl --gzip --rotate-interval 5s {consume}"
        # with which it publishes again what an nsqd that ends had maybe taken: doubles, no losses
        publish = "--retry-unknown --retry-timeout 120s"
        where = [f"--destination-nsqd-tcp-address={nsqd.tcp_address}" for nsqd in self.nsqds]
        commands = {
            "archiver": f"to-file -t {TOPIC} -c archive --output-dir {self.directory}/archive"
            f" {to_file}",
            "archiver of copies": f"to-file -t {COPY} -c archive --create"
            f" --output-dir {self.directory}/copies {to_file}",
            "tail": f"tail -t {TOPIC} -c tailed {consume}",
            "forwarder": f"to-nsq -t {TOPIC} -c mirror --destination-topic {COPY}"
            f" {' '.join(where)} {consume}",
        }
        for name, words in commands.items():
            self.start(name, *words.split())
        for number, nsqd in enumerate(self.nsqds):
            words = f"pub -t {TOPIC} {publish} --nsqd-tcp-address {nsqd.tcp_address}"
            self.start(f"publisher {number}", *words.split(), lookup=False)

    # -- what goes on meanwhile, each in a thread of its own -------------------------------------

    def publish(self) -> None:
        """Write numbers to the publishers until it is over, at a steady rate."""
        pipes = [self.commands[f"publisher {n}"].stdin for n in range(len(self.nsqds))]
        began = time.monotonic()
        for batch in itertools.count(1):
            if self.over.wait(max(began + batch * 0.1 - time.monotonic(), 0)):
                return
            for pipe in pipes:
                assert pipe is not None
                last = self.published + RATE // 10
                pipe.write(b"".join(b"%d\n" % n for n in range(self.published, last)))
                pipe.flush()
                self.published = last

    def disturb(self, interval_s: float) -> None:
        """Restart and pause daemons, one after the other."""
        faults: list[Callable[[], None]] = [
            *(lambda nsqd=nsqd: restart(nsqd) for nsqd in self.nsqds),  # type: ignore[misc]
            *(lambda nsqd=nsqd: pause(nsqd) for nsqd in self.nsqds),  # type: ignore[misc]
            lambda: restart(self.lookupd),
        ]
        for fault in itertools.cycle(faults):
            if self.over.wait(interval_s):
                return
            fault()
            self.faults += 1

    def churn(self, interval_s: float) -> None:
        """Create topics and delete them again, on whichever nsqd answers."""
        for number in itertools.count():
            if self.over.wait(interval_s):
                return
            nsqd, topic = self.nsqds[number % 2], f"churn-{number}"
            try:
                nsqd.create_channel(topic, "c")
                nsqd.publish(topic, b"x", b"y")
                nsqd.post("/topic/delete", topic=topic)
            except (OSError, AssertionError):
                continue  # it is being restarted

    def measure(self, interval_s: float) -> None:
        while not self.over.wait(interval_s):
            for name, process in self.commands.items():
                if cost := cost_of(process.pid):
                    self.costs.setdefault(name, []).append(cost)
            if cost := cost_of(os.getpid()):
                self.costs.setdefault("library", []).append(cost)

    def take(self, message: Message) -> bool:
        """The handler of the Consumer."""
        number = int(message.body)
        self.seen.extend(bytes(max(0, number + 1 - len(self.seen))))
        self.doubles += self.seen[number]
        self.seen[number] = 1
        return True

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let everything published come through, then end the commands."""
        for number in range(len(self.nsqds)):
            publisher = self.commands[f"publisher {number}"]
            assert publisher.stdin is not None
            publisher.stdin.close()
            assert publisher.wait(patience_s(150)) == 0, self.log(f"publisher {number}")
        for topic, channel in [*((TOPIC, each) for each in CHANNELS), (COPY, "archive")]:
            wait_until(
                lambda topic=topic, channel=channel: (
                    not any(  # type: ignore[misc]
                        unfinished(nsqd, topic, channel)
                        for nsqd in self.nsqds
                        if nsqd.stats(topic)["topics"]
                    )
                ),
                what=f"the end of {topic}/{channel}",
                timeout_s=60,
            )
        for name, process in self.commands.items():
            if not name.startswith("publisher"):
                assert process.poll() is None, self.log(name)
                process.send_signal(signal.SIGTERM)
                assert process.wait(patience_s(60)) == 143, self.log(name)

    def log(self, name: str) -> str:
        return f"{name}: {(self.directory / f'{name}.log').read_text()}"

    def arrived(self) -> dict[str, list[int]]:
        """The numbers that came through, of each that wrote them down."""
        tailed = (self.directory / "tail.out").read_bytes().split()
        return {
            "archive": [int(each["body"]) for each in messages_of(self.directory / "archive")],
            "copies": [int(each["body"]) for each in messages_of(self.directory / "copies")],
            "tail": [int(each) for each in tailed],
        }


def restart(daemon: GoNsqd | GoNsqlookupd) -> None:
    daemon.stop()
    time.sleep(0.3)
    daemon.start()


def pause(daemon: GoNsqd) -> None:
    daemon.pause()
    time.sleep(1.5)
    daemon.resume()


def quarters(costs: list[Cost]) -> tuple[list[Cost], list[Cost]]:
    """The second and the last quarter."""
    quarter = len(costs) // 4
    return costs[quarter : 2 * quarter], costs[-quarter:]


def grown(costs: list[Cost]) -> list[str]:
    """What the last quarter has more of than the second."""
    before, after = quarters(costs)
    first, last = (median(cost.memory_mb for cost in each) for each in (before, after))
    found = []
    if last > first * 1.1 + GROWTH_MB:
        found.append(f"memory {first:.1f} -> {last:.1f} MB")
    most, more = (max(cost.descriptors for cost in each) for each in (before, after))
    if more > most + GROWTH_DESCRIPTORS:
        found.append(f"descriptors {most} -> {more}")
    most, more = (max(cost.threads for cost in each) for each in (before, after))
    if more > most + 1:
        found.append(f"threads {most} -> {more}")
    return found


@contextmanager
def consuming(soak: Soak) -> Iterator[None]:
    """A Consumer of the library handles messages meanwhile, and at the end what is left."""
    consumer = Consumer(
        TOPIC,
        "library",
        lookupd_http_addresses=soak.lookupd.http_address,
        options=ClientOptions(lookupd_poll_interval_s=1, reconnect_base_s=0.05),
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(consumer.run, soak.take)
        try:
            yield
        finally:
            assert consumer.stop(timeout_s=patience_s(10))
            running.result(patience_s(10))


def soak_for(soak: Soak, duration_s: float) -> dict[str, object]:
    """Run it; return what there is to report."""
    for nsqd in soak.nsqds:
        for channel in CHANNELS:
            nsqd.create_channel(TOPIC, channel)
    soak.start_commands()
    with consuming(soak):
        with ThreadPoolExecutor(4) as pool:
            doing = [
                pool.submit(soak.publish),
                pool.submit(soak.disturb, min(30.0, max(duration_s / 12, WITHOUT_FAULTS_S))),
                pool.submit(soak.churn, 2.0),
                pool.submit(soak.measure, duration_s / SAMPLES),
            ]
            try:
                time.sleep(duration_s)
            finally:
                soak.over.set()
            for each in doing:
                each.result()
        soak.finish()
    return {
        "seconds": duration_s,
        "messages": soak.published,
        "faults": soak.faults,
        "doubles of the library": soak.doubles,
        "costs": {
            name: {
                "second quarter": repr(quarters(costs)[0][-1]),
                "last quarter": repr(quarters(costs)[1][-1]),
            }
            for name, costs in soak.costs.items()
        },
    }


@pytest.fixture
def soak(
    nsqlookupd: Callable[..., GoNsqlookupd],
    go_nsqd: Callable[..., GoNsqd],
    serve: Callable[[GoNsqd], GoNsqd],
    data_path: Callable[[], Path],
    nsq_env: dict[str, str],
    tmp_path: Path,
) -> Iterator[Soak]:
    lookupd = nsqlookupd()
    flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-msg-timeout=10s")
    nsqds = [go_nsqd(*flags), serve(EmbeddedNsqdProcess(data_path(), *flags))]
    soak = Soak(lookupd, nsqds, nsq_env, tmp_path)
    yield soak
    for process in soak.commands.values():
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def check(soak: Soak, report: dict[str, object]) -> None:
    everything = set(range(soak.published))
    assert everything
    missing = {
        name: sorted(everything - set(numbers))[:10] for name, numbers in soak.arrived().items()
    }
    assert missing == {"archive": [], "copies": [], "tail": []}
    assert soak.seen == b"\1" * soak.published
    assert soak.faults
    print(json.dumps(report, indent=2))


def test_everything_at_once_for_a_moment(soak: Soak) -> None:
    check(soak, soak_for(soak, 10))


@pytest.mark.slow
def test_everything_at_once_for_hours(soak: Soak) -> None:
    duration_s = float(os.environ.get("NSQTOOLS_SOAK_S", "7200"))
    check(soak, soak_for(soak, duration_s))
    growth = {name: grown(costs) for name, costs in soak.costs.items()}
    assert not any(growth.values()), growth
