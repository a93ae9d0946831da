"""The way of messages from the connections of a consumer to its handlers.

`Delivery` puts new messages in the `Backlog`, but for those that were tried too often. There they
wait for a handler: the I/O thread adds, handler threads take. From there they come back when they
have waited too long, when nsqd delivers them again, or when their connection is lost; such a
delivery is remembered, and does not count against the message (`giving_up.Attempts`). And the
number of messages in flight is fitted to what the handlers can take (`in_flight_limit`).

A message that may kill its process waits apart (`giving_up` tells which): nothing more is let in,
until what is in flight is answered. Then it goes to a handler alone. That must not take long, as
one handler may hang: after a part of msg_timeout everything goes on as usual.

Taking is what hands a message out. What waits can still be withdrawn: because it waited too long,
because nsqd delivered it again, or because its connection is gone. Each message is either taken or
withdrawn, never both, as both happen under one lock. The I/O thread does not wait long for it.

What the I/O thread read in one turn is one entry: with many connections those are many batches of
one message, and an entry each would cost more than the rest of their way. It may be taken whole or
by parts: a handler that is slow takes one message at a time and leaves the rest to others.

A message that a worker has does not occupy another worker when nsqd delivers it again: the message
object that the worker has stands for the new delivery as well (`message.adopt_redelivery`), which
is not handed out. The worker's answer is for that delivery; without one nsqd takes it back by its
timeout (`Delivery.watch_workers`). So a handler that hangs costs one worker, and when all hang RDY
is 0. What a handler has passed on, to threads of its own, counts as in no worker's hands: it may
have been dropped, so its redelivery is handed out.

Before anything is handed out its consumer must be *current*: the I/O thread has looked at its
sockets a moment ago. After a pause of the process nsqd may have delivered everything again, and the
newer deliveries are still in the sockets.
"""

from __future__ import annotations

import collections
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, MutableSet, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from nsqtools.client.attempts import Attempts, Key
from nsqtools.client.in_flight_limit import InFlightLimit
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.message import (
    Batch,
    Message,
    MessageSource,
    max_attempts_of,
    requeue_undelivered,
    source_of,
)
from nsqtools.client.rdy import ReadyControl
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

EXPIRED_SHARE = 0.5  # of msg_timeout: the rest is for the handler
TICKS = 8  # in msg_timeout, to look for what has expired
MAX_TICK_S = 0.25
MAX_PAUSE_S = 2.0
QUARANTINE_SHARE = 0.25  # of msg_timeout, the longest that suspects hold up others
CATCH_UP_S = 2.0
TAKEN_BACK_S = 0.25  # after its timeout nsqd has taken a message back; it looks each 0.1 s
IDLE_S = 2.0  # without messages, before every connection may bring one again
# A signal that comes just before a thread goes to sleep does not wake it: its Python handler waits
# until something else does (seen in 12 of 20,000 on a busy machine).
MAX_SLEEP_S = 1.0
LOCK_TIMEOUT_S = (
    0.1  # a lock, by whom a signal handler has interrupted: it may wait for the I/O thread
)


@dataclass(slots=True, eq=False)
class QueuedBatches:
    """Batches that arrived together, nothing of them taken; empty once they were withdrawn."""

    owner: Delivery
    batches: list[Batch]
    to_give_up: bool = False


class Worker:
    """One loop over messages: what it has ``taken``, at ``since``, and what its body works on, the
    ``current`` message or a whole batch."""

    __slots__ = ("current", "has_batch", "since", "taken", "thread")

    def __init__(self, *, has_batch: bool = False) -> None:
        self.has_batch = has_batch
        self.taken: Sequence[Message] = ()
        self.current: Message | None = None
        self.since = 0.0
        self.thread = 0

    @property
    def messages(self) -> Sequence[Message]:
        """What the body works on, answered or not."""
        if self.has_batch:
            return self.taken
        current = self.current  # its thread changes it meanwhile
        return () if current is None else (current,)


class Pool(Protocol):
    """What passes messages on and keeps track of them until they are answered.

    Its methods are called on the I/O thread.
    """

    def at_work(self) -> dict[Message, float]:
        """Return the messages that it has, and since when."""

    def redelivered(self, message: Message) -> None:
        """Note that nsqd delivered one of them again, which is no attempt."""


class Backlog:
    """What waits, of one consumer or of several. Entries other than messages pass through.

    ``on_entry`` is called after something was added, on the thread that did.
    """

    def __init__(self, on_entry: Callable[[], None] | None = None) -> None:
        self._on_entry = on_entry
        # who takes messages, one after the other: threads that iterate
        self.iterators: MutableSet[Any] = set()
        self._asking: set[object] = set()  # threads and tasks that wait for messages
        self.workers: set[Worker] = set()
        self.pools: list[Pool] = []
        # messages that nsqd took back, or lost the connection of, while a worker or a pool has
        # them, and since when it has them
        self.overdue: dict[Message, float] = {}
        self._lock = threading.RLock()  # re-entrant: a signal handler may put something in
        self._entries: collections.deque[object] = collections.deque()
        # one for each entry, and after withdrawals too many: waiting costs no lock
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    # -- adding (any thread) --------------------------------------------------------------------

    def put(self, entry: object, *, is_first: bool = False) -> None:
        """Add an entry at the end, or before all others."""
        if isinstance(entry, QueuedBatches):
            entry.owner.waiting[entry] = None
        if is_first:
            with self._lock:
                self._entries.appendleft(entry)
        else:  # without it: see `LOCK_TIMEOUT_S`
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
        taken = self.get_some(until, several=False)
        return taken[0] if isinstance(taken, list) else taken

    def get_some(self, until: float, most: int = sys.maxsize, *, several: bool = True) -> object:
        """Like `get`, but return a list: of a batch, or of ``several`` of one consumer, ``most``
        messages together."""
        thread = threading.get_ident()
        while True:
            left_s = max(0.0, until - time.monotonic())
            self._asking.add(thread)
            try:
                self._tokens.get(timeout=min(left_s, MAX_SLEEP_S))
            except queue.Empty:
                if left_s > MAX_SLEEP_S:
                    continue
                return None
            finally:
                self._asking.discard(thread)
            entry, is_current = self._take(most, several=several)
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

    def _take(self, most: int, *, several: bool) -> tuple[object, bool]:
        """Take the next entry, or a part of it, and whether its consumer is current."""
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
            if entry.to_give_up:  # one by one: a callback may take so long that the rest expires
                most, several = 1, False
            taken = self._take_batches(entry, most, several=several)
            return QueuedBatches(entry.owner, taken, entry.to_give_up), True

    def _take_batches(self, entry: QueuedBatches, room: int, *, several: bool) -> list[Batch]:
        """Take a batch of an entry, or what fits of it and of those of the same owner after it."""
        taken: list[Batch] = []
        owner = entry.owner
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
                not isinstance(following, QueuedBatches)
                or following.owner is not owner
                or following.to_give_up
            ):
                return taken
            entry = following
            try:
                self._tokens.get_nowait()
            except queue.Empty:
                pass  # another thread has it, and will find less

    @property
    def is_asked(self) -> bool:
        """Tell whether a thread or task waits for messages."""
        return bool(self._asking)

    # -- what workers have (the I/O thread, but for `health`) ------------------------------------

    def at_work(self) -> dict[Message, float]:
        """Return the messages that workers and pools have, answered or not, and since when."""
        messages = {m: worker.since for worker in list(self.workers) for m in worker.messages}
        for pool in self.pools:
            messages |= pool.at_work()
        return messages

    @property
    def is_stuck(self) -> bool:
        """Tell whether every worker has a message that is overdue."""
        workers = list(self.workers) if self.overdue else []
        return bool(workers) and all(
            any(message in self.overdue for message in worker.messages) for worker in workers
        )

    # -- withdrawing (the I/O thread) ------------------------------------------------------------

    def withdraw(self, owner: Delivery, expired_at: float | None = None) -> list[Batch]:
        """Take out what belongs to an owner: all, or what has waited too long at ``expired_at``.

        If the lock cannot be had soon, nothing is taken out, and all is returned as it is.
        """
        withdrawn: list[Batch] = []
        if self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            try:
                for entry in list(owner.waiting):
                    if expired_at is None or _has_expired(entry.batches[0], expired_at):
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
        """Drop messages of a connection, by id or (None) all; return the ids of those dropped.

        If the lock cannot be had soon, nothing is dropped.
        """
        dropped: set[bytes] = set()
        if not self._lock.acquire(
            timeout=10 * LOCK_TIMEOUT_S
        ):  # busy handlers may hold it for long, too
            return dropped
        try:
            for entry in list(owner.waiting):
                for batch in entry.batches:
                    if batch.source is source:
                        gone = {m.id for m in batch if ids is None or m.id in ids}
                        dropped |= gone
                        batch[:] = [message for message in batch if message.id not in gone]
                entry.batches[:] = filter(None, entry.batches)
                if not entry.batches:
                    del owner.waiting[entry]
            self._drop_withdrawn()
        finally:
            self._lock.release()
        return dropped


def _move(source: list[Batch], to: list[Batch], room: int, *, several: bool) -> int:
    """Move the first batch, or ``several``, of at most ``room`` messages: return what is left.

    Only the first of what is taken is divided.
    """
    count = 0
    for batch in source:
        if len(batch) > room:
            if not to:
                to.append(Batch(batch.source, batch[:room]))
                del batch[:room]
            room = 0
            break
        to.append(batch)
        count += 1
        room -= len(batch)
        if not several:
            break
    del source[:count]
    return room


def _turn(suspect: QueuedBatches) -> tuple[int, int]:
    message = suspect.batches[0][0]
    number = int.from_bytes(message.id)
    return message.attempts, number if message.attempts % 2 else -number


def _has_expired(batch: Batch, now: float) -> bool:
    return now - batch[0].received_at > EXPIRED_SHARE * batch.source.msg_timeout_s


@dataclass(slots=True)
class ConsumerStats:
    """Counts of messages since the start.

    ``late`` counts answers that nsqd refused as late; ``expired`` counts deliveries that ended
    before a handler saw them, because they waited too long or their connection was lost.
    """

    received: int = 0
    finished: int = 0
    requeued: int = 0
    given_up: int = 0
    late: int = 0
    expired: int = 0


class Delivery:
    """``on_limit`` gets the number of messages that may be in flight when it has changed; ``rdy``
    knows how many are."""

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
        self.waiting: dict[
            QueuedBatches, None
        ] = {}  # what the backlog has of ours, or gets this turn
        self._arrived: QueuedBatches | None = None  # in this turn
        self._loop = loop
        self._backlog = backlog
        self._on_limit = on_limit
        self._rdy = rdy
        self._attempts = attempts
        self._quarantined: list[QueuedBatches] = []  # which wait until nothing else is in flight
        self._quarantine_began_at: float | None = None
        self.in_flight_limit = limit
        self._sources: dict[MessageSource, None] = {}
        # what workers had of connections that were lost: nsqd delivers it again on the next one
        self.orphans: dict[Key, Message] = {}
        self._is_stuck = False  # see `Backlog.is_stuck`
        self._arrived_bytes = self._arrived_count = 0  # since the messages were weighed last
        self._weigh_at = 0.0  # the first at once: the limit doubles with each answer
        self._tick_s = 0.0
        self._ticks: Timer | None = None  # while something can expire, or was handled just now
        self._busy_at = 0.0

    # -- messages, on the I/O thread ------------------------------------------------------------

    def deliver(self, source: MessageSource, batch: Batch) -> None:
        """Put new messages where handlers take them, at the end of the turn."""
        self._start_ticks()
        self._arrived_count += len(batch)
        if len(batch) == 1:
            self._arrived_bytes += len(batch[0].body)
        else:
            self._arrived_bytes += sum([len(message.body) for message in batch])
        if self._arrived_bytes > self._weigh_at:
            self._weigh()
        if 0 < self._attempts.limit < max_attempts_of(batch):
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
            for message in list(source.in_flight.values())
            if message.id not in source.released
        ]

    def _weigh(self) -> None:
        """Count the bytes in flight: not for each message, whose answers do not tell its size."""
        sizes = [len(message.body) for message in self._in_flight()]
        size, count = sum(sizes), len(sizes)
        most = self.in_flight_limit.maximum_bytes
        self._weigh_at = max(most / 16, most / 2 - size)
        if not count:
            size, count = self._arrived_bytes, self._arrived_count
        self._arrived_bytes = self._arrived_count = 0
        if count:
            self.in_flight_limit.weighed(size, count)
            self._apply_limit()

    def _hand_over(self) -> None:
        """Let handlers have all that the turn has read.

        A handler that is woken for its first message competes with the thread that reads the others
        and sends answers.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is not None and arrived.batches:
            self._backlog.put(arrived)

    def _sort_out(self, source: MessageSource, batch: Batch) -> Batch:
        """Return what is to be handled as usual, and put the rest in the backlog apart."""
        usual, given_up = Batch(source, ()), Batch(source, ())
        for message in batch:
            key = source.topic, source.nsqd, message.id
            verdict = self._attempts.verdict(key, message.attempts)
            if verdict == "isolate":
                suspect = QueuedBatches(self, [Batch(source, [message])])
                self._quarantined.append(suspect)
                self.waiting[suspect] = None
            else:
                (given_up if verdict == "give up" else usual).append(message)
        if given_up:
            self._backlog.put(QueuedBatches(self, [given_up], to_give_up=True))
        if self._quarantined and self._quarantine_began_at is None:
            self._quarantine_began_at = self._loop.now()
            self._apply_limit()
            self._loop.after_flush(self._hand_out_suspects)
        return usual

    def _hand_out_suspects(self) -> None:
        """Give a handler the next suspect when all others are answered, and then go on as usual.

        The one with the fewest attempts first: it was not there at every death. The others in one
        order and, at their next delivery, in the other: whichever kills the process, those before
        it are handled.
        """
        if self._quarantine_began_at is None:
            return
        self._quarantined = [each for each in self._quarantined if each.batches]  # not withdrawn
        if (
            self._loop.now() - self._quarantine_began_at
            > QUARANTINE_SHARE * self.in_flight_limit.msg_timeout_s
        ):
            self.end_quarantine()
        elif self._rdy.in_flight <= len(self._quarantined):
            if self._quarantined:
                self._quarantined.sort(key=_turn, reverse=True)
                self._backlog.put(self._quarantined.pop())
            else:
                self.end_quarantine()

    def end_quarantine(self) -> None:
        """Hand out what waits apart, and let others in again."""
        self._quarantine_began_at = None
        for suspect in self._quarantined:
            if suspect.batches:  # not withdrawn
                self._backlog.put(suspect)
        self._quarantined.clear()
        self._apply_limit()

    def redelivered(
        self, source: MessageSource, ids: Set[bytes], dropped: list[bytes]
    ) -> dict[bytes, Message]:
        """Messages arrived, some perhaps again: drop earlier deliveries that wait here, and return
        by id the messages that workers have. Those stand for the new deliveries; elsewhere the new
        delivery takes over. Some were ``dropped``, for a later one came in the same read."""
        again = ids & source.in_flight.keys()
        if not (again or dropped or self.orphans):
            return {}
        unseen = self._backlog.discard(self, source, again) if again else set()
        self.stats.expired += len(unseen) + len(dropped)
        self.discount(source, [*again, *dropped])
        earlier = {id: m for id in again - unseen if (m := source.in_flight.get(id)) is not None}
        if self.orphans:
            keys = {id: (source.topic, source.nsqd, id) for id in ids - again}
            earlier |= {id: self.orphans[key] for id, key in keys.items() if key in self.orphans}
        if not earlier:
            return {}
        at_work = self._backlog.at_work()
        kept = {id: message for id, message in earlier.items() if message in at_work}
        # a single message that takes long says nothing of how many should be in flight
        if not {worker.current for worker in self._backlog.workers}.issuperset(earlier.values()):
            self.timed_out()
        for id, message in kept.items():
            self.orphans.pop((source.topic, source.nsqd, id), None)
            for pool in self._backlog.pools:
                pool.redelivered(message)
        self._note_overdue({message: at_work[message] for message in kept.values()})
        self._start_ticks()
        return kept

    def lost(self, source: MessageSource) -> None:
        """Drop what waits of a connection: nsqd will deliver it again."""
        self._sources.pop(source, None)
        self.in_flight_limit.connections -= 1
        self.stats.expired += len(self._backlog.discard(self, source))
        self.discount(source, list(source.in_flight))
        self.orphans |= {(m.topic, m.nsqd, m.id): m for m in list(source.in_flight.values())}
        self._apply_limit()

    def finished(self, source: MessageSource, ids: list[bytes]) -> None:
        """Handlers finished messages."""
        self.stats.finished += len(ids)
        if self._attempts:
            for message_id in ids:
                self._attempts.forget((source.topic, source.nsqd, message_id))

    def tried(self, source: MessageSource, message_id: bytes, *, late: bool) -> None:
        """A handler requeued a message; ``late``: nsqd had delivered it again before."""
        self._attempts.record_failure((source.topic, source.nsqd, message_id), late=late)

    def discount(self, source: MessageSource, ids: Iterable[bytes]) -> None:
        """Deliveries ended before a handler said anything about them."""
        for message_id in ids:
            self._attempts.discount((source.topic, source.nsqd, message_id))

    # -- limits, on the I/O thread --------------------------------------------------------------

    def connected(self, source: MessageSource) -> None:
        """There is another connection."""
        self._sources[source] = None
        limit = self.in_flight_limit
        limit.connections += 1
        limit.msg_timeout_s = min(limit.msg_timeout_s, source.msg_timeout_s)  # of all connections
        self._tick_s = min(MAX_TICK_S, limit.msg_timeout_s / TICKS)
        pause_s = min(MAX_PAUSE_S, 2 * limit.msg_timeout_s / TICKS)
        self._loop.on_pause(pause_s, self._return_expired)
        if self._ticks is not None:
            self._ticks.interval_s = self._tick_s
        self._apply_limit()

    def timed_out(self) -> None:
        """Messages timed out in the hands of handlers."""
        self.in_flight_limit.timed_out(self._rdy.in_flight, self._loop.now())
        self._apply_limit()

    def passed(self, now: float) -> None:
        """What is in flight is about to change."""
        self.in_flight_limit.passed(now, self._rdy.in_flight)

    def adapt(self) -> None:
        """Fit the limit to the answers."""
        self.in_flight_limit.adapt(self._rdy.in_flight, self._ages_s, waits=bool(self.waiting))
        self._hand_out_suspects()
        if self._is_stuck:
            self.watch_workers(self._loop.now())
        self._apply_limit()

    def _ages_s(self) -> float:
        now = self._loop.now()
        return sum([now - message.received_at for message in self._in_flight()])

    def gather(self, count: int) -> None:
        """Handlers answer ``count`` messages together."""
        self.in_flight_limit.gathered = count
        self._apply_limit()

    def grow_for_batch(self) -> bool:
        """Messages that are answered together do not fit in the limit: raise it. Return False where
        max_in_flight or the bytes allow no more."""
        limit = self.in_flight_limit
        if (
            self._quarantine_began_at is not None
            or limit.is_by_bytes
            or limit.current >= limit.maximum
        ):
            return False
        self.gather(2 * limit.current)
        return True

    def set_maximum(self, count: int) -> None:
        """Change max_in_flight."""
        self.in_flight_limit.maximum = count
        self._apply_limit()

    def _tick(self) -> None:
        """Return what has waited too long, and see whether a handler is stuck."""
        self._return_expired()
        if self.in_flight_limit.is_by_bytes:
            self._weigh()  # smaller ones may follow
        now, in_flight = self._loop.now(), self._rdy.in_flight
        if in_flight:
            self._busy_at = now
        is_idle = now - self._busy_at > IDLE_S
        self._on_tick(now)
        self.passed(now)
        self.watch_workers(now)
        self.in_flight_limit.look(in_flight, is_asked=self._backlog.is_asked and not self.waiting)
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
            # nsqd may have taken back itself what is past its deadline: a REQ would be an error
            self.stats.expired += requeue_undelivered(batch, in_time=batch[0].deadline > now)

    def _apply_limit(self) -> None:
        self.in_flight_limit.iterators = len(self._backlog.iterators)
        # nothing more is let in while suspects wait, or no worker is free
        is_shut = self._quarantine_began_at is not None or self._is_stuck
        self._on_limit(0 if is_shut else self.in_flight_limit.current)

    # -- what workers have for too long, on the I/O thread ---------------------------------------

    def watch_workers(self, now: float) -> None:
        """Note what nsqd has taken back while workers have it: that is in flight no longer."""
        overdue, expired = self._backlog.overdue, []
        for source in self._sources:
            before = now - source.msg_timeout_s - TAKEN_BACK_S
            expired += [m for m in list(source.in_flight.values()) if m.received_at < before]
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
            state = "no worker is free; taking nothing until one is" if is_stuck else "going on"
            log.warning("%s: %s", self._loop.name, state)
            self._apply_limit()  # before RDY is renewed for what is in flight no longer
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
        first = min(fresh, key=overdue.__getitem__)
        others = f" (and {counted(len(fresh) - 1, 'other')})" if len(fresh) > 1 else ""
        handled_s = self._loop.now() - overdue[first]
        log.warning(
            "nsqd took back %r%s, which its handler has had for %.1f s;"
            " no other worker gets it meanwhile",
            first,
            others,
            handled_s,
        )

    # -- from handlers' threads -----------------------------------------------------------------

    def wait_until_polled(self) -> None:
        until = self._loop.now() + CATCH_UP_S
        while not self._loop.is_current(now := self._loop.now()) and now < until:
            self._loop.wake()
            time.sleep(0.001)
