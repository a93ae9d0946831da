"""A producer, a consumer and ``nsq to-file`` with an nsqd on the other side of a link that fails.

Whatever happens, confirmed messages are consumed and archived, and no message is archived twice.
A killed nsqd loses only the messages that it had in memory.
"""

import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.archives import messages_of, unfinished
from plugins.cli import SpawnNsq
from plugins.clients import OPTIONS
from plugins.examples import slow
from plugins.network import TO_CLIENT, TO_SERVER, Proxy, ProxyTo
from plugins.servers import GoNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Consumer, Producer, PublishError

TOPIC = "clicks"
QUICK = ["heartbeat_interval=1s", "reconnect_base=100ms", "reconnect_max=500ms", "dial_timeout=1s"]


@pytest.fixture
def nsqd(go_nsqd: MakeNsqd) -> GoNsqd:
    return go_nsqd("-msg-timeout=3s", "-mem-queue-size=100")


@pytest.fixture
def link(nsqd: GoNsqd, proxy_to: ProxyTo) -> Proxy:
    return proxy_to(nsqd.tcp_address)


class Course:
    """A producer, a consumer and an archiver that work, whatever happens.

    ``confirmed`` and ``consumed`` are the bodies that they have published and received.
    """

    def __init__(self, nsqd: GoNsqd, address: str, spawn_nsq: SpawnNsq, archive: Path) -> None:
        self._nsqd, self._archive = nsqd, archive
        self.padding = b""
        self.confirmed: list[bytes] = []
        self.consumed: Counter[bytes] = Counter()
        options = OPTIONS.with_options(dict(option.split("=", 1) for option in QUICK))
        options = options.with_options({"publish_timeout": "2s", "drain_timeout": "5s"})
        self._consumer = Consumer(TOPIC, "live", nsqd_tcp_addresses=address, options=options)
        self._producer = Producer(address, options)
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._publish, self._consume)]
        words = [word for option in QUICK for word in ("--consumer-opt", option)]
        words += ["--nsqd-tcp-address", address, "--output-dir", str(archive)]
        command = ["to-file", "-t", TOPIC, "-c", "archive", "--sync-interval", "500ms", *words]
        self._archiver = spawn_nsq(command)

    def start(self) -> None:
        clients = lambda: self._nsqd.channel_stats(TOPIC, "archive")["clients"]  # noqa: E731
        wait_until(clients, what="the archiver", timeout_s=20)
        for thread in self._threads:
            thread.start()
        self.goes_on()

    def _publish(self) -> None:
        for number in itertools.count():
            if self._ends.wait(0.005):
                return
            body = b"%06d" % number + self.padding
            with suppress(PublishError):
                self._producer.publish(TOPIC, body)
                self.confirmed.append(body)

    def _consume(self) -> None:
        self._consumer.run(lambda message: self.consumed.update([message.body]))

    def goes_on(self) -> None:
        """Wait until some more messages are confirmed."""
        confirmed = len(self.confirmed)
        wait_until(lambda: len(self.confirmed) > confirmed + 100, what="publishing", timeout_s=30)

    def stop(self) -> None:
        self._ends.set()
        self._producer.stop(patience_s(5))
        self._consumer.begin_stop()
        for thread in self._threads:
            if thread.ident:
                thread.join()

    def end(self, *, may_lose: int = 0) -> None:
        """Stop publishing, and check that at most ``may_lose`` messages are missing."""
        nsqd = self._nsqd
        self._ends.set()
        self._threads[0].join()
        confirmed = set(self.confirmed)
        wait_until(
            lambda: len(confirmed - self.consumed.keys()) <= may_lose, what="all", timeout_s=30
        )
        wait_until(lambda: unfinished(nsqd, TOPIC, "archive") == 0, what="the end", timeout_s=30)
        self._archiver.send_signal(signal.SIGTERM)
        _, stderr = self._archiver.communicate(timeout=patience_s(20))
        assert self._archiver.returncode == 143, stderr.decode()
        messages = messages_of(self._archive)
        missing = confirmed - {message["body"] for message in messages}
        assert len(missing) <= may_lose, f"{len(missing)} of {len(confirmed)} are not archived"
        ids = Counter(message["id"] for message in messages)
        assert [message_id for message_id, count in ids.items() if count > 1] == []
        assert self.consumed.total() - len(self.consumed) <= 200  # in flight at the fault


@pytest.fixture
def course(nsqd: GoNsqd, link: Proxy, spawn_nsq: SpawnNsq, tmp_path: Path) -> Iterator[Course]:
    for channel in ("live", "archive"):
        nsqd.create_channel(TOPIC, channel)
    course = Course(nsqd, link.address, spawn_nsq, tmp_path / "archive")
    try:
        course.start()
        yield course
    finally:
        course.stop()


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("from nsqd only", 3),
        ("FINs that are cut off", 1),
        *(
            slow(fault, 20)
            for fault in ("black hole", "from nsqd only", "to nsqd only", "nsqd stopped")
        ),
        slow("black hole", 75),
    ],
)
def test_confirmed_messages_are_consumed_and_archived_once(
    fault: str, seconds: float, nsqd: GoNsqd, link: Proxy, course: Course
) -> None:
    lost = {
        "black hole": (TO_CLIENT, TO_SERVER),
        "from nsqd only": (TO_CLIENT,),
        "to nsqd only": (TO_SERVER,),
        "FINs that are cut off": (TO_SERVER,),
        "nsqd stopped": (),
    }[fault]
    for direction in lost:
        link.pause(direction)
    if not lost:
        nsqd.pause()
    began_with = len(course.confirmed)
    time.sleep(seconds)
    during = len(course.confirmed)
    if is_cut := fault == "FINs that are cut off":
        link.cut(reset=True)
    for direction in lost:
        link.resume(direction)
    if not lost:
        nsqd.resume()
    assert during - began_with < 20
    course.goes_on()
    course.end()
    assert not is_cut or nsqd.channel_stats(TOPIC, "archive")["timeout_count"]


@pytest.mark.parametrize(
    ("delay_s", "piece_size", "seconds"),
    [
        pytest.param(0.1, 1000, 2, id="a moment"),
        slow(0.1, 1 << 16, 15, id="far away"),
        slow(0.01, 1250, 12, id="1 Mbit"),
        slow(0.3, 2500, 20, id="both"),
    ],
)
def test_a_bad_link_only_costs_time(
    delay_s: float, piece_size: int, seconds: float, link: Proxy, course: Course
) -> None:
    """A publish to a distant nsqd takes a second or more, and still succeeds."""
    course.padding = b"." * 600
    usual_size = link.piece_size
    link.delay_s, link.piece_size = delay_s, piece_size
    confirmed = len(course.confirmed)
    time.sleep(seconds)
    wait_until(lambda: len(course.confirmed) > confirmed, what="a publish", timeout_s=30)
    link.delay_s, link.piece_size = 0.0, usual_size
    course.goes_on()
    course.end()


@pytest.mark.parametrize("kills", [1, slow(4)])
def test_a_killed_nsqd_loses_only_messages_in_memory(
    kills: int, nsqd: GoNsqd, course: Course
) -> None:
    for _ in range(kills):
        nsqd.kill()
        time.sleep(1)
        nsqd.start()
        course.goes_on()
    course.end(may_lose=kills * 300)  # its memory queue, and messages in flight
