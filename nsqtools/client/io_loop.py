"""The I/O thread of a process: one selector, one heap of timers, one wake-up for all its members.

Every consumer and producer is a `LoopMember`. The thread starts with the first of them and ends
with the last, so a hundred consumers cost one thread. A member owns its connections: they are read,
written, registered and closed on the thread only, and other threads talk to it with `call_soon`.
The thread is woken through a socket pair, and only when it sleeps: under load it finds the calls on
its next turn without a system call.

A turn costs what there is to do in it: only members to which something happened are served, and
periodic work of all members falls into the same turn (`LoopMember.call_each`). A member that fails
ends alone.

A fork leaves the child without the thread: it closes its copies of the descriptors, and its first
member starts a loop of its own.

Trap: callbacks of users run here, and one that blocks stops all members.
"""

from __future__ import annotations

import collections
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nsqtools.client.io_thread import IOThread, next_multiple

log = logging.getLogger("nsqtools")


class Watched(Protocol):
    """What can be registered: a descriptor and what to do when it is ready."""

    def fileno(self) -> int: ...
    def on_readable(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def close_copy(self) -> None:
        """Close the descriptor in a forked child; the connection is the parent's."""


class Timer:
    """A call to be made later; `cancel` it from the loop's thread."""

    __slots__ = ("at", "call", "interval_s", "member")

    def __init__(
        self, member: LoopMember, at: float, call: Callable[[], object], interval_s: float
    ) -> None:
        self.member = member
        self.at = at
        self.call: Callable[[], object] | None = call
        self.interval_s = interval_s

    def cancel(self) -> None:
        """The call will not be made."""
        self.call = None


class LoopMember:
    """A consumer or a producer on the I/O thread, from `start` until `stop` takes effect.

    ``each_turn`` is called after each event of this member: bytes that came, a timer, a call, a
    wake-up. What it writes is flushed at the end of the turn, with one send per connection.
    ``at_end`` is called on the thread when the member has stopped, or failed by a defect
    (`failure` then): nobody may wait for it any longer.
    """

    now = staticmethod(time.monotonic)

    def __init__(
        self, name: str, each_turn: Callable[[], None], at_end: Callable[[], None]
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.has_ended = False
        self.is_due = False  # the loop's: it has a turn to come
        self.is_leaving = False
        self.pause_after_s: float | None = None
        self.after_pause: Callable[[], object] | None = None
        self._each_turn = each_turn
        self._at_end = at_end
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._ended = threading.Event()
        self._thread: IOThread | None = None

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Join the I/O thread of the process, and start it if there is none."""
        self._thread = _join(self)
        self.wake()

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
        return (
            self._thread is None
            or self.pause_after_s is None
            or now < self._thread.current_until
            or self.has_ended
        )

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the member has ended; return whether it has. On the I/O thread, False."""
        return not self.is_own_thread and self._ended.wait(timeout_s)

    @property
    def is_own_thread(self) -> bool:
        """Tell whether this is the I/O thread, which must not wait for itself."""
        return self._thread is not None and self._thread.is_own_thread

    # -- on the I/O thread ----------------------------------------------------------------------

    def stop(self) -> None:
        """End after this turn."""
        self.is_leaving = True

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Have a call made after a delay."""
        return self._own.add_timer(Timer(self, self.now() + delay_s, call, 0.0))

    def call_each(self, interval_s: float, call: Callable[[], object]) -> Timer:
        """Have a call made again and again, at the same moments as those of other members."""
        at = next_multiple(self.now(), interval_s)
        return self._own.add_timer(Timer(self, at, call, interval_s))

    def notice_pauses(self, after_s: float, call: Callable[[], object]) -> None:
        """Have a call made after a pause of the process, once all sockets were read."""
        self.pause_after_s = after_s
        self.after_pause = call
        self._own.fit_pause(after_s)

    @property
    def bytes_since(self) -> float:
        """What this turn reads was sent after this time, as far as we know."""
        thread = self._thread  # not `_own`: this is once for each read
        return thread.bytes_since if thread is not None else 0.0

    def flush_soon(self, connection: Watched) -> None:
        """Flush a connection at the end of this turn."""
        thread = self._thread  # not `_own`, as above
        if thread is not None:
            thread.unflushed.append((connection, self))

    def after_flush(self, call: Callable[[], object]) -> None:
        """Have a call made at the end of this turn, when everything is sent."""
        self._own.at_last.append((call, self))

    def register(self, connection: Watched) -> None:
        """Watch a connection for bytes to read."""
        self._own.selector.register(connection, selectors.EVENT_READ, (connection, self))

    def watch_writes(self, connection: Watched, wanted: bool) -> None:
        """Watch a connection for room to write as well, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._own.selector.modify(connection, events, (connection, self))

    def unregister(self, connection: Watched) -> None:
        """Stop watching; call it before the connection is closed."""
        self._own.selector.unregister(connection)

    @property
    def _own(self) -> IOThread:
        assert self._thread is not None
        return self._thread

    # -- what the loop calls --------------------------------------------------------------------

    def take_turn(self) -> None:
        """Make the calls that wait, and what there is to do each turn."""
        if not self.has_ended:  # else who asks for a call makes it
            self._make_calls()
        if not self.has_ended:
            self._each_turn()

    def end(self) -> None:
        """The member serves nobody any longer."""
        try:
            self._at_end()
        except Exception:
            log.exception("%s: its end failed", self.name)
        self.has_ended = True
        self._make_calls()

    def release(self) -> None:
        """End the waiting of `join`."""
        self._ended.set()

    def abandon(self) -> None:
        """In a forked child: the member goes on in the parent only. Nobody waits for it here."""
        self._calls.clear()
        self.has_ended = True
        self._ended = threading.Event()  # a thread that is gone may hold the other's lock
        self._ended.set()

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                call = self._calls.popleft()
            except IndexError:  # after the end two threads may meet here
                return
            call()


# -- the process ----------------------------------------------------------------------------------

_shared: IOThread | None = None
_sharing = threading.Lock()


def _join(member: LoopMember) -> IOThread:
    """Let a member join the thread of this process."""
    global _shared
    with _sharing:
        if _shared is None or not _shared.admit(member):
            thread = IOThread()
            thread.admit(member)
            thread.start()
            _shared = thread
        return _shared


def _leave_to_parent() -> None:
    """In a forked child, whose copy of the lock may be held by a thread that it does not have."""
    global _shared, _sharing
    thread, _shared, _sharing = _shared, None, threading.Lock()
    if thread is not None:
        thread.close_copies()


os.register_at_fork(after_in_child=_leave_to_parent)
