"""The asyncio client: many tasks, and no message lost by a cancellation."""

import asyncio
import collections
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import TOPIC, bodies_in, fill
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, GoNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, RequeueWithoutBackoff, errors
from nsqtools.aio import Consumer, Message, Producer

CHANNEL = "tasks"
DEAD = "127.0.0.1:1"


def make_consumer(*servers: Nsqd, **options: Any) -> Consumer:
    quick: dict[str, Any] = {"output_buffer_timeout_s": 0.025, "max_backoff_duration_s": 0.0}
    addresses, settled = [nsqd.tcp_address for nsqd in servers], ClientOptions(**(quick | options))
    return Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=addresses, options=settled)


@pytest.mark.parametrize(("count", "held_s"), [(2000, 0.0), (20, 0.03)])
async def test_a_loop_that_never_waits_yields_to_other_tasks(
    nsqd: GoNsqd, count: int, held_s: float
) -> None:
    fill(nsqd, count, CHANNEL)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            time.sleep(held_s)  # a task should not block
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with make_consumer(nsqd) as consumer:
        for _ in range(count):
            await (await anext(consumer)).finish()
    task.cancel()
    assert held_s or turns > 10
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


async def test_waiting_for_a_message_can_time_out(nsqd: GoNsqd) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    consumer = make_consumer(nsqd)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(consumer), 0.2)
    fill(nsqd, 1, CHANNEL)
    message = await asyncio.wait_for(anext(consumer), patience_s(5))
    async with consumer:
        await message.finish()
        assert message.body == b"0"


# -- run and batches -------------------------------------------------------------------------------


async def test_concurrent_handlers_answer_by_their_outcome(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    fill(nsqd, 40, CHANNEL)
    calls: collections.Counter[int] = collections.Counter()
    hooked: list[tuple[int, type[BaseException] | None]] = []
    running: set[int] = set()
    most = 0
    consumer = make_consumer(nsqd, default_requeue_delay_s=0)

    async def handle(message: Message) -> object:
        nonlocal most
        number = int(message.body)
        calls[number] += 1
        running.add(number)
        most = max(most, len(running))
        await asyncio.sleep(0.02)
        running.remove(number)
        if message.attempts == 1 and number in (2, 3):
            raise ValueError if number == 2 else RequeueWithoutBackoff(0)
        if message.attempts == 1 and number == 4:
            raise asyncio.CancelledError  # an awaited task was cancelled, not the handler
        return None if message.attempts > 1 else number != 1

    def on_handled(message: Message, seconds: float, error: BaseException | None) -> None:
        assert message.is_answered
        hooked.append((int(message.body), type(error) if error else None))
        if len(hooked) == 44:
            consumer.begin_stop()

    await consumer.run(handle, concurrency=8, on_handled=on_handled)
    redelivered = dict.fromkeys((1, 2, 3, 4), 2)
    assert {number: count for number, count in calls.items() if count > 1} == redelivered
    assert 2 <= most <= 8
    errors_of = {2: ValueError, 3: RequeueWithoutBackoff, 4: RuntimeError}
    assert dict(entry for entry in hooked if entry[1]) == errors_of
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


async def test_a_cancelled_run_requeues_messages_of_handlers(nsqd: GoNsqd) -> None:
    fill(nsqd, 20, CHANNEL)
    reached = asyncio.Event()

    async def handle(message: Message) -> None:
        reached.set()
        await asyncio.sleep(3600)

    async with make_consumer(nsqd) as consumer:
        handling = asyncio.create_task(consumer.run(handle))
        await reached.wait()
        handling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handling
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (20, 0, 0)


async def test_a_long_handler_keeps_its_message_with_auto_touch(nsqd: GoNsqd) -> None:
    fill(nsqd, 1, CHANNEL)
    attempts: list[int] = []
    consumer = make_consumer(nsqd, msg_timeout_s=1.0)

    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        first = message.deadline
        while message.deadline < first + 1.5:  # it was touched more than once
            await asyncio.sleep(0.02)
        consumer.begin_stop(drain=True)

    await consumer.run(handle, auto_touch=True)
    assert attempts == [1]
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


PROGRAM = """
import asyncio, sys, time
from nsqtools.aio import Consumer
async def stuck(message):
    print("stuck", flush=True)
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
async def blocking(message):
    print("stuck", flush=True)
    time.sleep(1000)
consumer = Consumer("clicks", "tasks", nsqd_tcp_addresses=sys.argv[1])
asyncio.run(consumer.run({}))
"""


@pytest.mark.parametrize("handler", ["stuck", "blocking"])
def test_further_signals_end_a_program_with_stuck_handlers(nsqd: GoNsqd, handler: str) -> None:
    """The second signal ends a blocked event loop, the third a task that ignores cancellation."""
    fill(nsqd, 100, CHANNEL)
    command = [sys.executable, "-c", PROGRAM.format(handler), nsqd.tcp_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
    assert nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 0
    assert unfinished(nsqd, TOPIC, CHANNEL) == 100


async def test_batches_end_by_size_or_time(go_nsqd: MakeNsqd) -> None:
    servers = [go_nsqd(), go_nsqd()]
    for nsqd in servers:
        fill(nsqd, 525, CHANNEL)
    async with make_consumer(*servers, max_in_flight=1000) as consumer:
        batch = await anext(consumer.batches(size=500, within_s=3600))
        assert (len(batch), batch.topic) == (500, TOPIC)
        assert await batch[0].requeue(0, backoff=False)
        assert await batch.finish() == 499
        assert await batch.requeue() == 0
        remaining = 551
        async for batch in consumer.batches(size=500, within_s=0.2):
            remaining -= len(batch)
            assert await batch.finish() == len(batch)
            if not remaining:
                break
    assert sum(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in servers) == 0


async def test_a_cancelled_task_requeues_its_batch(nsqd: GoNsqd) -> None:
    fill(nsqd, 5, CHANNEL)
    async with make_consumer(nsqd) as consumer:
        gathering = asyncio.ensure_future(anext(consumer.batches(within_s=3600)))
        while consumer.stats.received < 5:
            await asyncio.sleep(0.05)
        is_handed_over, loop = threading.Event(), consumer._io.loop
        loop.call_soon(lambda: loop.after_flush(is_handed_over.set))
        while not (is_handed_over.is_set() and consumer._backlog.is_empty):
            await asyncio.sleep(0.01)
        gathering.cancel()
        for _ in range(5):
            message = await anext(consumer)
            assert message.attempts == 2
            message.finish()


async def test_a_batch_ends_in_time_while_other_tasks_take_messages() -> None:
    consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=DEAD)
    consumer._backlog.serve(asyncio.get_running_loop())
    taking = asyncio.create_task(consumer._take_in(0.05, 10))
    while not taking.done():
        consumer._backlog._filled.set()
        await asyncio.sleep(0.005)
    assert await taking is None


async def test_invalid_handlers_are_refused(nsqd: GoNsqd) -> None:
    fill(nsqd, 3, CHANNEL)

    async def run(handler: Callable[[Message], Any], **how: Any) -> None:
        async with make_consumer(nsqd) as consumer:
            await consumer.run(handler, **how)

    with pytest.raises(errors.ConfigurationError, match="concurrency must be a whole number >= 1"):
        await run(lambda message: asyncio.sleep(0), concurrency=0)
    with pytest.raises(errors.ConfigurationError, match=r"use nsqtools\.Consumer"):
        await run(lambda message: None)
    assert unfinished(nsqd, TOPIC, CHANNEL) == 3
    with pytest.raises(errors.ConnectionFailed):
        await Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=DEAD).start(fail_fast=True)


# -- publishing: outcomes, the window, and cancellation -------------------------------------------


async def test_a_cancelled_publish_frees_its_window_when_it_settles(nsqd: GoNsqd) -> None:
    async with Producer(nsqd.tcp_address, ClientOptions(max_outstanding=2)) as producer:
        for _ in range(20):
            tasks = [asyncio.create_task(producer.publish(TOPIC, b"x")) for _ in range(5)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await producer.publish(TOPIC, b"last")
        assert await producer.flush(5)
    assert nsqd.depth(TOPIC) >= 1


async def test_a_flush_waits_for_publishes_that_wait_for_room(nsqd: GoNsqd) -> None:
    async with Producer(nsqd.tcp_address, ClientOptions(max_outstanding=1)) as producer:
        tasks = [asyncio.create_task(producer.publish(TOPIC, b"x")) for _ in range(20)]
        await asyncio.sleep(0)  # all of them have begun
        assert await producer.flush(patience_s(5))
        assert nsqd.topic_stats(TOPIC)["message_count"] == 20
        await asyncio.gather(*tasks)


def test_a_producer_can_serve_several_event_loops_in_sequence(nsqd: GoNsqd) -> None:
    """The test covers every way of publishing."""
    nsqd.create_channel(TOPIC, "check")
    producer = Producer(nsqd.tcp_address)
    asyncio.run(producer.publish(TOPIC, b"one"))
    asyncio.run(producer.publish_many(TOPIC, [b"two", b"three"]))
    asyncio.run(producer.publish_deferred(TOPIC, b"later", 60))
    assert asyncio.run(producer.stop(patience_s(5)))
    wait_until(lambda: unfinished(nsqd, TOPIC, "check") == 4, what="the channel has all of them")
    assert bodies_in(nsqd, TOPIC, 3) == [b"one", b"three", b"two"]


def in_another_loop(use: Callable[[], Coroutine[Any, Any, object]]) -> str:
    """Return the error that another event loop gets."""
    with pytest.raises(errors.ConfigurationError) as caught:
        asyncio.run(use())
    return str(caught.value)


async def test_a_second_running_loop_is_refused_and_the_first_continues(nsqd: GoNsqd) -> None:
    """Otherwise tasks of the first loop would wait forever."""

    producer = Producer(nsqd.tcp_address)
    async with producer, Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        waiting = asyncio.create_task(anext(consumer))
        await asyncio.sleep(0)
        await producer.publish(TOPIC, b"x")
        await (await waiting).finish()
        waiting = asyncio.create_task(anext(consumer))
        publishes = asyncio.gather(*[producer.publish(TOPIC, b"x") for _ in range(20)])
        uses = [
            partial(producer.publish, TOPIC, b"y"),
            partial(producer.publish_many, TOPIC, [b"y"]),
            consumer.start,
            partial(anext, consumer),
        ]
        for use in uses:
            error = await asyncio.to_thread(in_another_loop, use)
            assert error.endswith("is in use by another event loop")
        await publishes
        await (await waiting).finish()


async def test_messages_fetched_by_one_loop_are_not_returned_in_another(nsqd: GoNsqd) -> None:
    fill(nsqd, 60, CHANNEL)
    async with make_consumer(nsqd) as consumer:
        count = 0
        for _ in range(30):  # several are fetched at a time, and some are left between two calls
            await (await anext(consumer)).finish()
            count += 1
            error = await asyncio.to_thread(in_another_loop, partial(anext, consumer))
            assert error.endswith("is in use by another event loop")
        async for message in consumer:
            await message.finish()
            count += 1
            if count == 60:
                break
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="all messages are finished")


async def test_a_window_full_of_bytes_does_not_block_the_event_loop(
    scripted_nsqd: ScriptedNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting publishes enter in order, as far as the first of them leaves room."""
    monkeypatch.setattr(Producer, "_window_bytes", 10)
    bodies = [b"%010d" % number for number in range(10)]
    producer = Producer(scripted_nsqd.address, ClientOptions(max_outstanding=4))
    tasks = [asyncio.create_task(producer.publish(TOPIC, body)) for body in bodies]
    await asyncio.sleep(0)
    with pytest.raises(errors.PublishNotSent, match="no room"):
        await producer.publish(TOPIC, b"x", timeout_s=patience_s(0.2))
    conn = await asyncio.to_thread(scripted_nsqd.identified)
    for body in bodies:
        command = await asyncio.to_thread(conn.expect, f"PUB {TOPIC}")
        assert command.body == body
        conn.ok()
    await asyncio.gather(*tasks)
    await producer.stop(patience_s(5))


async def test_a_refused_publish_frees_its_window_for_the_next(nsqd: GoNsqd) -> None:
    options = ClientOptions(max_outstanding=1, publish_timeout_s=600)
    async with Producer(nsqd.tcp_address, options) as producer:
        publishes = [producer.publish(topic, b"x") for topic in (TOPIC, "not a topic", TOPIC)]
        ended = await asyncio.gather(*publishes, return_exceptions=True)
    assert [type(result) for result in ended] == [type(None), errors.PublishInvalid, type(None)]


async def test_a_hanging_nsqd_does_not_fill_the_window_of_another_nsqd(go_nsqd: MakeNsqd) -> None:
    first, second = go_nsqd(), go_nsqd()
    options = ClientOptions(publish_timeout_s=600, max_outstanding=4)
    producer = Producer([first.tcp_address, second.tcp_address], options)
    await producer.publish(TOPIC, b"x")
    first.pause()
    stuck = [asyncio.create_task(producer.publish(TOPIC, b"stuck")) for _ in range(4)]
    await asyncio.sleep(0)
    await producer.publish(TOPIC, b"goes on")
    first.resume()
    await asyncio.gather(*stuck)
    await producer.stop(patience_s(5))
    assert second.depth(TOPIC) >= 1
