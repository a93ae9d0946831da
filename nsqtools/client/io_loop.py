"""The I/O thread of a process: one selector, one heap of timers, one wake-up for all its members.

Every consumer and producer is a `LoopMember`. The thread starts with the first of them and ends
with the last, so a hundred consumers cost one thread. A member owns its connections: they are read,
written, registered and closed on the thread only, and other threads talk to it with `call_soon`.
The thread is woken through a socket pair, and only when it sleeps: under load it finds the calls on
its next turn without a system call.

A turn costs what there is to do in it: only members to which something happened are served, and
periodic work of all members falls into the same turn (`LoopMember.call_every`). A member that fails
ends alone.

A fork leaves the child without the thread: it closes its copies of the descriptors, and its first
member starts a loop of its own.

Traps: callbacks of users run here, and one that blocks stops all members. A signal handler runs
between any two calls of the main thread, and may wait for this thread: so this takes no lock that
the main thread holds often, and what tells it of work needs no second step.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import logging
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nsqtools.transport.stream import READ_SIZE

log = logging.getLogger("nsqtools")

MAX_SLEEP_S = 1.0  # a signal may interrupt who wakes the thread
MAX_CATCHING_UP_TURNS = 100  # under a stream that does not end
NO_BUFFER = memoryview(b"")  # in place of 256 KiB, in what has ended


class Watched(Protocol):
    """What can be registered: a descriptor and what to do when it is ready."""

    def fileno(self) -> int: ...
    def on_readable(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def close_copy(self) -> None:
        """Close the descriptor in a forked child; the connection is the parent's."""


@dataclass(slots=True, eq=False)
class Timer:
    """A call to be made later; `cancel` it from the loop's thread."""

    member: LoopMember
    at: float
    call: Callable[[], object] | None
    interval_s: float

    def cancel(self) -> None:
        """The call will not be made."""
        self.call = None


class LoopMember:
    """A consumer or a producer on the I/O thread, from `start` until `stop` takes effect.

    ``each_turn`` is called after each event of this member: bytes that came, a timer, a call, a
    wake-up. What it writes is flushed at the end of the turn, with one send per connection.
    ``at_end`` is called on the thread when the member has stopped, or failed by a defect (`failure`
    then): nothing may wait for it any longer.
    """

    now = staticmethod(time.monotonic)

    def __init__(
        self, name: str, each_turn: Callable[[], None], at_end: Callable[[], None]
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.has_ended = False
        self.is_leaving = False
        self.pause_after_s = math.inf
        self.after_pause: Callable[[], object] | None = None
        self._each_turn = each_turn
        self._at_end = at_end
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._is_released = False
        self._waiters: list[threading.Lock] = []  # for its end
        self._thread: IOThread | None = None  # from `start` on
        self.own: IOThread  # the same, for what runs on it

    # -- from any thread ------------------------------------------------------------------------

    def start(self, begin: Callable[[], object]) -> None:
        """Join the I/O thread of the process, which is started if there is none; ``begin`` there.

        A signal handler or another greenlet may start the member meanwhile: it begins once.
        """
        thread = _join(self)
        if self._thread is None:
            self.own = self._thread = thread
            self.call_soon(begin)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have a call made on the I/O thread, in the order of these requests.

        After the member has ended the call is made at once: what it was given may need closing.
        """
        self._calls.append(call)
        if self.has_ended:
            self._make_calls()
        else:  # should it end in this moment, its end makes the call
            self.wake()

    def wake(self) -> None:
        """See that the member has a turn after this call."""
        if self._thread is not None:
            self._thread.wake(self)

    def is_current(self, now: float) -> bool:
        """Tell whether all sockets were read a moment ago, or will never be again."""
        return self._thread is None or self.has_ended or now < self._thread.current_until

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the member has ended; return whether it has. On the I/O thread, False."""
        return not self.is_own_thread and wait_until_released(
            self._waiters, lambda: self._is_released, timeout_s
        )

    @property
    def is_own_thread(self) -> bool:
        """Tell whether this is the I/O thread, which must not wait for itself."""
        return self._thread is not None and self._thread.is_own_thread

    # -- on the I/O thread ----------------------------------------------------------------------

    def stop(self) -> None:
        """End after this turn."""
        self.is_leaving = True

    def call_later(
        self, delay_s: float, call: Callable[[], object], *, instead_of: Timer | None = None
    ) -> Timer:
        """Have a call made after a delay, and that of another timer not."""
        if instead_of is not None:
            instead_of.cancel()
        return self.own.add_timer(Timer(self, self.now() + delay_s, call, 0.0))

    def call_every(self, interval_s: float, call: Callable[[], object]) -> Timer:
        """Have a call made again and again, at the same moments as those of other members."""
        at = next_multiple(self.now(), interval_s)
        return self.own.add_timer(Timer(self, at, call, interval_s))

    def on_pause(self, after_s: float, call: Callable[[], object]) -> None:
        """Have a call made after a pause of the process, once all sockets were read."""
        self.pause_after_s = after_s
        self.after_pause = call
        self.own.pause_after_s = min(after_s, self.own.pause_after_s)

    def flush_soon(self, connection: Watched) -> None:
        """Flush a connection at the end of this turn."""
        self.own.unflushed.append((connection, self))

    def after_flush(self, call: Callable[[], object]) -> None:
        """Have a call made at the end of this turn, when everything is sent."""
        self.own.at_last.append((call, self))

    def register(self, connection: Watched) -> None:
        """Watch a connection for bytes to read."""
        self.own.selector.register(connection, selectors.EVENT_READ, (connection, self))

    def watch_writes(self, connection: Watched, wanted: bool) -> None:
        """Watch a connection for room to write as well, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self.own.selector.modify(connection, events, (connection, self))

    def unregister(self, connection: Watched) -> None:
        """Stop watching; call it before the connection is closed."""
        self.own.selector.unregister(connection)

    # -- what the loop calls --------------------------------------------------------------------

    def take_turn(self) -> None:
        """Make the calls that wait, and what there is to do each turn."""
        if not self.has_ended:  # else `call_soon` makes it at once
            self._make_calls()
        if not self.has_ended:
            self._each_turn()

    def end(self) -> None:
        """The member has ended: nothing is served any longer."""
        try:
            self._at_end()
        except BaseException:  # or those would wait for ever that wait for this end
            log.exception("%s: its end failed", self.name)
        self.has_ended = True
        self._make_calls()

    def release(self) -> None:
        """End the waiting of `join`."""
        self._is_released = True
        for waiter in self._waiters:
            waiter.release()

    def abandon(self) -> None:
        """In a forked child: the member goes on in the parent only. Nothing waits for it here."""
        self._calls.clear()
        self.has_ended = True
        self._is_released = True

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                call = self._calls.popleft()
            except IndexError:  # after the end two threads may meet here
                return
            call()


class IOThread:
    """Serves members until there are none. What is public is for `LoopMember` and connections."""

    def __init__(self) -> None:
        self.poll_time = 0.0  # what this turn reads was sent after it, as far as we know
        self.buffer = memoryview(bytearray(READ_SIZE))  # scratch space, to read into
        self.current_until = 0.0  # see `LoopMember.is_current`
        self.unflushed: list[tuple[Watched, LoopMember]] = []
        self.at_last: list[tuple[Callable[[], object], LoopMember]] = []  # in this turn
        self._members: set[LoopMember] = set()
        self._joining = threading.RLock()
        self._ended: list[LoopMember] = []  # and not released yet
        self._due: dict[LoopMember, None] = {}  # that have a turn to come
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        # a turn that took longer was a pause: of the process, or the interpreter was held elsewhere
        self.pause_after_s = math.inf
        self._polled_at = 0.0
        self._catches_up = False
        self._catching_up_turns = 0
        self._asleep = False
        self._is_over = False
        self.selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="nsq-io", daemon=True)

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Raises ``RuntimeError`` where no thread can be started."""
        try:
            if sys.is_finalizing():  # before Python 3.12 the start would never return
                raise RuntimeError("can't create new thread at interpreter shutdown")
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def retire(self) -> None:
        """End without a member."""
        self._is_over = True
        self._wake_sender.send(b"w")

    def admit(self, member: LoopMember) -> bool:
        """Serve a member; return False when the thread is ending."""
        with self._joining:
            # A stopped member refers to its thread. If that referred to the next member, which has
            # a thread of its own, one stopped producer in a variable would keep every later one.
            if not self._is_over:
                self._members.add(member)
            return not self._is_over

    def wake(self, member: LoopMember) -> None:
        """See that a member has a turn after this call."""
        self._due[member] = None
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
        self._is_over = True
        self._close()

    def _close(self) -> None:
        # Members that have ended still refer to this, and must not keep one another alive.
        self.buffer = NO_BUFFER
        self._timers.clear()
        self._due.clear()
        self.selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    # -- on the thread --------------------------------------------------------------------------

    def add_timer(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, (timer.at, next(self._sequence), timer))
        return timer

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
                if self._ended or self._is_over:
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
        """Release threads that wait for a member; if it was the last, close everything before."""
        if self._joining.acquire(blocking=False):  # else there will be another
            self._is_over = not self._members
            self._joining.release()
        if self._is_over:
            self._close()
        ended, self._ended = self._ended, []
        for member in ended:
            member.release()

    def _turn(self) -> None:
        self._asleep = True
        ready = self.selector.select(self._sleep_s())
        self._asleep = False  # what comes from here on is due before the work is looked at
        self._note_poll(any(key.data is not None for key, _ in ready))
        for key, events in ready:
            if key.data is None:
                self._wake_receiver.recv(4096)
            else:
                connection, member = key.data
                if events & selectors.EVENT_READ:
                    self._call(member, connection.on_readable)
                if events & selectors.EVENT_WRITE:
                    self._call(member, connection.flush)
                self._due[member] = None
        if not self._catches_up:
            self._run_timers()
        leaving = self._give_turns()
        self._flush()
        calls, self.at_last = self.at_last, []
        for call, member in calls:
            self._call(member, call)
        for member in leaving:
            self._remove(member)
        if not self._catches_up:
            self.current_until = self._polled_at + self.pause_after_s

    def _give_turns(self) -> list[LoopMember]:
        """Let the members have their turns; return those that stop with it."""
        leaving = []
        for member in list(self._due):
            del self._due[member]  # before it looks at its work, as above
            self._call(member, member.take_turn)
            if member.is_leaving and not member.has_ended:
                leaving.append(member)
        return leaving

    def _flush(self) -> None:
        while self.unflushed:
            unflushed, self.unflushed = self.unflushed, []
            for connection, member in unflushed:
                self._call(member, connection.flush)

    def _call(self, member: LoopMember, call: Callable[[], object]) -> None:
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
        if member.pause_after_s == self.pause_after_s < math.inf:
            limits_s = [each.pause_after_s for each in self._members]
            self.pause_after_s = min(limits_s, default=math.inf)

    def _note_poll(self, has_bytes: bool) -> None:
        """Notice a pause; then everything is read before anything relies on what was read earlier.

        The poll that a stop of the process interrupts returns nothing: the next one counts.
        """
        now = time.monotonic()
        if now - self._polled_at > self.pause_after_s and self._polled_at:
            self._catches_up = True
            self._catching_up_turns = 0
        elif self._catches_up:
            self._catching_up_turns += 1
            self._catches_up = has_bytes and self._catching_up_turns < MAX_CATCHING_UP_TURNS
            if not self._catches_up:
                self._report_pause()
        self._polled_at = now
        if not self._catches_up:
            self.poll_time = now

    def _report_pause(self) -> None:
        for member in list(self._members):
            if member.after_pause is not None:
                self._call(member, member.after_pause)
                self._due[member] = None

    def _sleep_s(self) -> float:
        # looked at after _asleep was set: who woke us before is seen here, who comes later sends
        if self._catches_up or self._due:
            return 0
        left_s = self._timers[0][0] - time.monotonic() if self._timers else math.inf
        # a sleep that is as long as a pause would look like one
        return max(0.0, min(left_s, self.pause_after_s / 2, MAX_SLEEP_S))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            member = timer.member
            if timer.call is None or member.has_ended:
                continue
            self._call(member, timer.call)
            self._due[member] = None
            if timer.interval_s and timer.call is not None:
                timer.at = next_multiple(now, timer.interval_s)
                self.add_timer(timer)


def wait_until_released(
    waiters: list[Any], is_over: Callable[[], bool], timeout_s: float | None
) -> bool:
    """Wait with a lock among the ``waiters``, which are released when it is over; return whether it
    is. An Event has a lock of its own, which a signal handler may have interrupted us with."""
    waiter = threading.Lock()
    waiter.acquire()
    waiters.append(waiter)  # in this order: who releases looks at them last
    # -1 would wait without end
    limit_s = -1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
    if is_over() or waiter.acquire(timeout=limit_s):
        return True
    with suppress(ValueError):  # released in this moment
        waiters.remove(waiter)  # many may give up before it is over
    return False


def next_multiple(now: float, interval_s: float) -> float:
    """Return the next moment at which everything with this interval happens: after ``now``, also
    where the product is rounded down to it."""
    count = now // interval_s + 1
    return (count if count * interval_s > now else count + 1) * interval_s


# -- the process ----------------------------------------------------------------------------------

_shared: IOThread | None = None
_sharing = threading.RLock()  # re-entrant: a signal handler may start another


def _join(member: LoopMember) -> IOThread:
    """Let a member join the thread of this process."""
    global _shared
    with _sharing:
        while (shared := _shared) is None or not shared.admit(member):
            thread = IOThread()
            thread.start()
            if _shared is shared:
                _shared = thread
            else:  # a signal handler has started one meanwhile
                thread.retire()
        return shared


def _leave_to_parent() -> None:
    """In a forked child, whose copy of the lock may be held by a thread that it does not have."""
    global _shared, _sharing
    thread, _shared, _sharing = _shared, None, threading.RLock()
    call_at_end_of_child.cache_clear()
    if thread is not None:
        thread.close_copies()


os.register_at_fork(after_in_child=_leave_to_parent)


@functools.cache  # once: it is kept as long as the child
def call_at_end_of_child(stop: Callable[[], object]) -> None:
    """Call ``stop`` at the end of a child of multiprocessing, before its queues are closed.

    Such a child skips atexit. In any other process this does nothing.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, stop, exitpriority=100)  # kept until it has run
