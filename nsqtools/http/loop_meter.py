"""An event loop that measures its turns and shares each turn among busy clients.

In one turn a loop waits in ``select`` and then runs the ready callbacks. Everything that becomes
ready meanwhile waits for the next turn. The selector sees the begin and the end of a turn, so it
measures each turn in wall time and in CPU time of the thread. Wall time includes other programs.

A client that waits for each answer makes a turn of each message. asyncio would take half of the
time of such a turn, so the selector itself runs the callbacks of connections that have input, and
returns when the loop has other work. A message then takes three system calls: wait, read, write.

Busy clients share a turn of 8 ms. A share is 8 ms divided by the number of clients that asked in
the turn before, but at most 2 ms. A client that finds the turn used up gets its share in the next
turn, before the clients that already had one (`LoopMeter.soon`). So the number of busy clients does
not delay an idle client, whose command runs as soon as it is read.

The daemon divides its own long work into steps of 2 ms (`in_steps`, `free_in_steps`).
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from asyncio import sleep
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextvars import Context
from itertools import islice
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple

_TURN_S = 0.008
_MAX_SHARE_S = 0.002
_MIN_SHARE_S = 0.0002
_RETRY_S = 1.0  # after work has raised
_MAX_READY = 64  # connections to read from, or to clean up, in a turn
_CPU_STEP_S = 0.001
_MAX_WAIT_S = 3600.0
_READ = selectors.EVENT_READ
_FULL_SHARES = _TURN_S / _MAX_SHARE_S

Ready = tuple[selectors.SelectorKey, int]
Arguments = TypeVarTuple("Arguments")


class LoopMeter(selectors.DefaultSelector):
    """The selector of a loop, and its measurements in seconds.

    ``pending`` has the callbacks that the loop will run after `select`, and ``wakes_at_s`` is the
    time of its first timer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending: Collection[object] = (None,)  # of a loop that is no `MeteredLoop`
        self.wakes_at_s = 0.0
        self.longest_s = self.longest_cpu_s = 0.0
        self._shares = 0  # given in this turn
        self._share_s = _MAX_SHARE_S
        self._waiting: deque[Callable[[], object]] = deque()  # for a share
        self._is_due = False
        self._first_ready = 0
        self._began_s = time.monotonic()
        self._began_cpu_s = time.thread_time()
        self._unmeasured_s = 0.0

    def select(self, timeout: float | None = None) -> list[Ready]:
        """Read from connections until the loop has other work; measure each turn."""
        wait, clock_s = super().select, time.monotonic
        now_s = clock_s()
        timeout = _MAX_WAIT_S if timeout is None else timeout
        self.wakes_at_s = now_s + timeout
        others: list[Ready] = []
        while True:
            self._end_turn(now_s)
            ready = wait(timeout)
            self._began_s = clock_s()
            for event in ready if len(ready) <= _MAX_READY else self._rotated(ready):
                key, events = event
                reader = key.data[0]  # handles to read and to write, as asyncio registers them
                if events == _READ and not reader.cancelled():
                    reader._run()
                else:
                    others.append(event)
            now_s = clock_s()
            timeout = self.wakes_at_s - now_s
            if others or self.pending or timeout <= 0:
                return others

    def _end_turn(self, now_s: float) -> None:
        took_s = now_s - self._began_s
        # The CPU clock is a system call, so it is read after 1 ms of work, in one turn or several.
        self._unmeasured_s += took_s
        if self._unmeasured_s >= _CPU_STEP_S:
            self._unmeasured_s = 0.0
            cpu_s = time.thread_time()
            self.longest_cpu_s = max(self.longest_cpu_s, min(took_s, cpu_s - self._began_cpu_s))
            self.longest_s = max(self.longest_s, took_s)
            self._began_cpu_s = cpu_s
        requests = self._shares + len(self._waiting)
        self._share_s = _MAX_SHARE_S
        if requests > _FULL_SHARES:
            self._share_s = max(_MIN_SHARE_S, _TURN_S / requests)
        self._shares = 0

    def _rotated(self, ready: list[Ready]) -> list[Ready]:
        """Return `_MAX_READY` connections in rotation; the next wait reports the others again."""
        start = self._first_ready = (self._first_ready + _MAX_READY) % len(ready)
        return (ready[start:] + ready[:start])[:_MAX_READY]

    @property
    def is_used_up(self) -> bool:
        """Whether the time of this turn has passed, so that clients wait for the next one."""
        return time.monotonic() - self._began_s >= _TURN_S

    def soon(self, work: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        """Call ``work``, which asks for a share, in one of the next turns, first in first out.

        If it raises, the loop reports the exception and calls it again a second later.
        """
        self._waiting.append(work)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(len(self._waiting)):
            work = self._waiting.popleft()
            try:
                work()
            except Exception as exc:  # the others still get their turns
                message = f"{work} failed, and is tried again"
                loop.call_exception_handler({"message": message, "exception": exc})
                loop.call_later(_RETRY_S, self.soon, work, loop)
            if self.is_used_up:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            loop.call_soon(self._run, loop)

    def share_ends_s(self) -> float:
        """Return the time on the loop's clock at which the share of a client ends."""
        self._shares += 1
        return time.monotonic() + (_MIN_SHARE_S if self.is_used_up else self._share_s)

    def forget(self) -> None:
        """Restart the measurement, for example after the start of a daemon."""
        self.longest_s = self.longest_cpu_s = 0.0
        self._began_s = time.monotonic()
        self._began_cpu_s = time.thread_time()


class MeteredLoop(asyncio.SelectorEventLoop):
    """The loop of a daemon."""

    def __init__(self) -> None:
        self.meter = LoopMeter()
        super().__init__(self.meter)
        # No public method tells whether a callback was scheduled, for example by a signal.
        self.meter.pending = self._ready  # type: ignore[attr-defined]

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a timer, and end the wait for input by then."""
        self.meter.wakes_at_s = min(self.meter.wakes_at_s, when)
        return super().call_at(when, callback, *args, context=context)

    async def getaddrinfo(self, *address: Any, **hints: Any) -> list[Any]:
        """Resolve on a daemon thread, so that a silent name server cannot delay the exit."""
        answer: Future[list[Any]] = Future()
        answer.set_running_or_notify_cancel()

        def ask() -> None:
            try:
                answer.set_result(socket.getaddrinfo(*address, **hints))
            except Exception as exc:
                answer.set_exception(exc)

        Thread(target=ask, name="nsqd-look-up", daemon=True).start()
        return await asyncio.wrap_future(answer)


def meter_of(loop: asyncio.AbstractEventLoop) -> LoopMeter:
    """Return the meter of a `MeteredLoop`, or an unused meter for any other loop."""
    return loop.meter if isinstance(loop, MeteredLoop) else LoopMeter()


# -- long work -------------------------------------------------------------------------------------

T = TypeVar("T")

STEP_S = 0.002
_AT_ONCE = 64  # objects to free, or lines to join, between looks at the clock


async def in_steps(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let the loop run other work after each step."""
    loop = asyncio.get_running_loop()
    meter = meter_of(loop)
    until_s = meter.share_ends_s()
    for item in items:
        yield item
        if loop.time() >= until_s:
            await sleep(0)
            until_s = meter.share_ends_s()


async def list_in_steps(items: Iterable[T]) -> list[T]:
    """Return the items, and let the loop run other work after each step.

    An item costs a tenth of what it costs with `in_steps`.
    """
    meter, clock_s = meter_of(asyncio.get_running_loop()), time.monotonic
    result: list[T] = []
    until_s = meter.share_ends_s()
    for item in items:
        result.append(item)
        if clock_s() >= until_s:
            await sleep(0)
            until_s = meter.share_ends_s()
    return result


async def page_in_steps(lines: Iterable[str]) -> bytes:
    """Return the lines as one page, each with a final newline."""
    return b"".join(await list_in_steps(_in_pieces(lines)))


def _in_pieces(lines: Iterable[str]) -> Iterator[bytes]:
    # A page of 15,000 channels has 150,000 lines. To free them together takes 20 ms.
    rest = iter(lines)
    while batch := list(islice(rest, _AT_ONCE)):
        yield "\n".join([*batch, ""]).encode()


def free_in_steps(dropped: deque[Any] | list[Any]) -> None:
    """Free messages in steps, because a million of them take 250 ms."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STEP_S
    while dropped:
        if loop.time() >= until_s:
            loop.call_soon(free_in_steps, dropped)
            return
        for _ in range(min(_AT_ONCE, len(dropped))):
            dropped.pop()
