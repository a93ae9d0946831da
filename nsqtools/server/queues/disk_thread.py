"""What waits for a disk and must not hold up the loop: syncs, renamed files, files to be removed.

All work of one daemon runs on one thread, in the order in which it was given. So a removal never
overtakes the sync that stops needing the file. Without a loop (tests, recovery) `AtOnce` does the
same work on the spot.
"""

from __future__ import annotations

import os
import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

Work = Callable[[], None]
Done = Callable[[OSError | None], None]


class Behind(Protocol):
    """Runs work that waits for a disk."""

    is_ending: bool  # the owner closes: syncs that wait are left to it

    def run(self, work: Work, done: Done) -> None:
        """Do ``work``, then call ``done`` on the caller's thread with what it raised."""

    def sync(self, descriptor: int) -> None:
        """Make the data of an open file durable. Raises ``OSError``."""


class AtOnce:
    """Runs work on the spot."""

    is_ending = False

    def run(self, work: Work, done: Done) -> None:
        try:
            work()
        except OSError as exc:
            done(exc)
        else:
            done(None)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)


class DiskThread:
    """Runs work on a thread of its own, until `end`."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.is_ending = False
        self.sync_count = 0
        self.sync_s = self.longest_sync_s = 0.0
        self._loop = loop
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="nsqd-disk")

    def run(self, work: Work, done: Done) -> None:
        if self.is_ending:
            AtOnce().run(work, done)
            return

        def finished(future: Future[None]) -> None:
            if future.cancelled():
                return
            exc = future.exception()
            done(exc if exc is None or isinstance(exc, OSError) else OSError(repr(exc)))

        self._loop.run_in_executor(self._executor, work).add_done_callback(finished)

    async def wait_for(self, work: Work) -> None:
        """Do ``work`` after all that was given before. Raises what it raises."""
        await self._loop.run_in_executor(self._executor, work)

    def sync(self, descriptor: int) -> None:
        started_s = time.monotonic()
        os.fsync(descriptor)
        took_s = time.monotonic() - started_s
        self.sync_count += 1
        self.sync_s += took_s
        self.longest_sync_s = max(self.longest_sync_s, took_s)

    def end(self) -> None:
        """Finish what was given, without the syncs; later work is done on the spot."""
        self.is_ending = True
        self._executor.shutdown()
