"""What the brokers of Celery and taskiq have in common: the messages in a framework's hands.

A framework takes a message, runs its task in a process, thread or coroutine of its own, and
acknowledges it later, in any order.
"""

from __future__ import annotations

import time

from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError, PublishRejected

# The framework decides how long a stop waits for running tasks, and disconnects after that.
DRAIN_TIMEOUT_S = 7 * 86_400.0
# A task whose time is this near is left to the worker: nsqd scans its deferred messages every
# 0.1 s, and its clock differs.
MIN_DEFER_S = 1.0


class TaskPool:
    """The unanswered messages that a framework has, as a `Pool` of a backlog.

    A message that nsqd delivers again is not handed out twice. The consumer touches them, if it is
    made with ``_auto_touch``.
    """

    def __init__(self) -> None:
        self._since: dict[Message, float] = {}

    def add(self, message: Message) -> None:
        self._since[message] = time.monotonic()

    def discard(self, message: Message) -> None:
        self._since.pop(message, None)

    def finish(self, message: Message) -> None:
        """Finish a message whose task has run."""
        self.discard(message)
        message.finish()

    # -- on the I/O thread --

    def at_work(self) -> dict[Message, float]:
        return self._since.copy()

    def redelivered(self, message: Message) -> None:
        """Frameworks count no attempts."""


def refuse_delay(error: PublishRejected, delay: str) -> Exception:
    """Return the error for a task that nsqd refused to defer."""
    if "out of range" not in error.cause.text:
        return error
    return ConfigurationError(
        f"{delay} is above nsqd's --max-req-timeout ({error})",
        hint="Start nsqd with a larger --max-req-timeout.",
    )
