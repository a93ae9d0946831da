"""The thread of the I/O loop: a selector, a heap of timers, and turns for those who have work.

See `io_loop`, through which everybody else uses it.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqtools.client.io_loop import LoopMember, Timer, Watched

log = logging.getLogger("nsqtools")

MAX_CATCHING_UP_TURNS = 100  # under a stream that does not end


class IOThread:
    """Serves members until there are none. What is public is for `LoopMember`."""

    def __init__(self) -> None:
        self.bytes_since = 0.0
        self.current_until = 0.0  # see `LoopMember.is_current`
        self.unflushed: list[tuple[Watched, LoopMember]] = []
        self.at_last: list[tuple[Callable[[], object], LoopMember]] = []  # in this turn
        self._members: set[LoopMember] = set()
        self._joining = threading.Lock()
        self._ended: list[LoopMember] = []  # and not released yet
        self._due: collections.deque[LoopMember] = collections.deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        # a turn that took longer was a pause: of the process, or the interpreter was held elsewhere
        self._pause_after_s: float | None = None
        self._polled_at = 0.0
        self._catches_up = False
        self._catching_up_turns = 0
        self._asleep = False
        self._is_woken = False
        self._is_over = False
        self.selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="nsq-io", daemon=True)

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Raises ``RuntimeError`` where no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def admit(self, member: LoopMember) -> bool:
        """Serve a member; return False when the thread is ending."""
        with self._joining:
            if not self._is_over:
                self._members.add(member)
            return not self._is_over

    def wake(self, member: LoopMember) -> None:
        """See that a member has a turn after this call."""
        if not member.is_due:
            member.is_due = True
            self._due.append(member)
        self._is_woken = True
        if self._asleep:
            self._asleep = False
            try:
                self._wake_sender.send(b"w")
            except OSError:
                pass  # full: it is being woken; closed: it has ended

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close_copies(self) -> None:
        """In a forked child: close its copies of the descriptors; the thread is the parent's.

        Nothing is unregistered: the kernel's list of what is watched is shared with the parent.
        """
        watched = self.selector.get_map() or {}  # None when the thread had ended before the fork
        for key in watched.values():
            if key.data is not None:
                key.data[0].close_copy()
        for member in self._members:
            member.abandon()
        self._close()

    def _close(self) -> None:
        self.selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    # -- on the thread --------------------------------------------------------------------------

    def add_timer(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, (timer.at, next(self._sequence), timer))
        return timer

    def fit_pause(self, after_s: float) -> None:
        """Notice pauses that are as short as this."""
        shortest_s = self._pause_after_s
        self._pause_after_s = after_s if shortest_s is None else min(after_s, shortest_s)

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
                if self._ended:
                    self._release_ended()
        except BaseException as exc:
            # a defect of the loop itself: whatever a member does wrong ends that member
            log.exception("the I/O thread failed")
            with self._joining:
                self._is_over = True
            for member in list(self._members):
                self._fail(member, exc)
            self._release_ended()

    def _release_ended(self) -> None:
        """Tell those who wait for a member, and close everything if it was the last, before."""
        with self._joining:
            self._is_over = not self._members
        if self._is_over:
            self._close()
        ended, self._ended = self._ended, []
        for member in ended:
            member.release()

    def _turn(self) -> None:
        self._asleep = True
        ready = self.selector.select(self._sleep_s())
        self._note_poll(any(key.data is not None for key, _ in ready))
        for key, events in ready:
            if key.data is None:
                self._drain_wake_ups()
            else:
                connection, member = key.data
                try:
                    if events & selectors.EVENT_READ:
                        connection.on_readable()
                    if events & selectors.EVENT_WRITE:
                        connection.flush()
                except BaseException as exc:
                    self._fail(member, exc)
                if not member.is_due:
                    self._make_due(member)
        self._asleep = False
        self._is_woken = False  # before the work is looked at: what comes later is seen next turn
        if not self._catches_up:
            self._run_timers()
        leaving = self._give_turns()
        self._flush()
        if self.at_last:
            self._do_at_last()
        for member in leaving:
            self._remove(member)
        if self._pause_after_s is not None and not self._catches_up:
            self.current_until = self._polled_at + self._pause_after_s

    def _make_due(self, member: LoopMember) -> None:
        if not member.is_due:
            member.is_due = True
            self._due.append(member)

    def _give_turns(self) -> list[LoopMember]:
        """Let the members have their turns; return those that stop with it."""
        leaving = []
        for _ in range(len(self._due)):
            member = self._due.popleft()
            member.is_due = False  # before it looks at its work, as above
            try:
                member.take_turn()
            except BaseException as exc:
                self._fail(member, exc)
            if member.is_leaving and not member.has_ended:
                leaving.append(member)
        return leaving

    def _flush(self) -> None:
        while self.unflushed:
            unflushed, self.unflushed = self.unflushed, []
            for connection, member in unflushed:
                try:
                    connection.flush()
                except BaseException as exc:
                    self._fail(member, exc)

    def _do_at_last(self) -> None:
        calls, self.at_last = self.at_last, []
        for call, member in calls:
            try:
                call()
            except BaseException as exc:
                self._fail(member, exc)

    def _fail(self, member: LoopMember, failure: BaseException) -> None:
        if not member.has_ended:
            log.error("%s: the I/O thread failed", member.name, exc_info=failure)
            member.failure = failure
            self._remove(member)
            for key in list(self.selector.get_map().values()):
                if key.data is not None and key.data[1] is member:
                    key.data[0].close()  # what its end has left behind

    def _remove(self, member: LoopMember) -> None:
        """The member has stopped or failed."""
        if member.has_ended:  # both, or it came up twice
            return
        self._members.discard(member)
        member.end()
        self._ended.append(member)
        if member.pause_after_s is not None and member.pause_after_s == self._pause_after_s:
            limits = [m.pause_after_s for m in self._members if m.pause_after_s is not None]
            self._pause_after_s = min(limits, default=None)

    def _note_poll(self, has_bytes: bool) -> None:
        """Notice a pause; then everything is read before anybody relies on what was read earlier.

        The poll that a stop of the process interrupts returns nothing: the next one counts.
        """
        now = time.monotonic()
        if self._pause_after_s is not None:
            if now - self._polled_at > self._pause_after_s and self._polled_at:
                self._catches_up = True
                self._catching_up_turns = 0
            elif self._catches_up:
                self._catching_up_turns += 1
                self._catches_up = has_bytes and self._catching_up_turns < MAX_CATCHING_UP_TURNS
                if not self._catches_up:
                    self._report_pause()
        else:
            self._catches_up = False
        self._polled_at = now
        if not self._catches_up:
            self.bytes_since = now

    def _report_pause(self) -> None:
        for member in list(self._members):
            if member.after_pause is not None:
                try:
                    member.after_pause()
                except BaseException as exc:
                    self._fail(member, exc)
                self._make_due(member)

    def _sleep_s(self) -> float | None:
        # looked at after _asleep was set: who woke us before is seen here, who comes later sends
        if self._is_woken or self._catches_up or self._due:
            return 0
        # a sleep that is as long as a pause would look like one
        longest_s = None if self._pause_after_s is None else self._pause_after_s / 2
        if not self._timers:
            return longest_s
        until_timer_s = max(0.0, self._timers[0][0] - time.monotonic())
        return until_timer_s if longest_s is None else min(until_timer_s, longest_s)

    def _drain_wake_ups(self) -> None:
        try:
            while len(self._wake_receiver.recv(64)) == 64:
                pass
        except BlockingIOError:
            pass

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            member = timer.member
            if timer.call is None or member.has_ended:
                continue
            try:
                timer.call()
            except BaseException as exc:
                self._fail(member, exc)
            self._make_due(member)
            if timer.interval_s and timer.call is not None:
                timer.at = next_multiple(now, timer.interval_s)
                self.add_timer(timer)


def next_multiple(now: float, interval_s: float) -> float:
    """Return the next moment at which everything with this interval happens."""
    return (now // interval_s + 1) * interval_s
