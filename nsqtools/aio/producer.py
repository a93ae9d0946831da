"""Producer for asyncio: `nsqtools.Producer` with awaitable outcomes.

A full window must not block the event loop's thread, so tasks wait for room in a queue. The I/O
thread reports outcomes in groups, and wakes the event loop once for each group.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nsqtools.client import outcomes
from nsqtools.client.producer import ProducerCore, schedule_request
from nsqtools.client.publication import PendingPublication, Publication
from nsqtools.errors import ConfigurationError, PublishError
from nsqtools.protocol.arguments import NUMBER, check_argument

if TYPE_CHECKING:
    from datetime import datetime

    from _typeshed import ReadableBuffer

T = TypeVar("T")


def claim_running_loop(
    previous: asyncio.AbstractEventLoop | None, owner: object, *, has_waiters: bool = False
) -> asyncio.AbstractEventLoop:
    """Return the running event loop, which the ``owner`` serves from now on.

    Raises `ConfigurationError` if the ``previous`` loop may still have tasks that wait for the
    owner, because they would wait forever.
    """
    loop = asyncio.get_running_loop()
    if previous is None or previous is loop or previous.is_closed():
        return loop
    if previous.is_running() or has_waiters:
        raise ConfigurationError(
            f"{owner!r} is in use by another event loop", hint="Make one for each event loop."
        )
    return loop


class Producer(ProducerCore):
    """Publishes to one or several nsqd from one event loop at a time.

    The parameters are those of `nsqtools.Producer`. A publish from another event loop raises
    `ConfigurationError` while the first one runs. ``linger_s`` joins the publishes of many tasks,
    which is several times faster.

    Cancelling a task does not cancel its publish: the message may be published. Raises
    `ConfigurationError` for a bad address or bad options.
    """

    def _begin_life(self) -> None:
        super()._begin_life()
        self._serve(None)

    def _serve(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Serve an event loop, and forget the tasks of the previous one."""
        self._loop = loop
        self._outcomes: dict[Publication, asyncio.Future[None]] = {}
        # Publishes that wait for room in the window, in order.
        self._waiting: dict[asyncio.Future[Any], Callable[[], None]] = {}
        self._settled: collections.deque[Publication] = collections.deque()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(self._patience_s)

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for outstanding publishes, then close; return whether all settled in time."""
        return await asyncio.shield(asyncio.to_thread(self._stop, timeout_s))

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything published so far has settled; return whether it has in time."""
        began_at = asyncio.get_running_loop().time()
        if waiting := [*self._waiting]:
            await asyncio.wait(waiting, timeout=timeout_s)
        if timeout_s is not None:
            timeout_s += began_at - asyncio.get_running_loop().time()
        has_settled = await asyncio.to_thread(self._flush, timeout_s)
        return has_settled and all(outcome.done() for outcome in waiting)

    async def publish(
        self,
        topic: str,
        body: ReadableBuffer,
        *,
        timeout_s: float | None = None,
        defer_s: float | None = None,
        at: datetime | None = None,
        key: str = "",
    ) -> None:
        """Publish one message and wait for the confirmation. Raises `PublishError`.

        ``timeout_s`` limits the whole call, ``defer_s`` delays the delivery, and ``at`` and ``key``
        are for a message that is published later: see `nsqtools.Producer.publish`.
        """
        if at is not None or key:
            topic, body = schedule_request(topic, body, at, key, defer_s)
        await self._publish(topic, [body], defer_s, timeout_s)

    async def publish_deferred(
        self, topic: str, body: ReadableBuffer, defer_s: float, *, timeout_s: float | None = None
    ) -> None:
        """Publish with ``defer_s``: see `publish`."""
        await self.publish(topic, body, defer_s=defer_s, timeout_s=timeout_s)

    async def publish_many(
        self, topic: str, bodies: Sequence[ReadableBuffer], *, timeout_s: float | None = None
    ) -> None:
        """Publish messages in as few MPUB as nsqd's limits allow, and wait. Raises `PublishError`.

        ``outcomes`` of the error has the result of each: see `nsqtools.Producer.publish_many`.
        """
        parts = self._checked_parts(bodies)
        publishes = [self._publish(topic, part, None, timeout_s) for part in parts]
        errors: list[PublishError | None] = []
        for result in await asyncio.gather(*publishes, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, PublishError):
                raise result
            errors.append(result)
        if error := outcomes.combined_error(list(map(len, parts)), errors):
            raise error

    async def submit(
        self,
        topic: str,
        bodies: Sequence[ReadableBuffer],
        *,
        defer_s: float | None = None,
        timeout_s: float | None = None,
        on_settled: Callable[[Publication], None] | None = None,
        splits: bool = False,
    ) -> Publication:
        """Submit a publish, and return it once the window has room. Await it for its outcome.

            publication = await producer.submit("clicks", [b"..."])
            await publication

        It works like `nsqtools.Producer.submit`; ``on_settled`` runs on the I/O thread.
        """

        def begin(left_s: float | None, submitted: asyncio.Future[Publication]) -> None:
            publication = self._submit(topic, bodies, defer_s, left_s, on_settled, splits)
            publication.add_done_callback(self._add_settled)  # others may wait for its room
            submitted.set_result(publication)

        return await self._when_room(begin, len(bodies), timeout_s)

    async def _publish(
        self,
        topic: str,
        bodies: Sequence[ReadableBuffer],
        defer_s: float | None,
        timeout_s: float | None,
    ) -> None:
        def begin(left_s: float | None, outcome: asyncio.Future[None]) -> None:
            publication = self._submit(topic, bodies, defer_s, left_s, self._add_settled)
            self._outcomes[publication] = outcome

        await self._when_room(begin, len(bodies), timeout_s)

    async def _when_room(
        self,
        begin: Callable[[float | None, asyncio.Future[T]], None],
        count: int,
        timeout_s: float | None,
    ) -> T:
        """Call ``begin`` once the window has room, and await the future that it gets.

        It publishes ``count`` messages. Calls are in order.
        """
        if timeout_s is not None:
            check_argument("timeout_s", timeout_s, *NUMBER)
        if self._rate is not None:
            delay_s = self._rate_delay_s(count, timeout_s)
            await asyncio.sleep(delay_s)
            timeout_s = None if timeout_s is None else timeout_s - delay_s
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            with self._lock:  # several threads may each have a loop
                waiters = [*self._outcomes.values(), *self._waiting]
                has_waiters = not all(outcome.done() for outcome in waiters)
                self._serve(claim_running_loop(self._loop, self, has_waiters=has_waiters))
        outcome: asyncio.Future[T] = loop.create_future()
        limit_s = self.options.publish_timeout_s if timeout_s is None else timeout_s
        give_up_at = loop.time() + limit_s

        def begin_now() -> None:
            begin(None if timeout_s is None else max(0.0, give_up_at - loop.time()), outcome)

        # Without room `_submit` would block the event loop.
        if self._has_room and not self._waiting:
            begin_now()
            return await outcome
        self._waiting[outcome] = begin_now
        timer = loop.call_at(give_up_at, self._refuse, outcome, limit_s)
        try:
            return await outcome
        finally:
            timer.cancel()
            self._waiting.pop(outcome, None)  # it is still there if the task was cancelled

    # -- the window -----------------------------------------------------------------------------

    def _release_window(self, publications: Iterable[PendingPublication]) -> None:
        super()._release_window(publications)
        self._call_soon(self._begin_waiting)

    def _begin_waiting(self) -> None:
        while self._waiting and self._has_room:
            outcome = next(iter(self._waiting))
            begin = self._waiting.pop(outcome)
            try:
                if not outcome.done():  # its task may have been cancelled
                    begin()
            except Exception as exc:
                outcome.set_exception(exc)

    def _refuse(self, outcome: asyncio.Future[Any], waited_s: float) -> None:
        if self._waiting.pop(outcome, None) is not None and not outcome.done():
            outcome.set_exception(self._no_room(waited_s))

    # -- outcomes -------------------------------------------------------------------------------

    def _add_settled(self, publication: Publication) -> None:  # on the I/O thread
        self._settled.append(publication)
        if len(self._settled) == 1:
            self._call_soon(self._take_settled)

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the event loop has ended, and its tasks with it

    def _take_settled(self) -> None:
        settled = self._settled
        while settled:
            publication = settled[0]
            outcome = self._outcomes.pop(publication, None)
            if outcome is not None and not outcome.done():  # its task may have been cancelled
                if publication.error is None:
                    outcome.set_result(None)
                else:
                    outcome.set_exception(publication.error)
            # Removed last: `_add_settled` schedules a call only if the queue was empty.
            settled.popleft()
        self._begin_waiting()

    def __repr__(self) -> str:
        return super().__repr__().replace("<Producer", "<aio.Producer")
