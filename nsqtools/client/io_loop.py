"""The I/O thread: a selector, timers, and calls handed over by other threads.

One loop owns its connections: they are read, written, registered and closed on its thread only.
Other threads talk to it with `call_soon`. The loop is woken through a socket pair, and only when it
sleeps: under load it finds the calls on its next turn without a system call.
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
from typing import Any, Protocol

log = logging.getLogger("nsqtools")

MAX_CATCHING_UP_TURNS = 100  # under a stream that does not end


class Watched(Protocol):
    """What can be registered: a descriptor and what to do when it is ready."""

    def fileno(self) -> int: ...
    def on_readable(self) -> None: ...
    def flush(self) -> None: ...


class Timer:
    """A call to be made later; `cancel` it from the loop's thread."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """The call will not be made."""
        self.call = None


class IOLoop:
    """Runs on a thread of its own from `start` until `stop`.

    ``each_turn`` is called once per turn, after reading and before sleeping; then what the turn has
    written is flushed, with one send per connection. ``at_end`` is called on the thread when the
    loop has ended, also by a defect (`failure` then): nobody may wait for it any longer.
    """

    def __init__(
        self,
        name: str,
        each_turn: Callable[[], None],
        at_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._each_turn = each_turn
        self._at_end = at_end
        self.now = clock
        self.failure: BaseException | None = None
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._unflushed: list[Watched] = []
        # a turn that took longer was a pause: of the process, or the interpreter was held elsewhere
        self.pause_after_s: float | None = None
        self.bytes_since = 0.0  # what this turn reads was sent after this time, as far as we know
        self._polled_at = 0.0
        self.after_pause: Callable[[], None] | None = None  # when all sockets have been read
        self._catches_up = False
        self._catching_up_turns = 0
        self._current_until = 0.0
        self.max_sleep_s: float | None = None  # for work that other threads leave without a wake-up
        self._asleep = False
        self._is_woken = False
        self._is_running = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        # here and not before: what is never started has nothing to close
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._is_running = True
        self._thread.start()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have a call made on the loop's thread, in the order of these requests.

        After the loop has ended the call is made at once: what it was given may need closing.
        """
        self._calls.append(call)
        self.wake()
        if self._has_ended:
            self._make_calls()

    def wake(self) -> None:
        """See that the loop takes a turn after this call."""
        self._is_woken = True
        if self._asleep:
            self._asleep = False
            try:
                self._wake_sender.send(b"w")
            except OSError:
                pass  # full: it is being woken; closed: it has ended

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def is_current(self, now: float) -> bool:
        """Tell whether all sockets were read a moment ago, or will never be again."""
        return now < self._current_until or self.pause_after_s is None or self._has_ended

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; return whether it has. On the thread itself, False."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close_copies(self) -> None:
        """In a forked child: close its copies of the descriptors; the thread is the parent's.

        Nothing is unregistered: the kernel's list of what is watched is shared with the parent.
        """
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- on the loop's thread -------------------------------------------------------------------

    def stop(self) -> None:
        """End the loop after this turn."""
        self._is_running = False

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Have a call made after a delay."""
        timer = Timer(self.now() + delay_s, call)
        heapq.heappush(self._timers, (timer.at, next(self._sequence), timer))
        return timer

    def flush_soon(self, connection: Watched) -> None:
        """Flush a connection at the end of this turn."""
        self._unflushed.append(connection)

    def register(self, connection: Watched) -> None:
        """Watch a connection for bytes to read."""
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def watch_writes(self, connection: Watched, wanted: bool) -> None:
        """Watch a connection for room to write as well, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(connection, events, connection)

    def unregister(self, connection: Watched) -> None:
        """Stop watching; call it before the connection is closed."""
        self._selector.unregister(connection)

    def _run(self) -> None:
        try:
            while self._is_running:
                self._turn()
        except BaseException as exc:
            # a defect: whatever can happen outside has its own error by now
            log.exception("the I/O thread failed")
            self.failure = exc
            raise
        finally:
            try:
                self._at_end()
            finally:
                self._has_ended = True
                self._selector.close()
                self._wake_receiver.close()
                self._wake_sender.close()
                self._make_calls()

    def _turn(self) -> None:
        self._asleep = True
        ready = self._selector.select(self._sleep_s())
        self._note_poll(any(key.data is not None for key, _ in ready))
        for key, events in ready:
            owner: Any = key.data
            if owner is None:
                self._drain_wake_ups()
                continue
            if events & selectors.EVENT_READ:
                owner.on_readable()
            if events & selectors.EVENT_WRITE:
                owner.flush()
        self._asleep = False
        self._is_woken = False  # before the work is looked at: what comes later is seen next turn
        self._make_calls()
        if not self._catches_up:
            self._run_timers()
        self._each_turn()
        while self._unflushed:
            unflushed, self._unflushed = self._unflushed, []
            for connection in unflushed:
                connection.flush()
        if self.pause_after_s is not None and not self._catches_up:
            self._current_until = self._polled_at + self.pause_after_s

    def _note_poll(self, has_bytes: bool) -> None:
        """Notice a pause; then everything is read before anybody relies on what was read earlier.

        The poll that a stop of the process interrupts returns nothing: the next one counts.
        """
        now = self.now()
        if self.pause_after_s is not None:
            if now - self._polled_at > self.pause_after_s and self._polled_at:
                self._catches_up = True
                self._catching_up_turns = 0
            elif self._catches_up:
                self._catching_up_turns += 1
                self._catches_up = has_bytes and self._catching_up_turns < MAX_CATCHING_UP_TURNS
                if not self._catches_up and self.after_pause is not None:
                    self.after_pause()
        self._polled_at = now
        if not self._catches_up:
            self.bytes_since = now

    def _sleep_s(self) -> float | None:
        # looked at after _asleep was set: who woke us before is seen here, who comes later sends
        if self._is_woken or self._catches_up:
            return 0
        if not self._timers:
            return self.max_sleep_s
        until_timer_s = max(0.0, self._timers[0][0] - self.now())
        return until_timer_s if self.max_sleep_s is None else min(until_timer_s, self.max_sleep_s)

    def _drain_wake_ups(self) -> None:
        try:
            while len(self._wake_receiver.recv(64)) == 64:
                pass
        except BlockingIOError:
            pass

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                call = self._calls.popleft()
            except IndexError:  # after the end two threads may meet here
                return
            call()

    def _run_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()
