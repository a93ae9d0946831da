"""INT and TERM for a command that runs until it is stopped.

The first signal asks the command to stop, which drains what is in flight; the second leaves at
once. The exit status tells which signal it was: 130 or 143.

    with stopping(consumer.stop) as signals:
        for message in consumer: ...
    return signals.status(otherwise=ExitStatus.DONE)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """The signals that arrived; ``received`` is the first one's number, or None."""

    def __init__(self, stop: Callable[[], object]):
        self._stop = stop
        self.received: int | None = None

    def status(self, *, otherwise: int = 0) -> int:
        """128 and the number of the signal that stopped the command, else ``otherwise``."""
        return otherwise if self.received is None else 128 + self.received

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        # On a thread of its own, for the code that was interrupted may hold the lock that `stop`
        # takes: called from here, it would wait for itself.
        threading.Thread(target=self._stop, name="stop", daemon=True).start()


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[StopSignals]:
    """Inside, the first INT or TERM calls ``stop`` (on another thread), the second exits at once.

    Used on the main thread; the handlers from before are put back at the end.
    """
    signals = StopSignals(stop)
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
