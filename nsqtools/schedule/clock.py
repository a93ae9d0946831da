"""The wall clock, with jumps noticed: entries are due by the wall clock, which somebody may set.

A jump back needs no care, because an occurrence that was published is not due again. A jump forward
would publish everything that seems to be due, so after a jump of more than `JUMP_NS` nothing is due
until it has lasted for `HOLD_NS`: a clock that was set by mistake is usually set back sooner.
The monotonic clock, which nobody sets, shows the jump. It stands still while a machine is
suspended, so a resume looks like a jump, and costs the same minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nsqtools.protocol.text import NS, format_duration

log = logging.getLogger("nsqtools")

JUMP_NS = 60 * NS
HOLD_NS = 60 * NS


class CheckedClock:
    """Wall time that is withheld after a jump. Both clocks are in nanoseconds."""

    def __init__(self, wall_ns: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._offset_ns = wall_ns() - monotonic_ns()  # of the wall clock that is believed
        self._jumped_at_ns: int | None = None  # by the monotonic clock

    def now_ns(self) -> int:
        """Return the wall time."""
        return self._wall_ns()

    def trusted_now_ns(self) -> int | None:
        """Return the wall time, or None while a jump forward has not lasted long enough."""
        now_ns, monotonic_ns = self._wall_ns(), self._monotonic_ns()
        jump_ns = now_ns - monotonic_ns - self._offset_ns
        if jump_ns <= JUMP_NS:
            self._accept(now_ns - monotonic_ns)
            return now_ns
        if self._jumped_at_ns is None:
            self._jumped_at_ns = monotonic_ns
            log.warning(
                "the clock jumped forward by %s: nothing is published for %s, unless it returns",
                format_duration(jump_ns / NS),
                format_duration(HOLD_NS / NS),
            )
        if monotonic_ns - self._jumped_at_ns < HOLD_NS:
            return None
        self._accept(now_ns - monotonic_ns)
        return now_ns

    def _accept(self, offset_ns: int) -> None:
        if self._jumped_at_ns is not None:
            log.warning("the clock is trusted again")
        self._offset_ns, self._jumped_at_ns = offset_ns, None
