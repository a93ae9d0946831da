"""Messages that were delivered and wait for a handler: I/O threads add, handler threads take.

Taking is what hands a message out. What waits can still be withdrawn: because it waited too long,
because nsqd delivered it again, or because its connection is gone. Each message is either taken or
withdrawn, never both, as both happen under one lock.

A batch may be taken whole or by parts: a handler that is slow takes one message at a time and
leaves the rest to others. How long handlers take is measured between two calls of `get` on a
thread.

Before anything is handed out its consumer must be *current*: the I/O thread has looked at its
sockets a moment ago. After a pause of the process nsqd may have delivered everything again, and the
newer deliveries are still in the sockets.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from nsqtools.client.in_flight_limit import HandlingTime
from nsqtools.client.message import Answers, Batch

EXPIRED_SHARE = 0.5  # of msg_timeout: the rest is for the handler


class Owner(Protocol):
    """The consumer that messages belong to."""

    def is_current(self, now: float) -> bool:
        """Tell whether its sockets were read a moment ago."""

    def catch_up(self) -> None:
        """Wait until they are read."""

    def measured(self) -> None:
        """`Backlog.handling` has changed."""

    def give_up(self, batch: Batch) -> None:
        """Give messages up, on the thread that would have handled them."""


@dataclass(slots=True, eq=False)
class Waiting:
    """Messages of one connection, none of them taken."""

    owner: Owner
    batch: Batch
    to_give_up: bool = False


class Backlog:
    """What waits, of one consumer or of several. Entries other than messages pass through."""

    def __init__(self) -> None:
        self.handling = HandlingTime()
        self._lock = threading.RLock()  # re-entrant: a signal handler may put something in
        self._entries: collections.deque[object] = collections.deque()
        # one for each entry, and after withdrawals too many: waiting costs no lock
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._handlers: set[int] = set()  # threads
        self._taken: dict[int, tuple[float, int, Owner]] = {}  # by thread: when, and how many

    # -- adding (any thread) --------------------------------------------------------------------

    def put(self, entry: object) -> None:
        """Add an entry at the end."""
        with self._lock:
            self._entries.append(entry)
        self._tokens.put(None)

    def put_first(self, entry: object) -> None:
        """Add an entry before all others."""
        with self._lock:
            self._entries.appendleft(entry)
        self._tokens.put(None)

    @property
    def is_empty(self) -> bool:
        return not self._entries

    # -- taking (handler threads) ---------------------------------------------------------------

    def get(self, timeout_s: float | None = None, *, most: int | None = None) -> object:
        """Return the next `Batch`, of at most ``most`` messages, or the next other entry.

        None when ``timeout_s`` passed first.
        """
        thread = threading.get_ident()
        self._note_handled(thread)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                self._tokens.get(timeout=left_s)
            except queue.Empty:
                return None
            entry, is_current = self._take(most)
            if not isinstance(entry, Waiting):
                if entry is not None:
                    return entry
            elif not is_current:
                entry.owner.catch_up()
            elif entry.to_give_up:
                entry.owner.give_up(entry.batch)
            else:
                self._handlers.add(thread)
                self._taken[thread] = time.monotonic(), len(entry.batch), entry.owner
                return entry.batch

    def _take(self, most: int | None) -> tuple[object, bool]:
        with self._lock:
            if not self._entries:
                return None, True
            entry = self._entries[0]
            if not isinstance(entry, Waiting):
                return self._entries.popleft(), True
            if not entry.owner.is_current(time.monotonic()):
                self._tokens.put(None)
                return entry, False
            batch = entry.batch
            if most is None or len(batch) <= most or entry.to_give_up:
                return self._entries.popleft(), True
            part = Batch(batch.source, batch[:most])
            del batch[:most]
            self._tokens.put(None)
            return Waiting(entry.owner, part), True

    def put_back(self, batch: Batch) -> None:
        """Return messages that the calling thread took and did not reach."""
        taken = self._taken.get(threading.get_ident())
        if taken is not None and batch:
            at, count, owner = taken
            self._taken[threading.get_ident()] = at, max(1, count - len(batch)), owner
            self.put_first(Waiting(owner, batch))

    def leave(self) -> None:
        """The calling thread handles no more messages."""
        thread = threading.get_ident()
        self._note_handled(thread)
        self._handlers.discard(thread)

    # -- measuring ------------------------------------------------------------------------------

    def _note_handled(self, thread: int) -> None:
        taken = self._taken.pop(thread, None)
        if taken is not None:
            at, count, owner = taken
            self.handling.note(count, time.monotonic() - at)
            owner.measured()

    @property
    def workers(self) -> int:
        """Threads that take messages."""
        return max(1, len(self._handlers))

    def per_message_s(self, now: float) -> float | None:
        """Return the handling time, not below what the handlers at work have taken already."""
        running = [(now - at) / count for at, count, _ in list(self._taken.values())]
        measured = self.handling.per_message_s
        return max(running + ([] if measured is None else [measured]), default=None)

    # -- withdrawing (I/O threads) --------------------------------------------------------------

    def withdraw(self, owner: Owner, expired_at: float | None = None) -> list[Batch]:
        """Take out what belongs to an owner: all, or what has waited too long at ``expired_at``."""
        withdrawn: list[Batch] = []
        kept: list[object] = []
        with self._lock:
            for entry in self._entries:
                if (
                    isinstance(entry, Waiting)
                    and entry.owner is owner
                    and (expired_at is None or _has_expired(entry.batch, expired_at))
                ):
                    withdrawn.append(entry.batch)
                else:
                    kept.append(entry)
            if withdrawn:
                self._entries = collections.deque(kept)
        return withdrawn

    def discard(self, source: Answers, ids: Container[bytes] | None = None) -> set[bytes]:
        """Drop messages of a connection, by id or (None) all; return the ids of the dropped."""
        dropped: set[bytes] = set()
        with self._lock:
            for entry in list(self._entries):
                if isinstance(entry, Waiting) and entry.batch.source is source:
                    batch = entry.batch
                    gone = [m.id for m in batch if ids is None or m.id in ids]
                    dropped.update(gone)
                    if len(gone) == len(batch):
                        self._entries.remove(entry)
                    elif gone:
                        batch[:] = [message for message in batch if message.id not in dropped]
        return dropped


def _has_expired(batch: Batch, now: float) -> bool:
    return now - batch[0].received_at > EXPIRED_SHARE * batch.source.msg_timeout_s
