"""Backoff: what a failing handler does to the whole consumer. Pure: no clock, no sockets.

The machine has three modes. NORMAL: messages flow. WAIT: every connection is at RDY 0 until a timer
runs out. TEST: one connection has RDY 1, and the first answer decides: success lowers the level,
failure raises it, a requeue without backoff keeps it; then the wait starts again, or at level 0
everything is restored. Answers in WAIT are ignored, so fifty failures at once count as one.

Backoff protects what the handler works on, so it covers all connections (as in go-nsq and pynsq).
Unlike go-nsq's, the level keeps its meaning at the cap, and a message given up unseen does not
count as a result.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class BackoffMode(enum.Enum):
    NORMAL = "normal"
    WAIT = "wait"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Wait:
    """Send RDY 0 everywhere and call `Backoff.expire` after ``delay_s`` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Restore RDY on every connection."""


class Backoff:
    """The machine. Each event returns what to do now, or None.

    ``multiplier_s`` and ``maximum_s`` are seconds; a maximum of 0 disables backoff. With
    ``full_jitter`` a delay is drawn between 0 and what it would be.
    """

    def __init__(
        self,
        multiplier_s: float = 1.0,
        maximum_s: float = 120.0,
        *,
        full_jitter: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self._multiplier_s = multiplier_s
        self._maximum_s = maximum_s
        self._full_jitter = full_jitter
        self._rng = rng or random.Random()
        self.level = 0
        self.mode = BackoffMode.NORMAL

    def ceiling_s(self, level: int) -> float:
        """Return the delay of a level in seconds, before jitter."""
        # beyond 2**62 the product overflows nothing, but it has long been past any cap
        return min(self._maximum_s, self._multiplier_s * 2.0 ** min(level, 62))

    def failure(self) -> Wait | None:
        """A message was requeued with backoff."""
        if self.mode is BackoffMode.WAIT or self._maximum_s <= 0:
            return None
        if self.mode is BackoffMode.NORMAL:
            self.level = 1
        elif self.ceiling_s(self.level) < self.ceiling_s(self.level + 1):
            self.level += 1  # not where it would lengthen nothing, only the way back
        return self._wait()

    def success(self) -> Wait | Resume | None:
        """A message was finished by its handler."""
        if self.mode is not BackoffMode.TEST:
            return None
        self.level -= 1
        if self.level > 0:
            return self._wait()
        self.mode = BackoffMode.NORMAL
        return Resume()

    def neutral(self) -> Wait | None:
        """A message was requeued without backoff."""
        return self._wait() if self.mode is BackoffMode.TEST else None

    def expire(self) -> None:
        """The timer ran out and a connection was found to test with RDY 1."""
        self.mode = BackoffMode.TEST

    def _wait(self) -> Wait:
        self.mode = BackoffMode.WAIT
        ceiling_s = self.ceiling_s(self.level)
        return Wait(self._rng.uniform(0, ceiling_s) if self._full_jitter else ceiling_s)
