"""How many messages may be in flight, so that none waits long for its handler. Pure.

Messages in flight wait in the client while handlers are busy, and nsqd delivers what waits longer
than msg_timeout again. So the limit follows the handlers: with one message every `per_message_s`
and so many workers, what is in flight is handled within `WAIT_SHARE` of msg_timeout. It starts
small, grows as far as it doubles from one measurement to the next, and ends at max_in_flight: a
handler of a microsecond gets there in milliseconds, one of a second stays at a few messages.
"""

from __future__ import annotations

START = 16  # before anything was measured
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

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.adapted = START

    def current(self, connections: int) -> int:
        """Return the limit: at least a message for each connection, or RDY would have to rotate."""
        return min(self.maximum, max(self.adapted, connections))

    def proposed(self, per_message_s: float | None, workers: int, msg_timeout_s: float) -> int:
        """Return what ``adapted`` should be; small changes are left out."""
        if per_message_s is None:
            return max(self.adapted, 2 * workers)
        fits = WAIT_SHARE * msg_timeout_s * workers / max(per_message_s, 1e-9)
        proposed = int(max(workers, min(fits, 2 * self.adapted, self.maximum)))
        return self.adapted if self._is_near(proposed) else proposed

    def _is_near(self, proposed: int) -> bool:
        if proposed == self.maximum:
            return self.adapted >= self.maximum
        return abs(proposed - self.adapted) <= MIN_CHANGE * self.adapted
