"""Waiting for the state of another process: ask again until it holds, with a deadline.

Inside one process tests wait on events and conditions; this is for what only polling can see, such
as a counter in nsqd's statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


def wait_until(condition: Callable[[], T], *, what: str, timeout_s: float = 5.0) -> T:
    """Return the first true value of `condition`; fail with `what` and the last value otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last value: {value!r})")
        time.sleep(POLL_S)
