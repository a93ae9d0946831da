"""The path of messages from the connections of a consumer to its handlers.

`Delivery` puts new messages into the `Backlog`, except those that have failed too often. The I/O
thread adds to the backlog, and handler threads take from it. Pending messages are withdrawn when
they have waited too long, when nsqd delivers them again, or when their connection is lost. Such a
delivery does not count against max_attempts (`attempts.Attempts`). `Delivery` also adapts the
number of messages in flight to the speed of the handlers (`in_flight_limit`).

A message that may kill its process is isolated (`Quarantine`).

A message is either taken by a handler or withdrawn, never both, because both happen under one lock.
The I/O thread waits for that lock only briefly.

Everything that the I/O thread reads in one turn is one entry. Many connections bring many batches
of one message, and an entry for each would cost more than the rest of their path. An entry may be
taken in parts: a slow handler takes one message at a time and leaves the others.

When nsqd delivers a message again that a worker has, the new delivery is not handed out. The
worker's message object represents it as well (`message.adopt_redelivery`), and the worker's answer
is for the new delivery. Without an answer nsqd requeues it by its timeout
(`Delivery.watch_workers`). So a handler that hangs costs one worker, and when all hang, RDY is 0. A
message that a handler has passed to threads of its own counts as being in no worker's hands: it may
have been dropped, so its redelivery is handed out.

Before a message is handed out, its consumer must be *current*: the I/O thread has read all sockets
a moment ago. After a pause of the process nsqd may have delivered everything again, and the newer
deliveries are still in the sockets.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, MutableSet, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from nsqtools.client.attempts import Attempts, MessageKey
from nsqtools.client.in_flight_limit import InFlightLimit
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.message import (
    Batch,
    Message,
    MessageSource,
    batches_of,
    max_attempts_of,
    requeue_undelivered,
    source_of,
)
from nsqtools.client.rdy import ReadyControl
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

# Share of msg_timeout after which a pending message is returned to nsqd. The rest of the time
# remains for the handler that gets the message just before.
EXPIRED_SHARE = 0.5
# Ticks in msg_timeout: a pending message is returned at most an eighth of it late.
TICKS = 8
MAX_TICK_S = 0.25
# A pause of the process after which messages may have been delivered again. It is two ticks where
# msg_timeout is short.
MAX_PAUSE_S = 2.0
# Share of msg_timeout for which suspects may delay other messages. Messages that were pending
# before then have as much time left until they expire.
QUARANTINE_SHARE = 0.25
# How long a handler's thread waits for the I/O thread to read all sockets.
POLL_WAIT_S = 2.0
# Time after the timeout of a message at which nsqd has certainly requeued it: nsqd scans its queues
# every 0.1 s.
REQUEUED_AFTER_S = 0.25
# Time without messages after which every connection may bring a message again.
IDLE_AFTER_S = 2.0
# A signal that arrives just before a thread goes to sleep does not wake it, and its Python handler
# waits until something else does (seen in 12 of 20,000 on a busy machine).
MAX_SLEEP_S = 1.0
# The longest wait of the I/O thread for a lock. A signal handler may have interrupted the owner,
# and may be waiting for the I/O thread.
LOCK_TIMEOUT_S = 0.1


@dataclass(slots=True, eq=False)
class QueuedBatches:
    """Batches that arrived together and have not been taken; empty once they are withdrawn."""

    owner: Delivery
    batches: list[Batch]
    to_give_up: bool = False


class Worker:
    """One loop over messages, which has taken some at the time ``since``.

    Its body works on the ``current`` message, with those ``ahead`` still to come; or with
    ``has_batch`` on all that it has ``taken``. Both its thread and the I/O thread take from those
    ahead, for another worker. Each removal is atomic, so that one of them gets a message.
    """

    __slots__ = ("ahead", "current", "has_batch", "since", "taken", "task", "thread")

    def __init__(self, *, has_batch: bool = False, task: object = None) -> None:
        self.task = task  # of asyncio, in which the body runs
        self.has_batch = has_batch
        self.taken: Sequence[Message] = ()
        self.ahead: collections.deque[Message] = collections.deque()
        self.current: Message | None = None
        self.since = 0.0
        self.thread = 0

    @property
    def messages(self) -> Sequence[Message]:
        """The messages that the body works on, answered or not."""
        if self.has_batch:
            return self.taken
        current = self.current  # read once, because the worker's thread changes it
        return () if current is None else (current,)

    def all_messages(self) -> Sequence[Message]:
        """Return also the messages ahead."""
        return [*self.messages, *self.ahead]

    def take_ahead(self) -> list[Batch]:
        """Remove and return the messages ahead."""
        messages = []
        with contextlib.suppress(IndexError):
            while True:
                messages.append(self.ahead.popleft())
        return batches_of(messages)


class Pool(Protocol):
    """A program that passes messages on and tracks them until they are answered.

    Its methods are called on the I/O thread.
    """

    def at_work(self) -> dict[Message, float]:
        """Return its messages, with the time at which it got each."""

    def redelivered(self, message: Message) -> None:
        """Record that nsqd delivered a message again, which does not count as an attempt."""


class Backlog:
    """The pending messages of one or several consumers, and other entries in between.

    ``on_entry`` is called after each addition, on the thread that adds.
    """

    def __init__(self, on_entry: Callable[[], None] | None = None) -> None:
        self._on_entry = on_entry
        self.iterators: MutableSet[Any] = set()  # threads and tasks that iterate over messages
        self._waiters: set[object] = set()  # threads and tasks that wait for messages
        self.workers: set[Worker] = set()
        self.pools: list[Pool] = []
        # Messages that timed out at nsqd, or lost their connection, while a worker or a pool has
        # them; with the time at which it got each.
        self.overdue: dict[Message, float] = {}
        self._lock = threading.RLock()  # re-entrant: a signal handler may put an entry
        self._entries: collections.deque[object] = collections.deque()
        # At least one token for each entry, so that a thread can wait without the lock. Withdrawals
        # leave surplus tokens behind.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    # -- adding (any thread) --------------------------------------------------------------------

    def put(self, entry: object, *, is_first: bool = False) -> None:
        """Add an entry at the end, or before all others."""
        if isinstance(entry, QueuedBatches):
            entry.owner.waiting[entry] = None
        if is_first:
            with self._lock:
                self._entries.appendleft(entry)
        else:
            # A deque's append is atomic, and the I/O thread must not wait for handlers here.
            self._entries.append(entry)
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
        while entries and isinstance(entries[0], QueuedBatches) and not entries[0].batches:
            entries.popleft()

    # -- taking (handler threads) ---------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> object:
        """Return the next `Batch` or other entry; None when ``timeout_s`` passed first."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        entry = self.get_batches(until, several=False)
        return entry[0] if isinstance(entry, list) else entry

    def get_batches(
        self, until: float, max_messages: int = sys.maxsize, *, several: bool = True
    ) -> object:
        """Like `get`, but return batches of one consumer as a list.

        It has one batch, or with ``several`` as many as there are, with at most ``max_messages``.
        """
        thread = threading.get_ident()
        while True:
            left_s = max(0.0, until - time.monotonic())
            self._waiters.add(thread)
            try:
                self._tokens.get(timeout=min(left_s, MAX_SLEEP_S))
            except queue.Empty:
                if left_s > MAX_SLEEP_S:
                    continue
                return None
            finally:
                self._waiters.discard(thread)
            entry, is_current = self._take(max_messages, several=several)
            if not isinstance(entry, QueuedBatches):
                if entry is not None:
                    return entry
            elif not is_current:
                entry.owner.wait_until_polled()
            elif entry.to_give_up:
                for batch in entry.batches:
                    entry.owner.give_up(batch)
            else:
                return entry.batches

    def _take(self, max_messages: int, *, several: bool) -> tuple[object, bool]:
        """Return the next entry or a part of it, and whether its consumer is current.

        The entry of a consumer that is not current stays in the backlog.
        """
        with self._lock:
            self._drop_withdrawn()
            if not self._entries:
                return None, True
            entry = self._entries[0]
            if not isinstance(entry, QueuedBatches):
                return self._entries.popleft(), True
            if not entry.owner.is_current(time.monotonic()):
                self._tokens.put(None)
                return entry, False
            if entry.to_give_up:
                # One by one, because the callback may be slow and the others may expire meanwhile.
                max_messages, several = 1, False
            batches = self._take_batches(entry, max_messages, several=several)
            return QueuedBatches(entry.owner, batches, entry.to_give_up), True

    def _take_batches(self, entry: QueuedBatches, room: int, *, several: bool) -> list[Batch]:
        """Take one batch of an entry, or ``several`` of it and of the next entries of its owner."""
        batches: list[Batch] = []
        owner = entry.owner
        while True:
            room = _move_batches(entry.batches, batches, room, several=several)
            if entry.batches:
                self._tokens.put(None)
                return batches
            del owner.waiting[entry]
            self._entries.popleft()
            self._drop_withdrawn()
            following = self._entries[0] if several and room and self._entries else None
            if (
                not isinstance(following, QueuedBatches)
                or following.owner is not owner
                or following.to_give_up
            ):
                return batches
            entry = following
            try:
                self._tokens.get_nowait()
            except queue.Empty:
                pass  # another thread has taken the token, and will find fewer entries

    @property
    def has_waiters(self) -> bool:
        """Return whether a thread or task waits for messages."""
        return bool(self._waiters)

    # -- messages of workers (the I/O thread, and any thread for `health`) -----------------------

    def at_work(self) -> dict[Message, float]:
        """Return the messages of workers and pools, answered or not, and since when."""
        messages = {m: worker.since for worker in list(self.workers) for m in worker.messages}
        for pool in self.pools:
            messages |= pool.at_work()
        return messages

    @property
    def is_stuck(self) -> bool:
        """Return whether every worker has an overdue message."""
        workers = list(self.workers) if self.overdue else []
        return bool(workers) and all(
            any(message in self.overdue for message in worker.messages) for worker in workers
        )

    # -- withdrawing (the I/O thread) ------------------------------------------------------------

    def withdraw(self, owner: Delivery, expired_at: float | None = None) -> list[Batch]:
        """Remove and return the messages of an owner, or only those expired at ``expired_at``.

        If the lock is not available, nothing is removed. All messages are returned nevertheless if
        no time is given: they are to be requeued in any case.
        """
        withdrawn: list[Batch] = []
        if self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            try:
                for entry in list(owner.waiting):
                    # A signal handler may have raised within `_take_batches`, after the last batch.
                    is_empty = not entry.batches
                    if is_empty or expired_at is None or _has_expired(entry.batches[0], expired_at):
                        withdrawn += entry.batches
                        entry.batches = []
                        del owner.waiting[entry]
                self._drop_withdrawn()
            finally:
                self._lock.release()
        elif expired_at is None:
            withdrawn = [batch for entry in list(owner.waiting) for batch in entry.batches]
        return withdrawn

    def discard(
        self, owner: Delivery, source: MessageSource, ids: Container[bytes] | None = None
    ) -> set[bytes]:
        """Drop all messages of a connection, or those with certain ids; return the dropped ids.

        If the lock is not available, nothing is dropped.
        """
        dropped: set[bytes] = set()
        # Longer than elsewhere: busy handlers may have the lock for a while, and a message that is
        # not dropped here may be handled twice.
        if not self._lock.acquire(timeout=10 * LOCK_TIMEOUT_S):
            return dropped
        try:
            for entry in list(owner.waiting):
                for batch in entry.batches:
                    if batch._source is source:
                        matches = {m.id for m in batch if ids is None or m.id in ids}
                        dropped |= matches
                        batch[:] = [message for message in batch if message.id not in matches]
                entry.batches[:] = filter(None, entry.batches)
                if not entry.batches:
                    del owner.waiting[entry]
            self._drop_withdrawn()
        finally:
            self._lock.release()
        return dropped


def _move_batches(source: list[Batch], target: list[Batch], room: int, *, several: bool) -> int:
    """Move one batch, or ``several``, with at most ``room`` messages; return the remaining room.

    A batch is divided only if it is the first in ``target``.
    """
    count = 0
    for batch in source:
        if len(batch) > room:
            if not target:
                target.append(Batch(batch._source, batch[:room]))
                del batch[:room]
            room = 0
            break
        target.append(batch)
        count += 1
        room -= len(batch)
        if not several:
            break
    del source[:count]
    return room


class Quarantine:
    """Suspects, messages that may kill their process, until each was handled alone. Pure.

    While it is active, no further messages are requested from nsqd. When all other messages in
    flight are answered, the suspects are released one by one. This must not take long, because a
    handler may hang: after ``limit_s`` the remaining suspects are released together.

    The suspect with the fewest attempts comes first, as it was not in flight at every death. Those
    with equal attempts come in one order and, at their next delivery, in the other: whichever of
    them kills the process, the ones before it are handled.
    """

    def __init__(self) -> None:
        self._suspects: list[QueuedBatches] = []
        self._began_at: float | None = None

    @property
    def is_active(self) -> bool:
        return self._began_at is not None

    def add(self, suspect: QueuedBatches, now: float) -> None:
        """Isolate a message."""
        self._suspects.append(suspect)
        if self._began_at is None:
            self._began_at = now

    def take_due(self, in_flight: int, now: float, limit_s: float) -> list[QueuedBatches]:
        """Return the suspects to hand out now; end the quarantine after the last one."""
        self._suspects = [suspect for suspect in self._suspects if suspect.batches]
        if self._began_at is None:
            return []
        if now - self._began_at > limit_s or not (self._suspects or in_flight):
            return self.end()
        if not self._suspects or in_flight > len(self._suspects):
            return []
        suspect = min(self._suspects, key=self._order)
        self._suspects.remove(suspect)
        return [suspect]

    def end(self) -> list[QueuedBatches]:
        """End the quarantine, and return the remaining suspects."""
        self._began_at = None
        suspects, self._suspects = self._suspects, []
        return [suspect for suspect in suspects if suspect.batches]

    @staticmethod
    def _order(suspect: QueuedBatches) -> tuple[int, int]:
        message = suspect.batches[0][0]
        number = int.from_bytes(message.id)
        return message.attempts, number if message.attempts % 2 else -number


def _has_expired(batch: Batch, now: float) -> bool:
    return now - batch[0].received_at > EXPIRED_SHARE * batch._source.msg_timeout_s


@dataclass(slots=True)
class ConsumerStats:
    """Counts of messages since the start.

    ``late`` counts answers that nsqd refused as late. ``expired`` counts deliveries that ended
    before a handler got them, because they waited too long or their connection was lost.
    """

    received: int = 0
    finished: int = 0
    requeued: int = 0
    given_up: int = 0
    late: int = 0
    expired: int = 0


class Delivery:
    """Delivers the messages of one consumer to the backlog, and limits their number in flight.

    ``give_up`` is called on a handler's thread. ``on_limit`` gets each new limit for messages in
    flight, and ``on_tick`` the time several times in msg_timeout, both on the I/O thread.
    """

    def __init__(
        self,
        loop: LoopMember,
        backlog: Backlog,
        attempts: Attempts,
        limit: InFlightLimit,
        rdy: ReadyControl[Any],
        *,
        give_up: Callable[[Batch], None],
        on_limit: Callable[[int], None],
        on_tick: Callable[[float], None],
    ) -> None:
        self.stats = ConsumerStats()
        self.give_up = give_up
        self.is_current = loop.is_current
        self._on_tick = on_tick
        # Our entries in the backlog, including one that is added at the end of this turn.
        self.waiting: dict[QueuedBatches, None] = {}
        self._arrived: QueuedBatches | None = None  # messages read in this turn
        self._loop = loop
        self._backlog = backlog
        self._on_limit = on_limit
        self._rdy = rdy
        self.attempts = attempts
        self._quarantine = Quarantine()
        self.in_flight_limit = limit
        self._sources: dict[MessageSource, None] = {}
        # Messages of workers whose connection was lost. nsqd delivers them again on another one.
        self.orphans: dict[MessageKey, Message] = {}
        self._is_stuck = False  # see `Backlog.is_stuck`
        # Arrived since the last `_weigh`, which the first message calls: the limit may double with
        # each answer.
        self._arrived_bytes = self._arrived_count = 0
        self._weigh_at = 0.0
        self._tick_s = 0.0
        self._ticks: Timer | None = None  # while messages may expire, plus `IDLE_AFTER_S`
        self._busy_at = 0.0

    # -- messages, on the I/O thread ------------------------------------------------------------

    def deliver(self, source: MessageSource, batch: Batch) -> None:
        """Put new messages into the backlog, at the end of the turn."""
        if self._ticks is None:
            self._start_ticks()
        self._arrived_count += len(batch)
        if len(batch) == 1:
            self._arrived_bytes += len(batch[0].body)
        else:
            self._arrived_bytes += sum([len(message.body) for message in batch])
        if self._arrived_bytes > self._weigh_at:
            self._weigh()
        if self.attempts.limit and self.attempts.limit < max_attempts_of(batch):
            batch = self._sort_out(source, batch)
        if batch:
            if self._arrived is None:
                self._arrived = QueuedBatches(self, [])
                self._loop.after_flush(self._hand_over)
            self._arrived.batches.append(batch)
            self.waiting[self._arrived] = None

    def _start_ticks(self) -> None:
        if self._ticks is None:
            self._ticks = self._loop.call_every(self._tick_s, self._tick)
            self._set_busy(True)

    def _in_flight(self) -> list[Message]:
        return [
            message
            for source in self._sources
            if source.in_flight
            for message in list(source.in_flight.values())
            if message.id not in source.released
        ]

    def _weigh(self) -> None:
        """Measure the bytes in flight. A running total would cost a lookup for each answer."""
        sizes = [len(message.body) for message in self._in_flight()]
        size, count = sum(sizes), len(sizes)
        max_bytes = self.in_flight_limit.max_bytes
        # Again when the arrivals could have filled half of the budget, at most 16 times for each.
        self._weigh_at = max(max_bytes / 16, max_bytes / 2 - size)
        if not count:
            size, count = self._arrived_bytes, self._arrived_count
        self._arrived_bytes = self._arrived_count = 0
        if count:
            self.in_flight_limit.weigh(size, count)
            self._apply_limit()

    def _hand_over(self) -> None:
        # At the end of the turn, because a handler that is woken for the first message would
        # compete with the I/O thread, which reads the others and sends answers.
        arrived, self._arrived = self._arrived, None
        if arrived is not None and arrived.batches:
            self._backlog.put(arrived)

    def _sort_out(self, source: MessageSource, batch: Batch) -> Batch:
        """Return the messages to deliver, and set aside those to isolate or to give up."""
        deliverable, given_up = Batch(source, ()), Batch(source, ())
        was_active = self._quarantine.is_active
        for message in batch:
            key = source.topic, source.nsqd, message.id
            verdict = self.attempts.verdict(key, message.attempts)
            if verdict == "isolate":
                suspect = QueuedBatches(self, [Batch(source, [message])])
                self._quarantine.add(suspect, self._loop.now())
                self.waiting[suspect] = None
            else:
                (given_up if verdict == "give up" else deliverable).append(message)
        if given_up:
            self._backlog.put(QueuedBatches(self, [given_up], to_give_up=True))
        if self._quarantine.is_active and not was_active:
            self._apply_limit()
            self._loop.after_flush(self._release_suspects)
        return deliverable

    def _release_suspects(self) -> None:
        if self._quarantine.is_active:
            limit_s = QUARANTINE_SHARE * self.in_flight_limit.msg_timeout_s
            now = self._loop.now()
            for suspect in self._quarantine.take_due(self._rdy.in_flight, now, limit_s):
                self._backlog.put(suspect)
            self._apply_limit()  # the quarantine may have ended

    def end_quarantine(self) -> None:
        """Hand out all suspects."""
        for suspect in self._quarantine.end():
            self._backlog.put(suspect)
        self._apply_limit()

    def redelivered(
        self, source: MessageSource, ids: Set[bytes], dropped: list[bytes]
    ) -> dict[bytes, Message]:
        """Process the arrival of messages that may have been delivered before.

        Earlier deliveries that are pending are dropped, in favor of the new ones. Return the
        messages that workers have, by id: they represent the new deliveries. ``dropped`` has ids of
        deliveries that a later one in the same read has superseded.
        """
        repeated = ids & source.in_flight.keys()
        if not (repeated or dropped or self.orphans):
            return {}
        pending = self._backlog.discard(self, source, repeated) if repeated else set()
        self.stats.expired += len(pending) + len(dropped)
        self.discount(source, [*repeated, *dropped])
        earlier = {
            id: message
            for id in repeated - pending
            if (message := source.in_flight.get(id)) is not None
        }
        if self.orphans:
            keys = {id: (source.topic, source.nsqd, id) for id in ids - repeated}
            earlier |= {id: self.orphans[key] for id, key in keys.items() if key in self.orphans}
        if not earlier:
            return {}
        at_work = self._backlog.at_work()
        kept = {id: message for id, message in earlier.items() if message in at_work}
        # A handler that is slow with its current message is no reason to lower the limit. Messages
        # that timed out behind the current ones are.
        current = {worker.current for worker in list(self._backlog.workers)}
        if not current.issuperset(earlier.values()):
            self.timed_out()
        for id, message in kept.items():
            self.orphans.pop((source.topic, source.nsqd, id), None)
            for pool in self._backlog.pools:
                pool.redelivered(message)
        self._note_overdue({message: at_work[message] for message in kept.values()})
        self._start_ticks()
        return kept

    def lost(self, source: MessageSource) -> None:
        """Drop the pending messages of a lost connection, which nsqd will deliver again."""
        self._sources.pop(source, None)
        self.in_flight_limit.connections = len(self._sources)
        self.stats.expired += len(self._backlog.discard(self, source))
        self.discount(source, list(source.in_flight))
        self.orphans |= {(m.topic, m.nsqd, m.id): m for m in list(source.in_flight.values())}
        self._apply_limit()

    def forget_attempts(self, source: MessageSource, ids: list[bytes]) -> None:
        """Drop the records of messages that handlers finished."""
        for message_id in ids:
            self.attempts.forget((source.topic, source.nsqd, message_id))

    def tried(self, source: MessageSource, message_id: bytes, *, late: bool) -> None:
        """Record a requeue by a handler; ``late``: nsqd had delivered the message again before."""
        self.attempts.record_failure((source.topic, source.nsqd, message_id), late=late)

    def discount(self, source: MessageSource, ids: Iterable[bytes]) -> None:
        """Record deliveries that ended without an answer of a handler."""
        for message_id in ids:
            self.attempts.discount((source.topic, source.nsqd, message_id))

    # -- limits, on the I/O thread --------------------------------------------------------------

    def connected(self, source: MessageSource) -> None:
        """Add a connection."""
        self._sources[source] = None
        limit = self.in_flight_limit
        limit.connections = len(self._sources)
        limit.msg_timeout_s = min(limit.msg_timeout_s, source.msg_timeout_s)
        self._tick_s = min(MAX_TICK_S, limit.msg_timeout_s / TICKS)
        pause_s = min(MAX_PAUSE_S, 2 * limit.msg_timeout_s / TICKS)
        self._loop.on_pause(pause_s, self._return_expired)
        if self._ticks is not None:
            self._ticks.interval_s = self._tick_s
        self._apply_limit()

    def timed_out(self) -> None:
        """Lower the limit, because messages timed out in the hands of handlers."""
        self.in_flight_limit.timed_out(self._rdy.in_flight, self._loop.now())
        self._apply_limit()

    def advance_clock(self, now: float) -> None:
        """Account for the time until now, before the number in flight changes."""
        self.in_flight_limit.advance_clock(now, self._rdy.in_flight)

    def adapt(self) -> None:
        """Adapt the limit to the answers."""
        self.in_flight_limit.adapt(self._rdy.in_flight, self._ages_s, is_pending=bool(self.waiting))
        self._release_suspects()
        if self._is_stuck:
            self.watch_workers(self._loop.now())
        self._apply_limit()

    def _ages_s(self) -> float:
        now = self._loop.now()
        return sum([now - message.received_at for message in self._in_flight()])

    def set_batch_size(self, count: int) -> None:
        """Allow at least ``count`` messages, which handlers answer together."""
        self.in_flight_limit.batch_size = count
        self._apply_limit()

    def grow_for_batch(self) -> bool:
        """Double the limit for a batch that does not fit in it.

        Return False if max_in_flight or the bytes allow no more.
        """
        limit = self.in_flight_limit
        if self._quarantine.is_active or limit.is_by_bytes or limit.current >= limit.maximum:
            return False
        self.set_batch_size(2 * limit.current)
        return True

    def set_maximum(self, count: int) -> None:
        """Change max_in_flight."""
        self.in_flight_limit.maximum = count
        self._apply_limit()

    def _tick(self) -> None:
        """Return expired messages, look for stuck handlers, and adapt the limit."""
        self._return_expired()
        if self.in_flight_limit.is_by_bytes:
            self._weigh()  # smaller messages may have arrived
        now, in_flight = self._loop.now(), self._rdy.in_flight
        if in_flight:
            self._busy_at = now
        is_idle = now - self._busy_at > IDLE_AFTER_S
        self._on_tick(now)
        self.advance_clock(now)
        self.watch_workers(now)
        is_starved = self._backlog.has_waiters and not self.waiting
        self.in_flight_limit.sample(in_flight, is_starved=is_starved)
        self.adapt()
        if is_idle and self._ticks is not None and not (self._backlog.overdue or self.orphans):
            self._ticks.cancel()
            self._ticks = None
            self._set_busy(False)

    def _set_busy(self, is_busy: bool) -> None:
        self._busy_at = self._loop.now()
        self.in_flight_limit.is_busy = is_busy
        self._apply_limit()

    def _return_expired(self) -> None:
        now = self._loop.now()
        for batch in self._backlog.withdraw(self, now):
            # nsqd may have requeued a message past its deadline: a REQ would be an error then.
            self.stats.expired += requeue_undelivered(batch, in_time=batch[0].deadline > now)

    def _apply_limit(self) -> None:
        self.in_flight_limit.iterators = len(self._backlog.iterators)
        is_closed = self._quarantine.is_active or self._is_stuck
        self._on_limit(0 if is_closed else self.in_flight_limit.current)

    # -- overdue messages of workers, on the I/O thread ------------------------------------------

    def watch_workers(self, now: float) -> None:
        """Find messages that timed out at nsqd while workers have them.

        They are no longer in flight. If every worker has such a message, no others are requested.
        """
        overdue, expired = self._backlog.overdue, []
        for source in self._sources:
            if not source.in_flight:  # of a thousand connections, most
                continue
            oldest = now - source.msg_timeout_s - REQUEUED_AFTER_S
            expired += [m for m in list(source.in_flight.values()) if m.received_at < oldest]
        if not (expired or overdue or self.orphans or self._is_stuck):
            return
        at_work = self._backlog.at_work()
        for key in [key for key, message in self.orphans.items() if message not in at_work]:
            del self.orphans[key]
        answered = {m for m in overdue if m.is_answered and source_of(m) in self._sources}
        for message in answered | (overdue.keys() - at_work.keys()):
            del overdue[message]
        expired += [
            message
            for message in self.orphans.values()
            if now > at_work[message] + source_of(message).msg_timeout_s
        ]
        late = {message: at_work[message] for message in expired if message in at_work}
        self._note_overdue(late)
        if self._is_stuck != (is_stuck := self._backlog.is_stuck):
            self._is_stuck = is_stuck
            state = "no worker is free; taking no messages until one is" if is_stuck else "resuming"
            log.warning("%s: %s", self._loop.name, state)
            # Before `ReadyControl.answered`, which would renew RDY.
            self._apply_limit()
        for message in late:
            source = source_of(message)
            if source in self._sources and message.id not in source.released:
                source.released.add(message.id)
                self._rdy.answered(source, 1, now)

    def _note_overdue(self, messages: Mapping[Message, float]) -> None:
        overdue = self._backlog.overdue
        if not (fresh := messages.keys() - overdue.keys()):
            return
        overdue |= messages
        oldest = min(fresh, key=overdue.__getitem__)
        suffix = f" (and {counted(len(fresh) - 1, 'other')})" if len(fresh) > 1 else ""
        handled_s = self._loop.now() - overdue[oldest]
        log.warning(
            "%r%s timed out at nsqd; its handler has had it for %.1f s,"
            " and no other worker gets it meanwhile",
            oldest,
            suffix,
            handled_s,
        )

    # -- from handlers' threads -----------------------------------------------------------------

    def wait_until_polled(self) -> None:
        """Wait until the I/O thread has read all sockets, for at most `POLL_WAIT_S`."""
        until = self._loop.now() + POLL_WAIT_S
        while not self._loop.is_current(now := self._loop.now()) and now < until:
            self._loop.wake()
            time.sleep(0.001)
