"""Handlers that are slow: what waits, what is handed out, and what is given up."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, bodies_in
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions


def fill(nsqd: GoNsqd, count: int) -> list[bytes]:
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = [b"%d" % number for number in range(count)]
    nsqd.publish(TOPIC, *bodies)
    return bodies


@contextmanager
def running(
    nsqd: GoNsqd, handler: Callable[[Message], object], *, workers: int = 1, **options: Any
) -> Iterator[Consumer]:
    """A consumer with default options but for ``options``, and its handler at work."""
    more = {name: options.pop(name) for name in ("dead_letter", "giving_up") if name in options}
    consumer = Consumer(
        TOPIC,
        CHANNEL,
        nsqd_tcp_addresses=nsqd.tcp_address,
        options=ClientOptions(**options),
        **more,
    )
    thread = threading.Thread(target=consumer.run, args=(handler,), kwargs={"workers": workers})
    thread.start()
    try:
        yield consumer
    finally:
        consumer.abort()
        thread.join(patience_s(10))
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("handler_s", "count", "msg_timeout"),
    [(0.033, 240, "5s"), (0.1, 80, "5s"), pytest.param(1.0, 150, "60s", marks=pytest.mark.slow)],
)
def test_a_slow_handler_gets_every_message_once_and_in_time(
    go_nsqd: Callable[..., GoNsqd], handler_s: float, count: int, msg_timeout: str
) -> None:
    """With 200 in flight most of them would expire in the client's own queue."""
    nsqd = go_nsqd(f"--msg-timeout={msg_timeout}")
    bodies = fill(nsqd, count)
    seen: collections.Counter[bytes] = collections.Counter()

    def handler(message: Message) -> None:
        time.sleep(handler_s)
        seen[message.body] += 1

    with running(nsqd, handler) as consumer:
        wait_until(lambda: len(seen) == count, what="all messages", timeout_s=3 * count * handler_s)
        wait_until(lambda: consumer.stats.finished >= count, what="the last FIN")
        stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert sorted(seen) == sorted(bodies)
    assert sum(seen.values()) <= 1.01 * count
    assert (consumer.stats.given_up, consumer.stats.late) == (0, 0)
    assert stats["timeout_count"] == 0


def test_a_handler_that_is_stuck_keeps_no_messages_from_others(
    go_nsqd: Callable[..., GoNsqd],
) -> None:
    nsqd = go_nsqd("--msg-timeout=6s")
    bodies = fill(nsqd, 10)
    release = threading.Event()
    seen: list[bytes] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        release.wait(patience_s(20))

    with running(nsqd, handler) as stuck:
        wait_until(lambda: stuck.stats.received == 10, what="all messages in the client")
        rest: list[bytes] = []
        try:
            with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as other:
                for message in other:
                    message.finish()
                    rest.append(message.body)
                    if len(rest) == 9:
                        break
        finally:
            release.set()
        stats = nsqd.channel_stats(TOPIC, CHANNEL)
        assert stats["timeout_count"] <= 1  # returned before nsqd took them back
        assert stuck.stats.expired >= 9
    assert sorted(rest + seen[:1]) == sorted(bodies)


def test_workers_share_a_burst_message_by_message(nsqd: GoNsqd) -> None:
    fill(nsqd, 200)
    threads: collections.Counter[int] = collections.Counter()

    def handler(message: Message) -> None:
        time.sleep(0.05)
        threads[threading.get_ident()] += 1

    with running(nsqd, handler, workers=4) as consumer:
        wait_until(lambda: threads.total() == 200, what="200 messages", timeout_s=15)
        # a thousand quiet consumers cost a process next to nothing
        wait_until(lambda: consumer._io.delivery._ticks is None, what="no clock for nothing")
    assert len(threads) == 4
    assert max(threads.values()) <= 100  # 50 each take 2.5 s; a read of one thread's is 196


def test_a_delivery_that_came_again_in_the_same_read_is_dropped(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=5)
    conn = connected(scripted_nsqd)
    first = b"%016d" % 7
    conn.send(b"".join(message_frame(first, attempts) for attempts in (1, 2, 3, 4)))
    batches = [consumer.next_batch(patience_s(5)) or [], *consumer.batches(timeout_s=0.3)]
    found = [message.attempts for batch in batches for message in batch if message.finish()]
    assert found == [4]


def test_a_waiting_delivery_that_came_again_is_dropped(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=5)
    conn = connected(scripted_nsqd)
    first = b"%016d" % 7
    for attempts in (1, 2, 3):
        conn.send(message_frame(first, attempts))
        wait_until(lambda n=attempts: consumer.stats.received == n, what="the delivery")  # type: ignore[misc]
    end_turn(consumer)
    attempts_seen = [m.attempts for batch in consumer.batches(timeout_s=0.3) for m in batch]
    assert attempts_seen == [3]


SLOW_READER = """
import sys, time
from nsqtools import Consumer
with Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1]) as consumer:
    for message in consumer:
        print(message.id.decode(), flush=True)
        time.sleep(0.1)
        message.finish()
"""


def test_after_a_pause_of_the_process_no_message_is_handed_out_twice(
    go_nsqd: Callable[..., GoNsqd], tmp_path: Path
) -> None:
    nsqd = go_nsqd("--msg-timeout=2s")
    fill(nsqd, 16)
    program = tmp_path / "reader.py"
    program.write_text(SLOW_READER)
    with subprocess.Popen(
        [sys.executable, str(program), nsqd.tcp_address], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ids = [process.stdout.readline()]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(process.pid, signal.SIGCONT)
        wait_until(
            lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=10
        )
        process.terminate()
        ids += process.stdout.read().split()
    repeated = len(ids) - len({each.strip() for each in ids})
    assert repeated <= 1  # what was being handled when the process was stopped


def test_a_message_that_only_waited_is_not_given_up(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    """Deliveries 1 to 9 expire here while the handler is busy; nobody saw them."""
    consumer = consume(scripted_nsqd.address, max_in_flight=5, max_attempts=3)
    conn = connected(scripted_nsqd)
    message_id = b"%016d" % 7
    for attempts in range(1, 10):
        conn.send(message_frame(message_id, attempts))
        wait_until(lambda n=attempts: consumer.stats.received == n, what="a delivery")  # type: ignore[misc]
    end_turn(consumer)
    handled: list[int] = []
    handle(consumer, lambda message: handled.append(message.attempts))
    wait_until(lambda: handled == [9], what="the last delivery")
    assert (consumer.stats.given_up, consumer.stats.expired) == (0, 8)


@pytest.mark.parametrize(
    ("attempts", "handled"), [(4, True), (6, True), (7, True), (8, False), (100, False)]
)
def test_what_no_handler_here_saw_is_given_up_above_twice_max_attempts(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle, attempts: int, handled: bool
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=5, max_attempts=3)
    seen: list[bytes] = []
    handle(consumer, lambda message: seen.append(message.id))
    conn = connected(scripted_nsqd)
    message_id = conn.message(b"x", attempts=attempts)
    conn.skip_to(f"FIN {message_id}")
    assert bool(seen) is handled
    assert consumer.stats.given_up == (not handled)


def test_what_a_handler_here_saw_is_given_up_above_max_attempts(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    consumer = consume(
        scripted_nsqd.address, max_in_flight=5, max_attempts=3, max_backoff_duration_s=0
    )
    seen: list[int] = []

    def fail(message: Message) -> bool:
        seen.append(message.attempts)
        return False

    handle(consumer, fail)
    conn = connected(scripted_nsqd)
    message_id = conn.message(b"x", attempts=3)
    conn.skip_to(f"REQ {message_id} 270000")
    conn.message(b"x", message_id=message_id, attempts=4)
    conn.skip_to(f"FIN {message_id}")
    assert seen == [3]


def test_a_message_that_is_given_up_can_be_requeued(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    consumer = consume(
        scripted_nsqd.address, max_in_flight=5, max_attempts=3, more={"giving_up": "requeue"}
    )
    handle(consumer, lambda message: pytest.fail("handled"))
    conn = connected(scripted_nsqd)
    message_id = conn.message(b"x", attempts=8)
    conn.skip_to(f"REQ {message_id} 720000")
    assert consumer._io.backoff.level == 0


def test_a_dead_letter_is_confirmed_before_the_message_is_finished(nsqd: GoNsqd) -> None:
    fill(nsqd, 1)

    def fail(message: Message) -> None:
        message.requeue(0, backoff=False)

    with running(nsqd, fail, max_attempts=2, dead_letter="dead") as consumer:
        wait_until(lambda: consumer.stats.given_up == 1, what="giving up")
        wait_until(
            lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 0, what="the FIN"
        )
    assert bodies_in(nsqd, "dead", 1) == [b"0"]


def test_a_message_knows_its_deadline(nsqd: GoNsqd, consume: Consume) -> None:
    began = time.monotonic()
    fill(nsqd, 1)
    for message in consume(nsqd.tcp_address):
        assert began + 58 < message.deadline < time.monotonic() + 61
        message.received_at -= 30
        began = time.monotonic()
        assert message.touch()
        assert began + 58 < message.deadline < time.monotonic() + 61
        message.finish()
        break


def end_turn(consumer: Consumer) -> None:
    """Wait until the I/O thread is through with what it has received."""
    is_through = threading.Event()
    consumer._io.loop.call_soon(is_through.set)
    assert is_through.wait(patience_s(5))


def connected(nsqd: ScriptedNsqd) -> Connection:
    conn = nsqd.accept()
    conn.subscribe(TOPIC, CHANNEL)
    conn.skip_to("RDY 1")
    return conn


def message_frame(message_id: bytes, attempts: int) -> bytes:
    payload = (1).to_bytes(8, "big") + attempts.to_bytes(2, "big") + message_id + b"x"
    return (4 + len(payload)).to_bytes(4, "big") + (2).to_bytes(4, "big") + payload
