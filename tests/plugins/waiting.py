"""Deadlines of tests, and polling for the state of another process.

Inside one process tests wait on events and conditions; `wait_until` is for state that needs
polling, such as a counter in nsqd's statistics.

Every deadline that only detects a hang goes through `patience_s`, so that one variable adapts them
to a slow machine: ``NSQTOOLS_TEST_SLOWNESS=5 tests/run``. A bound that is the point of a test, such
as "within 50 ms", does not.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01
SLOWNESS = float(os.environ.get("NSQTOOLS_TEST_SLOWNESS", "1"))


def patience_s(seconds: float) -> float:
    """The time limit on this machine for an event that takes ``seconds`` on an ordinary one."""
    return seconds * SLOWNESS


def wait_until(condition: Callable[[], T], *, what: str, timeout_s: float = 5.0) -> T:
    """Return the first true value of `condition`; fail with `what` and the last value otherwise.

    ``timeout_s`` is for an ordinary machine; `patience_s` adapts it to this one.
    """
    limit_s = patience_s(timeout_s)
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what} (last value: {value!r})")
        time.sleep(POLL_S)
    return value


def wait_for_threads(*prefixes: str) -> None:
    """Wait for the end of the threads with such names, also of a thread that is just starting."""
    present = {thread for thread in threading.enumerate() if thread.name.startswith(prefixes)}
    wait_until(
        lambda: present.isdisjoint(threading.enumerate()),
        what=f"the end of {' and '.join(prefixes)}",
        timeout_s=10,
    )
