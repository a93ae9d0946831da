"""Giving up messages that were delivered too often: one log line each, a callback, and an end.

All of it happens on the thread of a handler, as it may call the user's code. A dead letter is
published to the nsqd that delivered the message, and the message is finished only when nsqd has
confirmed that; until then it counts as in flight, and if the publish fails it comes again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, PublishError
from nsqtools.protocol.names import check_topic

if TYPE_CHECKING:
    from nsqtools.client.producer import Producer
    from nsqtools.client.publication import Publication

log = logging.getLogger("nsqtools")

Policy = Literal["finish", "requeue"]


class GivingUp:
    """What a consumer does with such messages. Raises `ConfigurationError`."""

    def __init__(
        self,
        options: ClientOptions,
        on_giving_up: Callable[[Message], None] | None,
        policy: Policy,
        dead_letter: str,
    ) -> None:
        if policy not in ("finish", "requeue"):
            raise ConfigurationError(f"giving_up {policy!r} is neither finish nor requeue")
        if dead_letter and policy != "finish":
            raise ConfigurationError("a dead letter topic replaces giving_up: set only one of them")
        self._options = options
        self._on_giving_up = on_giving_up
        self._policy = policy
        self._dead_letter = check_topic(dead_letter) if dead_letter else ""
        self._producers: dict[str, Producer] = {}  # by nsqd
        self._lock = threading.Lock()

    def messages(self, batch: Batch) -> None:
        """Give up messages that nobody has answered."""
        for message in batch:
            log.warning("giving up %r", message)
            if self._on_giving_up is not None:
                try:
                    self._on_giving_up(message)
                except Exception:
                    log.exception("on_giving_up failed for %r", message)
            if self._dead_letter:
                self._publish(message)
            elif self._policy == "requeue":
                message.requeue(backoff=False)
            else:
                message.give_up()

    def _publish(self, message: Message) -> None:
        def settled(publication: Publication) -> None:
            if publication.error is None:
                message.give_up()
            else:
                fail(publication.error)

        def fail(error: PublishError) -> None:
            log.warning("%r goes back to its queue, not to %s: %s", message, topic, error)
            message.requeue(backoff=False)

        topic = self._dead_letter
        try:
            self._producer(message.nsqd).submit(topic, [message.body], on_settled=settled)
        except PublishError as exc:
            fail(exc)

    def _producer(self, nsqd: str) -> Producer:
        from nsqtools.client.producer import Producer

        with self._lock:
            if nsqd not in self._producers:
                self._producers[nsqd] = Producer(nsqd, self._options)
            return self._producers[nsqd]

    def stop(self) -> None:
        """Close the connections for dead letters, when what is outstanding has settled."""
        with self._lock:
            for producer in self._producers.values():
                producer.stop(self._options.publish_timeout_s)
            self._producers.clear()
