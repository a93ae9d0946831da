"""``nsq to-nsq``, to-http, to-exec, a sink of one's own, and what is around them, killed often.

Nothing is lost. A message can be there twice when something ends between its arrival there and its
FIN here, so each time may double what was in flight, and no more. The nsqd around to-nsq is stopped
with SIGTERM: the Go nsqd keeps no promise about what it confirmed when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.embedded import EmbeddedServer
from plugins.examples import slow
from plugins.http_api import Nsqd
from plugins.http_server import MakeServer
from plugins.ports import ReservedPort
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "mirror"
DEADLINE_S = patience_s(60.0)


class Forwarding:
    """A program that forwards, which ``start`` starts, and what was published to its source."""

    body = b"%08d some text"

    def __init__(
        self, source: Nsqd, in_flight: int, start: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        self.source, self.in_flight, self.start = source, in_flight, start
        self.published: list[bytes] = []
        source.create_channel(TOPIC, CHANNEL)
        self.process: subprocess.Popen[bytes]

    def publish(self, count: int) -> None:
        before = len(self.published)
        self.published += [self.body % n for n in range(before, before + count)]
        for begin in range(before, before + count, 1000):
            self.source.publish(TOPIC, *self.published[begin : begin + 1000])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process = self.start()

    @property
    def left(self) -> int:
        return unfinished(self.source, TOPIC, CHANNEL)

    def survive(self, kills: list[Callable[[], object]], *, status: int = 143) -> None:
        """Forward all, through kills at random points; SIGTERM then ends it with the status."""
        rng = random.Random(len(self.published))
        self.process = self.start()
        for kill in kills:
            self.publish(self.in_flight)  # it may have been done with what there was
            before = self.left
            wait_until(
                lambda before=before: self.left < before,  # type: ignore[misc]
                what="progress",
                timeout_s=DEADLINE_S,
            )
            assert self.process.poll() is None, "it ended by itself"
            time.sleep(rng.uniform(0, 0.1))  # the random point
            kill()
        wait_until(lambda: self.left == 0, what="an empty channel", timeout_s=2 * DEADLINE_S)
        self.process.send_signal(signal.SIGTERM)
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == status, stderr

    def check(self, found: list[bytes], kills: int, more: int = 0) -> None:
        doubled = len(found) - len(set(found))
        print(f"{kills} kills, {len(self.published)} messages, {doubled} doubled")
        assert set(self.published) - set(found) == set(), "messages were lost"
        assert doubled <= kills * self.in_flight + more


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
    target = go_nsqd(flags[0])  # a check that is held up for a second is to see no message twice
    target.create_channel(TOPIC, "check")
    there = ["--destination-nsqd-tcp-address", target.tcp_address, "--no-loop-guard"]
    run = forward(source, 200, "to-nsq", *there, "--rate", "2000")
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
    quick_nsqd: EmbeddedServer,
    forward: Forward,
    http_server: MakeServer,
    messages: int,
    kills: int,
) -> None:
    rng, server = random.Random(messages), http_server()
    server.answer = lambda request: 0 if rng.random() < 0.01 else 200  # and some answers are lost
    more = ["--post", server.url, "--rate", "1000", "--concurrency", "20"]
    run = forward(quick_nsqd, 50, "to-http", *more)
    run.publish(messages)
    run.survive([run.kill] * kills)

    keys = {request.body: request.headers["Idempotency-Key"] for request in server.requests}
    assert all(keys[each.body] == each.headers["Idempotency-Key"] for each in server.requests)
    run.check([request.body for request in server.requests], kills, len(run.published) // 20)


# each appends its bodies to a file, and then says so
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
    more = [*ONCE, str(done)]
    if is_persistent:
        more = ["--persistent", "--", "python3", "-c", PERSISTENT, str(done), str(pids)]
    rate = "200" if messages < 1000 else "1500"
    run = forward(quick_nsqd, 50, "to-exec", "--workers", "2", "--rate", rate, *more)
    run.publish(messages)

    def kill_commands() -> None:
        for pid in pids.read_text().split()[-2:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    last = kill_commands if is_persistent else run.kill
    run.survive([run.kill, last] * (kills // 2))

    run.check(done.read_bytes().splitlines(), kills)


# -- a sink of one's own --------------------------------------------------------------------------

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
PROGRAM = Path(__file__).parents[1] / "examples" / "postgres_sink.py"
ROWS = "SELECT count(*), count(DISTINCT body->>'n') FROM messages"


class Postgres:
    """A server in a directory of its own; it refuses to run as root."""

    def __init__(self, directory: str) -> None:
        self._port = ReservedPort()
        self.dsn = f"host=127.0.0.1 port={self._port.number} user=postgres dbname=postgres"
        self._data, self._bin = f"{directory}/data", FOUND[-1].parent
        self._user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
        if self._user:
            shutil.chown(directory, "postgres")
        initdb = [self._bin / "initdb", "-U", "postgres", "-A", "trust", "-D", self._data]
        subprocess.run(initdb, check=True, capture_output=True, cwd=directory, **self._user)
        self.start()

    def start(self) -> None:
        flags = ["-D", self._data, "-p", str(self._port.number), "-k", "", "-h", "127.0.0.1"]
        how = {"start_new_session": True, "cwd": "/", **self._user}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([self._bin / "postgres", *flags], **silent, **how)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(patience_s(10))

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("psycopg")
    if not FOUND:
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        server = Postgres(directory)
        yield server
        server.kill()


@pytest.mark.slow
def test_each_message_is_one_row_while_postgresql_and_the_program_are_killed(
    go_nsqd: MakeNsqd, postgres: Postgres, tmp_path: Path
) -> None:
    """The sink of nsq-python(7)."""
    import psycopg

    letters, nsqd = tmp_path / "letters", go_nsqd("-msg-timeout=2s")
    words = [sys.executable, PROGRAM, postgres.dsn, nsqd.tcp_address, TOPIC, CHANNEL, letters]
    run = Forwarding(nsqd, 500, lambda: subprocess.Popen(words))
    run.body = b'{"n": %d}'
    bad = [b"not JSON %d" % number for number in range(5)]
    nsqd.publish(TOPIC, *bad)
    try:
        run.survive([postgres.restart, run.kill] * 5, status=0)
    finally:
        run.process.kill()
        run.process.wait()

    with psycopg.connect(postgres.dsn) as database:
        assert database.execute(ROWS).fetchall() == [(len(run.published), len(run.published))]
    dead = {json.loads(line)["body"] for line in letters.read_text().splitlines()}
    assert dead == {body.decode() for body in bad}
