"""The client for asyncio: the same Consumer and Producer, with ``async`` and ``await``.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("clicks", b"...")

    async with Consumer("clicks", "billing", nsqd_tcp_addresses=["127.0.0.1:4150"]) as consumer:
        async for message in consumer:
            await bill(message.body)
            await message.finish()

    await Consumer("clicks", "billing", nsqd_tcp_addresses=["127.0.0.1:4150"]).run(bill)

The protocol is not implemented a second time: the I/O thread of `nsqtools.client` does the network
traffic and wakes the event loop. Heartbeats are answered even while a task blocks the event loop.
Options, errors and outcomes are those of `nsqtools`.
"""

from __future__ import annotations

from nsqtools.aio.consumer import Consumer
from nsqtools.aio.producer import Producer
from nsqtools.client.message import Batch, Message

__all__ = ["Batch", "Consumer", "Message", "Producer"]
