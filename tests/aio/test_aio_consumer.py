"""Consuming with asyncio: one core, many tasks, and no message is lost to a cancellation."""

from __future__ import annotations

import asyncio
import collections
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import fill
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd
from plugins.servers import AnyNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, ConfigurationError, ConnectionFailed, RequeueWithoutBackoff
from nsqtools.aio import Consumer, Message

TOPIC, CHANNEL = "clicks", "tasks"


def consumer_of(*servers: Nsqd, **options: Any) -> Consumer:
    quick: dict[str, Any] = {"output_buffer_timeout_s": 0.025, "max_backoff_duration_s": 0.0}
    return Consumer(
        TOPIC,
        CHANNEL,
        nsqd_tcp_addresses=[nsqd.tcp_address for nsqd in servers],
        options=ClientOptions(**(quick | options)),
    )


@pytest.mark.parametrize(("count", "held_s"), [(2000, 0.0), (20, 0.03)])
def test_a_loop_that_never_waits_and_another_task_that_holds_the_event_loop_get_on(
    nsqd: GoNsqd, count: int, held_s: float
) -> None:
    fill(nsqd, count, CHANNEL)

    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                time.sleep(held_s)  # what a task should not do
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        left = count
        async with consumer_of(nsqd) as consumer:
            async for message in consumer:
                await message.finish()
                left -= 1
                if not left:
                    break
        task.cancel()
        return turns

    turns = asyncio.run(asyncio.wait_for(main(), patience_s(15)))
    assert held_s or turns > 10
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


def test_a_failing_task_of_a_group_requeues_what_the_others_hold(nsqd: GoNsqd) -> None:
    fill(nsqd, 21, CHANNEL)

    async def main() -> None:
        async with consumer_of(nsqd) as consumer, asyncio.TaskGroup() as group:
            await (await anext(consumer)).finish()  # until then one message is in flight

            async def work(fails: bool) -> None:
                async for _message in consumer:
                    await asyncio.sleep(0.1)
                    if fails:
                        raise LookupError
                    await asyncio.sleep(60)

            for number in range(4):
                group.create_task(work(number == 3))

    with pytest.raises(ExceptionGroup):
        asyncio.run(main())
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 0, what="the requeues"
    )
    assert unfinished(nsqd, TOPIC, CHANNEL) == 20


def test_waiting_for_a_message_can_time_out_and_go_on(nsqd: GoNsqd) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)

    async def main() -> bytes:
        async with consumer_of(nsqd) as consumer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(consumer), 0.2)
            fill(nsqd, 1, CHANNEL)
            message = await asyncio.wait_for(anext(consumer), 5)
            await message.finish()
            return message.body

    assert asyncio.run(main()) == b"0"


# -- run and batches -------------------------------------------------------------------------------


def test_messages_are_handled_at_the_same_time_and_answered_by_the_outcome(
    any_nsqd: AnyNsqd,
) -> None:
    nsqd = any_nsqd()
    fill(nsqd, 40, CHANNEL)
    seen: collections.Counter[int] = collections.Counter()
    hooked: list[tuple[int, type[BaseException] | None]] = []
    most = 0

    async def main() -> None:
        consumer = consumer_of(nsqd, default_requeue_delay_s=0)
        running: set[int] = set()

        async def handle(message: Message) -> object:
            nonlocal most
            number = int(message.body)
            seen[number] += 1
            running.add(number)
            most = max(most, len(running))
            await asyncio.sleep(0.02)
            running.remove(number)
            if message.attempts == 1 and number == 1:
                return False
            if message.attempts == 1 and number == 2:
                raise ValueError
            if message.attempts == 1 and number == 3:
                raise RequeueWithoutBackoff(0)
            return None

        def on_handled(message: Message, seconds: float, error: BaseException | None) -> None:
            assert message.is_answered
            hooked.append((int(message.body), type(error) if error else None))
            if len(hooked) == 43:
                consumer.begin_stop()

        await consumer.run(handle, concurrency=8, on_handled=on_handled)

    asyncio.run(asyncio.wait_for(main(), patience_s(20)))
    assert {number: count for number, count in seen.items() if count > 1} == {1: 2, 2: 2, 3: 2}
    assert 2 <= most <= 8
    assert {entry for entry in hooked if entry[1]} == {(2, ValueError), (3, RequeueWithoutBackoff)}
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


def test_a_cancelled_run_requeues_what_its_handlers_have(nsqd: GoNsqd) -> None:
    fill(nsqd, 20, CHANNEL)

    async def main() -> None:
        reached = asyncio.Event()

        async def handle(message: Message) -> None:
            reached.set()
            await asyncio.sleep(3600)

        async with consumer_of(nsqd) as consumer:
            handling = asyncio.create_task(consumer.run(handle))
            await reached.wait()
            handling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handling

    asyncio.run(asyncio.wait_for(main(), patience_s(20)))
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (20, 0, 0)


def test_a_long_handler_keeps_its_message_with_auto_touch(nsqd: GoNsqd) -> None:
    fill(nsqd, 1, CHANNEL)
    seen: list[int] = []

    async def main() -> None:
        consumer = consumer_of(nsqd, msg_timeout_s=1.0)

        async def handle(message: Message) -> None:
            seen.append(message.attempts)
            first = message.deadline
            while message.deadline < first + 1.5:  # it was touched more than once
                await asyncio.sleep(0.02)
            consumer.begin_stop(drain=True)

        await consumer.run(handle, auto_touch=True)

    asyncio.run(asyncio.wait_for(main(), patience_s(20)))
    assert seen == [1]
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
def test_more_signals_end_a_program_whose_handlers_are_stuck(nsqd: GoNsqd, handler: str) -> None:
    """The second leaves a blocked event loop; a task that refuses to be cancelled takes three."""
    fill(nsqd, 100, CHANNEL)
    command = [sys.executable, "-c", PROGRAM.format(handler), nsqd.tcp_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"] + stats["deferred_count"], stats["in_flight_count"]) == (100, 0)


def test_batches_come_by_size_and_by_time(go_nsqd: MakeNsqd) -> None:
    servers = [go_nsqd(), go_nsqd()]
    for nsqd in servers:
        fill(nsqd, 525, CHANNEL)
    sizes: list[int] = []

    async def main() -> None:
        async with consumer_of(*servers, max_in_flight=1000) as consumer:
            async for batch in consumer.batches(size=500, within_s=3600):
                sizes.append(len(batch))
                assert batch.topic == TOPIC
                assert await batch[0].requeue(0, backoff=False)
                assert await batch.finish() == len(batch) - 1
                assert await batch.requeue() == 0
                break
            async for batch in consumer.batches(size=500, within_s=0.2):
                sizes.append(len(batch))
                assert await batch.finish() == len(batch)
                if sum(sizes) == 1051:
                    break

    asyncio.run(asyncio.wait_for(main(), patience_s(20)))
    assert sizes[0] == 500
    assert sum(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in servers) == 0


def test_a_task_that_is_cancelled_gives_back_what_it_gathers(nsqd: GoNsqd) -> None:
    fill(nsqd, 5, CHANNEL)

    async def main() -> None:
        async with consumer_of(nsqd) as consumer:
            batches = consumer.batches(size=100, within_s=3600)
            gathering = asyncio.ensure_future(anext(batches))
            while consumer.stats.received < 5:
                await asyncio.sleep(0.05)
            gathering.cancel()
            for _ in range(5):
                message = await asyncio.wait_for(anext(consumer), patience_s(5))
                assert message.attempts == 2
                message.finish()

    asyncio.run(main())


def test_a_batch_does_not_wait_longer_where_other_tasks_take_what_comes() -> None:
    async def main() -> object:
        consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses="127.0.0.1:1")
        taking = asyncio.create_task(consumer._take_in(0.05, 10))
        while not taking.done():
            consumer.backlog._filled.set()
            await asyncio.sleep(0.005)
        return await taking

    assert asyncio.run(asyncio.wait_for(main(), patience_s(2))) is None


def test_what_cannot_be_run_is_refused(nsqd: GoNsqd) -> None:
    fill(nsqd, 3, CHANNEL)

    async def main(handler: Callable[[Message], Any], **how: Any) -> None:
        async with consumer_of(nsqd) as consumer:
            await consumer.run(handler, **how)

    async def handle(message: Message) -> None: ...

    with pytest.raises(ConfigurationError, match="concurrency must be a whole number >= 1"):
        asyncio.run(main(handle, concurrency=0))
    with pytest.raises(ConfigurationError, match=r"use nsqtools\.Consumer"):
        asyncio.run(asyncio.wait_for(main(lambda message: None), patience_s(20)))
    assert unfinished(nsqd, TOPIC, CHANNEL) == 3
    alone = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses="127.0.0.1:1")
    with pytest.raises(ConnectionFailed):
        asyncio.run(alone.start(fail_fast=True))
