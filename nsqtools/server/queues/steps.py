"""Long work of the loop in steps of a moment, so that clients get their turns in between."""

from __future__ import annotations

from asyncio import AbstractEventLoop, sleep
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

from nsqtools.server.loop_meter import meter_of

T = TypeVar("T")

STEP_S = 0.002
_AT_ONCE = 64  # objects to free between looks at the clock
_LINES_AT_ONCE = 1000


async def in_steps(items: Iterable[T], loop: AbstractEventLoop) -> AsyncIterator[T]:
    """Yield the items, and the loop after each step."""
    meter = meter_of(loop)
    until_s = meter.share_ends_s()
    for item in items:
        yield item
        if loop.time() >= until_s:
            await sleep(0)
            until_s = meter.share_ends_s()


async def page_in_steps(lines: Iterable[str], loop: AbstractEventLoop) -> bytes:
    """Return the lines as a page, each with a newline at its end."""
    pieces: list[bytes] = []
    some: list[str] = []
    async for line in in_steps(lines, loop):
        some.append(line)
        if len(some) == _LINES_AT_ONCE:
            pieces.append(_page(some))
            some = []
    return b"".join([*pieces, _page(some)])


def _page(lines: list[str]) -> bytes:
    return "".join([f"{line}\n" for line in lines]).encode()


def free_in_steps(dropped: deque[Any] | list[Any], loop: AbstractEventLoop) -> None:
    """Free messages: a million of them take a quarter of a second."""
    until_s = loop.time() + STEP_S
    while dropped:
        if loop.time() >= until_s:
            loop.call_soon(free_in_steps, dropped, loop)
            return
        for _ in range(min(_AT_ONCE, len(dropped))):
            dropped.pop()
