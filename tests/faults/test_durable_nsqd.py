"""``nsq nsqd --durable`` killed again and again under load: nothing confirmed is missing."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.durable_load import OFTEN, Load
from plugins.daemons import GO_PROGRAMS, EmbeddedNsqdProcess, GoNsqd
from plugins.raw_client import RawClient, mpub
from plugins.servers import Serve
from plugins.waiting import wait_until

FLAGS = ("-durable", "-mem-queue-size=50", "-max-bytes-per-file=20000")


class OftenCheckpointing(EmbeddedNsqdProcess):
    """An nsqd that makes a checkpoint every few dozen messages."""

    def _command(self) -> list[str | Path]:
        return [sys.executable, "-c", OFTEN]


class KilledLoad(Load):
    """Publishers and a consumer of the channel ``t:ch``, until the nsqd is killed."""

    def __init__(self, nsqd: EmbeddedNsqdProcess, first: int, chance: random.Random) -> None:
        super().__init__(nsqd)
        self.held: dict[bytes, float] = {}  # body -> since when, unanswered
        self.attempts: dict[bytes, int] = {}
        self.written_s = 0.0  # what nsqd did before is on its disk
        self._first = first
        self._chance = chance
        self.start(self._publish, self._publish_many, self._publish_deferred, self._consume)

    def _publish(self, client: RawClient) -> None:
        for number in range(100_000):
            body = b"single %d %d" % (self._first, number)
            began_s = time.monotonic()
            client.publish("t", body)
            self.written_s = began_s
            self.confirmed.add(body)

    def _publish_many(self, client: RawClient) -> None:
        for number in range(100_000):
            bodies = [b"many %d %d %d" % (self._first, number, each) for each in range(20)]
            assert client.ask(mpub("t", bodies)) == b"OK"
            self.confirmed.update(bodies)

    def _publish_deferred(self, client: RawClient) -> None:
        for number in range(100_000):
            body = b"deferred %d %d" % (self._first, number)
            client.publish_deferred("t", number % 7 * 200, body)
            self.confirmed.add(body)

    def _consume(self, client: RawClient) -> None:
        client.subscribe("t", "ch", ready=40)
        while True:
            message = client.read_message()
            self.attempts[message.body] = message.attempts
            what = self._chance.random()
            if what < 0.7:
                client.finish([message])
                self.finished.add(message.body)
            elif what < 0.9:
                client.send(b"REQ %b %d\n" % (message.id, self._chance.choice((0, 50, 1000))))
            elif len(self.held) < 30:
                self.held[message.body] = time.monotonic()
            else:
                client.send(b"REQ %b 0\n" % message.id)


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_confirmed_is_missing_however_often_it_is_killed(
    data_path: Callable[[], Path], serve: Serve, rounds: int
) -> None:
    nsqd = serve(OftenCheckpointing(data_path(), *FLAGS))
    nsqd.create_channel("t", "ch")
    chance = random.Random(14)
    confirmed: set[bytes] = set()
    finished: set[bytes] = set()
    delivered: dict[bytes, int] = {}  # to somebody who held it when nsqd was killed
    for number in range(rounds):
        load = KilledLoad(nsqd, number, chance)
        enough = chance.randint(20, 1000)  # not a time: much that is published takes long to read
        wait_until(lambda at=load, n=enough: len(at.confirmed) > n, what="publishing")  # type: ignore[misc]
        held_before = load.written_s
        nsqd.kill()
        load.join()
        confirmed |= load.confirmed
        finished |= load.finished
        for body, since in load.held.items():
            if since < held_before:
                delivered[body] = max(delivered.get(body, 0), load.attempts[body])
        nsqd.start()

    assert len(confirmed) > 20 * rounds
    missing = confirmed - finished
    received: dict[bytes, int] = {}
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=1000)
        while missing:
            message = client.read_message()
            received[message.body] = message.attempts
            missing.discard(message.body)
            client.finish([message])
    again = delivered.keys() & received.keys()
    assert all(received[body] > delivered[body] for body in again)


def test_deferred_messages_keep_their_time_and_others_their_attempts(
    data_path: Callable[[], Path], serve: Serve
) -> None:
    nsqd = serve(EmbeddedNsqdProcess(data_path(), "-durable"))
    nsqd.create_channel("t", "ch")
    with RawClient(nsqd.tcp_address) as client:
        client.publish("t", b"in flight", b"given back")
        client.publish_deferred("t", 3_600_000, b"in an hour")
        client.publish_deferred("t", 1_500, b"soon")
        client.subscribe("t", "ch", ready=2)
        first, second = client.read_messages(2)
        client.send(b"RDY 1\nREQ %b 3600000\n" % second.id)
        client.publish("other", b"confirmed, so that what was before is on disk, too")
        stats = nsqd.channel_stats("t", "ch")
        assert stats["deferred_count"] + stats["depth"] == 3  # one is due soon
    for how in (nsqd.kill, nsqd.stop, nsqd.kill):
        how()
        nsqd.start()

    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=10)
        found = {message.body: message.attempts for message in client.read_messages(2)}
        assert found == {first.body: 2, b"soon": 1}
        stats = nsqd.channel_stats("t", "ch")
        assert (stats["deferred_count"], stats["depth"]) == (2, 0)


@pytest.mark.real_nsqd
@pytest.mark.parametrize("how", ["stopped", "recovered"])
def test_the_go_nsqd_finds_every_message(
    data_path: Callable[[], Path], serve: Serve, how: str
) -> None:
    nsqd = serve(OftenCheckpointing(data_path(), *FLAGS))
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
    started = subprocess.run(
        [GO_PROGRAMS / "nsqd", f"-data-path={nsqd.data_path}", "-tcp-address=127.0.0.1:0"],
        capture_output=True,
        text=True,
    )
    assert started.returncode == 1
    assert "failed to parse metadata" in started.stderr
    command = [sys.executable, "-m", "nsqtools", "nsqd", "-recover-only"]
    subprocess.run([*command, f"-data-path={nsqd.data_path}"], check=True, capture_output=True)
    assert not list(nsqd.data_path.glob("nsqd.durable*"))

    go = serve(GoNsqd(nsqd.data_path))
    assert go.depth("no_channel") == 1
    with RawClient(go.tcp_address) as client:
        client.subscribe("t", "ch", ready=1000)
        found = {message.body for message in client.read_messages(401)}
    assert found == bodies - {message.body for message in done} | {b"deferred"}
