"""The way of messages from the connections of a consumer to its handlers.

New messages go to the `Backlog`, but for those that were delivered too often. From there they come
back here when they have waited too long, when nsqd delivers them again, or when their connection is
lost; what no handler saw is remembered, and does not count against the message (`attempts`). And
the number of messages in flight is fitted to what the handlers can take (`in_flight_limit`).

Everything runs on the I/O thread but for the methods that `backlog.Owner` names: those are called
by handlers' threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from nsqtools.client.attempts import Attempts, Decision
from nsqtools.client.backlog import Backlog, Waiting
from nsqtools.client.in_flight_limit import InFlightLimit
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.message import Batch
from nsqtools.client.options import ClientOptions
from nsqtools.client.subscription import Subscription, most_attempts

DEFAULT_MSG_TIMEOUT_S = 60.0
TICKS = 8  # in msg_timeout, to look for what has expired
MAX_TICK_S = 1.0
MEASURE_EACH_S = 0.001
CATCH_UP_S = 2.0


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
    """``on_limit`` gets the number of messages that may be in flight when it has changed."""

    def __init__(
        self,
        loop: LoopMember,
        backlog: Backlog,
        options: ClientOptions,
        on_giving_up: Callable[[Batch], None],
        on_limit: Callable[[int], None],
    ) -> None:
        self.stats = ConsumerStats()
        self.give_up = on_giving_up
        self.on_tick: Callable[[float], None] | None = None  # several times in msg_timeout
        self.waiting: dict[Waiting, None] = {}  # what the backlog has of ours, or gets this turn
        self._arrived: Waiting | None = None  # in this turn
        self._loop = loop
        self._backlog = backlog
        self._max_attempts = options.max_attempts
        self._on_limit = on_limit
        self._attempts = Attempts(options.max_attempts)
        self._limit = InFlightLimit(options.max_in_flight)
        self._connections = 0
        self._msg_timeout_s = DEFAULT_MSG_TIMEOUT_S  # the shortest of all connections
        self._tick_s = 0.0
        self._ticks: Timer | None = None  # while something can expire, or is handled
        self._measure_at = 0.0

    # -- messages, on the I/O thread ------------------------------------------------------------

    def deliver(self, subscription: Subscription, batch: Batch) -> None:
        """Put new messages where handlers take them, at the end of the turn."""
        if self._ticks is None:
            self._ticks = self._loop.call_each(self._tick_s, self._tick)
        if 0 < self._max_attempts < most_attempts(batch):
            batch = self._sort_out(subscription, batch)
        if batch:
            if self._arrived is None:
                self._arrived = Waiting(self, [])
                self._loop.after_flush(self._hand_over)
            self._arrived.batches.append(batch)
            self.waiting[self._arrived] = None

    def _hand_over(self) -> None:
        """Let handlers have all that the turn has read.

        A handler that is woken for its first message competes with the thread that reads the others
        and sends answers.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is not None and arrived.batches:
            self._backlog.put(arrived)

    def _sort_out(self, subscription: Subscription, batch: Batch) -> Batch:
        """Return what is to be handled as usual, and put the rest in the backlog apart."""
        parts: dict[Decision, Batch] = {
            decision: Batch(subscription, ()) for decision in ("deliver", "alone", "give_up")
        }
        for message in batch:
            decision = self._attempts.decide((subscription.nsqd, message.id), message.attempts)
            parts[decision].append(message)
        for message in parts["alone"]:
            self._backlog.put_first(Waiting(self, [Batch(subscription, [message])]))
        if given_up := parts["give_up"]:
            self.stats.given_up += len(given_up)
            self._backlog.put(Waiting(self, [given_up], to_give_up=True))
        return parts["deliver"]

    def redelivered(
        self, subscription: Subscription, again: Set[bytes], dropped: list[bytes]
    ) -> None:
        """Drop what waits of these messages: see `SubscriptionUser.redelivered`."""
        unseen = self._backlog.discard(self, subscription, again)
        self._note_unseen(subscription, [*unseen, *dropped])
        self.note_seen(subscription, again - unseen)

    def lost(self, subscription: Subscription) -> None:
        """Drop what waits of a connection: nsqd will deliver it again."""
        self._connections -= 1
        unseen = self._backlog.discard(self, subscription)
        self._note_unseen(subscription, unseen)
        self.note_seen(subscription, subscription.in_flight.keys() - unseen)
        self._apply_limit()

    def finished(self, subscription: Subscription, ids: list[bytes]) -> None:
        """Handlers finished messages."""
        self.stats.finished += len(ids)
        if self._attempts:
            for message_id in ids:
                self._attempts.forget((subscription.nsqd, message_id))

    def note_seen(self, subscription: Subscription, ids: Iterable[bytes]) -> None:
        """Handlers have seen messages and not finished them."""
        for message_id in ids:
            self._attempts.was_seen((subscription.nsqd, message_id))

    def _note_unseen(self, subscription: Subscription, ids: Iterable[bytes]) -> None:
        for message_id in ids:
            self.stats.expired += 1
            self._attempts.was_unseen((subscription.nsqd, message_id))

    def withdraw(self) -> list[Batch]:
        """Take everything back that no handler has seen."""
        return self._backlog.withdraw(self)

    # -- limits, on the I/O thread --------------------------------------------------------------

    def connected(self, subscription: Subscription) -> None:
        """There is another connection."""
        self._connections += 1
        self._msg_timeout_s = min(self._msg_timeout_s, subscription.msg_timeout_s)
        self._tick_s = min(MAX_TICK_S, self._msg_timeout_s / TICKS)
        self._loop.notice_pauses(2 * self._tick_s, self._return_expired)
        if self._ticks is not None:
            self._ticks.interval_s = self._tick_s
        self._apply_limit()

    def set_maximum(self, count: int) -> None:
        """Change max_in_flight."""
        self._limit.maximum = count
        self._apply_limit()

    @property
    def limit(self) -> int:
        """How many messages may be in flight."""
        return self._limit.current(self._connections)

    def _tick(self) -> None:
        """Return what has waited too long, and see whether a handler is stuck."""
        self._return_expired()
        is_idle = not self.waiting and not self._backlog.has_taken(self)
        if self.on_tick is not None:
            self.on_tick(self._loop.now())
        self._adapt()  # after the look: what was measured in between counts
        if is_idle and self.on_tick is None and self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None

    def _return_expired(self) -> None:
        if not self.waiting:
            return
        now = self._loop.now()
        for batch in self._backlog.withdraw(self, now):
            subscription = batch.source
            assert isinstance(subscription, Subscription)
            # nsqd may have taken back itself what is past its deadline: a REQ would be an error
            in_time = batch[0].deadline > now
            self._note_unseen(subscription, subscription.give_back(batch, in_time=in_time))

    def _adapt(self) -> None:
        self._limit.adapted = self._proposed()
        self._apply_limit()

    def _proposed(self) -> int:
        backlog = self._backlog
        per_message_s = backlog.per_message_s(self._loop.now())
        return self._limit.proposed(per_message_s, backlog.workers, self._msg_timeout_s)

    def _apply_limit(self) -> None:
        self._on_limit(self.limit)

    # -- from handlers' threads -----------------------------------------------------------------

    def is_current(self, now: float) -> bool:
        return self._loop.is_current(now)

    def catch_up(self) -> None:
        until = self._loop.now() + CATCH_UP_S
        while not self._loop.is_current(now := self._loop.now()) and now < until:
            self._loop.wake()
            time.sleep(0.001)

    def measured(self) -> None:
        now = self._loop.now()
        if now >= self._measure_at:  # not for each of many small batches
            self._measure_at = now + MEASURE_EACH_S
            if self._proposed() != self._limit.adapted:
                self._loop.call_soon(self._adapt)
