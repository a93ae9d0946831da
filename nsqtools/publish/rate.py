"""A rate limit that is exact at 10 a second and at 100,000. Pure: the caller keeps the clock.

Each message has its place on a schedule; nothing is published before its place. Places are handed
out in slices of a hundredth of a second, so that a high rate still publishes batches and a low one
publishes single messages on time. Time lost to a stall is made up for by at most `CATCH_UP_S`:
more would be a burst above the rate.
"""

from __future__ import annotations

SLICE_S = 0.01
CATCH_UP_S = 0.1


class RateLimit:
    """``rate`` messages a second."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._next = now

    def allowance(self, now: float) -> int:
        """Return how many messages may go now: 0 means to wait `wait_s`."""
        self._next = max(self._next, now - CATCH_UP_S)
        if now < self._next:
            return 0
        return max(1, int((now - self._next + SLICE_S) * self._rate))

    def took(self, count: int) -> None:
        """So many messages went."""
        self._next += count / self._rate

    def wait_s(self, now: float) -> float:
        """Return the seconds until something is allowed again."""
        return max(0.0, self._next - now)
