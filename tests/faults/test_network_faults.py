"""A producer, a consumer and ``nsq to-file`` with an nsqd on the other side of a link that fails.

nsqd runs in a network namespace of its own, at the other end of a `Link` that loses packets without
a word, delays or throttles them. Whatever happens: what was confirmed is consumed and archived, and
no message is archived twice. Only what nsqd had in memory goes with it when it is killed.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import secrets
import select
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from plugins.archives import messages_of, unfinished
from plugins.cli import SpawnNsq
from plugins.clients import OPTIONS
from plugins.daemons import GoNsqd
from plugins.servers import Serve
from plugins.waiting import patience_s, wait_until

from nsqtools import Consumer, Producer, PublishError

TOPIC = "clicks"
QUICK = ["heartbeat_interval=1s", "reconnect_base=100ms", "reconnect_max=500ms", "dial_timeout=1s"]

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65_536
MAX_QUEUE_S = 0.4


def ip(*words: str) -> None:
    """Run ip(8). Raises ``CalledProcessError`` where that is not allowed."""
    subprocess.run(["ip", *words], capture_output=True, check=True)


_numbers = itertools.count()


class Link:
    """Loses, delays or throttles packets: `impair` or `lose`, then `impair` by nothing.

    Two TUN devices, one of them in the namespace, and a thread that carries packets between them:
    it needs no netem, which many kernels do not have. What is over the rate waits in a queue for
    `MAX_QUEUE_S` and is dropped beyond it, as routers do it.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self.namespace = f"nsqtools-{os.getpid()}-{number}"
        # in a /30 that no other link has, of other workers or other runs on this machine
        high, low = divmod(4 * secrets.randbelow(1 << 14), 256)
        our_address, self.nsqd_address = (f"10.213.{high}.{low + end}" for end in (1, 2))
        self._here, there = f"n{os.getpid()}-{number}a", f"n{os.getpid()}-{number}b"
        self._ends = [_open_tun(self._here), _open_tun(there)]
        self._stop_receiver, self._stop_sender = os.pipe()
        self._random = random.Random(1)
        self._loss, self._delay_s, self._bits_per_s = (0.0, 0.0), 0.0, 0.0
        self._free_at = [0.0, 0.0]  # when each direction has sent what is queued
        ip("netns", "add", self.namespace)
        ip("link", "set", there, "netns", self.namespace)
        for where, device, address, peer in (
            ((), self._here, our_address, self.nsqd_address),
            (("-n", self.namespace), there, self.nsqd_address, our_address),
        ):
            ip(*where, "addr", "add", address, "peer", peer, "dev", device)
            ip(*where, "link", "set", device, "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self._thread = threading.Thread(target=self._carry, name="link")
        self._thread.start()

    def impair(self, *, loss: float = 0.0, delay_s: float = 0.0, bits_per_s: float = 0.0) -> None:
        """Lose this share of the packets, delay each (one way), and send no faster."""
        self._loss, self._delay_s, self._bits_per_s = (loss, loss), delay_s, bits_per_s

    def lose(self, *, to_nsqd: bool = True, from_nsqd: bool = True) -> None:
        """Lose all that goes to the one or the other end."""
        self._loss = float(to_nsqd), float(from_nsqd)

    def take_down(self) -> None:
        ip("link", "set", self._here, "down")

    def bring_up(self) -> None:
        ip("link", "set", self._here, "up")

    def close(self) -> None:
        os.write(self._stop_sender, b"x")
        self._thread.join()
        for end in (*self._ends, self._stop_receiver, self._stop_sender):
            os.close(end)  # a TUN device goes with its descriptor
        ip("netns", "del", self.namespace)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when, order, to which end, the packet
        order = itertools.count()
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._ends, self._stop_receiver], [], [], timeout_s)
            if self._stop_receiver in ready:
                return
            now = time.monotonic()
            for direction, end in enumerate(self._ends):
                if end in ready:
                    packet = os.read(end, MAX_PACKET)
                    at = self._arrival(direction, len(packet), now)
                    if at is not None:
                        heapq.heappush(waiting, (at, next(order), 1 - direction, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                with suppress(OSError):  # it is down
                    os.write(self._ends[to], packet)

    def _arrival(self, direction: int, size: int, now: float) -> float | None:
        """Return when a packet arrives, None where it is lost."""
        if self._random.random() < self._loss[direction]:
            return None
        sent_at = now
        if self._bits_per_s:
            begins_at = max(now, self._free_at[direction])
            if begins_at - now > MAX_QUEUE_S:
                return None
            sent_at = self._free_at[direction] = begins_at + size * 8 / self._bits_per_s
        return sent_at + self._delay_s


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class FarNsqd(GoNsqd):
    """nsqd at the other end of a link."""

    def __init__(self, link: Link, data_path: Path, *flags: str) -> None:
        self._link = link
        super().__init__(data_path, *flags)
        self.tcp_address = self.http_address = f"{link.nsqd_address}:0"  # until it has a port

    def _command(self) -> list[str | Path]:
        return ["ip", "netns", "exec", self._link.namespace, *super()._command()]


@pytest.fixture
def link() -> Iterator[Link]:
    """Skipped where none may be made."""
    try:
        link = Link()
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"network namespaces or TUN devices are not allowed here: {exc}")
    yield link
    link.close()


@pytest.fixture
def far_nsqd(
    link: Link, go_program: object, data_path: Callable[[], Path], serve: Serve
) -> FarNsqd:
    return serve(FarNsqd(link, data_path(), "-msg-timeout=3s", "-mem-queue-size=100"))


class Traffic:
    """Publishes all the time, and consumes; `confirmed` and `consumed` are what came of it."""

    def __init__(self, nsqd: FarNsqd, padding: int) -> None:
        self._padding = b"." * padding
        for channel in ("live", "archive"):
            nsqd.create_channel(TOPIC, channel)
        options = OPTIONS.with_options(dict(each.split("=", 1) for each in QUICK))
        options = options.with_options({"publish_timeout": "2s", "drain_timeout": "5s"})
        self.confirmed: list[bytes] = []
        self.consumed: Counter[bytes] = Counter()
        self._consumer = Consumer(
            TOPIC, "live", nsqd_tcp_addresses=nsqd.tcp_address, options=options
        )
        self._producer = Producer(nsqd.tcp_address, options)
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._publish, self._consume)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _publish(self) -> None:
        for number in itertools.count():
            if self._ends.wait(0.005):
                return
            body = b"%06d" % number + self._padding
            try:
                self._producer.publish(TOPIC, body)
            except PublishError:
                continue
            self.confirmed.append(body)

    def _consume(self) -> None:
        self._consumer.run(lambda message: self.consumed.update([message.body]))

    def end_publishing(self) -> None:
        self._ends.set()
        self._threads[0].join()

    def stop(self) -> None:
        self._ends.set()
        self._producer.stop(patience_s(5))
        self._consumer.begin_stop()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def begin(spawn_nsq: SpawnNsq, tmp_path: Path) -> Iterator[Callable[..., Course]]:
    """A factory of courses; what they run ends with the test."""
    with ExitStack() as running:

        def begin(nsqd: FarNsqd, padding: int = 0) -> Course:
            traffic = Traffic(nsqd, padding)
            running.callback(traffic.stop)
            return Course(nsqd, traffic, spawn_nsq, tmp_path / "archive")

        yield begin


class Course:
    """An archiver, a consumer and a producer that work, whatever happens, and what they have done
    in the end."""

    def __init__(self, nsqd: FarNsqd, traffic: Traffic, spawn_nsq: SpawnNsq, archive: Path) -> None:
        self._nsqd, self.traffic, self._archive = nsqd, traffic, archive
        options = [word for option in QUICK for word in ("--consumer-opt", option)]
        place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(archive)]
        place += ["--sync-interval", "500ms"]
        self._archiver = spawn_nsq(["to-file", "-t", TOPIC, "-c", "archive", *place, *options])
        archivers = lambda: nsqd.channel_stats(TOPIC, "archive")["clients"]  # noqa: E731
        wait_until(archivers, what="the archiver", timeout_s=20)
        traffic.start()
        self.goes_on()

    def goes_on(self) -> None:
        """Wait until some more messages are confirmed."""
        before = len(self.traffic.confirmed)
        wait_until(
            lambda: len(self.traffic.confirmed) > before + 100, what="publishing", timeout_s=30
        )

    def end(self, *, may_lose: int = 0) -> None:
        """Publish no more, and look: nothing is missing but what nsqd itself ``may_lose``."""
        traffic, nsqd = self.traffic, self._nsqd
        traffic.end_publishing()
        confirmed = set(traffic.confirmed)
        wait_until(
            lambda: len(confirmed - traffic.consumed.keys()) <= may_lose,
            what="all to be consumed",
            timeout_s=30,
        )
        wait_until(
            lambda: unfinished(nsqd, TOPIC, "archive") == 0, what="all archived", timeout_s=30
        )
        self._archiver.send_signal(signal.SIGTERM)
        _, stderr = self._archiver.communicate(timeout=patience_s(20))
        assert self._archiver.returncode == 143, stderr.decode()
        messages = messages_of(self._archive)
        missing = confirmed - {message["body"] for message in messages}
        assert len(missing) <= may_lose, f"{len(missing)} of {len(confirmed)} are not archived"
        ids = Counter(message["id"] for message in messages)
        assert [each for each, count in ids.items() if count > 1] == []
        doubled = sum(traffic.consumed.values()) - len(traffic.consumed)
        assert doubled <= 200  # in flight at the fault


FAULTS = ["black hole", "from nsqd only", "to nsqd only", "interface down", "nsqd stopped"]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("from nsqd only", 3),
        *(pytest.param(fault, 20, marks=pytest.mark.slow) for fault in FAULTS),
        pytest.param("black hole", 75, marks=pytest.mark.slow),
    ],
)
def test_what_was_confirmed_is_consumed_and_archived_once(
    fault: str,
    seconds: float,
    far_nsqd: FarNsqd,
    link: Link,
    begin: Callable[..., Course],
) -> None:
    course = begin(far_nsqd)
    begins, ends = {
        "black hole": (link.lose, link.impair),
        "from nsqd only": (lambda: link.lose(to_nsqd=False), link.impair),
        "to nsqd only": (lambda: link.lose(from_nsqd=False), link.impair),
        "interface down": (link.take_down, link.bring_up),
        "nsqd stopped": (far_nsqd.pause, far_nsqd.resume),
    }[fault]
    begins()
    began_with = len(course.traffic.confirmed)
    time.sleep(seconds)
    during = len(course.traffic.confirmed)
    ends()
    assert during - began_with < 20
    course.goes_on()
    course.end()


@pytest.mark.parametrize(
    ("impairment", "padding", "seconds"),
    [
        pytest.param({"loss": 0.05, "delay_s": 0.1, "bits_per_s": 1e6}, 600, 2, id="a moment"),
        pytest.param({"loss": 0.05, "delay_s": 0.1}, 0, 15, marks=pytest.mark.slow, id="loss"),
        pytest.param({"bits_per_s": 1e6}, 600, 12, marks=pytest.mark.slow, id="1 Mbit"),
        pytest.param(
            {"loss": 0.2, "delay_s": 0.3, "bits_per_s": 2e5},
            100,
            20,
            marks=pytest.mark.slow,
            id="all of it",
        ),
    ],
)
def test_a_bad_link_costs_time_only(
    impairment: dict[str, float],
    padding: int,
    seconds: float,
    far_nsqd: FarNsqd,
    link: Link,
    begin: Callable[..., Course],
) -> None:
    """With loss on its way a publish takes a second or more; it goes on, and ends well."""
    course = begin(far_nsqd, padding)
    link.impair(**impairment)
    before = len(course.traffic.confirmed)
    time.sleep(seconds)
    wait_until(lambda: len(course.traffic.confirmed) > before, what="a publish", timeout_s=30)
    link.impair()
    course.goes_on()
    course.end()


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_9_of_nsqd_costs_what_it_had_in_memory(
    kills: int,
    far_nsqd: FarNsqd,
    begin: Callable[..., Course],
) -> None:
    course = begin(far_nsqd)
    for _ in range(kills):
        far_nsqd.kill()
        time.sleep(1)
        far_nsqd.start()
        course.goes_on()
    course.end(may_lose=kills * 300)  # its memory queue, and what was in flight
