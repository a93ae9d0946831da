"""One publish command and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nsqtools.errors import DeadlineExceeded, PublishError


class Publication:
    """A PUB, MPUB or DPUB on its way. It settles exactly once.

    When ``is_settled``, ``error`` is None if nsqd has confirmed it, else a `PublishRejected` (nsqd
    refused it), `PublishNotSent` (nsqd does not have it) or `PublishUnknown` (nsqd may have it).
    """

    __slots__ = (
        "_on_settled",
        "_settled",
        "bodies",
        "command",
        "error",
        "is_settled",
        "submitted_at",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        bodies: Sequence[bytes],
        command: bytes,
        submitted_at: float,
        on_settled: Callable[[Publication], None] | None,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.command = command
        self.submitted_at = submitted_at
        self.error: PublishError | None = None
        self.is_settled = False
        self._on_settled = on_settled
        # a lock held until the outcome is known: an Event costs several times as much
        self._settled = threading.Lock()
        self._settled.acquire()

    def settle(self, error: PublishError | None) -> None:
        """Set the outcome (the producer's I/O thread)."""
        self.error = error
        self.is_settled = True
        self._settled.release()
        if self._on_settled is not None:
            self._on_settled(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the outcome. Raises `PublishError`, or `DeadlineExceeded` when the time passed
        first (the publication then is still under way)."""
        if not self._settled.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"a publish to {self.topic} is not settled yet")
        self._settled.release()
        if self.error is not None:
            raise self.error
