"""A broker of taskiq: tasks are messages of one topic, and all workers share its channel.

    broker = NsqBroker(nsqd_tcp_addresses="127.0.0.1:4150")

    @broker.task
    async def add(x: int, y: int) -> int: ...

taskiq acknowledges a task after it has run, and that finishes the message. Until then the message
is touched, so that nsqd does not redeliver it. The label ``delay`` defers a task by that many
seconds.

Traps: taskiq stops its listener while tasks are running, so the consumer requeues unanswered
messages only at `NsqBroker.shutdown`. And taskiq's signal handler does not wake the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from nsqtools import aio
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.client.task_pool import DRAIN_TIMEOUT_S, MIN_DEFER_S, TaskPool, refuse_delay
from nsqtools.errors import PublishRejected
from nsqtools.protocol.names import check_channel, check_topic

# Delay of the reaction to a signal: the event loop wakes up that often.
SIGNAL_CHECK_S = 0.5


class NsqBroker(AsyncBroker):
    """Sends tasks to nsqd, and receives them in workers.

    The addresses are those of `nsqtools.aio.Consumer`. ``options.max_in_flight`` is the number of
    tasks that a worker process has at most: give it taskiq's ``--max-async-tasks`` plus
    ``--max-prefetch``.

    Raises `ConfigurationError` for bad names or options, and without an address.
    """

    def __init__(
        self,
        topic: str = "taskiq",
        channel: str = "taskiq",
        *,
        nsqd_tcp_addresses: str | Sequence[str] = (),
        lookupd_http_addresses: str | Sequence[str] = (),
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__()
        self.topic = check_topic(topic)
        self.channel = check_channel(channel)
        options = options or ClientOptions(max_in_flight=100)  # taskiq's default of tasks at a time
        # taskiq's --wait-tasks-timeout says how long a stop waits for running tasks.
        self.options = replace(options, drain_timeout_s=DRAIN_TIMEOUT_S)
        self._nsqd_tcp_addresses = nsqd_tcp_addresses
        self._lookupd_http_addresses = lookupd_http_addresses
        self._producer = self._new_producer()
        self._consumers: list[aio.Consumer] = []

    def _new_producer(self) -> aio.Producer:
        return aio.Producer(
            self._nsqd_tcp_addresses,
            self.options,
            lookupd_http_addresses=self._lookupd_http_addresses,
        )

    async def shutdown(self) -> None:
        """Send all answers, requeue messages without one, and disconnect."""
        await super().shutdown()
        for consumer in self._consumers:
            consumer.abort()
            await asyncio.to_thread(consumer.wait_for_end)
        self._consumers.clear()
        await self._producer.stop()
        self._producer = self._new_producer()  # taskiq may start the broker again

    async def kick(self, message: BrokerMessage) -> None:
        """Publish a task. Raises `PublishError`, and `ConfigurationError` for too long a delay."""
        delay_s = float(message.labels.get("delay") or 0)
        if delay_s <= 0:
            await self._producer.publish(self.topic, message.message)
            return
        try:
            await self._producer.publish_deferred(self.topic, message.message, delay_s)
        except PublishRejected as exc:
            raise refuse_delay(exc, f"a delay of {delay_s:g} s") from None

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield the tasks of the topic."""
        consumer = aio.Consumer(
            self.topic,
            self.channel,
            nsqd_tcp_addresses=self._nsqd_tcp_addresses,
            lookupd_http_addresses=self._lookupd_http_addresses,
            options=self.options,
            _auto_touch=True,
        )
        pool = TaskPool()
        consumer._backlog.pools.append(pool)
        consumer._gather(pool, self.options.max_in_flight)
        self._consumers.append(consumer)
        ticks = asyncio.create_task(_wake_regularly())
        try:
            await consumer.start()
            while True:
                # Not ``async for``, which would be one worker with the last message: it would count
                # as stuck, and stop the consumer, while that message's task is overdue.
                message = await anext(consumer, None)
                if message is None:
                    return
                early_s = self._seconds_early(message)
                if early_s > MIN_DEFER_S:  # nsqd forgets delays when it restarts
                    message.requeue(early_s, backoff=False)
                    continue
                pool.add(message)
                yield AckableMessage(data=message.body, ack=partial(pool.finish, message))
        finally:
            ticks.cancel()
            consumer.begin_stop()

    def _seconds_early(self, message: Message) -> float:
        """Return for how long the delay of a task has yet to last."""
        if b"delay" not in message.body:
            return 0.0
        try:
            delay_s = float(self.formatter.loads(message.body).labels.get("delay") or 0)
        except Exception:  # taskiq logs and drops it
            return 0.0
        return message.timestamp_ns / 1e9 + delay_s - time.time()


async def _wake_regularly() -> None:
    while True:
        await asyncio.sleep(SIGNAL_CHECK_S)
