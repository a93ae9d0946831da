"""Messages that were delivered and wait for a handler: the I/O thread adds, handler threads take.

Taking is what hands a message out. What waits can still be withdrawn: because it waited too long,
because nsqd delivered it again, or because its connection is gone. Each message is either taken or
withdrawn, never both, as both happen under one lock.

What the I/O thread read in one turn is one entry: with many connections those are many batches of
one message, and an entry each would cost more than the rest of their way. It may be taken whole or
by parts: a handler that is slow takes one message at a time and leaves the rest to others. How long
handlers take is measured between two calls of `get` on a thread.

Before anything is handed out its consumer must be *current*: the I/O thread has looked at its
sockets a moment ago. After a pause of the process nsqd may have delivered everything again, and the
newer deliveries are still in the sockets.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from nsqtools.client.in_flight_limit import HandlingTime
from nsqtools.client.message import Answers, Batch

EXPIRED_SHARE = 0.5  # of msg_timeout: the rest is for the handler


class Owner(Protocol):
    """The consumer that messages belong to. ``waiting`` is the backlog's list of them."""

    waiting: dict[Waiting, None]

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
    """Batches that arrived together, nothing of them taken; empty once they were withdrawn."""

    owner: Owner
    batches: list[Batch]
    to_give_up: bool = False


class Backlog:
    """What waits, of one consumer or of several. Entries other than messages pass through.

    ``on_entry`` is called after something was added, on the thread that did.
    """

    def __init__(self, on_entry: Callable[[], None] | None = None) -> None:
        self._on_entry = on_entry
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
            _note(entry)
        self._tokens.put(None)
        if self._on_entry is not None:
            self._on_entry()

    def put_first(self, entry: object) -> None:
        """Add an entry before all others."""
        with self._lock:
            self._entries.appendleft(entry)
            _note(entry)
        self._tokens.put(None)
        if self._on_entry is not None:
            self._on_entry()

    @property
    def is_empty(self) -> bool:
        with self._lock:
            self._drop_withdrawn()
            return not self._entries

    def _drop_withdrawn(self) -> None:
        entries = self._entries
        while entries and isinstance(entries[0], Waiting) and not entries[0].batches:
            entries.popleft()

    # -- taking (handler threads) ---------------------------------------------------------------

    def get(self, timeout_s: float | None = None, *, most: int | None = None) -> object:
        """Return the next `Batch`, of at most ``most`` messages, or the next other entry.

        None when ``timeout_s`` passed first.
        """
        taken = self._get(timeout_s, most, several=False)
        return taken[0] if isinstance(taken, list) else taken

    def get_some(self, timeout_s: float | None = None, *, most: int | None = None) -> object:
        """Like `get`, but return a list of batches of one consumer, ``most`` messages together."""
        return self._get(timeout_s, most, several=True)

    def _get(self, timeout_s: float | None, most: int | None, *, several: bool) -> object:
        thread = threading.get_ident()
        self._note_handled(thread)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                self._tokens.get(timeout=left_s)
            except queue.Empty:
                return None
            entry, is_current = self._take(most, several=several)
            if not isinstance(entry, Waiting):
                if entry is not None:
                    return entry
            elif not is_current:
                entry.owner.catch_up()
            elif entry.to_give_up:
                for batch in entry.batches:
                    entry.owner.give_up(batch)
            else:
                count = sum(map(len, entry.batches))
                self._handlers.add(thread)
                self._taken[thread] = time.monotonic(), count, entry.owner
                return entry.batches

    def _take(self, most: int | None, *, several: bool) -> tuple[object, bool]:
        """Take the next entry, or a part of it, and whether its consumer is current."""
        with self._lock:
            self._drop_withdrawn()
            if not self._entries:
                return None, True
            entry = self._entries[0]
            if not isinstance(entry, Waiting):
                return self._entries.popleft(), True
            if not entry.owner.is_current(time.monotonic()):
                self._tokens.put(None)
                return entry, False
            if entry.to_give_up:
                del entry.owner.waiting[entry]
                return self._entries.popleft(), True
            return Waiting(entry.owner, self._take_batches(entry, most, several=several)), True

    def _take_batches(self, entry: Waiting, most: int | None, *, several: bool) -> list[Batch]:
        """Take a batch of an entry, or what fits of it and of those of the same owner after it."""
        taken: list[Batch] = []
        owner, room = entry.owner, most
        while True:
            room = _move(entry.batches, taken, room, several=several)
            if entry.batches:
                self._tokens.put(None)
                return taken
            del owner.waiting[entry]
            self._entries.popleft()
            self._drop_withdrawn()
            following = self._entries[0] if several and room and self._entries else None
            if (
                not isinstance(following, Waiting)
                or following.owner is not owner
                or following.to_give_up
            ):
                return taken
            entry = following
            try:
                self._tokens.get_nowait()
            except queue.Empty:
                pass  # another thread has it, and will find less

    def put_back(self, batches: list[Batch]) -> None:
        """Return messages that the calling thread took and did not reach."""
        taken = self._taken.get(threading.get_ident())
        if taken is not None and batches:
            at, count, owner = taken
            left = count - sum(map(len, batches))
            self._taken[threading.get_ident()] = at, max(1, left), owner
            self.put_first(Waiting(owner, batches))

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

    def has_taken(self, owner: Owner) -> bool:
        """Tell whether a handler is at work on messages of an owner."""
        return any(other is owner for _, _, other in list(self._taken.values()))

    def per_message_s(self, now: float) -> float | None:
        """Return the handling time, not below what the handlers at work have taken already."""
        running = [(now - at) / count for at, count, _ in list(self._taken.values())]
        measured = self.handling.per_message_s
        return max(running + ([] if measured is None else [measured]), default=None)

    # -- withdrawing (the I/O thread) ------------------------------------------------------------

    def withdraw(self, owner: Owner, expired_at: float | None = None) -> list[Batch]:
        """Take out what belongs to an owner: all, or what has waited too long at ``expired_at``."""
        withdrawn: list[Batch] = []
        with self._lock:
            for entry in list(owner.waiting):
                if expired_at is None or _has_expired(entry.batches[0], expired_at):
                    withdrawn += entry.batches
                    entry.batches = []
                    del owner.waiting[entry]
            self._drop_withdrawn()
        return withdrawn

    def discard(
        self, owner: Owner, source: Answers, ids: Container[bytes] | None = None
    ) -> set[bytes]:
        """Drop messages of a connection, by id or (None) all; return the ids of the dropped."""
        dropped: set[bytes] = set()
        with self._lock:
            for entry in list(owner.waiting):
                for batch in entry.batches:
                    if batch.source is source:
                        gone = {m.id for m in batch if ids is None or m.id in ids}
                        dropped |= gone
                        batch[:] = [message for message in batch if message.id not in gone]
                if not all(entry.batches):
                    entry.batches[:] = filter(None, entry.batches)
                    if not entry.batches:
                        del owner.waiting[entry]
            self._drop_withdrawn()
        return dropped


def _note(entry: object) -> None:
    if isinstance(entry, Waiting):
        entry.owner.waiting[entry] = None


def _move(source: list[Batch], to: list[Batch], room: int | None, *, several: bool) -> int | None:
    """Move the first batch, or ``several``, of at most ``room`` messages: return what is left.

    Only the first of what is taken is divided.
    """
    count = 0
    for batch in source:
        if room is not None and len(batch) > room:
            if not to:
                to.append(Batch(batch.source, batch[:room]))
                del batch[:room]
            room = 0
            break
        to.append(batch)
        count += 1
        if not several:
            room = 0
            break
        if room is not None:
            room -= len(batch)
    del source[:count]
    return room


def _has_expired(batch: Batch, now: float) -> bool:
    return now - batch[0].received_at > EXPIRED_SHARE * batch.source.msg_timeout_s
