"""How many messages may be in flight, so that none waits long for its handler. Pure.

Messages in flight wait in the client while handlers are busy, and nsqd delivers what waits longer
than msg_timeout again. So the limit follows the handlers: with one message every `per_message_s`
on each worker, what is in flight is handled within `WAIT_SHARE` of msg_timeout. It starts with
one message for each connection, so that a message that kills its process takes few others with it.
It grows as far as it doubles from one measurement to the next, and ends at max_in_flight: a handler
of a microsecond gets there in milliseconds, one of a second stays at a few messages.

A handler that passes messages on, to a pool or to tasks, seems to take no time. That they cannot
keep up shows when messages time out in their hands while the limit is in use: then it is halved, at
most once in a msg_timeout, and grows by one with as many answers as it is.

Bytes are limited by the number as well: `weighed` tells the size of messages in flight.

While handlers are busy it may be less than one for each connection: RDY rotates then. While they
are idle it is not, or the first message of a quiet nsqd would wait for its turn.
"""

from __future__ import annotations

import math

START = 1  # before anything was measured
WAIT_SHARE = 0.25  # of msg_timeout, for a message to be reached by a handler
MIN_CHANGE = 0.2


class HandlingTime:
    """The time that a message takes on one worker, measured: rises fast, falls slowly."""

    def __init__(self) -> None:
        self.per_message_s: float | None = None

    def note(self, count: int, elapsed_s: float) -> None:
        """A worker took this long for this many messages."""
        latest = elapsed_s / count
        known = self.per_message_s
        if known is None:
            self.per_message_s = latest
        else:
            self.per_message_s = known + (latest - known) * (0.5 if latest > known else 0.2)


class InFlightLimit:
    """The limit of one consumer, at most ``maximum`` (max_in_flight; 0 pauses).

    ``adapted`` is what its handlers can take, as measured last.
    """

    def __init__(self, maximum: int, maximum_bytes: int = 0) -> None:
        self.maximum = maximum
        self._maximum_bytes = maximum_bytes or math.inf
        self._fit = math.inf  # into the bytes
        self.connections = 0
        self.adapted = START
        self.gathered = 0  # messages that are answered together, which must be in flight together
        self.is_measured = False
        self.is_busy = False
        self._bound = math.inf  # what messages that timed out have shown
        self._halved_at = -math.inf

    @property
    def current(self) -> int:
        """The limit."""
        return int(min(self.maximum, self._base, self._fit))

    @property
    def _base(self) -> int:
        adapted = max(self.gathered, int(min(self.adapted, self._bound)))
        if self.is_measured and self.is_busy:
            return adapted
        return max(adapted, self.connections)

    @property
    def is_by_bytes(self) -> bool:
        """Tell whether more messages were allowed if they were smaller."""
        return self._fit < min(self.maximum, self._base)

    def weighed(self, size: int, count: int) -> None:
        """So many bytes are those of ``count`` messages; one of any size is always allowed."""
        self._fit = max(1.0, self._maximum_bytes * count / max(1, size))

    def timed_out(self, in_flight: int, workers: int, msg_timeout_s: float, now: float) -> None:
        """Messages timed out in the hands of handlers while ``in_flight`` were in flight."""
        if 2 * in_flight > self.current and now - self._halved_at >= msg_timeout_s:
            self._halved_at = now
            self._bound = max(workers, self.current // 2)

    def answered(self, count: int) -> None:
        """Handlers answered messages."""
        self._bound += count / max(1, self._bound)

    def proposed(self, per_message_s: float | None, workers: int, msg_timeout_s: float) -> int:
        """Return what ``adapted`` should be; small changes are left out."""
        if per_message_s is None:
            return max(self.adapted, 2 * workers)
        fits = WAIT_SHARE * msg_timeout_s * workers / max(per_message_s, 1e-9)
        proposed = int(max(workers, min(fits, 2 * self._base, self.maximum)))
        return self.adapted if self._is_near(proposed) else proposed

    def _is_near(self, proposed: int) -> bool:
        if proposed == self.maximum:
            return self.adapted >= self.maximum
        return abs(proposed - self.adapted) <= MIN_CHANGE * self.adapted
