"""Consumer.health, as a probe of Kubernetes reads it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from plugins.clients import CHANNEL, TOPIC, Consume
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import aio


def test_health_tells_connections_messages_and_backoff(nsqd: GoNsqd, consume: Consume) -> None:
    consumer = consume(nsqd.tcp_address, default_requeue_delay_s=3600, backoff_multiplier_s=3600)
    wait_until(lambda: consumer.connections, what="the connection")
    assert asdict(consumer.health()) == {
        "connections": [nsqd.tcp_address],
        "in_flight": 0,
        "backoff_level": 0,
        "idle_s": None,
    }
    nsqd.publish(TOPIC, b"x")
    [message] = consumer.next_batch(patience_s(5)) or []
    health = consumer.health()
    assert health.in_flight == 1
    assert health.idle_s is not None
    wait_until(lambda: (consumer.health().idle_s or 0) > health.idle_s, what="time to pass")
    message.requeue()
    wait_until(lambda: consumer.health().backoff_level == 1, what="backoff")
    assert consumer.health().in_flight == 0
    nsqd.stop()
    wait_until(lambda: not consumer.health().connections, what="the loss")


def test_health_of_asyncio_is_the_same(nsqd: GoNsqd) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")

    async def main() -> None:
        consumer = aio.Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address)

        async def handle(message: aio.Message) -> None:
            health = consumer.health()
            assert (health.connections, health.in_flight) == ([nsqd.tcp_address], 1)
            consumer.begin_stop()

        await consumer.run(handle)
        assert consumer.health().connections == []

    asyncio.run(main())
