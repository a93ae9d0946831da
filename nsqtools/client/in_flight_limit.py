"""How many messages may be in flight, so that none waits long for its answer. Pure.

Messages in flight wait in the client while handlers are busy, and nsqd delivers what waits longer
than msg_timeout again. So the limit follows the *answers*, whatever gives them: threads, tasks, or
a pool behind them. A round ends when as many were answered as were in flight at its beginning. It
shows the mean time from delivery to answer, by Little's law, as nothing is known of one message.

- The first message is alone until its answer, as it may kill its process, where
  threads and tasks iterate (``iterators``). Afterwards each of them may have one,
  however long it takes; also where the first hangs.
- While answers come within `WAIT_SHARE` of msg_timeout and handlers have nothing left, a round
  doubles the limit, up to max_in_flight: a handler of a microsecond gets there in milliseconds.
- Slower ones tell by asking for more while all of them have a message: they pass it on, to a pool.
  The limit grows by a quarter then, as long as the answers do not come later for it.
- Who asks and answers nothing may be collecting what is answered together: after a while that gets
  twice as many.
- Answers that come too late lower the limit, and so do messages that time out with handlers and
  those that wait while there are no answers.

Bytes are limited by the number as well: `weighed` tells the size of messages in flight.

While handlers are busy it may be less than one for each connection: RDY rotates then. While they
are idle it is not, or the first message of a quiet nsqd would wait for its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nsqtools.client.options import ClientOptions

START = 1  # before anything was measured
WAIT_SHARE = 0.25  # of msg_timeout, for an answer, while there is room for more
LATE_SHARE = 0.4  # of msg_timeout: too many are in flight, unless a handler alone takes as long
EXPIRES_SHARE = 0.5  # of msg_timeout, for what waits (`Backlog`)
PATIENCE_SHARE = 0.125  # of msg_timeout, without an answer; but not longer than
# four looks: who collects 200 has them in 8 s. A pool looks the same until its first answer: one of
# few threads and handlers of more than 5 s gets, once, some hundred that it answers too late.
PATIENCE_S = 0.95
UNDELAYED = 1.15  # times the shortest mean time: nothing waited
DELAYED = 1.4
PROBED_EACH = 400  # answers, whether one more is still too much
SAMPLE = 8  # answers that tell their mean time
TURNS = 20  # of RDY among quiet connections until each had one, in two seconds


class InFlightLimit:
    """The limit of one consumer, at most ``maximum`` (max_in_flight; 0 pauses).

    ``adapted`` is what its handlers can take, as measured last.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.maximum = options.max_in_flight
        self.msg_timeout_s = 60.0
        self.maximum_bytes = options.max_in_flight_bytes or math.inf
        self._fit = math.inf  # into the bytes
        self.connections = 0
        self.iterators = 0
        self.batch_size = 0  # messages that are answered together, which must be in flight together
        self.adapted = START
        self.is_busy = False
        self.is_used = False  # some connection had all that it may have
        self._is_measured = False  # there was an answer, or is none for long
        self._lowered_at = -math.inf
        self._seen_at = 0.0
        self._bound = math.inf  # what was too much, of slow handlers
        self._took_s = 0.0
        self._unqueued_s = math.inf  # the shortest time to an answer
        self._silent_s = self._quiet_s = 0.0  # without an answer; and without more of them
        self._new = 0  # answers
        self._stuck_at = math.inf  # what who collects had, before there were more
        self._together = 0  # answers that needed as many messages
        self._begin_round(0.0)

    def _begin_round(self, age_s: float) -> None:
        self._answers = 0
        self._busy_s = 0.0
        self._waited_s = age_s  # by the messages that are answered, together
        self._looks = self._asked = 0
        self.is_used = False

    @property
    def current(self) -> int:
        """The limit."""
        return int(min(self.maximum, self._base, self._fit))

    @property
    def _base(self) -> int:
        iterators = self.iterators if self._is_measured else 0
        adapted = max(self.batch_size, self._together, iterators, self.adapted)
        if self.is_busy and (self._is_measured or self.iterators):
            return adapted
        return max(adapted, self.connections if self._is_quick else self.connections // TURNS)

    @property
    def _is_quick(self) -> bool:
        """Tell whether each connection may bring a message at the same time."""
        if not self._is_measured:
            return not self.iterators
        together_s = self._unqueued_s * self.connections / max(1, self.iterators)
        return together_s < EXPIRES_SHARE * self.msg_timeout_s

    @property
    def is_by_bytes(self) -> bool:
        """Tell whether more messages were allowed if they were smaller."""
        return self._fit < min(self.maximum, self._base)

    def weighed(self, size: int, count: int) -> None:
        """Note that ``count`` messages have this many bytes; one of any size is always allowed."""
        self._fit = max(1.0, self.maximum_bytes * count / max(1, size))

    # -- what happens -----------------------------------------------------------------------------

    def advance_clock(self, now: float, in_flight: int) -> None:
        """Note how many were in flight until now."""
        passed_s, self._seen_at = now - self._seen_at, now
        if in_flight:
            self._busy_s += passed_s
            self._silent_s += passed_s
            self._quiet_s += passed_s
            self._waited_s += passed_s * in_flight

    def answered(self, count: int) -> None:
        """Handlers answered messages."""
        self._answers += count
        self._new += count
        self._took_s = max(self._took_s, self._silent_s)
        self._silent_s = self._quiet_s = 0.0
        self._is_measured = True

    def timed_out(self, in_flight: int, now: float) -> None:
        """Messages timed out in the hands of handlers while ``in_flight`` were in flight."""
        is_far = not 0 < self._took_s < self.msg_timeout_s
        # the queue of a pool that was a little too long is late once more
        settles_s = self.msg_timeout_s * (1 if is_far else 2)
        if 2 * in_flight > self.current and now - self._lowered_at >= settles_s:
            self._lowered_at = now
            self._bound = fewer = max(1, int(0.9 * self._base))
            self.adapted = max(1, self._base // 2) if is_far else fewer

    def sample(self, in_flight: int, *, is_starved: bool) -> None:
        """Note from time to time whether a handler wants a message while none waits."""
        self._looks += 1
        self._asked += is_starved and in_flight >= self.iterators

    def adapt(self, in_flight: int, ages_s: Callable[[], float], *, waits: bool) -> None:
        """Decide again, after answers and looks. ``waits``: messages do, for a handler.

        ``ages_s`` returns how long what is in flight has been, in sum.
        """
        if not self.maximum:  # paused, which must not lower what holds afterwards
            return
        timeout_s = self.msg_timeout_s
        if self._silent_s > PATIENCE_SHARE * timeout_s:
            self._is_measured = True  # the first may hang, and must not hold up the others
        new, self._new = self._new, 0
        if new > self._stuck_at:
            self._together, self._stuck_at = max(self._together, new), math.inf
        if self._answers >= (base := self._base):
            if base >= self.maximum and self._waited_s < WAIT_SHARE * timeout_s * self._answers:
                self._begin_round(self._waited_s)  # that is quick; the ages are no more than this
                return
            age_s = ages_s()
            took_s = (self._waited_s - age_s) / self._answers
            if took_s < WAIT_SHARE * timeout_s or self._answers >= SAMPLE:
                self._end_round(took_s, waits)
                self._begin_round(age_s)
        elif waits:
            per_answer_s = self._busy_s / (self._answers + 1)
            if per_answer_s * self._base > EXPIRES_SHARE * timeout_s:
                self.adapted = max(1, int(WAIT_SHARE * timeout_s / per_answer_s))
        elif in_flight >= self._base and self._hands_on:
            patience_s = max(min(PATIENCE_SHARE * timeout_s, PATIENCE_S), 1.5 * self._took_s)
            if self._quiet_s > patience_s:
                self._stuck_at, self._quiet_s = self._base, 0.0
                self.adapted = min(2 * self._base, self.maximum)

    @property
    def _hands_on(self) -> bool:
        return 2 * self._asked > self._looks

    def _end_round(self, took_s: float, waits: bool) -> None:
        base, timeout_s = self._base, self.msg_timeout_s
        self._took_s = took_s
        known_s = self._unqueued_s = min(1.02 * self._unqueued_s, took_s)
        self._bound += self._answers / PROBED_EACH
        if not self.is_used:
            pass
        elif took_s < WAIT_SHARE * timeout_s:
            if not waits:
                fits_s = 0.9 * LATE_SHARE * timeout_s
                more = base * min(2.0, fits_s / max(took_s, 1e-9))
                self.adapted = min(int(more), self.maximum)
        elif took_s > max(LATE_SHARE * timeout_s, DELAYED * known_s):
            fits_s = max(WAIT_SHARE * timeout_s, 0.9 * known_s)
            self.adapted = max(1, int(base * fits_s / took_s))
            self._bound = max(1, int(0.9 * base))
            self._unqueued_s = math.inf  # measured again, while little waits
        elif self._hands_on and took_s <= max(0.9 * LATE_SHARE * timeout_s, UNDELAYED * known_s):
            self.adapted = int(min(base + max(1, base // 4), max(base, self._bound), self.maximum))
