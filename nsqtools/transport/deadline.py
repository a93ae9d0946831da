"""A point in time by which something must be done, on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """``seconds`` from now. Several steps share one deadline instead of adding timeouts up."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() + seconds

    def remaining_s(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._at - self._clock())

    @property
    def has_passed(self) -> bool:
        return self._clock() >= self._at
