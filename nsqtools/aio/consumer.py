"""Consumer for asyncio: hands the messages of `nsqtools.Consumer` to tasks of one event loop.

The I/O thread puts messages into the backlog and wakes the event loop; a task takes messages from
it without blocking. Messages are taken in small numbers and handed out one by one, so that
concurrent tasks share them. The others stay in the backlog, which returns them to nsqd when they
have waited too long.

Trap: a loop body that never waits would block the event loop. So the iterator yields to other tasks
whenever it takes messages.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import chain
from typing import Any, Self

from nsqtools.aio.producer import claim_running_loop
from nsqtools.client.backlog import MAX_SLEEP_S, Backlog, Worker
from nsqtools.client.consumer import RATE_CHECK_S, TARGET_HOLD_S, BatchCollector, ConsumerCore
from nsqtools.client.handling import Handling, OnHandled, check_count
from nsqtools.client.message import Batch, Message, requeue_undelivered
from nsqtools.client.rate_limit import RateLimit
from nsqtools.protocol.arguments import NONE, NUMBER, check_argument


class _LoopBacklog(Backlog):
    """A backlog that wakes an event loop when an entry is added."""

    def __init__(self) -> None:
        super().__init__(on_entry=self._wake)
        self.iterators = weakref.WeakSet()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._filled: asyncio.Event
        # Whether the next entry must wake the event loop. A deque instead of a flag with a lock, as
        # a signal handler may have interrupted the lock's owner.
        self._wakes: collections.deque[None] = collections.deque(maxlen=1)

    def _wake(self) -> None:
        if self._wakes and self.loop is not None:
            # Another thread may have taken the token, and the event loop may have ended.
            with suppress(IndexError, RuntimeError):
                self._wakes.pop()
                self.loop.call_soon_threadsafe(self._filled.set)

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake this event loop from now on."""
        if loop is not self.loop:
            self._filled = asyncio.Event()  # an event belongs to the loop that waits for it
            self.loop = loop

    def prepare_wait(self) -> None:
        """Let every entry that is added from now on end the next `wait`."""
        self._filled.clear()
        self._wakes.append(None)

    async def wait(self) -> None:
        """Wait for an entry that was added since `prepare_wait`."""
        task = asyncio.current_task()
        self.iterators.add(task)
        self._waiters.add(task)
        try:
            await self._filled.wait()
        finally:
            self._waiters.discard(task)


class Consumer(ConsumerCore):
    """A channel of one or several topics, on all nsqd that have them, for one event loop.

    The parameters are those of `nsqtools.Consumer`. ``on_error`` runs on the I/O thread and
    ``on_giving_up`` on the event loop's thread, and neither may block.

    Raises `ConfigurationError` for bad names, addresses or options, and in a second event loop
    while the first one runs.
    """

    _new_backlog = _LoopBacklog
    _backlog: _LoopBacklog
    # Messages that were taken are shared by the tasks: they are `ahead` of all of them.
    _until = _yields_at = 0.0
    _reached = 0  # the number that was handed out since the last taking
    _share = 1  # messages to take at a time

    # -- life -----------------------------------------------------------------------------------

    async def start(self, *, fail_fast: bool = False) -> None:
        """Connect.

        With ``fail_fast``, wait for the first attempts, and raise the first error if none of them
        succeeded; otherwise failures are logged and retried.
        """
        with self._life:  # several threads may each have a loop
            self._backlog.serve(claim_running_loop(self._backlog.loop, self))
        if fail_fast:
            await asyncio.to_thread(self._begin, fail_fast=True)
        else:
            self._begin(fail_fast=False)

    def begin_stop(self, *, drain: bool = False) -> None:
        """End the iteration: see `nsqtools.Consumer`. Leaving ``async with`` waits for it.

        Without ``drain``, messages that no task has received are requeued immediately; with it they
        are still delivered.
        """
        super().begin_stop(drain=drain)
        if not drain:
            self._requeue_remainder()

    async def stop(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Stop, and wait until all delivered messages are answered and the answers sent.

        Returns whether the consumer has stopped. It has not after ``timeout_s``, and not if called
        by a handler or a loop with an unanswered message, because the wait would be for the caller
        itself. Unanswered messages are requeued after drain_timeout. May be called again.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        self.begin_stop(drain=drain)
        task = asyncio.current_task()
        workers = [worker for worker in list(self._backlog.workers) if worker.task is task]
        if any(not message.is_answered for worker in workers for message in worker.messages):
            return False
        return await asyncio.shield(asyncio.to_thread(self.wait_for_end, timeout_s))

    def _requeue_remainder(self) -> None:
        for batch in self._shared.take_ahead():
            requeue_undelivered(batch)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop, as leaving ``with`` does: `nsqtools.Consumer`."""
        if kind is not None or not self._is_stopping:
            self.abort()
        self._requeue_remainder()
        await asyncio.shield(asyncio.to_thread(self.wait_for_end))

    # -- messages -------------------------------------------------------------------------------

    async def run(
        self,
        handler: Callable[[Message], Awaitable[object]],
        *,
        concurrency: int = 50,
        signals: bool | None = None,
        auto_answer: bool = True,
        auto_touch: bool = False,
        on_handled: OnHandled | None = None,
    ) -> None:
        """Await ``handler`` with each message until the consumer stops, ``concurrency`` at a time.

        It works like `nsqtools.Consumer.run`: a message that the handler has not answered is
        finished when the handler returns, and requeued when it returns False or raises; SIGTERM and
        SIGINT stop it. Cancelling `run` cancels the handlers, and requeues their messages
        immediately.

        Raises `ConfigurationError` with ``signals`` outside the main thread, for a ``concurrency``
        below 1, and for a handler that returns nothing to await.
        """
        check_count("concurrency", concurrency)
        handling = Handling(
            handler, answers=auto_answer, on_handled=on_handled, give_up=self._give_up
        )
        with self._stop_signals(signals) as stop_signals:
            await self.start()
            self._auto_touches |= auto_touch
            tasks = {asyncio.create_task(self._work(handling)) for _ in range(concurrency)}
            try:
                pending = tasks
                while pending:
                    # A signal that arrives just before the event loop sleeps does not wake it.
                    when = asyncio.FIRST_EXCEPTION
                    done, pending = await asyncio.wait(
                        pending, timeout=MAX_SLEEP_S, return_when=when
                    )
                    for task in done:
                        task.result()
            except BaseException:
                self.begin_stop()
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if stop_signals:
                await asyncio.to_thread(self.wait_for_end)
        if handling.fatal_error is not None:
            raise handling.fatal_error

    async def _work(self, handling: Handling) -> None:
        async for message in self:
            await handling.handle_in_task(message)
            if handling.fatal_error is not None:
                self.begin_stop()
                return

    async def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch, or None after ``timeout_s`` and when the consumer has stopped.

        It works like `nsqtools.Consumer.next_batch`.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        await self.start()
        batches = await self._take_in(timeout_s, sys.maxsize, several=False)
        return batches[0] if batches else None

    async def batches(self, size: int = 100, within_s: float = 1.0) -> AsyncIterator[Batch]:
        """Iterate over batches of ``size`` messages until the consumer stops.

        A batch has fewer if no others arrived within ``within_s`` seconds or a quarter of
        msg_timeout after the first, or if the next one has another topic. Every message must be
        answered; `Batch.finish` finishes those that have no answer. Raises `ConfigurationError` for
        a ``size`` below 1 or above max_in_flight.
        """
        self._check_size(size, within_s)
        await self.start()
        worker = Worker(has_batch=True, task=asyncio.current_task())
        self._gather(worker, size)
        self._backlog.workers.add(worker)
        try:
            while True:
                collector = BatchCollector(self, size, within_s, None)
                try:
                    while collector.add(await self._take_in(collector.wait_s, collector.room)):
                        pass
                except BaseException:  # usually a cancellation; no handler has seen these messages
                    for part in collector.parts:
                        requeue_undelivered(part)
                    raise
                if (batch := collector.batch()) is None:
                    return
                worker.since, worker.taken = time.monotonic(), batch
                if batch:
                    yield batch
                worker.taken = ()
        finally:
            self._backlog.workers.discard(worker)
            self._gather(worker, 0)

    async def _take_in(
        self, wait_s: float | None, max_messages: int, *, several: bool = True
    ) -> list[Batch] | None:
        """Take batches within ``wait_s``, like `_take`, without blocking the event loop."""
        until = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        while True:
            if self._rate is not None:
                await self._wait_for_rate(self._rate, until)
            is_delivered = self._is_delivered  # read before the backlog
            self._backlog.prepare_wait()
            batches = self._take(0, max_messages, several=several)
            if batches or is_delivered or wait_s == 0:
                return batches
            try:
                # Until a fixed time: another task may take the entry that wakes this one.
                async with asyncio.timeout_at(until):
                    await self._backlog.wait()
            except TimeoutError:
                return None

    async def _wait_for_rate(self, rate: RateLimit, until: float | None) -> None:
        while self._waits_for_rate(rate) and (until is None or time.monotonic() < until):
            await asyncio.sleep(min(rate.wait_s(time.monotonic()), RATE_CHECK_S))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over messages until the consumer stops. Each must be answered.

        Several tasks may iterate at the same time: each message goes to one of them.
        """
        return _Loop(self)

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Return the next message outside of a loop. No worker has the message then."""
        return _Loop(self).__anext__()

    def _return_remainder(self) -> None:
        """Return messages that were not reached in time, and adapt the next share."""
        took_s = max(time.monotonic() - self._shared.since, 1e-6)
        self._share = max(1, min(4 * self._share, int(self._reached * TARGET_HOLD_S / took_s)))
        self._reached = 0
        self._io.expect_finish(False)
        if self._shared.ahead:
            self._put_back(self._shared.take_ahead())

    def __repr__(self) -> str:
        return super().__repr__().replace("<Consumer", "<aio.Consumer")


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # the iterator is made outside of an event loop
        return None


class _Loop:
    """One ``async for`` loop, which is a worker until its iterator is dropped."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._worker = Worker(task=_current_task())
        consumer._backlog.workers.add(self._worker)

    def __del__(self) -> None:
        self._consumer._backlog.workers.discard(self._worker)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        consumer, worker = self._consumer, self._worker
        shared, ahead = consumer._shared, consumer._shared.ahead
        while True:
            # Fetched messages belong to the event loop that fetched them, so another loop is
            # refused before it gets one. That costs each message one call.
            if consumer._backlog.loop is not asyncio.get_running_loop():
                await consumer.start()
            # This runs for every message, so it reads attributes and makes no calls.
            while ahead and (not consumer._reached or time.monotonic() < consumer._until):
                try:
                    message = ahead.popleft()
                except IndexError:  # the I/O thread has just returned the last ones
                    break
                consumer._reached += 1
                if message._source.in_flight.get(message.id) is message:
                    worker.current, worker.since = message, shared.since
                    return message
            worker.current = None
            if consumer._reached:
                consumer._return_remainder()
                if (now := time.monotonic()) >= consumer._yields_at:
                    # A handler that awaits nothing must not block the event loop. Not after each
                    # batch: with a message on each of many connections, that doubles the cost.
                    consumer._yields_at = now + TARGET_HOLD_S
                    await asyncio.sleep(0)
                continue
            if consumer._rate is not None:
                await consumer._wait_for_rate(consumer._rate, None)
            is_delivered = consumer._is_delivered  # read before the backlog
            consumer._backlog.prepare_wait()
            if batches := consumer._take(0, consumer._share, several=True):
                shared.since = time.monotonic()
                consumer._until = shared.since + 2 * TARGET_HOLD_S
                ahead.extend(chain(*batches))
                consumer._io.expect_finish(len(ahead) > 1)
            elif is_delivered:
                raise StopAsyncIteration
            else:
                await consumer._backlog.wait()
