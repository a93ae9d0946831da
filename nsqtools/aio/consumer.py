"""Consumer for asyncio: hands the messages of `nsqtools.Consumer` to tasks of one event loop.

The I/O thread puts messages in the backlog and wakes the event loop; a task that wants one takes it
there without blocking. Messages are taken in small numbers and handed out one by one, so that tasks
that iterate at the same time share them, and what was not handed out stays with the backlog, which
returns it to nsqd when it has waited too long.

Trap: a loop body that never really waits would keep the event loop to itself. So the iterator
yields to other tasks whenever it takes messages.
"""

from __future__ import annotations

import asyncio
import collections
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Self

from nsqtools.aio.producer import claim_running_loop
from nsqtools.client.backlog import MAX_SLEEP_S, Backlog, Worker
from nsqtools.client.consumer import TARGET_HOLD_S, BatchCollector, ConsumerCore
from nsqtools.client.handling import Handling, OnHandled, check_count
from nsqtools.client.message import Batch, Message, requeue_undelivered


class _LoopBacklog(Backlog):
    """Wakes an event loop when something is put in."""

    def __init__(self) -> None:
        super().__init__(on_entry=self._wake)
        self.iterators = weakref.WeakSet()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._filled: asyncio.Event
        # something, by who looks; no lock, which a signal handler may have interrupted us with
        self._expected: collections.deque[None] = collections.deque(maxlen=1)

    def _wake(self) -> None:
        if self._expected and self.loop is not None:
            # several threads may meet here; and the event loop may have ended
            with suppress(IndexError, RuntimeError):
                self._expected.pop()
                self.loop.call_soon_threadsafe(self._filled.set)

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake this event loop from here on."""
        if loop is not self.loop:
            self._filled = asyncio.Event()  # which belongs to the loop that waited for it
            self.loop = loop

    def expect(self) -> None:
        """What is put in from here on ends the next `wait` (the event loop)."""
        self._filled.clear()
        self._expected.append(None)

    async def wait(self) -> None:
        task = asyncio.current_task()
        self.iterators.add(task)
        self._asking.add(task)
        try:
            await self._filled.wait()
        finally:
            self._asking.discard(task)


class Consumer(ConsumerCore):
    """A channel of one or several topics, on all nsqd that have them, for one event loop.

    The parameters are those of `nsqtools.Consumer`; ``on_error`` is called on the I/O thread and
    ``on_giving_up`` on the event loop's, and neither may block.

    Raises `ConfigurationError` for bad names, addresses or options, and in another event loop while
    the first one runs.
    """

    _new_backlog = _LoopBacklog
    backlog: _LoopBacklog
    # what was taken and not handed out yet: from `_reached` to `_count`
    _held: Batch
    _in_flight: Mapping[bytes, Message]
    _count = _reached = 0
    _taken_at = _until = 0.0
    _most = 1

    # -- life -----------------------------------------------------------------------------------

    async def start(self, *, fail_fast: bool = False) -> None:
        """Connect. With ``fail_fast`` wait for the first tries, and raise the first error if none
        of them led to a connection; otherwise failures are logged and tried again."""
        with self._life:  # several threads may each have a loop
            self.backlog.serve(claim_running_loop(self.backlog.loop, self))
        if fail_fast:
            await asyncio.to_thread(self._begin, fail_fast=True)
        else:
            self._begin(fail_fast=False)

    def begin_stop(self, *, drain: bool = False) -> None:
        """End the iteration: see `nsqtools.Consumer`. Leaving ``async with`` waits for it.

        Without ``drain`` messages that no task has got are requeued at once; with it they are still
        delivered.
        """
        super().begin_stop(drain=drain)
        if not drain:
            self._requeue_held()

    def _requeue_held(self) -> None:
        if rest := self._take_held():
            requeue_undelivered(rest)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop, as leaving ``with`` does: `nsqtools.Consumer`."""
        if kind is not None or not self._is_stopping:
            self.abort()
        self._requeue_held()
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

        It works as `nsqtools.Consumer.run`: what the handler has not answered is finished when it
        returns, and requeued when it returns False or raises; SIGTERM and SIGINT stop it. When
        `run` is cancelled, so are the handlers, and what they had is requeued at once.

        Raises `ConfigurationError` with ``signals`` outside the main thread, for a ``concurrency``
        below 1, and for a handler that returns nothing to await.
        """
        check_count("concurrency", concurrency)
        handling = Handling(handler, answers=auto_answer, on_handled=on_handled)
        with self._stop_signals(signals) as stop_signals:
            await self.start()
            self._auto_touches |= auto_touch
            tasks = {asyncio.create_task(self._work(handling)) for _ in range(concurrency)}
            try:
                pending = tasks
                while pending:
                    # a signal that comes just before the event loop goes to sleep does not wake it
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

    async def batches(self, size: int = 100, within_s: float = 1.0) -> AsyncIterator[Batch]:
        """Iterate over batches of ``size`` messages until the consumer stops.

        A batch has fewer where no more came ``within_s`` seconds after the first, or in a quarter
        of msg_timeout, or some of them were of another topic. Every message must be answered:
        `Batch.finish` finishes what is left of a batch. Raises `ConfigurationError` for a ``size``
        below 1 or above max_in_flight.
        """
        self._check_size(size, within_s)
        await self.start()
        worker = Worker(has_batch=True)
        self.gather(worker, size)
        self.backlog.workers.add(worker)
        try:
            while True:
                collector = BatchCollector(self, size, within_s, None)
                try:
                    while collector.add(await self._take_in(collector.wait_s, collector.room)):
                        pass
                except BaseException:  # cancelled, as a rule: no handler has seen these
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
            self.backlog.workers.discard(worker)
            self.gather(worker, 0)

    async def _take_in(self, wait_s: float | None, most: int) -> list[Batch] | None:
        """Take what is there, or what comes next in ``wait_s``: `_take` without blocking."""
        until = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        while True:
            is_delivered = self.is_delivered  # read before the backlog
            self.backlog.expect()
            taken = self._take(0, most, several=True)
            if taken or is_delivered or wait_s == 0:
                return taken
            try:
                # no longer where another task takes what wakes this one
                async with asyncio.timeout_at(until):
                    await self.backlog.wait()
            except TimeoutError:
                return None

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over messages until the consumer stops. Each must be answered.

        Several tasks may iterate at the same time: each message goes to one of them.
        """
        return _Loop(self)

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Return the next message, outside of a loop: no worker has it then."""
        return _Loop(self).__anext__()

    def _return_rest(self) -> None:
        """Return what took too long to come to, and fit how much is taken next."""
        share = int(self._reached * TARGET_HOLD_S / max(time.monotonic() - self._taken_at, 1e-6))
        self._most = max(1, min(4 * self._most, share))
        if rest := self._take_held():
            self._put_back([rest])

    def _take_held(self) -> Batch | None:
        """Return what was taken and not handed out, and forget it."""
        reached, count, self._count = self._reached, self._count, 0
        return Batch(self._held.source, self._held[reached:]) if reached < count else None

    def __repr__(self) -> str:
        return super().__repr__().replace("<Consumer", "<aio.Consumer")


class _Loop:
    """One ``async for``, which is a worker until its iterator is dropped."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._worker = Worker()
        consumer.backlog.workers.add(self._worker)

    def __del__(self) -> None:
        self._consumer.backlog.workers.discard(self._worker)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        consumer, worker = self._consumer, self._worker
        while True:
            # Fetched messages belong to the event loop that fetched them, so another loop is
            # refused before it gets one. That costs each message one call.
            if consumer.backlog.loop is not asyncio.get_running_loop():
                await consumer.start()
            # everything here is once a message: attributes, not calls
            while (reached := consumer._reached) < consumer._count and (
                not reached or time.monotonic() < consumer._until
            ):
                message = consumer._held[reached]
                consumer._reached = reached + 1
                if consumer._in_flight.get(message.id) is message:
                    worker.current, worker.since = message, consumer._taken_at
                    return message
            worker.current = None
            if consumer._count:
                consumer._return_rest()
                await asyncio.sleep(0)
                continue
            is_delivered = consumer.is_delivered  # read before the backlog
            consumer.backlog.expect()
            if taken := consumer._take(0, consumer._most):
                consumer._held = taken[0]
                consumer._in_flight = consumer._held.source.in_flight
                consumer._count, consumer._reached = len(consumer._held), 0
                consumer._taken_at = time.monotonic()
                consumer._until = consumer._taken_at + 2 * TARGET_HOLD_S
            elif is_delivered:
                raise StopAsyncIteration
            else:
                await consumer.backlog.wait()
