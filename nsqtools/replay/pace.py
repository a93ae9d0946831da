"""When a message is due in a replay at a multiple of its original pace. Pure."""

from __future__ import annotations

NS = 1_000_000_000


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
