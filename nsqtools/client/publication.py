"""One publish and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nsqtools.errors import DeadlineExceeded, PublishError, ServerError
from nsqtools.protocol import commands


class Publication:
    """A publish on its way: one message, or several as one MPUB. It settles exactly once.

    When ``is_settled``, ``error`` is None if nsqd has confirmed it, else a `PublishRejected` (nsqd
    refused it), `PublishRefused` (nsqd does not accept this client), `PublishNotSent` (nsqd does
    not have it) or `PublishUnknown` (nsqd may have it).
    """

    __slots__ = (
        "_waiters",
        "bodies",
        "defer_s",
        "error",
        "is_alone",
        "is_settled",
        "is_written",
        "on_settled",
        "size",
        "submitted_at",
        "timeout_s",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        bodies: Sequence[bytes],
        size: int,
        submitted_at: float,
        defer_s: float | None = None,
        timeout_s: float | None = None,
        on_settled: Callable[[Publication], None] | None = None,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.size = size
        self.submitted_at = submitted_at
        self.defer_s = defer_s
        self.timeout_s = timeout_s
        self.on_settled = on_settled
        self.error: PublishError | None = None
        self.is_settled = False
        self.is_written = False  # handed to a connection; the I/O thread's
        self.is_alone = False  # must not be joined with others; the I/O thread's
        self._waiters: list[threading.Lock] = []  # each held until the outcome is known

    def encode(self) -> bytes:
        """Return the command for nsqd."""
        if self.defer_s is not None:
            defer_ms = round(self.defer_s * 1000)
            return commands.DeferredPublish(self.topic, defer_ms, self.bodies[0]).encode()
        if len(self.bodies) == 1:
            return commands.Publish(self.topic, self.bodies[0]).encode()
        return commands.MultiPublish(self.topic, self.bodies).encode()

    def settle(self, error: PublishError | None) -> None:
        """Set the outcome, once (on the I/O thread)."""
        self.error = error
        self.is_settled = True  # in this order: `wait` adds its lock before it looks
        for waiter in self._waiters:
            waiter.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the outcome. Raises `PublishError`, or `DeadlineExceeded` when the time passed
        first (the publication then is still under way)."""
        if not self.is_settled:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            limit_s = -1 if timeout_s is None else timeout_s
            if not self.is_settled and not waiter.acquire(timeout=limit_s):
                raise DeadlineExceeded(f"a publish to {self.topic} is not settled yet")
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        outcome = ("published" if self.error is None else repr(self.error)) * self.is_settled
        return (
            f"<Publication of {len(self.bodies)} messages to {self.topic},"
            f" {outcome or 'not settled'}>"
        )


def is_passing(error: ServerError) -> bool:
    """Tell whether a publish that nsqd rejected so may be taken later.

    nsqd refuses every publish while it stops and while the topic is being deleted.
    """
    return "exiting" in error.text
