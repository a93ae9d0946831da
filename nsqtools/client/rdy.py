"""RDY of each connection, and backoff. Pure: events and clock readings in, RDY commands out.

RDY is a window: nsqd keeps at most that many messages in flight on a connection (since 0.3.0).
Older documentation describes a credit, so RDY is also sent again, with the next answer, when a
quarter of it is left. A write of its own would double the cost of a message. RDY 1 that rotates is
not sent again, because rotation renews it.

Two invariants hold after every event:

- the sum of RDY never exceeds max_in_flight;
- an *increase* is granted only within max_in_flight minus the use of the other connections. The
  use of a connection is the larger of its RDY and its messages in flight. Messages in flight stay
  after RDY was lowered, so without this rule moving RDY would double them (pynsq#177).

Ungranted increases are kept in `_wanting` and retried when room appears. The sums are running
totals, so the cost of an answer does not depend on the number of connections. Shares do, so
arrivals, losses and limits only mark them as outdated, and `take_changes` computes them again once:
a thousand connections that subscribe in one turn cost one pass, not a thousand.

Shares are even, except for *idle* connections: those without messages for a moment while another
connection has used all of its RDY. An idle connection has RDY 1 until it is full from tick to tick,
and all idle ones together have at most half of max_in_flight. With even shares, only two of ten
slow workers would be busy if one of five nsqd had the backlog. The remainder of an even division
goes to the first connections, and what an nsqd refuses by its max_rdy_count to the others.

With fewer messages allowed than connections, RDY 1 rotates (`redistribute`, every `PROBE_S` then).
A connection without messages passes it on after a moment, to the one that has waited longest. While
all connections with RDY are busy, one at a time lends it to a waiting connection, which keeps it if
it has messages and else returns it after `PROBE_S`. A message on an idle nsqd then waits for
seconds, and the busy connections lose a twelfth of their time.

Backoff applies to all connections, because it protects the resource that the handler uses (as in
go-nsq and pynsq). It has three modes. NORMAL: messages flow. WAIT: every connection has RDY 0 until
a timer expires. TEST: one connection has RDY 1, and another one if that has no messages; the first
answer decides. Success lowers the level, failure raises it, and a requeue without backoff keeps it.
Then the wait starts again, or at level 0 all RDY is restored. Answers in WAIT are ignored, so fifty
simultaneous failures count as one. Unlike in go-nsq, the level stops rising at the longest delay,
and a message given up unhandled is not a result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from nsqtools.client.options import ClientOptions

# Share of RDY left at which it is sent again: go-nsq's and pynsq's rule.
RESEND_AT = 0.25
# Share of RDY in flight at which a connection is starved: pynsq's rule.
STARVED_AT = 0.85
# How long a connection has RDY before it counts as one without messages. nsqd delivers a waiting
# message within its output_buffer_timeout of 25 ms and the round trip.
PROBE_S = 0.1
PROBED_S = 0.9 * PROBE_S  # ticks are not exact
CONNECTION_IDLE_S = 2 * PROBE_S
# Time in which RDY visits all idle connections, if they are few. A user who publishes one message
# and waits for it does not want to wait longer.
ROUND_S = 2.0
# Share of the time of busy connections for which their RDY is lent.
LENT_SHARE = 0.08

K = TypeVar("K", bound=Hashable)

# Modes of backoff, and of a stop. Not an enum, because looking up a member of one costs as much as
# a call.
NORMAL, WAIT, TEST, CLOSED = "normal", "wait", "test", "closed"


@dataclass(slots=True)
class ReadyState(Generic[K]):
    """The state of one connection. ``cap`` is nsqd's max_rdy_count."""

    key: K
    cap: int
    last_message: float
    last_change: float
    rdy: int = 0
    share: int = 0  # of max_in_flight
    last_room: float = -math.inf  # when it last lost RDY unused for at least `PROBED_S`
    credit: int = 0  # messages until RDY is used up, for an nsqd that counts it so
    in_flight: int = 0
    was_full: bool = False  # at any time since the last tick
    full_ticks: int = 0  # consecutive ticks at which it was full
    is_idle: bool = False
    is_probed: bool = False  # has RDY on loan
    has_lent: bool = False  # was busy when its RDY was lent to another connection


def _is_idle(item: tuple[object, ReadyState[Any]]) -> bool:
    return item[1].is_idle


class ReadyControl(Generic[K]):
    """Decides the RDY of every connection. Keys are the caller's objects for connections.

    After each event the caller sends the commands of `take_changes`, in order, before any FIN or
    REQ of the same turn (go-nsq#83). Times are readings of the caller's clock.
    """

    def __init__(
        self, max_in_flight: int, options: ClientOptions, rng: random.Random | None = None
    ) -> None:
        self.max_in_flight = max_in_flight
        self._options = options
        self._rng = rng or random.Random()
        self.states: dict[K, ReadyState[K]] = {}
        self._wanting: dict[K, None] = {}  # in order of their requests
        self._changes: list[tuple[K, int]] = []
        # Sums over all connections.
        self._use = 0
        self._rdy = 0
        self.in_flight = 0
        self._idle_share = 0  # RDY of all idle connections together
        self.is_scarce = False  # some connections must wait for RDY
        self._outdated_at: float | None = None  # shares, by an event at this time
        self._newcomers: list[K] = []  # since the last computation of shares
        self._has_room = False  # a connection was lost since then, or the limit has changed
        self.mode = NORMAL
        self.level = 0  # of backoff
        self._tester: K | None = None
        self._next_loan = 0.0

    @property
    def rotates(self) -> bool:
        """Return whether connections without messages pass RDY on."""
        is_testing = self.mode == TEST and len(self.states) > 1
        return self.is_scarce or self._idle_share > 0 or is_testing

    @property
    def is_starved(self) -> bool:
        """Return whether a connection has 85 % of its RDY in flight, so that unanswered messages
        should be answered. Idle connections do not count, or each of their messages would be
        answered alone."""
        return self.mode != CLOSED and any(
            not s.is_idle and 0 < s.in_flight >= s.rdy * STARVED_AT
            for s in list(self.states.values())  # a copy, because other threads call this
        )

    def is_full(self, now: float, idle_s: float) -> bool:
        """Return whether no connection may bring further messages before an answer.

        Connections without messages for ``idle_s`` do not count.
        """
        states = self.states.values()
        active = [s for s in states if s.in_flight or now - s.last_message < idle_s]
        return all(s.in_flight >= s.rdy for s in active)

    def could_have_delivered_since(self, since: float, now: float) -> bool:
        """Return whether every connection could have brought a message after ``since``.

        That is so if it has had room in its RDY for `PROBED_S`, now or at a time after ``since``.
        """
        return self.mode == CLOSED or all(
            (s.rdy > s.in_flight and now - s.last_change >= PROBED_S) or s.last_room > since
            for s in list(self.states.values())  # a copy, because other threads call this
        )

    def take_changes(self) -> list[tuple[K, int]]:
        """Return and forget the RDY commands to send, in order."""
        if self._outdated_at is not None:
            self._share_out(self._outdated_at)
        changes, self._changes = self._changes, []
        return changes

    # -- connections ----------------------------------------------------------------------------

    def add(self, key: K, cap: int, now: float) -> None:
        """A connection has subscribed."""
        self.states[key] = ReadyState(key, cap, last_message=now, last_change=now)
        self._newcomers.append(key)
        self._outdated_at = now

    def remove(self, key: K, now: float) -> None:
        """Remove a lost connection, whose messages nsqd will deliver again."""
        state = self.states[key]
        self._update(state, 0, 0)
        del self.states[key]
        self._wanting.pop(key, None)
        if key == self._tester:
            self._tester = None
        self._has_room = True
        self._outdated_at = now

    def close(self) -> None:
        """Grant no further RDY, because CLS is sent on all connections."""
        self.mode = CLOSED
        self._tester = None
        self._changes.clear()
        self._wanting.clear()
        for state in self.states.values():
            self._update(state, 0, state.in_flight)

    # -- messages -------------------------------------------------------------------------------

    def received(self, key: K, count: int, now: float) -> bool:
        """Record the arrival of messages; return whether the connection has used all its RDY."""
        state = self.states[key]
        rdy, was = state.rdy, state.in_flight
        state.in_flight = in_flight = was + count
        self.in_flight += count
        if in_flight > rdy:
            self._use += in_flight - (was if was > rdy else rdy)
        state.credit -= count
        state.last_message = now
        # RDY 0 of a connection that has messages was taken for others if RDY is scarce.
        if rdy < state.share and self.mode == NORMAL and (rdy or not self.is_scarce):
            self._set(key, state.share, now)
        is_full = in_flight >= state.rdy
        state.was_full |= is_full
        return is_full

    def answered(self, key: K, count: int, now: float) -> None:
        """Record messages that were finished, requeued or replaced by a newer delivery."""
        state = self.states[key]
        rdy, was = state.rdy, state.in_flight
        state.in_flight = in_flight = was - count
        self.in_flight -= count
        if was > rdy:
            self._use -= was - (in_flight if in_flight > rdy else rdy)
        if self.mode == NORMAL:
            if rdy > self.is_scarce and state.credit <= rdy * RESEND_AT:
                state.credit = rdy
                self._changes.append((key, rdy))
            if self._wanting:
                self._retry_wanting(now)
        else:
            self._find_tester(now)

    # -- limits and the periodic tick -----------------------------------------------------------

    def set_max_in_flight(self, max_in_flight: int, now: float) -> None:
        """Change the total; 0 pauses, also in backoff."""
        self.max_in_flight = max_in_flight
        self._wanting.clear()
        if max_in_flight == 0:
            self._release_tester(now)
        self._has_room = True
        self._outdated_at = now

    def redistribute(self, now: float) -> None:
        """Move RDY to connections that need it. Called periodically."""
        if self._outdated_at is not None:
            self._share_out(now)
        if self.mode == TEST:
            self._move_idle_tester(now)
        elif self.mode == NORMAL:
            self._update_idle(now)
            if self.is_scarce:
                self._rotate(now)
            else:
                self._raise_to_share(now)

    # -- backoff --------------------------------------------------------------------------------
    #
    # These three return the seconds for which RDY is 0 from now on, 0 for the end of backoff, or
    # None for no change.

    def failed(self, now: float) -> float | None:
        """Record a requeue with backoff. A max_backoff_duration of 0 disables backoff."""
        if self.mode in (WAIT, CLOSED) or self._options.max_backoff_duration_s <= 0:
            return None
        if self.mode is NORMAL:
            self.level = 1
        elif self._backoff_s(self.level) < self._backoff_s(self.level + 1):
            # At the longest delay a higher level would only lengthen the way back.
            self.level += 1
        return self._enter_wait(now)

    def succeeded(self, now: float) -> float | None:
        """Record a message that its handler finished."""
        if self.mode is not TEST:
            return None
        self.level -= 1
        if self.level:
            return self._enter_wait(now)
        self.mode = NORMAL
        self._tester = None
        self._raise_to_share(now)
        return 0.0

    def requeued_without_backoff(self, now: float) -> float | None:
        """Record a requeue without backoff."""
        return self._enter_wait(now) if self.mode is TEST else None

    def _enter_wait(self, now: float) -> float:
        self.mode = WAIT
        self._tester = None
        self._wanting.clear()
        for key in self.states:
            self._set(key, 0, now)
        most_s = self._backoff_s(self.level)
        is_drawn = self._options.backoff_strategy == "full_jitter"
        return self._rng.uniform(0, most_s) if is_drawn else most_s

    def _backoff_s(self, level: int) -> float:
        # Far larger powers would overflow; the longest delay applies long before.
        delay_s = self._options.backoff_multiplier_s * 2.0 ** min(level, 62)
        return min(self._options.max_backoff_duration_s, delay_s)

    def test(self, now: float) -> bool:
        """End the wait with RDY 1 for one connection; return False without a connection."""
        if not self.states:
            return False
        self.mode = TEST
        self._tester = None
        self._find_tester(now)
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _share_out(self, now: float) -> None:
        """Apply the events since the last call: lower RDY first, and then use the room."""
        self._outdated_at = None
        if self._has_room:  # without the changes of lost connections
            self._changes = [change for change in self._changes if change[0] in self.states]
        self._count_sharers()
        if self.mode == NORMAL:
            self._lower_to_share(now)
            for key in self._newcomers:
                if key in self.states:
                    self._set(key, 1, now)
            if self._has_room:
                self._raise_to_share(now)
        self._newcomers.clear()
        self._has_room = False
        self._find_tester(now)

    def _count_sharers(self) -> None:
        sharers = self.states.values()
        idle_count = sum([state.is_idle for state in sharers])
        total = self.max_in_flight
        self._idle_share = min(idle_count, (total + 1) // 2)
        left, count = total - self._idle_share, len(sharers) - idle_count
        # The smallest caps first, so that the others get what those cannot use.
        for state in sorted(sharers, key=attrgetter("cap")):
            share = 1
            if not state.is_idle:
                share = -(-left // count)
                share = 1 if share < 1 else share if share < state.cap else state.cap
                left -= share
                count -= 1
            state.share = share if share < total else total
        self.is_scarce = total > 0 and (len(sharers) > total or idle_count > self._idle_share)

    def _update_idle(self, now: float) -> None:
        """Decide which connections are idle."""
        live = self.states.values()
        is_short = has_changed = False
        for state in live:
            is_full = state.was_full or state.in_flight >= state.rdy > 0
            state.full_ticks = state.full_ticks + 1 if is_full else 0
            state.was_full = False
            is_short |= state.full_ticks >= 2  # Two ticks, because a single message fills RDY 1.
        if not (is_short or self._idle_share):
            return
        for state in live:
            is_silent = not state.in_flight and now - state.last_message >= CONNECTION_IDLE_S
            is_idle = is_short and state.full_ticks < 2 and (state.is_idle or is_silent)
            has_changed |= is_idle is not state.is_idle
            state.is_idle = is_idle
        if has_changed:
            self._count_sharers()
            self._lower_to_share(now)
            self._raise_to_share(now)

    def _update(self, state: ReadyState[K], rdy: int, in_flight: int) -> None:
        """Change a connection, and the sums with it."""
        old_rdy, old_in_flight = state.rdy, state.in_flight
        state.rdy, state.in_flight = rdy, in_flight
        self._rdy += rdy - old_rdy
        self.in_flight += in_flight - old_in_flight
        self._use += max(rdy, in_flight) - max(old_rdy, old_in_flight)

    def _lower_to_share(self, now: float) -> None:
        for key, state in self.states.items():
            if state.rdy > state.share:
                self._set(key, state.share, now)
        # With more connections than messages allowed, some must have RDY 0: idle ones first.
        idle_rdy = sum([state.rdy for state in self.states.values() if state.is_idle])
        excess = max(self._rdy - self.max_in_flight, idle_rdy - self._idle_share)
        if excess > 0:
            for key, state in sorted(self.states.items(), key=_is_idle)[::-1]:
                if excess > 0 and state.rdy > 0:
                    excess -= state.rdy
                    self._set(key, 0, now)

    def _raise_to_share(self, now: float) -> None:
        low = [item for item in self.states.items() if item[1].rdy < item[1].share]
        for key, state in sorted(low, key=_is_idle):
            if self._use >= self.max_in_flight and state.in_flight <= state.rdy:
                # The same as `_set`, at a fifth of the cost: with a thousand connections this is
                # most of a tick.
                self._wanting[key] = None
            else:
                self._set(key, state.share, now)

    def _retry_wanting(self, now: float) -> None:
        while self._wanting and self._use < self.max_in_flight:
            key = next(iter(self._wanting))
            self._set(key, self.states[key].share, now)
            if key in self._wanting:
                return  # there was room for only a part of its share

    def _set(self, key: K, target: int, now: float) -> None:
        """Change the RDY of a connection to ``target``, as far as the invariants allow."""
        state = self.states[key]
        count = min(target, state.cap)
        if count > state.rdy:
            others = self._use - max(state.rdy, state.in_flight)
            granted = min(count, self.max_in_flight - others)
            if granted < count:
                self._wanting[key] = None
            count = max(granted, state.rdy)
        if count >= target:
            self._wanting.pop(key, None)
        if count != state.rdy:
            unused_s = now - max(state.last_change, state.last_message)
            if not count and not state.in_flight and unused_s >= PROBED_S:
                state.last_room = now
            state.last_change = now
            if not state.rdy:
                state.last_message = now  # its silence counts from here on
            self._send(key, state, count)

    def _send(self, key: K, state: ReadyState[K], count: int) -> None:
        state.credit = count
        self._update(state, count, state.in_flight)
        self._changes.append((key, count))

    def _find_tester(self, now: float) -> None:
        """Choose the connection that gets RDY 1 in TEST, now or when an answer makes room.

        A connection without messages in flight is preferred, because nsqd sends to it immediately;
        among these, the one that has waited longest. If max_in_flight is in flight already, the
        busiest is chosen: its RDY 1 takes effect when its own messages are answered, and adds none
        before.
        """
        if self.mode != TEST or self._tester is not None or self.max_in_flight == 0:
            return
        idle = [key for key, state in self.states.items() if not state.in_flight]
        busy = [key for key, state in self.states.items() if state.in_flight]
        if idle and self.in_flight < self.max_in_flight:
            self._rng.shuffle(idle)
            self._tester = min(idle, key=lambda key: self.states[key].last_change)
        elif busy:
            self._tester = max(busy, key=lambda key: self.states[key].in_flight)
        if self._tester is not None:
            state = self.states[self._tester]
            state.last_change = now
            self._send(self._tester, state, 1)

    def _release_tester(self, now: float) -> None:
        if self._tester is not None:
            self._set(self._tester, 0, now)
            self._tester = None

    def _move_idle_tester(self, now: float) -> None:
        if self._tester is None or len(self.states) < 2:
            return
        state, others = self.states[self._tester], len(self.states) - 1
        if not state.in_flight and now - state.last_change >= self._dwell_s(1, others):
            self._release_tester(now)
            self._find_tester(now)

    def _dwell_s(self, ready: int, waiting: int) -> float:
        """Return how long a connection without messages keeps its RDY while others wait."""
        round_s = ROUND_S * ready / max(1, waiting)
        return max(PROBED_S, min(self._options.low_rdy_idle_timeout_s, round_s))

    def _rotate(self, now: float) -> None:
        """Take RDY from some connections, and grant the free RDY to waiting ones."""
        ready = [state for state in self.states.values() if state.rdy]
        waiting = [state for state in self.states.values() if not state.rdy]
        # A connection that lent its RDY comes first, because it has messages. Then those that have
        # waited longest.
        waiting.sort(key=attrgetter("last_change"))
        waiting.sort(key=attrgetter("has_lent"), reverse=True)
        busy = self._release_idle(ready, len(waiting), now)
        if self._rdy >= self.max_in_flight == len(busy):
            self._lend(busy, waiting, now)
        for state in waiting[: self.max_in_flight - self._rdy]:
            state.has_lent = False
            self._set(state.key, 1, now)

    def _release_idle(
        self, ready: list[ReadyState[K]], waiting: int, now: float
    ) -> list[ReadyState[K]]:
        """Take RDY from connections without messages, and from those that have had RDY 1 for
        low_rdy_timeout, as many as are waiting. Return the busy ones that keep it."""
        dwell_s = self._dwell_s(len(ready), waiting)
        if self._idle_share:
            dwell_s = min(dwell_s, ROUND_S)
        self._wanting.clear()
        busy: list[ReadyState[K]] = []
        for state in sorted(ready, key=attrgetter("last_change")):
            has_had_s = now - state.last_change
            unused_s = min(has_had_s, now - state.last_message)
            limit_s = PROBED_S if state.is_probed else dwell_s
            is_unused = not state.in_flight and unused_s >= limit_s
            is_due = state.rdy == 1 and has_had_s > self._options.low_rdy_timeout_s
            if waiting and (is_unused or is_due):
                waiting -= 1
                self._take_back(state, now, lends=not is_unused)
            elif state.in_flight or unused_s < PROBED_S:
                busy.append(state)
        return busy

    def _lend(self, busy: list[ReadyState[K]], waiting: list[ReadyState[K]], now: float) -> None:
        """Take RDY from as many busy connections as are due, for those that waited longest."""
        # Each loan lasts for `PROBE_S`, so this interval makes loans `LENT_SHARE` of the time.
        interval_s = PROBE_S / (LENT_SHARE * self.max_in_flight)
        self._next_loan = max(self._next_loan, now - max(interval_s, PROBE_S))
        busy.sort(key=attrgetter("is_probed", "last_change"))
        waiting.sort(key=attrgetter("last_change"))
        for lender, borrower in zip(busy, waiting, strict=False):
            if now < self._next_loan:
                return
            self._next_loan += interval_s
            self._take_back(lender, now, lends=True)
            borrower.is_probed = True

    def _take_back(self, state: ReadyState[K], now: float, *, lends: bool) -> None:
        state.is_probed = False
        state.has_lent = lends
        self._set(state.key, 0, now)
