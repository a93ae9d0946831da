"""The small thread pool of a process for work that waits for the network.

It connects where a step may block (`opening`), and sends requests over HTTP. All consumers and
producers of a process share the threads, which end after a moment without work. Work is queued by
peer, and an unreachable peer must not delay those that answer. Peers that failed to answer last
time get at most half of the threads. Together with new peers they get all but two, and each of them
at most two.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from nsqtools.client.io_loop import LoopMember
from nsqtools.errors import ConnectionFailed, NsqError

log = logging.getLogger("nsqtools")

T = TypeVar("T")

# The threads wait for the network, so their number bounds how many peers are tried at a time. Eight
# connect to a thousand healthy nsqd within seconds.
MAX_POOL_THREADS = 8
MAX_FOR_RESPONSIVE = 6  # threads for one peer that answered last time, and may hang now
MAX_FOR_UNPROVEN = 2  # threads for one peer that did not, or is new
MAX_FOR_ALL_FAILING = 4  # threads for all peers that did not answer last time
# Threads for those and all new peers: nsqlookupd may announce many that hang.
MAX_FOR_ALL_UNPROVEN = 6
# A peer that refuses this fast, as with a closed port, delays no other: it counts as responsive.
PROMPT_S = 0.5
THREAD_IDLE_S = 2.0  # a thread without work ends after this time
MAX_REMEMBERED_PEERS = 10_000  # about 2 MB

PoolJob = tuple[LoopMember, Callable[[], Any], Callable[[Any], None]]


class ThreadPool:
    """A few threads for blocking work, which are started on demand."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start without threads and work. A forked child has no thread of its parent."""
        self._changed = threading.Condition()
        self._queue: dict[Hashable, collections.deque[PoolJob]] = {}  # by peer
        self._queued = 0
        self._running: collections.Counter[Hashable] = collections.Counter()
        self._has_answered: dict[Hashable, bool] = {}  # the last time; oldest first
        self._threads = 0
        self._idle_threads = 0

    def run(
        self,
        loop: LoopMember,
        peer: Hashable,
        work: Callable[[], T],
        done: Callable[[T | NsqError], None],
    ) -> None:
        """Do ``work`` that waits for a peer; ``done`` gets the result on the loop of the member."""
        with self._changed:
            self._queue.setdefault(peer, collections.deque()).append((loop, work, done))
            self._queued += 1
            self._changed.notify()
            needs_thread = self._queued > self._idle_threads and self._threads < MAX_POOL_THREADS
            self._threads += needs_thread
        # Outside the lock: with gevent a start switches greenlets, and a lock that was made before
        # gevent patched the module would let the other greenlet in.
        if needs_thread:
            self._start_thread()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._serve, name="nsq-background", daemon=True).start()
        except RuntimeError as exc:  # no more threads, or the interpreter is ending
            with self._changed:
                self._threads -= 1
                if self._threads:
                    return  # another thread does the work
                abandoned, self._queue, self._queued = self._queue, {}, 0
            for peer, works in abandoned.items():
                error = ConnectionFailed(f"cannot reach {peer} ({exc})")
                for loop, _, done in works:
                    loop.call_soon(partial(done, error))

    def _serve(self) -> None:
        while True:
            with self._changed:
                item = self._take()
                if item is None:
                    self._idle_threads += 1
                    is_notified = self._changed.wait(THREAD_IDLE_S)
                    self._idle_threads -= 1
                    if not is_notified and not self._queue:
                        self._threads -= 1
                        return
                    continue
            began_at = time.monotonic()
            peer, (loop, work, done) = item
            try:
                result = work()
            except NsqError as exc:
                result = exc
            except BaseException as exc:  # a defect must not end the thread or leave work undone
                log.exception("cannot reach %s", peer)
                result = ConnectionFailed(f"cannot reach {peer} ({exc!r})")
            loop.call_soon(partial(done, result))
            is_prompt = time.monotonic() - began_at < PROMPT_S
            self._finish(peer, has_answered=is_prompt or not isinstance(result, NsqError))

    def _take(self) -> tuple[Hashable, PoolJob] | None:
        for peer, works in self._queue.items():
            if self._may_run(peer):
                work = works.popleft()
                self._queued -= 1
                del self._queue[peer]
                if works:  # further work of this peer queues behind the other peers
                    self._queue[peer] = works
                self._running[peer] += 1
                return peer, work
        return None

    def _may_run(self, peer: Hashable) -> bool:
        has_answered, running = self._has_answered.get, self._running
        if has_answered(peer):
            return running[peer] < MAX_FOR_RESPONSIVE
        # False for each thread that works for a failing peer, None for each new peer.
        unproven = [has_answered(other) for other in running.elements() if not has_answered(other)]
        return (
            running[peer] < MAX_FOR_UNPROVEN
            and len(unproven) < MAX_FOR_ALL_UNPROVEN
            and (has_answered(peer) is None or unproven.count(False) < MAX_FOR_ALL_FAILING)
        )

    def _finish(self, peer: Hashable, *, has_answered: bool) -> None:
        with self._changed:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            self._has_answered.pop(peer, None)
            self._has_answered[peer] = has_answered
            if len(self._has_answered) > MAX_REMEMBERED_PEERS:
                del self._has_answered[next(iter(self._has_answered))]
            # Work that `_may_run` postponed may run now.
            if self._queue and self._idle_threads:
                self._changed.notify(self._idle_threads)


thread_pool = ThreadPool()
