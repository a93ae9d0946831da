"""RDY: how max_in_flight is shared between the connections, and backoff, which takes it from all of
them. Pure: events and clock readings in, RDY commands out.

RDY is a window: nsqd keeps at most that many messages in flight to a connection (since 0.3.0; the
old pages describe a credit, so RDY is also sent again when a quarter of it is left, with the next
answer, because a write of its own would double the cost of a message; not while RDY 1 rotates,
which renews it anyway).

Two invariants hold whatever happens, in whatever order:

- the sum of RDY never exceeds max_in_flight;
- an *increase* is granted only within max_in_flight minus what the other connections use, where a
  connection uses the larger of its RDY and its messages in flight. Messages in flight outlive the
  RDY that brought them, and without this rule moving RDY would double them (pynsq#177).

What could not be granted is remembered in `_wanting` and retried when room appears. The sums are
running totals, so that an answer costs the same with one connection as with a thousand.

Shares are even, but for a *quiet* connection: one without messages for a moment while another had
all that it may have. It keeps RDY 1 until it is full from tick to tick, and the quiet ones together
have half of what is allowed at most. Of ten slow workers two would work without that, where one of
five nsqd has the backlog. What an even division leaves over goes to the first ones.

With fewer messages allowed than connections RDY 1 rotates (`redistribute`, every `PROBE_S` then). A
connection without messages passes it on after a moment, to who has waited longest. While all that
have it are busy, one at a time lends it to a connection that waits, which keeps it if it has
messages and else gives it back after `PROBE_S`: a message on a quiet nsqd waits for seconds, and
the busy ones lose a twelfth of their time.

Backoff is what a failing handler does to the whole consumer, in three modes. NORMAL: messages flow.
WAIT: every connection is at RDY 0 until a timer runs out. TEST: one connection has RDY 1, another
one when that has no messages, and the first answer decides: success lowers the level, failure
raises it, a requeue without backoff keeps it; then the wait starts again, or at level 0 everything
is restored. Answers in WAIT are ignored, so fifty failures at once count as one. It protects what
the handler works on, so it covers all connections (as in go-nsq and pynsq). Unlike go-nsq's, the
level keeps its meaning at the cap, and a message given up unseen does not count as a result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nsqtools.client.options import ClientOptions

RESEND_AT = 0.25
STARVED_AT = 0.85
PROBE_S = 0.1  # how long a connection has RDY before it counts as one without messages
PROBED_S = 0.9 * PROBE_S  # ticks are not exact
QUIET_S = 2 * PROBE_S
ROUND_S = 2.0  # for idle connections to have their turns, where there are few
LENT_SHARE = 0.08  # of the time of busy connections

K = TypeVar("K", bound=Hashable)

# modes of backoff; no enum, as looking up a member of one costs as much as a call
NORMAL, WAIT, TEST = "normal", "wait", "test"


@dataclass(slots=True)
class ReadyState:
    """One connection. ``cap`` is nsqd's max_rdy_count; times are readings of the caller's clock."""

    cap: int
    last_message: float
    last_change: float
    rdy: int = 0
    share: int = 0  # of max_in_flight
    last_room: float = -math.inf  # when it lost RDY that had brought nothing for a moment
    left: int = 0  # of rdy, as the old credit reading counts it
    in_flight: int = 0
    closing: bool = False
    was_full: bool = False  # since the last tick
    full_ticks: int = 0
    is_idle: bool = False
    is_probed: bool = False  # has RDY on loan
    has_lent: bool = False  # was busy when its RDY was lent to another


class ReadyControl(Generic[K]):
    """Decides the RDY of every connection; keys are whatever the caller uses for a connection.

    After each event the caller sends what `take_changes` returns, in order, before any FIN or REQ
    of the same turn (go-nsq#83).
    """

    def __init__(
        self, max_in_flight: int, options: ClientOptions, rng: random.Random | None = None
    ) -> None:
        self.max_in_flight = max_in_flight
        self._options = options
        self._rng = rng or random.Random()
        self.states: dict[K, ReadyState] = {}
        self._wanting: dict[K, None] = {}  # ordered: the first to want is the first to get
        self._changes: list[tuple[K, int]] = []
        self._use = 0  # of all connections
        self._rdy = 0
        self.in_flight = 0
        self._sharers = 0  # connections that are not closing
        self._quiet_share = 0  # what those that are quiet get together
        self.is_scarce = False  # some connections must wait for RDY
        self.mode = NORMAL
        self.level = 0  # of backoff
        self._tester: K | None = None
        self._next_loan = 0.0

    @property
    def rotates(self) -> bool:
        """Tell whether connections without messages pass RDY on."""
        return self.is_scarce or self._quiet_share > 0 or (self.mode == TEST and self._sharers > 1)

    @property
    def is_starved(self) -> bool:
        """Tell whether some connection is within 15 % of its RDY: finish what is held back. The
        message of a quiet one does not count, or each would be flushed alone."""
        return any(
            not (s.closing or s.is_idle) and 0 < s.in_flight >= s.rdy * STARVED_AT
            for s in list(self.states.values())  # other threads ask, too
        )

    def is_full(self, now: float, idle_s: float) -> bool:
        """Tell whether no connection may bring more messages than are in flight, but for those that
        have brought none in ``idle_s``."""
        states = self.states.values()
        brings = [s for s in states if s.in_flight or now - s.last_message < idle_s]
        return all(s.in_flight >= s.rdy for s in brings)

    def had_turns(self, since: float, now: float) -> bool:
        """Tell whether every connection could have brought a message after ``since``: it has room
        in its RDY, for a moment already, or had until later than that."""
        return all(
            s.closing
            or (s.rdy > s.in_flight and now - s.last_change >= PROBED_S)
            or s.last_room > since
            for s in list(self.states.values())  # other threads ask, too
        )

    def take_changes(self) -> list[tuple[K, int]]:
        """Return and forget the RDY commands to send, in order."""
        changes, self._changes = self._changes, []
        return changes

    # -- connections ----------------------------------------------------------------------------

    def add(self, key: K, cap: int, now: float) -> None:
        """A connection has subscribed."""
        self.states[key] = ReadyState(cap, last_message=now, last_change=now)
        self._count_sharers()
        if self.mode == NORMAL:
            self._lower_to_share(now)
            self._set(key, 1, now)
        self._find_tester(now)

    def remove(self, key: K, now: float) -> None:
        """A connection is gone; its messages come again from nsqd."""
        state = self.states[key]
        self._update(state, 0, 0)
        del self.states[key]
        self._count_sharers()
        self._wanting.pop(key, None)
        self._changes = [change for change in self._changes if change[0] != key]
        if key == self._tester:
            self._tester = None
        if self.mode == NORMAL:
            self._raise_to_share(now)
        self._find_tester(now)

    def close(self, key: K, now: float) -> None:
        """CLS is being sent on a connection: it gets no more RDY."""
        self._changes = [change for change in self._changes if change[0] != key]
        state = self.states[key]
        state.closing = True
        self._count_sharers()
        state.left = 0
        self._update(state, 0, state.in_flight)
        self._wanting.pop(key, None)
        if key == self._tester:
            self._tester = None
        self._find_tester(now)

    # -- messages -------------------------------------------------------------------------------

    def received(self, key: K, count: int, now: float) -> bool:
        """Messages arrived on a connection; return whether it has all that it may have."""
        state = self.states[key]
        rdy, was = state.rdy, state.in_flight
        state.in_flight = in_flight = was + count
        self.in_flight += count
        if in_flight > rdy:
            self._use += in_flight - (was if was > rdy else rdy)
        state.left -= count
        state.last_message = now
        if rdy < state.share and self.mode == NORMAL and (rdy or not self.is_scarce):
            self._set(key, state.share, now)  # unless it was taken from it for those that wait
        is_full = in_flight >= state.rdy
        state.was_full |= is_full
        return is_full

    def answered(self, key: K, count: int, now: float) -> None:
        """Messages of a connection were finished, requeued or replaced by a newer delivery."""
        state = self.states[key]
        rdy, was = state.rdy, state.in_flight
        state.in_flight = in_flight = was - count
        self.in_flight -= count
        if was > rdy:
            self._use -= was - (in_flight if in_flight > rdy else rdy)
        if self.mode == NORMAL:
            if rdy > self.is_scarce and state.left <= rdy * RESEND_AT:
                self._send(key, state, rdy)
            if self._wanting:
                self._retry_wanting(now)
        else:
            self._find_tester(now)

    # -- decisions of others --------------------------------------------------------------------

    def set_max_in_flight(self, max_in_flight: int, now: float) -> None:
        """Change the total; 0 pauses, in backoff too."""
        self.max_in_flight = max_in_flight
        self._count_sharers()
        self._wanting.clear()
        if self.mode == NORMAL:
            self._lower_to_share(now)
            self._raise_to_share(now)
        elif max_in_flight == 0:
            self._release_tester(now)
        self._find_tester(now)

    def redistribute(self, now: float) -> None:
        """The periodic tick: move RDY where there is too little for all, and mend what is idle."""
        if self.mode == TEST:
            self._move_idle_tester(now)
        elif self.mode == NORMAL:
            self._find_quiet(now)
            if self.is_scarce:
                self._rotate(now)
            else:
                self._raise_to_share(now)

    # -- backoff: seconds for which RDY is 0 everywhere from now on, 0 where it is over, or None --

    def failed(self, now: float) -> float | None:
        """A message was requeued with backoff. A max_backoff_duration of 0 disables that."""
        if self.mode is WAIT or self._options.max_backoff_duration_s <= 0:
            return None
        if self.mode is NORMAL:
            self.level = 1
        elif self._backoff_s(self.level) < self._backoff_s(self.level + 1):
            self.level += 1  # not where it would lengthen nothing, only the way back
        return self._enter_wait(now)

    def succeeded(self, now: float) -> float | None:
        """A message was finished by its handler."""
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
        """A message was requeued without backoff."""
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
        # beyond 2**62 the product overflows nothing, but it has long been past any cap
        delay_s = self._options.backoff_multiplier_s * 2.0 ** min(level, 62)
        return min(self._options.max_backoff_duration_s, delay_s)

    def test(self, now: float) -> bool:
        """The wait is over: give RDY 1 to one connection. Return whether there is one."""
        if not self._sharers:
            return False
        self.mode = TEST
        self._tester = None
        self._find_tester(now)
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _count_sharers(self) -> None:
        sharers = [state for state in self.states.values() if not state.closing]
        quiet = sum([state.is_idle for state in sharers])
        most = self.max_in_flight
        self._sharers = len(sharers)
        self._quiet_share = min(quiet, (most + 1) // 2)
        even, rest = divmod(most - self._quiet_share, max(1, len(sharers) - quiet))
        for state in sharers:
            share = 1 if state.is_idle else even + (rest > 0)
            rest -= not state.is_idle
            state.share = min(max(share, 1), most, state.cap)
        self.is_scarce = most > 0 and (len(sharers) > most or quiet > self._quiet_share)

    def _find_quiet(self, now: float) -> None:
        """Decide again which connections are quiet."""
        live = [state for state in self.states.values() if not state.closing]
        before = [state.is_idle for state in live]
        for state in live:
            is_full = state.was_full or state.in_flight >= state.rdy > 0
            state.full_ticks = state.full_ticks + 1 if is_full else 0
            state.was_full = False
        is_short = any(state.full_ticks >= 2 for state in live)  # one message fills RDY 1
        for state in live:
            is_silent = not state.in_flight and now - state.last_message >= QUIET_S
            state.is_idle = is_short and state.full_ticks < 2 and (state.is_idle or is_silent)
        if before != [state.is_idle for state in live]:
            self._count_sharers()
            self._lower_to_share(now)
            self._raise_to_share(now)

    def _update(self, state: ReadyState, rdy: int, in_flight: int) -> None:
        """Change a connection, and the totals with it."""
        was_rdy, was_in_flight = state.rdy, state.in_flight
        state.rdy, state.in_flight = rdy, in_flight
        self._rdy += rdy - was_rdy
        self.in_flight += in_flight - was_in_flight
        self._use += rdy if rdy > in_flight else in_flight
        self._use -= was_rdy if was_rdy > was_in_flight else was_in_flight

    def _lower_to_share(self, now: float) -> None:
        for key, state in self.states.items():
            if state.rdy > state.share:
                self._set(key, state.share, now)
        quiet = sum([state.rdy for state in self.states.values() if state.is_idle])
        over = max(self._rdy - self.max_in_flight, quiet - self._quiet_share)
        for key, state in self._quiet_last()[::-1]:  # more connections than messages allowed
            if over > 0 and state.rdy > 0:
                over -= state.rdy
                self._set(key, 0, now)

    def _quiet_last(self) -> list[tuple[K, ReadyState]]:
        return sorted(self.states.items(), key=lambda each: each[1].is_idle)

    def _raise_to_share(self, now: float) -> None:
        for key, state in self._quiet_last():
            if not state.closing and state.rdy < state.share:
                self._set(key, state.share, now)

    def _retry_wanting(self, now: float) -> None:
        while self._wanting and self._use < self.max_in_flight:
            key = next(iter(self._wanting))
            self._set(key, self.states[key].share, now)
            if key in self._wanting:
                return  # there was room for a part of its share

    def _set(self, key: K, wish: int, now: float) -> None:
        """Bring a connection to the wished RDY, as far as the invariants allow."""
        state = self.states[key]
        if state.closing:
            return
        count = min(wish, state.cap)
        if count > state.rdy:
            others = self._use - max(state.rdy, state.in_flight)
            granted = min(count, self.max_in_flight - others)
            if granted < count:
                self._wanting[key] = None
            count = max(granted, state.rdy)
        if count >= wish:
            self._wanting.pop(key, None)
        if count != state.rdy:
            quiet_s = now - max(state.last_change, state.last_message)
            if not count and not state.in_flight and quiet_s >= PROBED_S:
                state.last_room = now
            state.last_change = now
            if not state.rdy:
                state.last_message = now  # it has been silent from here on
            self._send(key, state, count)

    def _send(self, key: K, state: ReadyState, count: int) -> None:
        state.left = count
        self._update(state, count, state.in_flight)
        self._changes.append((key, count))

    def _find_tester(self, now: float) -> None:
        """In a test without a tester, give RDY 1 to one: now, or when an answer makes room.

        Preferred is one without messages in flight, to which nsqd sends at once, and of these the
        one that has waited longest. When everything allowed is in flight already it is the busiest:
        its RDY 1 takes effect as soon as its own messages are answered, and adds nothing until
        then.
        """
        if self.mode != TEST or self._tester is not None or self.max_in_flight == 0:
            return
        keys = [key for key, state in self.states.items() if not state.closing]
        idle = [key for key in keys if not self.states[key].in_flight]
        busy = [key for key in keys if self.states[key].in_flight]
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
        if self._tester is None or self._sharers < 2:
            return
        state = self.states[self._tester]
        if not state.in_flight and now - state.last_change >= self._dwell_s(1, self._sharers - 1):
            self._release_tester(now)
            self._find_tester(now)

    def _dwell_s(self, ready: int, waiting: int) -> float:
        """Return how long a connection without messages keeps RDY that others wait for."""
        round_s = ROUND_S * ready / max(1, waiting)
        return max(PROBED_S, min(self._options.low_rdy_idle_timeout_s, round_s))

    def _rotate(self, now: float) -> None:
        """Take RDY from some connections, and give what is free to those that wait."""
        live = [(key, state) for key, state in self.states.items() if not state.closing]
        # who has lent its RDY comes first, as it has messages; then who has waited longest
        waiting = [(not s.has_lent, s.last_change, n) for n, (_, s) in enumerate(live) if not s.rdy]
        turns = [live[n] for _, _, n in sorted(waiting)]
        dwell_s = self._dwell_s(len(live) - len(turns), len(turns))
        if self._quiet_share:
            dwell_s = min(dwell_s, ROUND_S)
        self._wanting.clear()
        busy: list[tuple[K, ReadyState]] = []
        taken = 0
        for key, state in sorted(live, key=lambda each: each[1].last_change):
            if state.rdy:
                idle_s = now - max(state.last_message, state.last_change)
                lasts_s = PROBED_S if state.is_probed else dwell_s
                is_idle = not state.in_flight and idle_s >= lasts_s
                held_s = now - state.last_change
                is_due = state.rdy == 1 and held_s > self._options.low_rdy_timeout_s
                if taken < len(turns) and (is_idle or is_due):
                    taken += 1
                    self._take_back(key, state, now, lends=not is_idle)
                elif state.in_flight or idle_s < PROBED_S:
                    busy.append((key, state))
        if self._rdy >= self.max_in_flight == len(busy):
            self._lend(busy, turns, now)
        for key, state in turns[: self.max_in_flight - self._rdy]:
            state.has_lent = False
            self._set(key, 1, now)

    def _lend(
        self, busy: list[tuple[K, ReadyState]], turns: list[tuple[K, ReadyState]], now: float
    ) -> None:
        """Take RDY from busy connections, as many as are due, for those that waited longest."""
        interval_s = PROBE_S / (LENT_SHARE * self.max_in_flight)
        self._next_loan = max(self._next_loan, now - max(interval_s, PROBE_S))
        busy.sort(key=lambda each: (each[1].is_probed, each[1].last_change))
        turns.sort(key=lambda each: each[1].last_change)
        for lender, (_, borrower) in zip(busy, turns, strict=False):
            if now < self._next_loan:
                return
            self._next_loan += interval_s
            self._take_back(*lender, now, lends=True)
            borrower.is_probed = True

    def _take_back(self, key: K, state: ReadyState, now: float, *, lends: bool) -> None:
        state.is_probed = False
        state.has_lent = lends
        self._set(key, 0, now)
