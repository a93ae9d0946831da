"""Consuming with asyncio: one core, many tasks, and no message is lost to a cancellation."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import fill
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until

from nsqtools import ClientOptions, ConnectionFailed
from nsqtools.aio import Consumer

TOPIC, CHANNEL = "clicks", "tasks"
OPTIONS = ClientOptions(output_buffer_timeout_s=0.025, drain_timeout_s=3.0)


def consumer_of(nsqd: GoNsqd, **options: Any) -> Consumer:
    return Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=OPTIONS, **options)


def test_a_loop_that_never_waits_leaves_time_for_other_tasks(nsqd: GoNsqd) -> None:
    fill(nsqd, 2000, CHANNEL)

    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        count = 0
        async with consumer_of(nsqd) as consumer:
            async for message in consumer:
                await message.finish()
                count += 1
                if count == 2000:
                    break
        task.cancel()
        return turns

    assert asyncio.run(main()) > 10


def test_messages_come_although_another_task_holds_the_event_loop(nsqd: GoNsqd) -> None:
    fill(nsqd, 20, CHANNEL)

    async def main() -> None:
        async def hold() -> None:
            while True:
                time.sleep(0.03)  # what a task should not do
                await asyncio.sleep(0)

        task = asyncio.create_task(hold())
        count = 0
        async with consumer_of(nsqd) as consumer:
            async for message in consumer:
                await message.finish()
                count += 1
                if count == 20:
                    break
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 15))
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


def test_a_start_can_fail_fast() -> None:
    async def main() -> None:
        consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses="127.0.0.1:1")
        with pytest.raises(ConnectionFailed):
            await consumer.start(fail_fast=True)

    asyncio.run(main())
