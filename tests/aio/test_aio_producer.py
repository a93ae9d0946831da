"""Publishing with asyncio: outcomes, the window, and cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest
from plugins.archives import unfinished
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, PublishInvalid, PublishNotSent
from nsqtools.aio import Producer
from nsqtools.client import producer as producer_module

TOPIC = "clicks"


def test_every_way_of_publishing_arrives(nsqd: GoNsqd) -> None:
    async def main() -> None:
        async with Producer(nsqd.tcp_address) as producer:
            await producer.publish(TOPIC, b"one")
            await producer.publish_many(TOPIC, [b"two", b"three"])
            await producer.publish_deferred(TOPIC, b"later", 60)

    nsqd.create_channel(TOPIC, "check")
    asyncio.run(main())
    wait_until(lambda: unfinished(nsqd, TOPIC, "check") == 4, what="the channel has all of them")
    assert bodies_in(nsqd, TOPIC, 3) == [b"one", b"three", b"two"]


def test_a_full_window_does_not_hold_the_event_loop(scripted_nsqd: ScriptedNsqd) -> None:
    async def main() -> int:
        options = ClientOptions(max_outstanding=1)
        producer = Producer(scripted_nsqd.address, options)
        first = asyncio.create_task(producer.publish(TOPIC, b"x"))
        await asyncio.sleep(0)
        began = time.monotonic()
        second = asyncio.create_task(producer.publish(TOPIC, b"x", timeout_s=patience_s(0.2)))
        turns = 0
        while not second.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(PublishNotSent, match="no room"):
            await second
        assert time.monotonic() - began < patience_s(3)
        first.cancel()
        await producer.stop(0)
        return turns

    assert asyncio.run(main()) > 5  # a loop that is held turns once


def test_a_cancelled_publish_frees_its_place_when_it_settles(nsqd: GoNsqd) -> None:
    async def main() -> None:
        options = ClientOptions(max_outstanding=2)
        async with Producer(nsqd.tcp_address, options) as producer:
            for _ in range(20):
                tasks = [asyncio.create_task(producer.publish(TOPIC, b"x")) for _ in range(5)]
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait_for(producer.publish(TOPIC, b"last"), 5)
            assert await producer.flush(5)

    asyncio.run(main())
    assert nsqd.depth(TOPIC) >= 1


def test_a_producer_can_serve_one_event_loop_after_the_other(nsqd: GoNsqd) -> None:
    producer = Producer(nsqd.tcp_address)
    for _ in range(3):
        asyncio.run(producer.publish(TOPIC, b"x"))
    assert asyncio.run(producer.stop(patience_s(5)))
    assert nsqd.depth(TOPIC) == 3


def test_a_window_full_of_bytes_does_not_hold_the_event_loop(
    scripted_nsqd: ScriptedNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait are let in together, the first of them fills it, and the order stays."""
    monkeypatch.setattr(producer_module, "WINDOW_BYTES", 10)
    bodies = [b"%010d" % number for number in range(10)]

    async def main() -> None:
        producer = Producer(scripted_nsqd.address, ClientOptions(max_outstanding=4))
        tasks = [asyncio.create_task(producer.publish(TOPIC, body)) for body in bodies]
        conn = await asyncio.to_thread(scripted_nsqd.identified)
        for body in bodies:
            command = await asyncio.to_thread(conn.expect, f"PUB {TOPIC}")
            assert command.body == body
            conn.ok()
        await asyncio.gather(*tasks)
        await producer.stop(patience_s(5))

    asyncio.run(main())


def test_one_that_is_refused_leaves_its_room_to_the_next(nsqd: GoNsqd) -> None:
    async def main() -> list[BaseException | None]:
        options = ClientOptions(max_outstanding=1, publish_timeout_s=600)
        async with Producer(nsqd.tcp_address, options) as producer:
            publishes = [producer.publish(topic, b"x") for topic in (TOPIC, "not a topic", TOPIC)]
            ended = asyncio.gather(*publishes, return_exceptions=True)
            return await asyncio.wait_for(ended, patience_s(5))

    assert [type(each) for each in asyncio.run(main())] == [type(None), PublishInvalid, type(None)]


def test_an_nsqd_that_hangs_does_not_fill_the_window_of_another(go_nsqd: MakeNsqd) -> None:
    first, second = go_nsqd(), go_nsqd()
    options = ClientOptions(publish_timeout_s=600, max_outstanding=4)

    async def main() -> None:
        producer = Producer([first.tcp_address, second.tcp_address], options)
        await producer.publish(TOPIC, b"x")
        first.pause()
        stuck = [asyncio.create_task(producer.publish(TOPIC, b"stuck")) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.wait_for(producer.publish(TOPIC, b"goes on"), patience_s(20))
        first.resume()
        await asyncio.gather(*stuck)
        await producer.stop(patience_s(5))

    asyncio.run(main())
    assert second.depth(TOPIC) >= 1
