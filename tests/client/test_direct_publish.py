"""Publishing on the calling thread: the connection is lent, and always returned."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, InBackground, Produce
from plugins.network import ProxyTo
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.servers import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Producer, errors
from nsqtools.client import direct_publish
from nsqtools.client.direct_publish import MAX_REFUSALS, DirectPath
from nsqtools.client.producer_io import LEND_AFTER
from nsqtools.client.publication import PendingPublication
from nsqtools.protocol.frames import OK_FRAME


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise limits, because on a late answer of a busy machine the I/O thread would take over."""
    monkeypatch.setattr(direct_publish, "MAX_WAIT_MS", 500)


def lend(producer: Producer) -> Producer:
    """Publish from one thread until the connection is lent."""

    for _ in range(LEND_AFTER):
        producer.publish(TOPIC, b"alone")

    def is_lent() -> bool:
        producer.publish(TOPIC, b"alone")
        return producer._io.direct is not None

    wait_until(is_lent, what="the connection is lent")
    return producer


@pytest.fixture
def lent(scripted_nsqd: ScriptedNsqd, produce: Produce, in_background: InBackground) -> Any:
    """A producer with a lent connection, and nsqd's end of the connection."""
    producer = produce(scripted_nsqd.address)
    warm_up = in_background(lambda: [producer.publish(TOPIC, b"x") for _ in range(LEND_AFTER)])
    conn = scripted_nsqd.identified(f"PUB {TOPIC}")
    conn.ok()
    for _ in range(LEND_AFTER - 1):
        conn.expect(f"PUB {TOPIC}")
        conn.ok()
    warm_up.result(patience_s(5))
    wait_until(lambda: producer._io.direct is not None, what="the connection is lent")
    return producer, conn


Lent = tuple[Producer, Connection]


def test_a_lone_publisher_leaves_the_io_thread_asleep(nsqd: GoNsqd, produce: Produce) -> None:
    producer = lend(produce(nsqd.tcp_address))
    direct = producer._io.direct
    assert direct is not None
    exchanges = direct.exchanges
    for _ in range(20):
        producer.publish(TOPIC, b"x")
    producer.publish_deferred(TOPIC, b"x", 1)
    assert direct.exchanges - exchanges == 21
    assert producer.health().under_way == 0


def test_submits_of_a_thread_are_not_overtaken(nsqd: GoNsqd, produce: Produce) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = lend(produce(nsqd.tcp_address))
    count = nsqd.topic_stats(TOPIC)["message_count"]
    for number in range(200):
        producer.submit("other", [b"%d" % number])
        producer.publish("other", b"%d" % number)
    bodies: list[bytes] = []
    options = ClientOptions(max_in_flight=1)
    with Consumer("other", "c", nsqd_tcp_addresses=nsqd.tcp_address, options=options) as consumer:
        for message in consumer:
            bodies.append(message.body)
            message.finish()
            if len(bodies) == 400:
                break
    assert bodies == [b"%d" % (number // 2) for number in range(400)]
    assert nsqd.topic_stats(TOPIC)["message_count"] == count


def test_an_answer_behind_a_heartbeat_counts(lent: Lent, in_background: InBackground) -> None:
    producer, conn = lent
    publishing = in_background(lambda: producer.publish(TOPIC, b"x"))
    conn.expect(f"PUB {TOPIC}")
    conn.heartbeat()
    conn.expect("NOP")
    conn.ok()
    publishing.result(patience_s(5))


def test_a_refused_message_is_rejected(lent: Lent, in_background: InBackground) -> None:
    producer, conn = lent
    publishing = in_background(lambda: producer.publish(TOPIC, b"x"))
    conn.expect(f"PUB {TOPIC}")
    conn.error("E_BAD_MESSAGE PUB message too big")
    with pytest.raises(errors.PublishRejected, match="too big"):
        publishing.result(patience_s(5))


def test_a_message_is_rejected_if_the_connection_ends_behind_the_refusal(
    lent: Lent, in_background: InBackground
) -> None:
    producer, conn = lent
    # The I/O thread continues only after nsqd has closed the connection.
    closed = threading.Event()
    reclaim = producer._io.reclaim
    producer._io.reclaim = lambda: closed.wait(patience_s(5)) and reclaim()  # type: ignore[method-assign]
    publishing = in_background(lambda: producer.publish(TOPIC, b"x"))
    conn.expect(f"PUB {TOPIC}")
    conn.error("E_BAD_MESSAGE PUB message too big")
    conn.close()
    closed.set()
    with pytest.raises(errors.PublishRejected, match="too big"):
        publishing.result(patience_s(5))


def test_a_late_answer_counts_within_the_timeout(
    lent: Lent, in_background: InBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_publish, "MAX_WAIT_MS", 1)
    producer, conn = lent
    publishing = in_background(lambda: producer.publish(TOPIC, b"x"))
    conn.expect(f"PUB {TOPIC}")
    wait_until(lambda: producer._io.direct is None, what="the I/O thread has taken over")
    conn.ok()
    publishing.result(patience_s(5))
    late = in_background(lambda: producer.publish(TOPIC, b"x", timeout_s=0.1))
    conn.expect(f"PUB {TOPIC}")
    with pytest.raises(errors.PublishUnknown, match=r"within 0\.1 s"):
        late.result(patience_s(5))


def test_an_unused_connection_answers_heartbeats(lent: Lent) -> None:
    _, conn = lent
    conn.heartbeat()
    conn.expect("NOP")


def test_a_cut_between_publishes_is_noticed_before_the_next_one(
    nsqd: GoNsqd, proxy_to: ProxyTo, produce: Produce
) -> None:
    proxy = proxy_to(nsqd.tcp_address)
    producer = lend(produce(proxy.address))
    proxy.cut(reset=True)
    threading.Event().wait(0.01)  # beyond CURRENT_S
    producer.publish(TOPIC, b"x")


Steps = set[tuple[str, int]]


@contextmanager
def interrupting(handle: Callable[[], None], steps: Steps) -> Iterator[None]:
    """Call ``handle`` like a signal handler, before each bytecode of `direct_publish` once."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_globals["__name__"] != direct_publish.__name__:
            return None
        frame.f_trace_opcodes = True
        step = frame.f_code.co_name, frame.f_lasti
        if event == "opcode" and step not in steps:
            steps.add(step)
            handle()
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(tracer)


@pytest.fixture
def brief_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted thread may wait this long for an answer that the I/O thread has read."""
    monkeypatch.setattr(direct_publish, "MAX_WAIT_MS", 20)


@pytest.mark.usefixtures("brief_wait")
def test_a_handler_may_use_the_producer_at_every_step(nsqd: GoNsqd, produce: Produce) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    producer = produce(nsqd.tcp_address)
    steps: Steps = set()
    published = 0

    def publish() -> None:
        nonlocal published
        producer.publish(TOPIC, b"x", timeout_s=patience_s(5))
        published += 1

    def handle() -> None:
        publish()
        assert producer.flush(patience_s(5))

    with interrupting(handle, steps):
        is_complete = False
        while not is_complete:
            while (direct := producer._io.direct) is None:
                publish()
            counts = len(steps), direct.exchanges
            publish()
            is_complete = counts[0] == len(steps) and counts[1] < direct.exchanges
    assert len(steps) > 100
    assert unfinished(nsqd, TOPIC, CHANNEL) == published


@pytest.mark.usefixtures("brief_wait")
def test_a_handler_may_raise_at_every_step(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    steps: Steps = set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    is_complete = False
    while not is_complete:
        direct = lend(producer)._io.direct
        exchanges = direct.exchanges if direct else 0
        try:
            with interrupting(interrupt, steps):
                producer.publish(TOPIC, b"x")
            # On a busy machine the connection may have been taken back already.
            is_complete = direct is not None and direct.exchanges > exchanges
        except KeyboardInterrupt:
            pass
    assert len(steps) > 100
    assert producer.health().under_way == 0


@pytest.mark.usefixtures("brief_wait")
def test_a_handler_may_stop_the_producer_at_every_step(nsqd: GoNsqd, produce: Produce) -> None:
    steps: Steps = set()
    is_complete = False
    while not is_complete:
        producer = lend(produce(nsqd.tcp_address))
        stored = nsqd.topic_stats(TOPIC)["message_count"]
        direct = producer._io.direct
        exchanges = direct.exchanges if direct else 0

        def stop(producer: Producer = producer) -> None:
            if not producer._is_stopped:
                assert producer.stop(patience_s(5))

        try:
            with interrupting(stop, steps):
                producer.publish(TOPIC, b"x")
            stored += 1
        except errors.PublishNotSent:
            pass
        assert nsqd.topic_stats(TOPIC)["message_count"] == stored
        is_direct = direct is not None and direct.exchanges > exchanges
        is_complete = is_direct and not producer._is_stopped
    assert len(steps) > 100


@pytest.mark.parametrize("failing", ["send", "receive"])
def test_a_handler_after_a_failed_call_gets_the_connection(failing: str) -> None:
    steps: Steps = set()
    is_complete = False
    while not is_complete:
        ours, peer = socket.socketpair()
        with ours, peer:
            peer.send(OK_FRAME)
            calls = {"send": ours.send, "receive": ours.recv}
            calls[failing] = partial(os.read, -1)  # raises OSError
            direct = DirectPath(ours.fileno(), calls["send"], calls["receive"])
            publication = PendingPublication(TOPIC, [b"x"], 1, time.monotonic())
            taken: list[bool] = []

            def take(direct: DirectPath = direct, taken: list[bool] = taken) -> None:
                if not taken:
                    taken.append(any(direct.end() for _ in range(2 * MAX_REFUSALS)))

            with interrupting(take, steps):
                assert direct.publish(publication) != "confirmed"
            assert taken != [False]
            is_complete = not taken


def test_threads_that_publish_and_stop_at_random_lose_no_message(
    nsqd: GoNsqd, produce: Produce, in_background: InBackground
) -> None:
    """The connection is lent and taken back all the time."""
    producer = produce(nsqd.tcp_address)

    def publish(count: int) -> None:
        for number in range(count):
            producer.publish(TOPIC, b"x")
            if number % 7 == 0:
                producer.submit(TOPIC, [b"y"])

    for _ in range(10):
        publish(20)
        publishing = [in_background(lambda: publish(30)) for _ in range(3)]
        for task in publishing:
            task.result(patience_s(20))
    assert producer.flush(patience_s(5))
    count = 10 * (20 + 3 + 3 * (30 + 5))
    assert nsqd.topic_stats(TOPIC)["message_count"] == count
    assert producer.health().under_way == 0
    assert producer._entered_bytes == producer._left_bytes
