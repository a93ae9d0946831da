"""A handler that hangs blocks one worker, which keeps the redeliveries of its message."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Dialog, bodies_in
from plugins.raw_client import message_frame
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.servers import AnyNsqd, EmbeddedServer
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, aio
from nsqtools.client.backlog import Worker
from nsqtools.client.consumer import ConsumerCore
from nsqtools.client.message import Message

WAYS = ["run", "for", "batches", "aio.run", "aio.for", "aio.batches"]


class Program:
    """Two workers, started in a way of `WAYS`. A message named ``hang...`` blocks its worker."""

    def __init__(self, way: str, address: str, workers: int = 2, **options: Any) -> None:
        self.begun: Counter[bytes] = Counter()
        self.release = threading.Event()
        self.error: Exception | None = None  # raised by a handler when it is released
        kind, _, self._way = way.rpartition(".")
        make = aio.Consumer if kind else Consumer
        settings = ClientOptions(**{"max_in_flight": 10, "max_attempts": 2, **options})
        self.consumer: Any = make(
            TOPIC, CHANNEL, nsqd_tcp_addresses=address, options=settings, dead_letter="dead"
        )
        work = (lambda: asyncio.run(self._main(workers))) if kind else self._loop
        alone = bool(kind) or self._way == "run"
        if not kind and alone:
            work = lambda: self.consumer.run(self._handle, workers=workers)  # noqa: E731
        self.threads = [threading.Thread(target=work) for _ in range(1 if alone else workers)]

    def _note(self, message: Message) -> bool:
        self.begun[message.body] += 1
        return message.body.startswith(b"hang")

    def _handle(self, message: Message) -> None:
        if self._note(message):
            self.release.wait(patience_s(20))
            if self.error is not None:
                raise self.error

    def _loop(self) -> None:
        if self._way == "for":
            for message in self.consumer:
                self._handle(message)
                message.finish()
        else:
            for batch in self.consumer.batches(size=1):
                self._handle(batch[0])
                batch.finish()

    async def _handle_in_task(self, message: Message) -> None:
        if self._note(message):
            await asyncio.to_thread(self.release.wait, patience_s(20))
            if self.error is not None:
                raise self.error

    async def _main(self, workers: int) -> None:
        if self._way == "run":
            await self.consumer.run(self._handle_in_task, concurrency=workers)
        else:
            await asyncio.gather(*[self._loop_in_task() for _ in range(workers)])

    async def _loop_in_task(self) -> None:
        if self._way == "for":
            async for message in self.consumer:
                await self._handle_in_task(message)
                message.finish()
        else:
            async for batch in self.consumer.batches(size=1):
                await self._handle_in_task(batch[0])
                batch.finish()


@contextmanager
def running(way: str, address: str, workers: int = 2, **options: Any) -> Iterator[Program]:
    program = Program(way, address, workers, **options)
    for thread in program.threads:
        thread.start()
    try:
        yield program
    finally:
        program.release.set()
        ConsumerCore.abort(program.consumer)
        for thread in program.threads:
            thread.join(patience_s(10))
            assert not thread.is_alive()


def hang(program: Program, conn: Connection) -> str:
    """Deliver a message that blocks its handler, and return its id."""
    message_id = conn.message(b"hang")
    wait_until(lambda: program.begun[b"hang"], what="the handler to hang")
    return message_id


def redeliver(program: Program, conn: Connection, message_id: str, attempts: int) -> None:
    received = program.consumer.stats.received
    conn.message(b"hang", message_id=message_id, attempts=attempts)
    wait_until(lambda: program.consumer.stats.received > received, what="the delivery")


@pytest.mark.parametrize("way", WAYS)
def test_a_redelivery_waits_for_the_running_handler(scripted_nsqd: ScriptedNsqd, way: str) -> None:
    """Its one answer is for the last delivery, even beyond max_attempts."""
    with running(way, scripted_nsqd.address) as program:
        conn = scripted_nsqd.subscribed("RDY 1")
        message_id = hang(program, conn)
        for attempts in range(2, 6):
            redeliver(program, conn, message_id, attempts)
        other_id = conn.message(b"other")
        conn.skip_to(f"FIN {other_id}")
        [overdue] = program.consumer.health().overdue
        assert (overdue.id, overdue.attempts) == (message_id, 5)
        assert program.consumer.health().in_flight == 1
        program.release.set()
        conn.skip_to(f"FIN {message_id}")
        wait_until(lambda: not program.consumer.health().in_flight, what="nothing in flight")
        assert program.begun == {b"hang": 1, b"other": 1}
        assert not [line for line in conn.not_yet_expected if line.startswith(("FIN", "REQ"))]


@pytest.mark.parametrize("way", ["run", "for", "aio.run", "aio.for"])
def test_messages_behind_a_hanging_handler_go_to_the_other_worker(
    embedded_nsqd: AnyNsqd, way: str
) -> None:
    """The worker was fast before, so it has taken several messages at a time."""
    nsqd = embedded_nsqd()
    nsqd.create_channel(TOPIC, CHANNEL)
    fast, pending = [b"%d" % number for number in range(40)], [b"a", b"b", b"c"]
    with running(way, nsqd.tcp_address) as program:
        for body in fast:
            nsqd.publish(TOPIC, body)
        wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="the fast ones")
        nsqd.publish(TOPIC, b"hang", *pending)
        wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 1, what="all others are finished")
        assert program.begun == Counter([*fast, b"hang", *pending])


@pytest.mark.parametrize("way", ["for", "aio.for"])
def test_messages_behind_the_only_handler_are_requeued_if_it_hangs(
    scripted_nsqd: ScriptedNsqd, way: str
) -> None:
    """Other consumers of the channel get them after half of msg_timeout."""
    with running(way, scripted_nsqd.address, workers=1) as program:
        conn = scripted_nsqd.accept()
        conn.subscribe(TOPIC, CHANNEL, msg_timeout=round(patience_s(2) * 1000))
        conn.skip_to("RDY 1")
        for _ in range(40):
            conn.skip_to(f"FIN {conn.message(b'fast')}")
        ids = [conn.new_id() for _ in range(4)]
        bodies = [b"hang", b"a", b"b", b"c"]
        frames = [
            message_frame(body, id, attempts=1, timestamp_ns=17 * 10**17)
            for body, id in zip(bodies, ids, strict=True)
        ]
        conn.send(b"".join(frames))
        for id in ids[1:]:
            conn.skip_to(f"REQ {id} 0")
        assert program.begun == {b"fast": 40, b"hang": 1}


@pytest.mark.parametrize("way", WAYS)
def test_a_redelivery_on_another_connection_waits_as_well(
    scripted_nsqd: ScriptedNsqd, way: str
) -> None:
    """The redelivery may have attempts of 1, because a killed nsqd has lost the count."""
    with running(way, scripted_nsqd.address, reconnect_base_s=0.01) as program:
        conn = scripted_nsqd.subscribed("RDY 1")
        message_id = hang(program, conn)
        for attempts in (1, 2):
            conn.close()
            scripted_nsqd.accept()  # a connection that checks whether the topic was deleted
            conn = scripted_nsqd.subscribed()
            conn.take("RDY")
            redeliver(program, conn, message_id, attempts)
        other_id = conn.message(b"other", message_id="f" * 16)
        conn.skip_to(f"FIN {other_id}")
        program.release.set()
        conn.skip_to(f"FIN {message_id}")
        assert program.begun == {b"hang": 1, b"other": 1}
        wait_until(lambda: not program.consumer.health().in_flight, what="nothing in flight")


@pytest.mark.parametrize("way", ["run", "aio.run"])
def test_a_late_exception_requeues_the_last_delivery(scripted_nsqd: ScriptedNsqd, way: str) -> None:
    """Deliveries that timed out during the handler do not count as attempts."""
    with running(way, scripted_nsqd.address, max_backoff_duration_s=0.0) as program:
        conn = scripted_nsqd.subscribed("RDY 1")
        message_id = hang(program, conn)
        for attempts in (2, 3):
            redeliver(program, conn, message_id, attempts)
        program.error = ValueError("late")
        program.release.set()
        conn.skip_to(f"REQ {message_id} 270000")
        conn.message(b"hang", message_id=message_id, attempts=4)
        conn.skip_to(f"REQ {message_id} 360000")
        assert program.begun[b"hang"] == 2


@pytest.mark.parametrize("way", WAYS)
def test_without_a_free_worker_no_message_is_requested(
    quick_nsqd: EmbeddedServer, way: str
) -> None:
    """Messages that timed out do not count as in flight. A free worker resumes consumption."""
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"hang 1", b"hang 2")
    with running(way, nsqd.tcp_address) as program:
        health = program.consumer.health
        wait_until(lambda: len(health().overdue) == 2, what="both to be overdue")
        wait_until(lambda: program.consumer._io.rdy.max_in_flight == 0, what="RDY 0")
        wait_until(lambda: health().in_flight == 0, what="nothing in flight")
        nsqd.publish(TOPIC, b"other")
        assert {overdue.topic for overdue in health().overdue} == {TOPIC}
        assert all(overdue.handled_s > 1 for overdue in health().overdue)
        program.release.set()
        wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="an empty channel")
        assert program.begun[b"other"] == 1
        wait_until(lambda: not health().overdue, what="nothing overdue")


@pytest.mark.parametrize("way", ["run", "aio.run"])
def test_messages_expire_behind_a_hanging_handler(quick_nsqd: EmbeddedServer, way: str) -> None:
    """Without a free worker no redelivery replaces them. Another consumer may have got them."""
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"0")
    with running(way, nsqd.tcp_address, workers=1) as program:
        wait_until(lambda: program.begun, what="the first")
        nsqd.publish(TOPIC, *[b"%d" % number for number in range(1, 60)], b"hang", *[b"behind"] * 9)
        wait_until(lambda: program.consumer.health().overdue, what="the message to be overdue")
        wait_until(lambda: program.consumer._io.rdy.max_in_flight == 0, what="RDY 0")
        returned = bodies_in(nsqd, TOPIC, 9, CHANNEL)
        assert returned.count(b"behind") >= 8
        program.release.set()
        wait_until(lambda: not program.consumer.health().overdue, what="the end of its handler")
        assert program.begun[b"behind"] <= 1


def test_a_refused_touch_means_a_timeout(
    scripted_nsqd: ScriptedNsqd,
) -> None:
    with running("run", scripted_nsqd.address) as program:
        conn = scripted_nsqd.subscribed("RDY 1")
        message_id = hang(program, conn)
        conn.error(f"E_TOUCH_FAILED TOUCH {message_id} failed ID not in flight")
        wait_until(lambda: program.consumer.health().overdue, what="the message to be overdue")
        wait_until(lambda: not program.consumer.health().in_flight, what="nothing in flight")


def test_a_hanging_handler_is_logged_once(
    any_nsqd: AnyNsqd, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = any_nsqd("--msg-timeout=1s")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"hang")
    with running("run", nsqd.tcp_address) as program:
        stats = program.consumer.stats
        wait_until(lambda: stats.received >= 3, what="two more deliveries", timeout_s=20)
        nsqd.publish(TOPIC, *[b"%d" % number for number in range(10)])
        wait_until(lambda: stats.finished == 10, what="the others")
        assert program.begun[b"hang"] == 1
    taken_back = [record for record in caplog.records if "timed out at nsqd" in record.message]
    assert len(taken_back) == 1


def test_a_loop_may_begin_while_a_message_is_delivered_again(dialog: Dialog) -> None:
    consumer, conn = dialog("RDY 200")
    workers = consumer._backlog.workers

    class Interrupted(Worker):
        """At each look at this one, as between any two, another thread begins a loop."""

        @property
        def current(self) -> Message | None:  # type: ignore[override]
            workers.add(Worker())
            return None

        @current.setter
        def current(self, message: Message | None) -> None:
            pass

    message_id = conn.message(b"x")
    assert consumer.next_batch(timeout_s=patience_s(5))
    workers.add(Interrupted())
    conn.message(b"x", message_id=message_id, attempts=2)
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []
    assert message.attempts == 2
