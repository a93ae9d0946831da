"""How many messages may be in flight: a control law on the measured rate of answers. Pure.

Messages in flight wait in the client while handlers are busy, and nsqd redelivers a message that
waits longer than msg_timeout T. With too few in flight, handlers are idle.

**Law.** By Little's law the mean number in flight L, the rate of answers r and the mean time W from
delivery to answer satisfy L = r W. This holds for any handlers: threads, tasks, or a pool to which
the program passes messages. So to bring W to a target W*, allow

    L* = r W* = L W* / W

and bound the change to a factor `MAX_CHANGE` in each *round*, a period with as many answers as
messages were allowed. A round that did not use its limit proves nothing and changes nothing.

**Stability.** If k handlers need s seconds for a message, then r = min(L, k) / s. For L <= k the
law gives L* = L W* / s, which grows if s < W*. For L > k it gives L* = k W* / s, a fixed point that
is reached in one round: all handlers are busy, and messages wait for W* - s. With W* = T / 4 a
message is answered long before its timeout, even if the measured W is a round old.

**Slow handlers.** For s >= W* the law alone would shrink L to 1. There are two cases.

*Iterators*, threads and tasks that iterate, are counted. Each may have one message, however long it
takes. Then L = k, and nothing waits.

A *pool* is opaque. It shows by an iterator that asks for messages while every iterator has one. Its
s is the shortest W so far, and the target is `PROBE_TARGET` s, so that L grows by a fifth in a
round while W does not grow with it. A longer W shows that messages queue. Then L returns to L s /
W, and probes this height again only after `PROBE_ANSWERS` answers. If a smaller L does not shorten
W, the handlers have become slower, and W is the new s.

**Silence.** Without an answer there is no rate. The first message is alone until its answer,
because it may kill its process, but at most for `PATIENCE_SHARE` of T. An iterator that asks for
messages and answers none feeds a pool, or collects a batch of unknown size before it answers. So
the limit doubles after each patience. Until the first answer, and at most for T / 60, it grows
`BURST`-fold at each tick instead: with T = 60 s a collector has hundreds of messages within a
second. The price is paid by a pool that is slow from its start. If max_in_flight messages take it
longer than T, it answers some of its first ones late, once for each start.

Messages that time out in the hands of handlers lower the limit, once in a timeout. Bytes are
limited as a number of messages: `weigh` measures their size.

While handlers are busy the limit may be below one for each connection, and RDY rotates. While they
are idle it is not, or the first message of an idle nsqd would wait until RDY visits its connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nsqtools.client.options import ClientOptions

START = 1  # the limit before the first answer
# W* / T. It is half of `EXPIRES_SHARE`, so that a measurement may be wrong by a factor of two.
TARGET_SHARE = 0.25
# Share of T after which a pending message expires (`backlog.EXPIRED_SHARE`).
EXPIRES_SHARE = 0.5
MAX_CHANGE = 2.0
# W* / s of a slow pool: above the noise of W in a round (handlers that vary by 10 %), and with s =
# 0.7 T still below T.
PROBE_TARGET = 1.2
# A probe may cost a late message, so this makes it one in 400.
PROBE_ANSWERS = 400
# Factor for a limit that has proven too high: 2 becomes 1, 3 becomes 2, 20 becomes 18.
BACK_OFF = 0.9
# Answers after which a round may end although W is long. Fewer do not average the variation.
MIN_SAMPLE = 8
# Share of T without an answer before the limit grows, and its maximum: four ticks, so that even
# after the burst a collector of 200 messages has them in 8 s.
PATIENCE_SHARE = 0.125
MAX_PATIENCE_S = 0.95
# Growth in the burst: 1, 8, 64, 512 within three ticks of 0.25 s. And its duration as a share of T.
BURST = 8
BURST_SHARE = 1 / 60
# Share of T before a round without answers shows that handlers are slow. On a busy machine all
# threads stand still for 0.3 s at times, and with a tenth of the RDY a thousand connections cost
# twice as much CPU.
PAUSE_SHARE = 1 / 60
# A message waits as long in nsqd's output buffer, with the output_buffer_timeout that we request.
SHORT_WAIT_S = 0.025
# Messages of each connection that are worth a wait of this length as well: two messages that are
# read and answered together cost two thirds of the CPU. Slower handlers prefetch no more.
PER_CONNECTION = 4
BATCH_WAIT_S = 0.25
# Shares of RDY among idle connections, so that it visits all of them in two seconds: `rdy.ROUND_S`
# divided by `rdy.PROBE_S`.
ROTATIONS = 20


class InFlightLimit:
    """The limit of one consumer, at most ``maximum`` (max_in_flight; 0 pauses)."""

    def __init__(self, options: ClientOptions) -> None:
        self.maximum = options.max_in_flight
        self.msg_timeout_s = 60.0  # the shortest of all connections
        self.max_bytes = options.max_in_flight_bytes or math.inf
        self.connections = 0
        self.iterators = 0
        self.batch_size = 0  # messages that the program answers together, as it announced
        self.is_busy = False  # messages were in flight a moment ago
        self.was_used = False  # a connection had all its RDY in flight in this round
        self._law = START  # the result of the law
        self._byte_limit = math.inf  # as a number of messages
        self._learned_batch = 0  # messages that were answered together after a silence
        self._stalled_at = math.inf  # the limit at the last growth in silence
        self._has_rate = False  # there was an answer, or the patience for the first has passed
        self._clock = 0.0
        self._silent_s = self._patient_s = 0.0  # without an answer, and since the last growth
        self._new_answers = 0
        self._time_s = 0.0  # W of the last round, or the longest silence since
        self._service_s = math.inf  # the time s that a handler needs
        self._ceiling = math.inf  # the highest limit that a slow pool may probe
        self._lowered_from_s: float | None = None  # W of the last round, if it lowered the limit
        self._lowered_at = -math.inf
        self._begin_round(0.0)

    def _begin_round(self, ages_s: float) -> None:
        self._answers = 0
        self._waited_s = ages_s  # sum of the times in flight of all messages
        self._busy_s = 0.0  # time with messages in flight
        self._samples = self._starved_samples = 0
        self.was_used = False
        self._was_lowered = False  # by `timed_out`: the round has messages of a longer queue

    @property
    def current(self) -> int:
        """The number of messages that may be in flight."""
        return int(min(self.maximum, self._demand, self._byte_limit))

    @property
    def _demand(self) -> int:
        iterators = self.iterators if self._has_rate else 0
        demand = max(self.batch_size, self._learned_batch, iterators, self._law)
        if self.is_busy and (self._has_rate or self.iterators):
            return demand
        return max(demand, self.connections if self._is_fast else self.connections // ROTATIONS)

    @property
    def _is_fast(self) -> bool:
        """Return whether handlers can take a message of each connection at the same time."""
        if not self._has_rate:
            return not self.iterators
        all_s = self._service_s * self.connections / max(1, self.iterators)
        return all_s < EXPIRES_SHARE * self.msg_timeout_s

    @property
    def is_by_bytes(self) -> bool:
        """Return whether smaller messages would raise the limit."""
        return self._byte_limit < min(self.maximum, self._demand)

    def weigh(self, size: int, count: int) -> None:
        """Record that ``count`` messages have ``size`` bytes. One message is always allowed."""
        self._byte_limit = max(1.0, self.max_bytes * count / max(1, size))

    # -- measuring ------------------------------------------------------------------------------

    def advance_clock(self, now: float, in_flight: int) -> None:
        """Account for the time until now, in which ``in_flight`` messages were in flight."""
        elapsed_s, self._clock = now - self._clock, now
        if in_flight:
            self._busy_s += elapsed_s
            self._silent_s += elapsed_s
            self._patient_s += elapsed_s
            self._waited_s += elapsed_s * in_flight

    def answered(self, count: int) -> None:
        """Record answers of handlers."""
        self._answers += count
        self._new_answers += count
        self._time_s = max(self._time_s, self._silent_s)
        self._silent_s = self._patient_s = 0.0
        self._has_rate = True

    def sample(self, in_flight: int, *, is_starved: bool) -> None:
        """Record at a tick whether a handler waits for a message while none is pending."""
        self._samples += 1
        self._starved_samples += is_starved and in_flight >= self.iterators

    @property
    def _is_pool(self) -> bool:
        return 2 * self._starved_samples > self._samples

    # -- deciding -------------------------------------------------------------------------------

    def timed_out(self, in_flight: int, now: float) -> None:
        """Lower the limit, because messages timed out in the hands of handlers.

        ``in_flight`` were in flight then. If most of the limit was unused, it is not the reason.
        """
        # Without a valid measurement the limit is halved. Otherwise a pool has queued a little too
        # much, and messages in its queue will time out once more before the change takes effect.
        is_unmeasured = not 0 < self._time_s < self.msg_timeout_s
        settles_s = self.msg_timeout_s * (1 if is_unmeasured else 2)
        if 2 * in_flight > self.current and now - self._lowered_at >= settles_s:
            self._lowered_at = now
            self._was_lowered = True
            demand = self._demand
            self._ceiling = max(1, int(BACK_OFF * demand))
            self._law = max(1, demand // 2) if is_unmeasured else int(self._ceiling)

    def adapt(self, in_flight: int, ages_s: Callable[[], float], *, is_pending: bool) -> None:
        """Decide again, after answers and ticks.

        ``ages_s`` returns the sum of the times that the messages in flight have been so.
        ``is_pending`` means that messages wait for an iterator.
        """
        if not self.maximum:  # a pause must not change what holds after it
            return
        timeout_s, demand = self.msg_timeout_s, self._demand
        if self._silent_s > PATIENCE_SHARE * timeout_s and not self._has_rate:
            self._has_rate = True  # the first message may hang, and must not stop the others
            demand = self._demand
        new_answers, self._new_answers = self._new_answers, 0
        if new_answers > self._stalled_at:  # answers that needed the growth in silence
            self._learned_batch = max(self._learned_batch, new_answers)
            self._stalled_at = math.inf
            demand = self._demand
        if self._answers >= demand:
            is_short = self._waited_s < TARGET_SHARE * timeout_s * self._answers
            # At the maximum the ages, which cost a loop, could only shorten W further.
            sum_s = 0.0 if is_short and demand >= self.maximum else ages_s()
            time_s = (self._waited_s - sum_s) / self._answers
            if time_s < TARGET_SHARE * timeout_s or self._answers >= MIN_SAMPLE:
                self._end_round(demand, time_s, is_pending=is_pending)
                self._begin_round(sum_s)
        elif is_pending and self._busy_s > PAUSE_SHARE * timeout_s:
            # The round may last too long: with the next answer the rate is at most this.
            rate = (self._answers + 1) / self._busy_s if self._busy_s else math.inf
            if demand > rate * EXPIRES_SHARE * timeout_s:
                self._law = max(1, int(rate * TARGET_SHARE * timeout_s))
        elif in_flight >= demand and self._is_pool:
            self._grow_in_silence(demand)

    def _grow_in_silence(self, demand: int) -> None:
        timeout_s = self.msg_timeout_s
        is_burst = not self._time_s and self._silent_s <= BURST_SHARE * timeout_s
        patience_s = min(PATIENCE_SHARE * timeout_s, MAX_PATIENCE_S)
        if is_burst or self._patient_s > max(patience_s, 1.5 * self._time_s):
            self._stalled_at, self._patient_s = demand, 0.0
            self._law = min((BURST if is_burst else 2) * demand, self.maximum)

    def _end_round(self, demand: int, time_s: float, *, is_pending: bool) -> None:
        """Apply the law to a round in which ``demand`` was the limit and W was ``time_s``."""
        self._time_s = time_s
        self._ceiling += self._answers / PROBE_ANSWERS
        if not self.was_used or self._was_lowered:
            return
        lowered_from_s, self._lowered_from_s = self._lowered_from_s, None
        if lowered_from_s is not None and time_s > 0.95 * lowered_from_s:
            self._service_s = time_s
        self._service_s = min(self._service_s, time_s)
        target_s, ceiling = TARGET_SHARE * self.msg_timeout_s, math.inf
        is_slow_pool = self._is_pool and time_s > target_s
        if is_slow_pool:
            target_s, ceiling = max(target_s, PROBE_TARGET * self._service_s), self._ceiling
        law = demand * target_s / max(time_s, 1e-9)
        if law >= demand:
            # If handlers are busy, more messages would only wait. A short wait is worth it, because
            # fewer in flight on many connections would be read and answered one by one.
            is_thin = demand < PER_CONNECTION * self.connections
            if not is_pending or time_s < (BATCH_WAIT_S if is_thin else SHORT_WAIT_S):
                law = max(law, demand + 1)
                self._law = int(min(law, MAX_CHANGE * demand, max(demand, ceiling), self.maximum))
            return
        if is_slow_pool:
            law = demand * max(TARGET_SHARE * self.msg_timeout_s, self._service_s) / time_s
            self._ceiling = max(1, int(BACK_OFF * demand))
        self._lowered_from_s = time_s
        self._law = max(1, int(max(law, demand / MAX_CHANGE)))
