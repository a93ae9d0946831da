"""The time since 1970 that never jumps, for what must last a while and is also shown as a time.

It is the wall clock when the program started, and the monotonic clock since; what Go compares goes
by the latter, too. With the wall clock alone, a step of NTP would hide every nsqd from lookups.
"""

from __future__ import annotations

import time

_AHEAD_NS = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Return nanoseconds since 1970."""
    return time.monotonic_ns() + _AHEAD_NS
