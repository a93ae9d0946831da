"""The I/O thread of a process: one selector, one heap of timers and one wake-up for all members.

Every consumer and producer is a `LoopMember`. The thread starts with the first member and ends with
the last, so a hundred consumers cost one thread. A member owns its connections. They are
registered, read, written and closed on the I/O thread only, unless they are lent
(`direct_publish`); other threads talk to a member with `call_soon`. A socket pair wakes the thread,
and only when it sleeps: under load it finds the calls in its next iteration without a system call.

In this package a *turn* is an iteration of the loop, and a member's turn is its part of one. An
iteration costs no more than the work in it: only members with an event are served, and the periodic
work of all members is due in the same iteration (`LoopMember.call_every`). A member that raises
ends alone.

A fork leaves the child without the thread. The child closes its copies of the descriptors, and its
first member starts another loop.

Traps: callbacks of users run here, and a callback that blocks stops all members. A signal handler
runs between any two bytecodes of the main thread, and may wait for this thread. So this module
takes no lock that the main thread holds often, and each notification of the thread is a single
step.
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

from nsqtools.errors import ConfigurationError
from nsqtools.transport.stream import SOCKET_READ_SIZE

log = logging.getLogger("nsqtools")

# A signal handler may interrupt a thread between marking a member as due and waking this thread.
# The call is then at most this late.
MAX_POLL_S = 1.0
# Turns that only read after a pause of the process. A publisher that never stops must not keep the
# loop in this state.
MAX_CATCHING_UP_TURNS = 100
# Replaces the read buffer of 256 KiB after the end, because ended members still refer to the
# thread.
NO_BUFFER = memoryview(b"")


class Watched(Protocol):
    """An object with a descriptor, and the callbacks for when it is ready."""

    def fileno(self) -> int: ...
    def on_readable(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def close_copy(self) -> None:
        """Close the descriptor in a forked child, which does not own the connection."""


@dataclass(slots=True, eq=False)
class Timer:
    """A scheduled call. `cancel` it on the I/O thread."""

    member: LoopMember | None
    at: float
    call: Callable[[], object] | None
    interval_s: float

    def cancel(self) -> None:
        """Prevent the call."""
        # The timer stays in the heap until its time, and an ended member should not.
        self.call = self.member = None


class LoopMember:
    """A consumer or producer on the I/O thread, from `start` until `stop` takes effect.

    ``each_turn`` is called after each event of this member: bytes to read, a timer, a call or a
    wake-up. Its writes are flushed at the end of the turn, with one send for each connection.
    ``at_end`` is called on the I/O thread when the member has stopped or raised (see ``failure``),
    and must release all threads that wait for the member.
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
        self._waiters: list[threading.Lock] = []  # of `join`
        self._thread: IOThread | None = None  # from `start` on
        self.io_thread: IOThread  # the same object, for code on the I/O thread

    # -- from any thread ------------------------------------------------------------------------

    def start(self, begin: Callable[[], object]) -> None:
        """Join the I/O thread of the process, starting it if necessary, and call ``begin`` on it.

        A signal handler or another greenlet may start the member meanwhile; ``begin`` runs once.
        """
        _refuse_eventlet()
        thread = _join(self)
        if self._thread is None:
            self.io_thread = self._thread = thread
            self.call_soon(begin)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make a call on the I/O thread, in the order of these requests.

        After the end of the member the call is made immediately, because it may close something.
        """
        self._calls.append(call)
        if self.has_ended:
            self._make_calls()
        else:  # if the member ends concurrently, `end` makes the call
            self.wake()

    def wake(self) -> None:
        """Ensure that the member has a turn after this call."""
        if self._thread is not None:
            self._thread.wake(self)

    def is_current(self, now: float) -> bool:
        """Return whether all sockets were read a moment ago, or will never be read again."""
        return self._thread is None or self.has_ended or now < self._thread.current_until

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the member has ended; return whether it has. Returns False on the I/O thread,
        which must not wait for itself."""
        return not self.is_own_thread and wait_until_released(
            self._waiters, lambda: self._is_released, timeout_s
        )

    @property
    def is_own_thread(self) -> bool:
        """Return whether the caller runs on the I/O thread."""
        return self._thread is not None and self._thread.is_own_thread

    # -- on the I/O thread ----------------------------------------------------------------------

    def stop(self) -> None:
        """End the member after this turn."""
        self.is_leaving = True

    def call_later(
        self, delay_s: float, call: Callable[[], object], *, instead_of: Timer | None = None
    ) -> Timer:
        """Make a call after a delay, in place of the call of another timer."""
        if instead_of is not None:
            instead_of.cancel()
        return self.io_thread.add_timer(Timer(self, self.now() + delay_s, call, 0.0))

    def call_every(self, interval_s: float, call: Callable[[], object]) -> Timer:
        """Make a call periodically, at the same times as other members with this interval."""
        at = next_multiple(self.now(), interval_s)
        return self.io_thread.add_timer(Timer(self, at, call, interval_s))

    def on_pause(self, after_s: float, call: Callable[[], object]) -> None:
        """Make a call after each pause of the process, once all sockets have been read.

        A pause is a turn that took longer than ``after_s``: the process was stopped or the machine
        suspended, or another thread held the interpreter.
        """
        self.pause_after_s = after_s
        self.after_pause = call
        self.io_thread.pause_after_s = min(after_s, self.io_thread.pause_after_s)

    def after_flush(self, call: Callable[[], object]) -> None:
        """Make a call at the end of this turn, when everything is sent."""
        self.io_thread.at_last.append((call, self))

    def register(self, connection: Watched, *, writes: bool = False) -> None:
        """Watch a connection for bytes to read, or also for room to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        self.io_thread.selector.register(connection, events, (connection, self))

    def watch_writes(self, connection: Watched, enabled: bool) -> None:
        """Start or stop watching a connection for room to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if enabled else 0)
        self.io_thread.selector.modify(connection, events, (connection, self))

    def unregister(self, connection: Watched) -> None:
        """Stop watching a connection. Call this before closing it."""
        if self.io_thread.lent.pop(connection, None) is None:
            self.io_thread.selector.unregister(connection)

    def lend(self, connection: Watched) -> None:
        """Stop watching a connection that another thread uses until `reclaim`."""
        self.unregister(connection)
        self.io_thread.lent[connection] = self

    def reclaim(self, connection: Watched) -> None:
        """Watch a connection again that was lent."""
        self.unregister(connection)
        self.register(connection)

    # -- called by the loop ---------------------------------------------------------------------

    def take_turn(self) -> None:
        """Make the pending calls, and then the regular work of a turn."""
        if not self.has_ended:
            self._make_calls()
        if not self.has_ended:  # a call may have ended it
            self._each_turn()

    def end(self) -> None:
        """End the member; it gets no further turns."""
        try:
            self._at_end()
        except BaseException:  # an error here must not keep threads waiting in `join`
            log.exception("%s: its end failed", self.name)
        self.has_ended = True
        self._make_calls()

    def release(self) -> None:
        """Wake the threads in `join`."""
        self._is_released = True
        for waiter in self._waiters:
            waiter.release()

    def abandon(self) -> None:
        """End the member in a forked child. It continues in the parent."""
        self._calls.clear()
        self.has_ended = True
        self._is_released = True

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                call = self._calls.popleft()
            except IndexError:  # after the end other threads make calls, too
                return
            call()


class IOThread:
    """Serves members until none is left. Public attributes are for `LoopMember` and connections."""

    def __init__(self) -> None:
        self.polled_at = 0.0
        # The same, except after a pause of the process: bytes that this turn reads were sent later.
        self.poll_time = 0.0
        self.buffer = memoryview(bytearray(SOCKET_READ_SIZE))  # scratch space for reading
        self.current_until = 0.0  # see `LoopMember.is_current`
        self.unflushed: list[tuple[Watched, LoopMember]] = []  # to flush at the end of this turn
        self.at_last: list[tuple[Callable[[], object], LoopMember]] = []  # see `after_flush`
        self.lent: dict[Watched, LoopMember] = {}  # not registered: see `LoopMember.lend`
        self._members: set[LoopMember] = set()
        self._joining = threading.RLock()
        self._ended: list[LoopMember] = []  # ended but not released
        self._due: dict[LoopMember, None] = {}  # members that have a turn
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()  # keeps timers with equal times comparable
        self.pause_after_s = math.inf  # the shortest of all members: see `LoopMember.on_pause`
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
        """Start the thread. Raises ``RuntimeError`` if no thread can be started."""
        try:
            if sys.is_finalizing():  # before Python 3.12 the start would never return
                raise RuntimeError("can't create new thread at interpreter shutdown")
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def retire(self) -> None:
        """End a thread that never had a member."""
        self._is_over = True
        self._wake_sender.send(b"w")

    def admit(self, member: LoopMember) -> bool:
        """Serve a member; return False if the thread is ending."""
        with self._joining:
            # A thread that is ending must not refer to the member: an earlier member refers to this
            # thread, so one stopped producer in a variable would keep every later one alive.
            if not self._is_over:
                self._members.add(member)
            return not self._is_over

    def wake(self, member: LoopMember) -> None:
        """Ensure that a member has a turn after this call."""
        self._due[member] = None
        if self._asleep:
            self._asleep = False
            try:
                self._wake_sender.send(b"w")
            except OSError:
                pass  # a full buffer wakes it as well; a closed socket means that it has ended

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors.

        Nothing is unregistered, because the child shares the kernel's epoll set with the parent.
        """
        for connection, _ in self._connections():
            connection.close_copy()
        for member in self._members:
            member.abandon()
        self._is_over = True
        self._close()

    def _connections(self) -> list[tuple[Watched, LoopMember]]:
        watched = self.selector.get_map() or {}  # None if the thread had ended before a fork
        registered = [key.data for key in watched.values() if key.data is not None]
        return [*registered, *self.lent.items()]

    def _close(self) -> None:
        # Ended members still refer to this thread and must not keep one another alive.
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
            # This is a defect of the loop itself: an error of a member ends only that member.
            log.exception("the I/O thread failed")
            with self._joining:
                self._is_over = True
            for member in list(self._members):
                self._fail(member, exc)
            self._release_ended()

    def _release_ended(self) -> None:
        """Release threads that wait for ended members; after the last member, close first."""
        # A member that joins at this moment has the lock, so this one is not the last.
        if self._joining.acquire(blocking=False):
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
        # From here on `wake` sends nothing: it adds to `_due`, which is read after this.
        self._asleep = False
        self._note_poll(any(key.data is not None for key, _ in ready))
        for key, events in ready:
            if key.data is None:
                self._wake_receiver.recv(4096)
            else:
                connection, member = key.data
                try:  # `_call` without its call
                    if events & selectors.EVENT_READ:
                        connection.on_readable()
                    if events & selectors.EVENT_WRITE:
                        connection.flush()
                except BaseException as exc:
                    self._fail(member, exc)
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
            self.current_until = self.polled_at + self.pause_after_s

    def _give_turns(self) -> list[LoopMember]:
        """Give the due members their turns; return the members that stop after it."""
        leaving = []
        for member in list(self._due):
            # Before the turn: work that arrives during it makes the member due again.
            del self._due[member]
            self._call(member, member.take_turn)
            if member.is_leaving and not member.has_ended:
                leaving.append(member)
        return leaving

    def _flush(self) -> None:
        while self.unflushed:
            unflushed, self.unflushed = self.unflushed, []
            for connection, member in unflushed:
                try:  # `_call` without its call
                    connection.flush()
                except BaseException as exc:
                    self._fail(member, exc)

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
            for connection, owner in self._connections():
                if owner is member:
                    connection.close()  # its end did not close it

    def _remove(self, member: LoopMember) -> None:
        """End a member that has stopped or failed."""
        if member.has_ended:  # it may have done both
            return
        self._members.discard(member)
        member.end()
        self._ended.append(member)
        if member.pause_after_s == self.pause_after_s < math.inf:
            self.pause_after_s = min((m.pause_after_s for m in self._members), default=math.inf)

    def _note_poll(self, has_bytes: bool) -> None:
        """Detect a pause of the process, after which all sockets are read before anything else.

        The poll that a stop of the process interrupts returns nothing, so the next one counts.
        """
        now = time.monotonic()
        if now - self.polled_at > self.pause_after_s and self.polled_at:
            self._catches_up = True
            self._catching_up_turns = 0
        elif self._catches_up:
            self._catching_up_turns += 1
            self._catches_up = has_bytes and self._catching_up_turns < MAX_CATCHING_UP_TURNS
            if not self._catches_up:
                self._report_pause()
        self.polled_at = now
        if not self._catches_up:
            self.poll_time = now

    def _report_pause(self) -> None:
        for member in list(self._members):
            if member.after_pause is not None:
                self._call(member, member.after_pause)
                self._due[member] = None

    def _sleep_s(self) -> float:
        # `_asleep` is set already: an earlier `wake` shows in `_due`, a later one sends a byte.
        if self._catches_up or self._due:
            return 0
        left_s = self._timers[0][0] - time.monotonic() if self._timers else math.inf
        # A sleep as long as a pause would be taken for one.
        return max(0.0, min(left_s, self.pause_after_s / 2, MAX_POLL_S))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            member, call = timer.member, timer.call
            if member is None or call is None or member.has_ended:
                continue
            self._call(member, call)
            self._due[member] = None
            if timer.interval_s and timer.call is not None:
                timer.at = next_multiple(now, timer.interval_s)
                self.add_timer(timer)


def wait_until_released(
    waiters: list[Any], is_over: Callable[[], bool], timeout_s: float | None
) -> bool:
    """Wait until ``is_over``, or until another thread releases our lock among the ``waiters``.

    Return whether it is over. A `threading.Event` would not do: its internal lock may be held by
    the code that a signal handler has interrupted.
    """
    waiter = threading.Lock()
    waiter.acquire()
    # Append first and check second: the other side sets its state first and releases second.
    waiters.append(waiter)
    limit_s = -1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
    is_released = False
    try:
        is_at_once = is_over()
        is_released = not is_at_once and waiter.acquire(timeout=limit_s)
        return is_at_once or is_released
    finally:
        if not is_released:
            with suppress(ValueError):  # it was released concurrently
                waiters.remove(waiter)  # or it would be released in place of one that waits


def next_multiple(now: float, interval_s: float) -> float:
    """Return the first multiple of the interval that is greater than ``now``."""
    # The product may be rounded down to ``now``.
    count = now // interval_s + 1
    return (count if count * interval_s > now else count + 1) * interval_s


# -- the process ----------------------------------------------------------------------------------

_shared: IOThread | None = None
_sharing = threading.RLock()  # re-entrant: a signal handler may start another


def _join(member: LoopMember) -> IOThread:
    """Add a member to the I/O thread of this process, and return the thread."""
    global _shared
    with _sharing:
        while (shared := _shared) is None or not shared.admit(member):
            thread = IOThread()
            thread.start()
            if _shared is shared:
                _shared = thread
            else:  # a signal handler has started another one meanwhile
                thread.retire()
        return shared


def _refuse_eventlet() -> None:
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("socket"):
        raise ConfigurationError(
            "nsqtools does not work on sockets that eventlet has patched",
            hint="Use threads, asyncio or gevent, or monkey_patch(socket=False, thread=False).",
        )


def _forget_thread() -> None:
    """Forget the parent's thread in a forked child, and replace the lock, which it may hold."""
    global _shared, _sharing
    thread, _shared, _sharing = _shared, None, threading.RLock()
    call_at_end_of_child.cache_clear()
    if thread is not None:
        thread.close_copies()


os.register_at_fork(after_in_child=_forget_thread)


@functools.cache  # one registration for each process
def call_at_end_of_child(stop: Callable[[], object]) -> None:
    """Call ``stop`` at the end of a child of multiprocessing, before its queues are closed.

    Such a child skips atexit. In other processes this does nothing.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, stop, exitpriority=100)  # kept until it has run
