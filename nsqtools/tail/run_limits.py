"""When a command that streams ends by itself: after N messages, when idle, after a time. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class End(enum.Enum):
    """Why a stream ended."""

    COUNT = "count"
    IDLE = "idle"
    TIME = "time"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Each None means without limit. Times are seconds. ``is_each_topic``: the count is that of
    each topic, and the first that reaches it ends the run, as with nsq_tail."""

    count: int | None = None
    idle_s: float | None = None
    for_s: float | None = None
    is_each_topic: bool = False


class LimitWatch:
    """The limits of one run that began at ``now``; times are readings of the caller's clock."""

    def __init__(self, limits: RunLimits, now: float) -> None:
        self._counts = {"": 0}
        self._limits = limits
        self._ends_at = None if limits.for_s is None else now + limits.for_s
        self._last = now

    def left_s(self, now: float) -> float:
        """Return the seconds until the run has to end."""
        return math.inf if self._ends_at is None else max(0.0, self._ends_at - now)

    def saw_message(self, now: float) -> None:
        """Something came: the stream is not idle."""
        self._last = now

    @property
    def count(self) -> int:
        """Messages taken."""
        return sum(self._counts.values())

    def room_for(self, count: int, topic: str = "") -> int:
        """Return how many of ``count`` messages may still be taken, and count them."""
        counted = topic if self._limits.is_each_topic else ""
        before = self._counts.get(counted, 0)
        if self._limits.count is not None:
            count = min(count, self._limits.count - before)
        self._counts[counted] = before + count
        return count

    def end(self, now: float) -> End | None:
        """Return the limit that is reached, if one is."""
        if self._limits.count is not None and max(self._counts.values()) >= self._limits.count:
            return End.COUNT
        if self._ends_at is not None and now >= self._ends_at:
            return End.TIME
        if self._limits.idle_s is not None and now - self._last >= self._limits.idle_s:
            return End.IDLE
        return None

    def wait_s(self, now: float) -> float | None:
        """Return how long to wait for a message before looking at `end` again."""
        ends = [] if self._ends_at is None else [self._ends_at]
        if self._limits.idle_s is not None:
            ends.append(self._last + self._limits.idle_s)
        return max(0.0, min(ends) - now) if ends else None

    @property
    def falls_short(self) -> bool:
        """Tell whether a count was asked for and not reached."""
        return self._limits.count is not None and self.count < self._limits.count
