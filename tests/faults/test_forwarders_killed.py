"""``nsq to-nsq``, to-http, to-exec, a custom sink, and the programs around them, killed often.

No message is lost. A message arrives twice if a program ends between its arrival and its FIN, so
each kill doubles at most the messages in flight. The nsqd around to-nsq are stopped with SIGTERM,
because a killed Go nsqd may lose messages that it has confirmed.
"""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.examples import slow
from plugins.http_server import MakeServer
from plugins.readme import parse
from plugins.servers import EmbeddedServer, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.records.envelope import decode

TOPIC, CHANNEL = "clicks", "mirror"
DEADLINE_S = patience_s(60.0)


class Forwarding:
    """A forwarder, which ``start`` starts, and the messages that were published to its source."""

    body = b"%08d some text"

    def __init__(
        self, source: Nsqd, in_flight: int, start: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        self.source, self.in_flight, self.start = source, in_flight, start
        self.published: list[bytes] = []
        source.create_channel(TOPIC, CHANNEL)
        self.process: subprocess.Popen[bytes]

    def publish(self, count: int) -> None:
        first = len(self.published)
        self.published += [self.body % n for n in range(first, first + count)]
        for begin in range(first, first + count, 1000):
            self.source.publish(TOPIC, *self.published[begin : begin + 1000])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process = self.start()

    @property
    def left(self) -> int:
        return unfinished(self.source, TOPIC, CHANNEL)

    def survive(self, kills: list[Callable[[], object]], *, status: int = 143) -> None:
        """Forward through kills at random points; SIGTERM then ends it with ``status``."""
        rng = random.Random(len(self.published))
        self.process = self.start()
        for kill in kills:
            self.publish(self.in_flight)  # it may have finished all earlier messages
            wait_until(lambda n=self.left: self.left < n, what="progress", timeout_s=DEADLINE_S)
            assert self.process.poll() is None, "it ended by itself"
            time.sleep(rng.uniform(0, 0.1))  # the random point
            kill()
        wait_until(lambda: self.left == 0, what="an empty channel", timeout_s=2 * DEADLINE_S)
        self.process.send_signal(signal.SIGTERM)
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == status, stderr

    def check(self, arrived: list[bytes], kills: int, margin: int = 0) -> None:
        doubled = len(arrived) - len(set(arrived))
        print(f"{kills} kills, {len(self.published)} messages, {doubled} doubled")
        assert set(self.published) - set(arrived) == set(), "messages were lost"
        assert doubled <= kills * self.in_flight + margin


Forward = Callable[..., Forwarding]


@pytest.fixture
def forward(spawn_nsq: SpawnNsq) -> Forward:
    """Forward with a command: ``forward(source, 200, "to-http", "--post", url)``."""

    def make(source: Nsqd, in_flight: int, name: str, *more: str) -> Forwarding:
        place = ["--nsqd-tcp-address", source.tcp_address, "-X", "reconnect_base=50ms"]
        command = [name, "-t", TOPIC, "-c", CHANNEL, *place, "--max-in-flight", str(in_flight)]
        return Forwarding(source, in_flight, lambda: spawn_nsq([*command, *more]))

    return make


@pytest.mark.parametrize("victim", ["command", "source", "destination"])
@pytest.mark.parametrize(("messages", "kills"), [(3_000, 2), slow(30_000, 10)])
def test_to_nsq(
    go_nsqd: MakeNsqd,
    quick_nsqd: EmbeddedServer,
    forward: Forward,
    victim: str,
    messages: int,
    kills: int,
) -> None:
    flags = (f"-mem-queue-size={2 * messages}", "-msg-timeout=1s")
    source: Nsqd = quick_nsqd if victim == "command" else go_nsqd(*flags)
    # no -msg-timeout, so that a check that stalls for a second sees no message twice
    target = go_nsqd(flags[0])
    target.create_channel(TOPIC, "check")
    destination = ["--destination-nsqd-tcp-address", target.tcp_address, "--no-loop-guard"]
    run = forward(source, 200, "to-nsq", *destination, "--rate", "2000")
    run.publish(messages)

    def kill() -> None:
        if victim == "command":
            run.kill()
        else:
            nsqd = source if victim == "source" else target
            nsqd.stop()
            nsqd.start()

    run.survive([kill] * kills)

    arrived = unfinished(target, TOPIC, "check")
    run.check(bodies_in(target, TOPIC, arrived, channel="check"), kills)


@pytest.mark.parametrize(("messages", "kills"), [(800, 2), slow(15_000, 10)])
def test_to_http(
    quick_nsqd: EmbeddedServer, forward: Forward, http_server: MakeServer, messages: int, kills: int
) -> None:
    rng, server = random.Random(messages), http_server()
    server.answer = lambda request: 0 if rng.random() < 0.01 else 200  # some answers are lost
    options = ["--post", server.url, "--rate", "1000", "--concurrency", "20"]
    run = forward(quick_nsqd, 50, "to-http", *options)
    run.publish(messages)
    run.survive([run.kill] * kills)

    keys = {request.body: request.headers["Idempotency-Key"] for request in server.requests}
    assert all(
        keys[request.body] == request.headers["Idempotency-Key"] for request in server.requests
    )
    run.check([request.body for request in server.requests], kills, len(run.published) // 20)


# each command appends its bodies to a file, and then reports them as done
ONCE = ["--batch", "10", "--batch-wait", "50ms", "--", "sh", "-c", "exec cat >>$0"]
PERSISTENT = """
import json, os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
with open(sys.argv[2], "a") as file:
    file.write(f"{os.getpid()}\\n")
for line in sys.stdin:
    os.write(fd, json.loads(line)["body"].encode() + b"\\n")
    print("ok", flush=True)
"""


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize(("messages", "kills"), [(200, 2), slow(20_000, 10)])
def test_to_exec(
    quick_nsqd: EmbeddedServer,
    forward: Forward,
    tmp_path: Path,
    messages: int,
    kills: int,
    is_persistent: bool,
) -> None:
    done, pids = tmp_path / "done", tmp_path / "pids"
    done.touch()
    pids.touch()
    command = [*ONCE, str(done)]
    if is_persistent:
        command = ["--persistent", "--", "python3", "-c", PERSISTENT, str(done), str(pids)]
    rate = "200" if messages < 1000 else "1500"
    run = forward(quick_nsqd, 50, "to-exec", "--workers", "2", "--rate", rate, *command)
    run.publish(messages)

    def kill_commands() -> None:
        for pid in pids.read_text().split()[-2:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    last = kill_commands if is_persistent else run.kill
    run.survive([run.kill, last] * (kills // 2))

    run.check(done.read_bytes().splitlines(), kills)


GUIDE = Path(__file__).parents[2] / "man" / "nsq-python.7.md"


@pytest.mark.parametrize(("messages", "kills"), [(5_000, 2), slow(50_000, 10)])
def test_a_custom_sink(
    quick_nsqd: EmbeddedServer, tmp_path: Path, messages: int, kills: int
) -> None:
    """The sink of the guide loses no message."""
    blocks = [b for b in parse(GUIDE.name, GUIDE.read_text()) if b.heading == "Write a sink"]
    program = blocks[0].text
    in_flight = 'options={"max_in_flight": "500"}'
    changes = {"127.0.0.1:4150": quick_nsqd.tcp_address, "exit_idle_s=2": in_flight}
    for old, new in {**changes, '"sqlite"': f'"{CHANNEL}"'}.items():
        assert old in program
        program = program.replace(old, new)
    words = [sys.executable, "-c", program]
    run = Forwarding(quick_nsqd, 500, lambda: subprocess.Popen(words, cwd=tmp_path))
    bad = [b"\xff%d" % number for number in range(5)]
    quick_nsqd.publish(TOPIC, *bad)
    run.publish(messages)
    try:
        run.survive([run.kill] * kills, status=-signal.SIGTERM)
    finally:
        run.process.kill()
        run.process.wait()

    with contextlib.closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        rows = database.execute("SELECT body FROM rows").fetchall()
    run.check([body.encode() for (body,) in rows], kills)
    letters = (tmp_path / "failed.jsonl").read_bytes().splitlines()
    assert {decode(line).body for line in letters} == {*bad}
