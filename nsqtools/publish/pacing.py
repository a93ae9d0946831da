"""When messages are due: at a fixed rate, or at a multiple of their original speed.

Pure: the caller keeps the clock.

A rate limit is exact at 10 a second and at 100,000. Each message has its place on a schedule;
nothing is published before its place. Places are handed out in slices of a hundredth of a second,
so that a high rate still publishes batches and a low one publishes single messages on time. Time
lost to a stall is made up for by at most `CATCH_UP_S`: more would be a burst above the rate.
"""

from __future__ import annotations

from nsqtools.protocol.text import NS

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


class Pace:
    """``speed`` 2 plays an hour in half an hour; the first message is due at once."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._first: tuple[int, float] | None = None

    def due_at(self, timestamp_ns: int, now: float) -> float:
        """Return the clock reading at which a message of that time is due."""
        if self._first is None:
            self._first = timestamp_ns, now
        first_ns, began = self._first
        return began + (timestamp_ns - first_ns) / NS / self._speed
