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
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Self

from nsqtools.client import consumer as client
from nsqtools.client.backlog import MAX_SLEEP_S, Backlog, ConsumerStats
from nsqtools.client.giving_up import Policy
from nsqtools.client.handling import Handling, OnHandled, StopSignals, check_count
from nsqtools.client.message import Batch, Gathered, Message, give_back
from nsqtools.client.options import ClientOptions
from nsqtools.errors import NsqError

SHARE_S = 0.005  # how much work is taken at a time


class Consumer:
    """A channel of one or several topics, on all nsqd that have them, for one event loop.

    The parameters are those of `nsqtools.Consumer`; ``on_error`` is called on the I/O thread and
    ``on_giving_up`` on the event loop's, and neither may block.

    Raises `ConfigurationError` for bad names, addresses or options.
    """

    def __init__(
        self,
        topic: str | Sequence[str],
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] = (),
        lookupd_http_addresses: str | Sequence[str] = (),
        options: ClientOptions | None = None,
        address_map: Mapping[str, str] | None = None,
        on_error: Callable[[NsqError], None] | None = None,
        on_giving_up: Callable[[Message], object] | None = None,
        giving_up: Policy = "requeue",
        dead_letter: str = "",
    ) -> None:
        self._backlog = _LoopBacklog()
        self._consumer = _Source(
            topic,
            channel,
            nsqd_tcp_addresses=nsqd_tcp_addresses,
            lookupd_http_addresses=lookupd_http_addresses,
            options=options,
            address_map=address_map,
            on_error=on_error,
            on_giving_up=on_giving_up,
            giving_up=giving_up,
            dead_letter=dead_letter,
            _backlog=self._backlog,
        )
        # what was taken and not handed out yet: from `_reached` to `_count`
        self._held: Batch
        self._in_flight: Mapping[bytes, Message] = {}
        self._count = self._reached = 0
        self._taken_at = self._until = 0.0
        self._most = 1

    @property
    def topics(self) -> list[str]:
        return self._consumer.topics

    @property
    def channel(self) -> str:
        return self._consumer.channel

    # -- life -----------------------------------------------------------------------------------

    async def start(self, *, fail_fast: bool = False) -> None:
        """Connect. With ``fail_fast`` wait for the first tries, and raise the first error if none
        of them led to a connection; otherwise failures are logged and tried again."""
        self._backlog.serve(asyncio.get_running_loop())
        if fail_fast:
            await asyncio.to_thread(self._consumer.start, fail_fast=True)
        else:
            self._consumer.start()

    def begin_stop(self, *, drain: bool = False) -> None:
        """End the iteration: `nsqtools.Consumer.begin_stop`. Leaving ``async with`` waits for it.

        Without ``drain`` messages that no task has got are requeued at once; with it they are
        still delivered.
        """
        self._consumer.begin_stop(drain=drain)
        if not drain:
            self._requeue_held()

    def _requeue_held(self) -> None:
        if rest := self._take_held():
            give_back(rest)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop, as leaving ``with`` does: `nsqtools.Consumer`."""
        if kind is not None or not self._consumer.has_begun_to_stop:
            self._consumer.abort()
        self._requeue_held()
        await asyncio.shield(asyncio.to_thread(self._consumer.wait_for_end))

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

        Raises `ConfigurationError` with ``signals`` outside the main thread, for a
        ``concurrency`` below 1, and for a handler that returns nothing to await.
        """
        check_count("concurrency", concurrency)
        handling = Handling(handler, answers=auto_answer, on_handled=on_handled)
        with StopSignals(self._consumer, signals) as stop_signals:
            await self.start()
            if auto_touch:
                self._consumer.touch_with(handling.touch)
            tasks = {asyncio.create_task(self._work(handling)) for _ in range(concurrency)}
            try:
                pending = tasks
                while pending:
                    # a signal that comes just before the event loop goes to sleep does not wake it
                    done, pending = await asyncio.wait(
                        pending, timeout=MAX_SLEEP_S, return_when=asyncio.FIRST_EXCEPTION
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
                await asyncio.to_thread(self._consumer.wait_for_end)
        if handling.misuse is not None:
            raise handling.misuse

    async def _work(self, handling: Handling) -> None:
        async for message in self:
            await handling.handle_in_task(message)
            if handling.misuse is not None:
                self.begin_stop()
                return

    async def batches(self, size: int = 500, within_s: float = 1.0) -> AsyncIterator[Batch]:
        """Iterate over batches of ``size`` messages until the consumer stops.

        A batch has fewer where no more came ``within_s`` seconds after the first, or in a quarter
        of msg_timeout. Every message must be answered: `Batch.finish` finishes what is left of a
        batch. Raises `ConfigurationError` for a ``size`` below 1 or above max_in_flight.
        """
        self._consumer.check_size(size, within_s)
        await self.start()
        who = object()
        self._consumer.gather(who, size)
        try:
            while parts := await self._gather(size, within_s):
                if batch := Gathered(parts):
                    yield batch
        finally:
            self._consumer.gather(who, 0)

    async def _gather(self, size: int, within_s: float) -> list[Batch]:
        parts: list[Batch] = []
        until = math.inf
        is_full: list[bool] | None = None
        while size and (left_s := until - time.monotonic()) > 0:
            has_stopped = self._backlog.has_stopped
            is_last = bool(is_full and is_full[0])  # read before the backlog, as ``has_stopped``
            self._backlog.expect()
            more = self._consumer.take_some_now(size)
            if more:
                until = min(until, client.gather_until(more, within_s))
                parts += more
                size -= sum(map(len, more))
                is_full = None
            elif has_stopped or (is_last and self._backlog.is_empty):
                break
            else:
                if parts and (is_full is None or is_full):
                    is_full = self._consumer.ask_if_full(within_s)
                try:
                    wait_s = min(left_s, client.GATHER_LOOK_S) if parts else None
                    await asyncio.wait_for(self._backlog.wait(), wait_s)
                except TimeoutError:
                    pass
        return parts

    def __aiter__(self) -> Self:
        """Iterate over messages until the consumer stops. Each must be answered.

        Several tasks may iterate at the same time: each message goes to one of them.
        """
        return self

    async def __anext__(self) -> Message:
        while True:
            # everything here is once a message: attributes, not calls
            while (reached := self._reached) < self._count and (
                not reached or time.monotonic() < self._until
            ):
                message = self._held[reached]
                self._reached = reached + 1
                if self._in_flight.get(message.id) is message:
                    return message
            if self._count:
                self._return_rest()
                await asyncio.sleep(0)
                continue
            has_stopped = self._backlog.has_stopped
            self._backlog.expect()
            batch = self._consumer.take_now(self._most)
            if batch is not None:
                self._hold(batch)
            elif has_stopped:
                raise StopAsyncIteration
            else:
                await self._backlog.wait()

    def _hold(self, batch: Batch) -> None:
        self._held = batch
        self._in_flight = batch.source.in_flight
        self._count, self._reached = len(batch), 0
        self._taken_at = time.monotonic()
        self._until = self._taken_at + 2 * SHARE_S

    def _return_rest(self) -> None:
        """Return what took too long to come to, and fit how much is taken next."""
        took_s = time.monotonic() - self._taken_at
        share = int(self._reached * SHARE_S / max(took_s, 1e-6))
        self._most = max(1, min(4 * self._most, share))
        if rest := self._take_held():
            self._consumer.put_back([rest])

    def _take_held(self) -> Batch | None:
        """Return what was taken and not handed out, and forget it."""
        reached, count, self._count = self._reached, self._count, 0
        return Batch(self._held.source, self._held[reached:]) if reached < count else None

    # -- state ----------------------------------------------------------------------------------

    def set_max_in_flight(self, count: int) -> None:
        """Change max_in_flight while running; 0 pauses."""
        self._consumer.set_max_in_flight(count)

    @property
    def is_starved(self) -> bool:
        """Tell whether some connection has 85 % of its RDY in flight."""
        return self._consumer.is_starved

    @property
    def connections(self) -> list[str]:
        """The addresses of the nsqd connected to now."""
        return self._consumer.connections

    def health(self) -> client.ConsumerHealth:
        """How the consumer is now: for a probe, or for metrics."""
        return self._consumer.health()

    @property
    def stats(self) -> ConsumerStats:
        """Counts since the start."""
        return self._consumer.stats

    def __repr__(self) -> str:
        return repr(self._consumer).replace("<_Source", "<aio.Consumer")


class _LoopBacklog(Backlog):
    """Wakes an event loop when something is put in."""

    def __init__(self) -> None:
        super().__init__(on_entry=self._wake)
        self.has_stopped = False
        self.takers = weakref.WeakSet()
        self._waiting = 0  # tasks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filled = asyncio.Event()
        self._is_expected = False
        self._wakes = threading.Lock()

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def put(self, entry: object, *, is_first: bool = False) -> None:
        if isinstance(entry, client.Stopped):
            self.has_stopped = True  # before it wakes a task: what came earlier is taken first
        super().put(entry, is_first=is_first)

    def _wake(self) -> None:
        with self._wakes:
            is_expected, self._is_expected = self._is_expected, False
        if is_expected and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:
                pass  # the event loop has ended

    def expect(self) -> None:
        """What is put in from here on ends the next `wait` (the event loop)."""
        self._filled.clear()
        with self._wakes:
            self._is_expected = True

    async def wait(self) -> None:
        self.takers.add(asyncio.current_task())
        self._waiting += 1
        try:
            await self._filled.wait()
        finally:
            self._waiting -= 1

    @property
    def is_asked(self) -> bool:
        return self._waiting > 0


class _Source(client.Consumer):
    """What the event loop needs of a consumer, without blocking."""

    @property
    def has_begun_to_stop(self) -> bool:
        return self._is_stopping

    def touch_with(self, touch: Callable[[float], None]) -> None:
        """Have a call made several times in msg_timeout (on the I/O thread)."""
        self._io.delivery.on_tick = touch

    def take_some_now(self, most: int) -> list[Batch] | None:
        """Return what is there, at most ``most`` messages together, or None."""
        return self._take(0, most, several=True)

    def take_now(self, most: int) -> Batch | None:
        """Return what is there, at most ``most`` messages, or None."""
        batches = self._take(0, most)
        return batches[0] if batches else None
