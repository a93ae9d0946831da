"""``nsq nsqd --durable`` killed under load, on disks of all kinds: nothing confirmed is missing.

A preloaded library simulates a disk that keeps only synced data, fails a sync or is full, because
SQLite makes its system calls itself. It needs a C compiler.
"""

import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from plugins.daemons import GO_PROGRAMS, EmbeddedNsqdProcess, GoNsqd
from plugins.examples import slow
from plugins.raw_client import RawClient, mpub, sized, subscribed
from plugins.servers import DataPath, Serve
from plugins.waiting import patience_s, wait_until

CHECKPOINTING = """
import sys
from nsqtools.server import durable_database as database
database._WAL_BYTES = int(sys.argv.pop(1))
from nsqtools.cli.commands.daemons import nsqd
sys.exit(nsqd(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("disk") / "unsynced_disk.so"
    source = Path(__file__).with_name("unsynced_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


class Durable(EmbeddedNsqdProcess):
    """An nsqd that makes a checkpoint every few dozen messages, or hardly ever.

    With a library, ``shadow`` is the content of its disk.
    """

    checkpoint_bytes = 50_000

    def __init__(self, data_path: Path, library: Path | None = None, shadow: Path = Path()) -> None:
        flags = ("-mem-queue-size=20", "-max-bytes-per-file=20000", "-min-disk-free=1")
        super().__init__(data_path, "-durable", *flags)
        self._library, self._shadow = library, shadow

    def _command(self) -> list[str | Path]:
        disk = [f"SHADOW={self._shadow}", f"DISK={self.data_path}"]
        preload = ["env", f"LD_PRELOAD={self._library}", *disk] if self._library else []
        return [*preload, sys.executable, "-c", CHECKPOINTING, str(self.checkpoint_bytes)]

    def lose_power(self) -> None:
        self.kill()
        shutil.rmtree(self.data_path)
        shutil.copytree(self._shadow, self.data_path, ignore=lambda *_: {"fail", "full"})
        for path in self.data_path.glob("*.copying"):
            path.unlink()


class Load:
    """Publishers and a consumer of the channel ``t:ch``, until the nsqd is killed.

    They record what it confirmed, and reconnect after it refused a command.
    """

    def __init__(self, nsqd: Durable, chance: random.Random, first: int) -> None:
        self.confirmed: set[bytes] = set()
        self.finished: set[bytes] = set()
        self.refused = 0
        self.held: dict[bytes, float] = {}  # body -> time of its delivery, unanswered
        self.attempts: dict[bytes, int] = {}
        self.written_s = 0.0  # everything that nsqd did earlier is on its disk
        self._nsqd, self._chance = nsqd, chance
        self._numbers = count(first)
        works = (self._publish, self._publish, self._publish, self._consume)
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, count: int) -> None:
        """Wait for a number of confirmations; a fixed time may yield more than is read quickly."""
        confirmed = len(self.confirmed)
        wait_until(lambda: len(self.confirmed) > confirmed + count, what="publishing")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(patience_s(20))
            assert not thread.is_alive()

    def _run(self, work: Callable[[RawClient], None]) -> None:
        with suppress(OSError, EOFError):  # it is killed
            while True:
                with RawClient(self._nsqd.tcp_address) as client:
                    work(client)

    def _publish(self, client: RawClient) -> None:
        while True:
            number = next(self._numbers)
            bodies = [b"%d %d" % (number, index) * 5 for index in range(7)]
            command = mpub("t", bodies)
            if number % 3:
                bodies = bodies[:1]
                defer = b"DPUB t %d\n" % (number % 7 * 200)
                command = (b"PUB t\n" if number % 3 == 1 else defer) + sized(bodies[0])
            began_s = time.monotonic()
            client.send(command)
            if client.read()[1] != b"OK":
                self.refused += 1
                return
            self.written_s = max(self.written_s, began_s)
            self.confirmed.update(bodies)

    def _consume(self, client: RawClient) -> None:
        client.subscribe("t", "ch", ready=40)
        while True:
            message = client.read_message()
            self.attempts[message.body] = message.attempts
            choice = self._chance.random()
            if choice < 0.7:
                client.finish([message])
                self.finished.add(message.body)
            elif choice < 0.9:
                client.send(b"REQ %b %d\n" % (message.id, self._chance.choice((0, 50, 1000))))
            elif len(self.held) < 30:
                self.held[message.body] = time.monotonic()
            else:
                client.send(b"REQ %b 0\n" % message.id)


@pytest.mark.parametrize("how", ["killed", "power", "failed sync", "full"])
@pytest.mark.parametrize("rounds", [2, slow(50)])
def test_confirmed_messages_survive_every_kind_of_end(
    request: pytest.FixtureRequest,
    data_path: DataPath,
    tmp_path: Path,
    serve: Serve,
    how: str,
    rounds: int,
) -> None:
    library = None if how == "killed" else request.getfixturevalue("library")
    nsqd = serve(Durable(data_path(), library, tmp_path))
    nsqd.create_channel("t", "ch")
    chance = random.Random(how)
    confirmed: set[bytes] = set()
    finished: set[bytes] = set()
    delivered: dict[bytes, int] = {}  # to a consumer that had it in flight when nsqd was killed
    for number in range(rounds):
        load = Load(nsqd, chance, number * 1_000_000)
        load.wait_for_more(chance.randint(20, 1000))
        if how in ("failed sync", "full"):
            trouble = tmp_path / ("fail" if how == "failed sync" else "full")
            trouble.touch()
            wait_until(
                lambda at=trouble, of=load: of.refused if at.name == "full" else not at.exists(),  # type: ignore[misc]
                what="a refusal, or a sync",
            )
            trouble.unlink(missing_ok=True)
            if number % 2:
                load.wait_for_more(0)
        held_before = load.written_s
        (nsqd.kill if how in ("killed", "full") else nsqd.lose_power)()
        load.join()
        confirmed |= load.confirmed
        finished |= load.finished
        for body, since in load.held.items():
            if since < held_before:
                delivered[body] = max(delivered.get(body, 0), load.attempts[body])
        nsqd.checkpoint_bytes = (10_000_000, 50_000)[number % 2]
        nsqd.start()

    missing = confirmed - finished
    received: dict[bytes, int] = {}
    with subscribed(nsqd.tcp_address, "t", "ch", ready=1000) as client:
        while missing:
            message = client.read_message()
            received[message.body] = message.attempts
            missing.discard(message.body)
            client.finish([message])
    if how == "killed":
        redelivered = delivered.keys() & received.keys()
        assert all(received[body] > delivered[body] for body in redelivered)


@pytest.mark.real_nsqd
@pytest.mark.parametrize("how", ["stopped", "recovered"])
def test_the_go_nsqd_finds_every_message(data_path: DataPath, serve: Serve, how: str) -> None:
    nsqd = serve(Durable(data_path()))
    nsqd.create_channel("t", "ch")
    bodies = {b"%d" % number for number in range(500)}
    with RawClient(nsqd.tcp_address) as client:
        client.publish("no_channel", b"waits")
        client.publish("t", *bodies)
        client.publish_deferred("t", 3_600_000, b"deferred")
        client.subscribe("t", "ch", ready=100)
        done = client.read_messages(100)
        client.send(b"RDY 0\n")
        client.finish(done)
        client.publish("other", b"confirmed, so that what was before is on disk, too")
    (nsqd.stop if how == "stopped" else nsqd.kill)()
    go = [GO_PROGRAMS / "nsqd", f"-data-path={nsqd.data_path}", "-tcp-address=127.0.0.1:0"]
    started = subprocess.run(go, capture_output=True, text=True)
    assert started.returncode == 1
    assert "failed to parse metadata" in started.stderr
    command = [sys.executable, "-m", "nsqtools", "nsqd", "-recover-only"]
    subprocess.run([*command, f"-data-path={nsqd.data_path}"], check=True, capture_output=True)
    assert not list(nsqd.data_path.glob("nsqd.durable*"))

    go = serve(GoNsqd(nsqd.data_path))
    assert go.depth("no_channel") == 1
    with subscribed(go.tcp_address, "t", "ch", ready=1000) as client:
        bodies_read = {message.body for message in client.read_messages(401)}
    assert bodies_read == bodies - {message.body for message in done} | {b"deferred"}
