"""A limit of messages a second, for consumers, producers and commands.

It is exact at 10 messages a second and at 100,000. Each message has a time on a schedule, and none
is allowed before its time. Allowances cover slices of `SLICE_S`, so a high rate still has batches
and a low rate has single messages on time. After a stall the schedule catches up by at most
`MAX_CATCH_UP_S`, because more would be a burst above the rate.
"""

from __future__ import annotations

import sys
import threading

# An allowance covers the messages of this time, so that high rates have batches.
SLICE_S = 0.01
# A longer stall is not caught up.
MAX_CATCH_UP_S = 0.1


class RateLimit:
    """A schedule of ``rate`` messages a second, by the caller's clock. Thread-safe."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._next = now
        self._lock = threading.RLock()  # re-entrant: a signal handler may publish

    def allowance(self, now: float) -> int:
        """Return how many messages may be sent now. After 0, wait for `wait_s`."""
        with self._lock:
            self._next = max(self._next, now - MAX_CATCH_UP_S)
            if now < self._next:
                return 0
            # An infinite rate has no whole number.
            return max(1, int(min((now - self._next + SLICE_S) * self._rate, sys.maxsize)))

    def spend(self, count: int) -> None:
        """Use the allowance of ``count`` messages; a negative count returns it."""
        with self._lock:
            self._next += count / self._rate

    def reserve(self, limit: int, now: float) -> int:
        """Spend the allowance, of at most ``limit`` messages, and return it."""
        with self._lock:
            count = min(limit, self.allowance(now))
            self.spend(count)
            return count

    def schedule(self, count: int, now: float, limit_s: float) -> float | None:
        """Spend ``count``, and return the seconds to wait before; None if above ``limit_s``."""
        with self._lock:
            self._next = max(self._next, now - MAX_CATCH_UP_S)
            wait_s = self.wait_s(now)
            if wait_s > limit_s:
                return None
            self.spend(count)
            return wait_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until a message is allowed, at most what a lock can wait."""
        return min(max(0.0, self._next - now), threading.TIMEOUT_MAX)
