"""Slow handlers: pending, delivered, withdrawn and isolated messages."""

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Dialog, Handle, bodies_in, fill
from plugins.raw_client import message_frame
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, EmbeddedServer, GoNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Batch, ClientOptions, Consumer, Message
from nsqtools.client import backlog as backlog_module
from nsqtools.client import consumer as consumer_module
from nsqtools.client import in_flight_limit
from nsqtools.client.backlog import (
    EXPIRED_SHARE,
    Backlog,
    Quarantine,
    QueuedBatches,
)
from nsqtools.client.message import batches_of
from nsqtools.testing import fake_batch

FINISHING = {"giving_up": "finish"}


@contextmanager
def running(nsqd: Nsqd, work: Callable[[Consumer], object], **more: Any) -> Iterator[Consumer]:
    """A consumer with default options, and ``work(consumer)`` on a thread until the block ends."""
    consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, **more)
    thread = threading.Thread(target=work, args=(consumer,))
    thread.start()
    try:
        yield consumer
    finally:
        consumer.abort()
        thread.join(patience_s(10))
        assert not thread.is_alive()


def test_a_stuck_handler_leaves_messages_to_other_consumers(
    embedded_nsqd: AnyNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight_limit, "START", 16)
    nsqd = embedded_nsqd("--msg-timeout=3s")
    bodies = fill(nsqd, 10)
    release = threading.Event()
    handled: list[bytes] = []

    def handler(message: Message) -> None:
        handled.append(message.body)
        release.wait(patience_s(20))

    with running(nsqd, lambda consumer: consumer.run(handler)) as stuck:
        wait_until(lambda: stuck.stats.received == 10, what="all messages in the client")
        try:
            returned = bodies_in(nsqd, TOPIC, 9, CHANNEL)
        finally:
            release.set()
        stats = nsqd.channel_stats(TOPIC, CHANNEL)
        assert stats["timeout_count"] <= 1  # returned before nsqd took them back
        assert stuck.stats.expired >= 9
    assert sorted(returned + handled[:1]) == sorted(bodies)


def test_workers_share_a_burst_message_by_message(nsqd: GoNsqd) -> None:
    fill(nsqd, 100)
    threads: collections.Counter[int] = collections.Counter()

    def handler(message: Message) -> None:
        time.sleep(0.05)
        threads[threading.get_ident()] += 1

    with running(nsqd, lambda consumer: consumer.run(handler, workers=4)) as consumer:
        wait_until(lambda: threads.total() == 100, what="100 messages", timeout_s=15)
        # a thousand idle consumers cost a process next to nothing
        wait_until(lambda: consumer._io.delivery._ticks is None, what="no clock for nothing")
    assert len(threads) == 4
    assert max(threads.values()) <= 50  # 96 messages of one read would go to one thread


def test_a_delivery_repeated_in_the_same_read_is_dropped(dialog: Dialog) -> None:
    consumer, conn = dialog("RDY 1", max_in_flight=5)
    first = conn.new_id()
    frames = [message_frame(b"x", first, attempts=number, timestamp_ns=1) for number in range(1, 5)]
    conn.send(b"".join(frames))
    batches = [consumer.next_batch(patience_s(5)) or [], *consumer.batches(timeout_s=0.3)]
    attempts = [message.attempts for batch in batches for message in batch if message.finish()]
    assert attempts == [4]


SLOW_READER = """
import sys, time
from nsqtools import Consumer
with Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1]) as consumer:
    for message in consumer:
        print(message.id.decode(), flush=True)
        time.sleep(0.1)
        message.finish()
"""


def test_a_suspended_process_returns_no_message_twice(embedded_nsqd: AnyNsqd) -> None:
    nsqd = embedded_nsqd("--msg-timeout=1500ms")
    fill(nsqd, 12)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_READER, nsqd.tcp_address], stdout=subprocess.PIPE, text=True
    ) as process:
        ids = [process.stdout.readline()]
        os.kill(process.pid, signal.SIGSTOP)
        stats = partial(nsqd.channel_stats, TOPIC, CHANNEL)
        wait_until(lambda: stats()["timeout_count"], what="what times out")
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="the end", timeout_s=10)
        process.terminate()
        ids += process.stdout.read().split()
    repeated = len(ids) - len({line.strip() for line in ids})
    assert repeated <= 1  # the message in a handler when the process was stopped


def test_a_message_that_only_expired_is_not_given_up(dialog: Dialog, handle: Handle) -> None:
    """Deliveries 1 to 9 expire in the client while the handler is busy."""
    consumer, conn = dialog("RDY 1", max_in_flight=5, max_attempts=3, more=FINISHING)
    message_id = conn.new_id()
    for attempts in range(1, 10):
        conn.message(b"x", message_id=message_id, attempts=attempts)
        wait_until(lambda n=attempts: consumer.stats.received == n, what="a delivery")  # type: ignore[misc]
    is_through = threading.Event()  # the I/O thread has processed all deliveries
    consumer._io.loop.call_soon(is_through.set)
    assert is_through.wait(patience_s(5))
    handled: list[int] = []
    handle(consumer, lambda message: handled.append(message.attempts))
    wait_until(lambda: handled == [9], what="the last delivery")
    assert (consumer.stats.given_up, consumer.stats.expired) == (0, 8)


def test_a_message_that_no_handler_received_has_no_attempt(
    dialog: Dialog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it takes several messages at a time
    monkeypatch.setattr(consumer_module, "TARGET_HOLD_S", patience_s(5))
    consumer, conn = dialog("RDY 1", max_in_flight=5, max_attempts=3, more=FINISHING)
    conn.message(b"x")
    messages = iter(consumer)
    next(messages).finish()
    ids = [conn.new_id() for _ in range(2)]
    frames = [message_frame(b"x", message_id, attempts=9, timestamp_ns=1) for message_id in ids]
    conn.send(b"".join(frames))
    next(messages).finish()
    messages.close()  # type: ignore[attr-defined]
    conn.skip_to(f"REQ {ids[1]} 0")
    conn.message(b"x", message_id=ids[1], attempts=10)
    assert next(iter(consumer)).id == ids[1].encode()
    assert consumer.stats.given_up == 0


def test_a_late_failure_is_an_attempt(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    """The failure counts although nsqd has already redelivered the message."""
    no_backoff = {"max_backoff_duration_s": 0, "more": FINISHING}
    consumer = consume(scripted_nsqd.address, max_in_flight=5, max_attempts=2, **no_backoff)
    handled: list[int] = []
    begun, was_redelivered = threading.Event(), threading.Event()

    def fail(message: Message) -> bool:
        handled.append(message.attempts)
        begun.set()
        was_redelivered.wait(patience_s(10))
        return False

    handle(consumer, fail)
    conn = scripted_nsqd.subscribed("RDY 1")
    message_id = conn.message(b"x", attempts=2)
    assert begun.wait(patience_s(5))
    conn.message(b"x", message_id=message_id, attempts=3)
    wait_until(lambda: consumer.stats.received == 2, what="the second delivery")
    was_redelivered.set()
    conn.skip_to(f"REQ {message_id} 270000")
    conn.message(b"x", message_id=message_id, attempts=4)
    conn.skip_to(f"FIN {message_id}")
    assert handled == [2]  # given up


# -- healthy programs with the harshest settings: giving up would lose finishable messages --------


def test_a_pool_loses_no_message(
    quick_nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, messages would time out repeatedly before the pool reaches them."""
    monkeypatch.setattr(in_flight_limit, "START", 16)
    nsqd = quick_nsqd
    bodies = fill(nsqd, 10)
    held: list[Message] = []
    finished: set[bytes] = set()

    def came_thrice() -> bool:
        return sum(message.attempts >= 3 for message in held) >= 10

    def finish_all() -> bool:
        finished.update(message.body for message in held[:] if message.finish())
        return len(finished) == 10

    arguments = {"options": ClientOptions(max_attempts=1), **FINISHING}
    with running(
        nsqd, lambda each: each.run(held.append, auto_answer=False), **arguments
    ) as consumer:
        wait_until(came_thrice, what="third deliveries", timeout_s=30)
        assert unfinished(nsqd, TOPIC, CHANNEL) == 10
        wait_until(finish_all, what="the answers", timeout_s=10)
        wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="the FINs")
    assert sorted(finished) == sorted(bodies)
    assert consumer.stats.given_up == 0


@pytest.mark.parametrize("way", ["handlers", "batches"])
def test_a_pool_gets_only_messages_that_it_answers_in_time(
    embedded_nsqd: AnyNsqd, way: str
) -> None:
    """With all of max_in_flight in its queue, messages would time out repeatedly."""
    nsqd = embedded_nsqd("--msg-timeout=2s")  # a busy machine may stall for one second
    fill(nsqd, 60)
    deliveries: collections.Counter[bytes] = collections.Counter()

    def slow(message: Message) -> None:
        deliveries[message.body] += 1
        time.sleep(0.3)
        message.finish()

    def work(consumer: Consumer) -> None:
        if way == "handlers":
            consumer.run(lambda message: pool.submit(slow, message), auto_answer=False)
        else:
            for batch in consumer.batches():
                for message in batch:
                    pool.submit(slow, message)

    with ThreadPoolExecutor(4) as pool, running(nsqd, work):
        wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an end", timeout_s=15)
    assert len(deliveries) == 60
    assert deliveries.total() <= 60 + 4  # a stall of two seconds costs a round


# -- the queue: parts of entries, returned and withdrawn messages ---------------------------------


class Owner:
    """A stand-in for a consumer's `Delivery`, which is always current."""

    def __init__(self) -> None:
        self.waiting: dict[QueuedBatches, None] = {}
        self.give_up: Callable[[Batch], None]

    def is_current(self, now: float) -> bool:
        return True


@pytest.fixture
def owner() -> Any:
    return Owner()


@pytest.fixture
def backlog() -> Backlog:
    return Backlog()


def deliver(backlog: Backlog, owner: Any, *sizes: int) -> list[Batch]:
    """Batches of these sizes, received at time 0, with bodies such as ``1-0``."""
    batches = [fake_batch([b"%d-%d" % (n, k) for k in range(sizes[n])]) for n in range(len(sizes))]
    for message in chain(*batches):
        message.received_at = 0.0
    backlog.put(QueuedBatches(owner, list(batches)))
    return batches


def bodies_of(batches: Any) -> list[list[bytes]]:
    return [[message.body for message in batch] for batch in batches]


def take(backlog: Backlog, max_messages: int) -> list[list[bytes]]:
    return bodies_of(backlog.get_batches(0, max_messages=max_messages))


def test_an_entry_is_taken_in_parts(backlog: Backlog, owner: Any) -> None:
    deliver(backlog, owner, 1, 3, 2)
    assert bodies_of([backlog.get(0)]) == [[b"0-0"]]
    assert take(backlog, 1) == [[b"1-0"]]
    assert take(backlog, 3) == [[b"1-1", b"1-2"]]  # only a first batch is divided
    assert take(backlog, 3) == [[b"2-0", b"2-1"]]
    assert backlog.get(0) is None
    assert not owner.waiting


def test_entries_of_one_owner_are_taken_together(backlog: Backlog, owner: Any) -> None:
    deliver(backlog, owner, 1, 1)
    deliver(backlog, owner, 1)
    deliver(backlog, Owner(), 1)
    backlog.put("last")
    assert [len(take(backlog, 10)) for _ in range(2)] == [3, 1]
    assert [backlog.get(0), backlog.get(0)] == ["last", None]


def test_returned_messages_come_first(backlog: Backlog, owner: Any) -> None:
    deliver(backlog, owner, 2, 1)
    batches: Any = backlog.get_batches(0, max_messages=10)
    backlog.put("other")
    backlog.put(QueuedBatches(owner, batches_of([*batches[0][1:], *batches[1]])), is_first=True)
    assert take(backlog, 10) == [[b"0-1"], [b"1-0"]]


def test_messages_of_a_connection_are_discarded(backlog: Backlog, owner: Any) -> None:
    (a,), (b, c) = batches = deliver(backlog, owner, 1, 2)
    assert backlog.discard(owner, batches[0]._source) == {a.id}
    assert backlog.discard(owner, batches[1]._source, {b.id}) == {b.id}
    assert backlog.get(0) == [c]
    assert backlog.is_empty
    assert not owner.waiting


def test_expired_messages_are_withdrawn_once(backlog: Backlog, owner: Any) -> None:
    deliver(backlog, owner, 1, 2)
    assert backlog.withdraw(owner, expired_at=60.0 * EXPIRED_SHARE) == []
    assert list(map(len, backlog.withdraw(owner, expired_at=60.0))) == [1, 2]
    assert backlog.withdraw(owner) == []
    assert backlog.get(0) is None


def test_the_io_thread_does_not_wait_for_the_lock(backlog: Backlog, owner: Any) -> None:
    """A signal handler may have interrupted the lock's owner, and wait for the I/O thread."""
    [[message]] = [batch] = deliver(backlog, owner, 1)
    with ThreadPoolExecutor(1) as io_thread, backlog._lock:
        assert not io_thread.submit(backlog.discard, owner, batch._source).result()
        assert bodies_of(io_thread.submit(backlog.withdraw, owner).result()) == [[message.body]]
    assert len(backlog.withdraw(owner)) == 1  # nothing was removed


def test_messages_to_give_up_expire_during_a_slow_callback(backlog: Backlog, owner: Any) -> None:
    withdrawn: list[Batch] = []
    owner.give_up = lambda batch: withdrawn.extend(backlog.withdraw(owner))
    backlog.put(QueuedBatches(owner, [fake_batch([b"0", b"1"])], to_give_up=True))
    assert backlog.get(0) is None
    assert bodies_of(withdrawn) == [[b"1"]]


def test_suspects_are_released_one_by_one(owner: Any) -> None:
    quarantine = Quarantine()
    batch: Any = fake_batch([b"often", b"seldom"])
    batch[0].attempts, batch[1].attempts = 9, 7
    suspects = [QueuedBatches(owner, [Batch(batch._source, [message])]) for message in batch]
    for suspect in suspects:
        quarantine.add(suspect, 0.0)
    assert quarantine.take_due(3, 1.0, 10.0) == []  # another message is in flight
    assert quarantine.take_due(2, 1.0, 10.0) == [suspects[1]]
    assert quarantine.take_due(2, 2.0, 10.0) == []
    assert quarantine.take_due(1, 3.0, 10.0) == [suspects[0]]
    assert quarantine.is_active
    assert quarantine.take_due(0, 4.0, 10.0) == []
    assert not quarantine.is_active


def test_a_quarantine_ends_after_its_limit(owner: Any) -> None:
    quarantine = Quarantine()
    suspects = [QueuedBatches(owner, [fake_batch([b"x"])]) for _ in range(3)]
    for suspect in suspects:
        quarantine.add(suspect, 0.0)
    suspects[0].batches.clear()  # withdrawn
    assert quarantine.take_due(9, 11.0, 10.0) == suspects[1:]
    assert not quarantine.is_active


def test_an_interrupt_while_a_batch_is_taken_does_not_end_the_consumer(
    dialog: Dialog, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, conn = dialog("RDY 200")
    move_batches = backlog_module._move_batches

    def interrupted(*arguments: Any, **options: Any) -> None:
        move_batches(*arguments, **options)
        raise KeyboardInterrupt

    conn.message(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(backlog_module, "_move_batches", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.next_batch(timeout_s=patience_s(5))
    wait_until(lambda: not consumer._io.waiting, what="nothing is pending")
    conn.message(b"y")
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []
    assert message.body == b"y"
