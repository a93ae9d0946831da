"""A few threads for what blocks: connecting, TLS handshakes, lookups over HTTP.

All consumers and producers of a process share them; they end when they have had nothing to do for a
moment. Work is named by the peer that it waits for, and an unreachable peer must not keep those
that answer from being served: those that did not answer last time get half of the threads at most,
and none of them, nor one that is new, more than two.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable

log = logging.getLogger("nsqtools")

MAX_THREADS = 8  # by default; of all that ask for work the one that allows most decides
MAX_DOUBTFUL = MAX_THREADS // 2
MAX_UNPROVEN = 2  # for one peer
QUICK_S = 0.5  # a peer that refuses so fast holds nothing up
IDLE_S = 2.0
MAX_KNOWN = 10_000

Work = Callable[[], bool]  # returns whether the peer answered


class Background:
    """The threads. Use `run_in_background`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, collections.deque[Work]] = {}
        self._running: collections.Counter[Hashable] = collections.Counter()
        self._has_answered: dict[Hashable, bool] = {}  # the last time; oldest first
        self._count = 0  # waiting
        self._threads = 0
        self._idle = 0
        self._max_threads = 1

    def run(self, peer: Hashable, work: Work, max_threads: int = MAX_THREADS) -> None:
        """Have work done. Raises ``RuntimeError`` where no thread can be started for it."""
        with self._changed:
            self._max_threads = max(self._max_threads, max_threads)
            self._waiting.setdefault(peer, collections.deque()).append(work)
            self._count += 1
            self._changed.notify()
            if self._count > self._idle and self._threads < self._max_threads:
                self._start_thread(peer)

    def _start_thread(self, peer: Hashable) -> None:
        try:
            threading.Thread(target=self._serve, name="nsq-background", daemon=True).start()
            self._threads += 1
        except RuntimeError:  # no threads are left; or the interpreter ends
            if not self._threads:
                self._waiting[peer].pop()
                self._count -= 1
                raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                taken = self._take()
                if taken is None:
                    self._idle += 1
                    is_wanted = self._changed.wait(IDLE_S)
                    self._idle -= 1
                    if not is_wanted and not self._waiting:
                        self._threads -= 1
                        return
                    continue
            peer, work = taken
            began_at = time.monotonic()
            try:
                has_answered = work() or time.monotonic() - began_at < QUICK_S
            except Exception:  # a defect, which must not cost a thread
                log.exception("work for %s failed", peer)
                has_answered = False
            self._note(peer, has_answered)

    def _take(self) -> tuple[Hashable, Work] | None:
        for peer, works in self._waiting.items():
            if self._may_run(peer):
                work = works.popleft()
                self._count -= 1
                del self._waiting[peer]
                if works:  # the other peers come first
                    self._waiting[peer] = works
                self._running[peer] += 1
                return peer, work
        return None

    def _may_run(self, peer: Hashable) -> bool:
        has_answered = self._has_answered.get(peer)
        if has_answered is False and self._doubtful() >= max(1, self._max_threads // 2):
            return False
        # one that answered may be gone by now: it does not get all of them
        most_proven = max(1, self._max_threads - 2)
        return self._running[peer] < (most_proven if has_answered else MAX_UNPROVEN)

    def _doubtful(self) -> int:
        known = self._has_answered
        return sum(count for peer, count in self._running.items() if known.get(peer) is False)

    def _note(self, peer: Hashable, has_answered: bool) -> None:
        with self._changed:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            self._has_answered.pop(peer, None)
            self._has_answered[peer] = has_answered
            if len(self._has_answered) > MAX_KNOWN:
                del self._has_answered[next(iter(self._has_answered))]
            if self._waiting and self._idle:
                self._changed.notify(self._idle)  # what was held back for this peer may go on


_shared = Background()


def run_in_background(peer: Hashable, work: Work, max_threads: int = MAX_THREADS) -> None:
    """Do work that waits for a peer on one of the threads.

    Raises ``RuntimeError`` where no thread can be started.
    """
    _shared.run(peer, work, max_threads)


def _start_afresh() -> None:
    """In a forked child, which has none of the threads."""
    global _shared
    _shared = Background()


os.register_at_fork(after_in_child=_start_afresh)
