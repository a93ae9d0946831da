"""Consumer.run: signals, refused handlers, automatic TOUCH, hooks, and a fork."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, run_program
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.servers import DataPath, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.client.handling import RequeueWithoutBackoff
from nsqtools.client.message import Message
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import ConfigurationError

IDLE_WORKER = """
import os, signal, sys, threading
from nsqtools import Consumer
consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1])
# The kernel hands the signal to another thread: the main thread sleeps on, as it does when a signal
# comes in the moment before it falls asleep.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def stop():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
threading.Timer(0.3, stop).start()
consumer.run(print, signals=True)
"""


def test_a_signal_that_does_not_wake_the_main_thread_stops_an_idle_worker(nsqd: GoNsqd) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    run_program(IDLE_WORKER, nsqd.tcp_address)


async def handle_async(message: Message) -> None:
    await asyncio.sleep(0)


async def generate_async(message: Message) -> AsyncIterator[None]:
    yield


class Service:
    async def handle(self, message: Message) -> None: ...
    async def __call__(self, message: Message) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [
        handle_async,
        generate_async,
        Service().handle,
        Service(),
        functools.partial(handle_async),
        functools.partial(functools.partial(Service())),
    ],
)
def test_an_async_handler_is_refused_before_anything_is_consumed(
    consume: Consume, handler: Callable[[Message], object]
) -> None:
    consumer = consume("127.0.0.1:1", started=False)
    with pytest.raises(ConfigurationError, match=r"use nsqtools\.aio\.Consumer"):
        consumer.run(handler)
    assert not consumer._is_started


@pytest.mark.parametrize("workers", [1, 3])
def test_a_handler_that_returns_an_awaitable_ends_run_and_finishes_nothing(
    nsqd: GoNsqd, consume: Consume, workers: int
) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(20)])
    consumer = consume(nsqd.tcp_address)
    with pytest.raises(ConfigurationError, match=r"use nsqtools\.aio\.Consumer"):
        consumer.run(lambda message: handle_async(message), workers=workers)
    assert consumer.stop(timeout_s=patience_s(10))
    assert unfinished(nsqd, TOPIC, CHANNEL) == 20


def test_a_long_handler_keeps_its_message_with_auto_touch(
    serve: Serve, data_path: DataPath, consume: Consume, in_background: Callable[..., object]
) -> None:
    """On the embedded nsqd, which looks for timeouts in a new channel at once."""
    nsqd = serve(EmbeddedServer(data_path(), "--msg-timeout=2s"))
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    seen: list[int] = []

    def handler(message: Message) -> None:
        seen.append(message.attempts)
        if len(seen) == 1:
            time.sleep(2.8)  # longer than that, and less than twice the time

    consumer = consume(nsqd.tcp_address)
    in_background(consumer.run, handler, auto_touch=True)
    wait_until(lambda: consumer.stats.finished == 1, what="the FIN")
    assert nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


def test_where_no_thread_can_be_had_those_that_began_end_too(
    nsqd: GoNsqd, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "nsq-worker-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    consumer = consume(nsqd.tcp_address)
    with pytest.raises(RuntimeError, match="new thread"):
        consumer.run(lambda message: None, workers=3)
    assert consumer.wait_for_end(patience_s(10))


def test_nobody_wakes_while_handlers_are_at_work(
    nsqd: GoNsqd, consume: Consume, handle: Handle
) -> None:
    """It took 40 turns a second while a message was unanswered."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    release, started = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        started.set()
        release.wait(20)

    consumer = consume(nsqd.tcp_address, rdy_redistribute_interval_s=5)
    handle(consumer, handler)
    assert started.wait(patience_s(5))
    time.sleep(0.3)
    turns = 0
    turn = consumer._io._each_turn

    def counted() -> None:
        nonlocal turns
        turns += 1
        turn()

    consumer._io.loop._each_turn = counted  # type: ignore[method-assign]
    time.sleep(0.5)
    release.set()
    assert turns <= 10


def test_hooks_see_what_was_handled_and_published(
    nsqd: GoNsqd, consume: Consume, handle: Handle
) -> None:
    published: list[tuple[str, bool]] = []

    def on_published(publication: Publication) -> None:
        published.append((publication.topic, publication.error is None))
        raise ValueError("of the hook: it harms nothing")

    nsqd.create_channel(TOPIC, CHANNEL)
    with Producer(nsqd.tcp_address, on_published=on_published) as producer:
        for body in (b"good", b"bad"):
            producer.publish(TOPIC, body)
    assert published == [(TOPIC, True)] * 2

    handled: dict[bytes, BaseException | None] = {}
    consumer = consume(nsqd.tcp_address, max_backoff_duration_s=0)

    def handler(message: Message) -> None:
        if message.body == b"bad":
            raise RequeueWithoutBackoff(60)

    def on_handled(message: Message, seconds: float, error: BaseException | None) -> None:
        assert message.is_answered
        assert 0 <= seconds < patience_s(5)
        handled[message.body] = error
        if len(handled) == 2:
            consumer.begin_stop()
        raise ValueError("of the hook: it harms nothing")

    consumer.run(handler, on_handled=on_handled)
    assert handled[b"good"] is None
    assert isinstance(handled[b"bad"], RequeueWithoutBackoff)
