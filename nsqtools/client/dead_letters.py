"""Give up messages that failed too often: to a callback, a dead letter topic, or a FIN.

`Attempts` decides which messages. Nothing is given up unless it has somewhere to go: a callback
that takes it, a dead letter topic, or the program's statement that it may be finished.

`GivingUp` runs on a handler's thread, because it may call the user's code. A dead letter is
published to the nsqd that delivered the message, and the message is finished only when nsqd has
confirmed the publish. Until then it is in flight; if the publish fails, it is requeued.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from nsqtools.client.message import Batch, Message
from nsqtools.client.options import LARGEST_SIZE, ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.errors import ConfigurationError, NsqError, PublishError
from nsqtools.protocol.names import check_topic

log = logging.getLogger("nsqtools")

Policy = Literal["requeue", "finish"]


class GivingUp:
    """Gives up messages as the arguments of a consumer demand.

    Raises `ConfigurationError` for an unknown policy, and for two destinations at once.
    """

    def __init__(
        self,
        options: ClientOptions,
        on_giving_up: Callable[[Message], object] | None,
        policy: Policy,
        dead_letter: str,
    ) -> None:
        if policy not in ("finish", "requeue"):
            raise ConfigurationError(f"giving_up {policy!r} is neither finish nor requeue")
        if dead_letter and policy == "finish":
            raise ConfigurationError("a dead letter topic replaces giving_up: set only one of them")
        self._on_giving_up = on_giving_up
        self._policy = policy
        self._dead_letters = DeadLetters(dead_letter, options) if dead_letter else None
        self.keeps = on_giving_up is not None or bool(dead_letter)
        # 0, for no limit, where a message that is given up would have nowhere to go.
        self.max_attempts = options.max_attempts if self.keeps or policy == "finish" else 0

    def give_up(self, batch: Batch, reason: str = "") -> None:
        """Give up unanswered messages. The ``reason`` is logged."""
        for message in batch:
            log.warning("giving up %r%s", message, f": {reason}" if reason else "")
            if self._is_taken(message) or self._policy == "finish":
                message._give_up()
            elif self._dead_letters is not None:
                self._publish(message, self._dead_letters)
            elif message.requeue():
                log.warning("%r is requeued: on_giving_up did not take it", message)

    def _is_taken(self, message: Message) -> bool:
        if self._on_giving_up is None:
            return False
        try:
            return self._on_giving_up(message) is True
        except Exception:
            log.exception("on_giving_up failed for %r", message)
            return False

    def _publish(self, message: Message, dead_letters: DeadLetters) -> None:
        def on_outcome(error: NsqError | None) -> None:
            if error is None:
                message._give_up()
                return
            topic = dead_letters.topic
            log.warning("%r is requeued: publishing it to %s failed: %s", message, topic, error)
            message.requeue(backoff=False)

        dead_letters.publish(message.nsqd, [message.body], on_outcome)

    def stop(self) -> None:
        """Close the connections for dead letters after the outstanding publishes have settled."""
        if self._dead_letters is not None:
            self._dead_letters.stop()


class _DeadLetterProducer(Producer):
    # Dead letters are in flight until they are confirmed, so max_in_flight bounds them already. A
    # window of their own would block the handler's thread, and with it the letters of other nsqd.
    _window_bytes = math.inf


class DeadLetters:
    """Publishes bodies to a topic of the nsqd that delivered them. Thread-safe."""

    def __init__(self, topic: str, options: ClientOptions) -> None:
        self.topic = check_topic(topic)
        # nsqd delivered these bodies, so it accepts them again, whatever their size.
        self._options = replace(options, max_outstanding=100_000, publish_max_msg_size=LARGEST_SIZE)
        self._producers: dict[str, Producer] = {}  # by nsqd
        self._lock = threading.RLock()  # re-entrant: a signal handler may stop during a publish

    def publish(
        self, nsqd: str, bodies: list[bytes], on_outcome: Callable[[NsqError | None], None]
    ) -> None:
        """Publish, and call ``on_outcome`` with the error or None, perhaps on another thread."""
        with self._lock:
            if nsqd not in self._producers:
                self._producers[nsqd] = _DeadLetterProducer(nsqd, self._options)
            producer = self._producers[nsqd]
        try:
            producer.submit(self.topic, bodies, on_settled=lambda sent: on_outcome(sent.error))
        except (PublishError, ConfigurationError) as exc:  # no room, or too large
            on_outcome(exc)

    def stop(self) -> None:
        """Close the connections after the outstanding publishes have settled."""
        # One limit for all nsqd: several that hang take no longer than one.
        give_up_at = time.monotonic() + self._options.publish_timeout_s
        with self._lock:
            producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.stop(max(0.0, give_up_at - time.monotonic()))
