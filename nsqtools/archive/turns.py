"""A few threads that give topics their turns: when something has come for one, or its time has.

A topic never has two turns at once, so what belongs to it needs no locks. A thousand quiet topics
cost nothing but their entry in a heap, and those with nothing to wait for not even that.

One idle thread waits for the next time, the others for work. Trap: when that one gets work, another
must take over the waiting, or one slow disk would hold up the clocks of all other topics.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("nsqtools")

MAX_THREADS = 3

Turn = Callable[[], float | None]
"""Does what there is to do. Returns when the next turn is due at the latest, by the monotonic
clock, or None when only something that comes can make work."""


class Scheduled:
    """Something that has turns. `soon` asks for one, from any thread."""

    __slots__ = ("_turns", "alarm", "due", "is_running", "is_wanted", "turn")

    def __init__(self, turns: Turns, turn: Turn) -> None:
        self._turns = turns
        self.turn = turn
        self.due: float | None = None
        self.alarm: float | None = None  # when it is looked at whether it is due; never later
        self.is_wanted = self.is_running = False

    def soon(self) -> None:
        """Have a turn after this call."""
        self._turns.want(self)


class Turns:
    """The threads; they are started when there is work for them."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._wanted: collections.deque[Scheduled] = collections.deque()
        self._times: list[tuple[float, int, Scheduled]] = []
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._watches_times = False  # one of the idle threads
        self._is_over = False

    def add(self, turn: Turn) -> Scheduled:
        """Return what gives this function its turns, once `Scheduled.soon` was called."""
        return Scheduled(self, turn)

    def want(self, scheduled: Scheduled) -> None:
        """See `Scheduled.soon`."""
        with self._changed:
            if not scheduled.is_wanted:
                scheduled.is_wanted = True
                if not scheduled.is_running:  # whoever runs it will see
                    self._wanted.append(scheduled)
                    self._find_a_thread()

    def end(self) -> None:
        """End the threads after the turns they are at, and wait for them."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _find_a_thread(self) -> None:
        if self._idle:
            self._changed.notify()
        elif len(self._threads) < self._max_threads:
            name = f"nsq-archive-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no threads are left: those there are will do
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while (scheduled := self._next()) is not None:
            due = None
            try:
                due = scheduled.turn()
            except Exception:  # a defect: turns report what can go wrong themselves
                log.exception("a turn failed")
            self._done(scheduled, due)

    def _next(self) -> Scheduled | None:
        """Wait for the next to have a turn; None at the end."""
        with self._changed:
            while not self._is_over:
                now = time.monotonic()
                self._want_what_is_due(now)
                if self._wanted:
                    scheduled = self._wanted.popleft()
                    scheduled.is_wanted, scheduled.is_running = False, True
                    if self._idle and (self._wanted or not self._watches_times):
                        self._changed.notify()
                    return scheduled
                self._wait(now)
        return None

    def _want_what_is_due(self, now: float) -> None:
        while self._times and self._times[0][0] <= now:
            at, _, scheduled = heapq.heappop(self._times)
            if at != scheduled.alarm:
                continue  # there is an earlier one
            scheduled.alarm = None
            if scheduled.due is None or scheduled.is_wanted:
                continue
            if scheduled.due > now:
                self._set_alarm(scheduled, scheduled.due)
            else:
                scheduled.is_wanted = True
                if not scheduled.is_running:
                    self._wanted.append(scheduled)

    def _set_alarm(self, scheduled: Scheduled, at: float) -> None:
        scheduled.alarm = at
        heapq.heappush(self._times, (at, next(self._sequence), scheduled))

    def _wait(self, now: float) -> None:
        watches = not self._watches_times and bool(self._times)
        self._idle += 1
        if watches:
            self._watches_times = True
            self._changed.wait(self._times[0][0] - now)
            self._watches_times = False
        else:
            self._changed.wait()
        self._idle -= 1

    def _done(self, scheduled: Scheduled, due: float | None) -> None:
        with self._changed:
            scheduled.is_running = False
            scheduled.due = due
            if scheduled.is_wanted:
                self._wanted.append(scheduled)
            if due is not None and (scheduled.alarm is None or due < scheduled.alarm):
                self._set_alarm(scheduled, due)
                if self._watches_times and self._times[0][2] is scheduled:
                    self._changed.notify_all()  # it waits for a later one
