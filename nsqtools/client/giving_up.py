"""Giving up messages that were tried too often: when, and where they go, with a log line each.

The limit protects against a message that no handler can handle. Only a handler that requeued the
message says that: a delivery that waited here until it expired, or whose connection broke, or that
timed out while a handler or its pool still held it, says nothing. nsqd counts all deliveries, so
those that ended like that here are subtracted (`Attempts`); those of other processes cannot be
known. Therefore a message is given up only after a handler of this process has requeued it.

A message that kills its process never gets that far: the handler has no time for a word. nsqd's
count cannot tell it from those that were in flight with it at each death. So a message that comes
more often than the limit, and that no handler here has requeued, is a suspect: it is handled
`ALONE` times with nothing else in flight (`backlog.Delivery`), which adds to no other's count. Then
it is given up before the handler, where it is kept: for dead letters, or by a callback.

Nothing is given up unless it has somewhere to go: a callback that takes it, a topic for dead
letters, or the program's word that it may be finished.

`GivingUp` works on the thread of a handler, as it may call the user's code. A dead letter is
published to the nsqd that delivered the message, and the message is finished only when nsqd has
confirmed that; until then it counts as in flight, and if the publish fails it comes again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError, PublishError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.text import INT32

if TYPE_CHECKING:
    from nsqtools.client.producer import Producer

log = logging.getLogger("nsqtools")

Policy = Literal["requeue", "finish"]

MAX_KNOWN = 100_000
ALONE = 2  # deliveries of a suspect; two, as those that come together take turns in both orders

Key = tuple[str, str, bytes]  # of a message: its topic, the address of its nsqd, and its id


def keys_of(batch: Batch) -> Iterator[Key]:
    """Yield what identifies each message."""
    topic, nsqd = batch.topic, batch.nsqd
    return ((topic, nsqd, message.id) for message in batch)


class Attempts:
    """Remembers what became of deliveries that were not finished. ``limit`` 0 means never.

    ``keeps``: what is given up is not lost.
    """

    def __init__(self, limit: int, *, keeps: bool = False) -> None:
        self._limit = limit
        self._keeps = keeps
        # deliveries that do not count, and whether a handler here requeued another
        self._known: dict[Key, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def does_not_count(self, key: Key) -> None:
        """A delivery ended without a word of a handler."""
        uncounted, is_tried = self._known.pop(key, (0, False))
        self._remember(key, uncounted + 1, is_tried)

    def was_tried(self, key: Key, *, late: bool = False) -> None:
        """A handler requeued the message; ``late``: a delivery that had ended before."""
        uncounted, _ = self._known.pop(key, (0, False))
        self._remember(key, max(0, uncounted - late), True)

    def forget(self, key: Key) -> None:
        """The message is finished."""
        self._known.pop(key, None)

    def counted(self, key: Key, attempts: int) -> int:
        """Return how many deliveries count, of those that nsqd has counted."""
        return attempts - self._known.get(key, (0, False))[0]

    def verdict(self, key: Key, attempts: int) -> Literal["usual", "alone", "give up"]:
        """Tell what to do with a delivery, going by nsqd's count of ``attempts``."""
        if not self._limit or attempts <= self._limit:
            return "usual"
        _, is_tried = self._known.get(key, (0, False))
        beyond = self.counted(key, attempts) - self._limit
        if beyond > 0 and (is_tried or (self._keeps and beyond > ALONE)):
            return "give up"
        return "alone" if beyond > 0 and self._keeps else "usual"

    def _remember(self, key: Key, uncounted: int, is_tried: bool) -> None:
        if not self._limit:
            return
        self._known[key] = uncounted, is_tried
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


class GivingUp:
    """What a consumer does with such messages. Raises `ConfigurationError`."""

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
        self.keeps = on_giving_up is not None or bool(dead_letter)  # what is given up is not lost
        # 0, never, where a message that is given up has nowhere to go
        self.max_attempts = options.max_attempts if self.keeps or policy == "finish" else 0

    def messages(self, batch: Batch) -> None:
        """Give up messages that have no answer yet."""
        for message in batch:
            log.warning("giving up %r", message)
            if self._is_taken(message) or self._policy == "finish":
                message.give_up()
            elif self._dead_letters is not None:
                self._publish(message, self._dead_letters)
            elif message.requeue():
                log.warning("%r goes back to its queue: on_giving_up did not take it", message)

    def _is_taken(self, message: Message) -> bool:
        if self._on_giving_up is None:
            return False
        try:
            return self._on_giving_up(message) is True
        except Exception:
            log.exception("on_giving_up failed for %r", message)
            return False

    def _publish(self, message: Message, letters: DeadLetters) -> None:
        def ended(error: NsqError | None) -> None:
            if error is None:
                message.give_up()
                return
            log.warning("%r goes back to its queue, not to %s: %s", message, letters.topic, error)
            message.requeue(backoff=False)

        letters.publish(message.nsqd, [message.body], ended)

    def stop(self) -> None:
        """Close the connections for dead letters, when what is outstanding has settled."""
        if self._dead_letters is not None:
            self._dead_letters.stop()


class DeadLetters:
    """Publishes bodies to a topic, on the nsqd that they came from. Thread-safe."""

    def __init__(self, topic: str, options: ClientOptions) -> None:
        self.topic = check_topic(topic)
        # at most what is in flight: an nsqd that hangs holds up no letters of the others; and what
        # nsqd has delivered it takes, whatever its size
        most = INT32.stop - 1
        self._options = replace(options, max_outstanding=100_000, publish_max_msg_size=most)
        self._producers: dict[str, Producer] = {}  # by nsqd
        self._lock = threading.RLock()  # re-entrant: a signal handler may stop what publishes

    def publish(
        self, nsqd: str, bodies: list[bytes], ended: Callable[[NsqError | None], None]
    ) -> None:
        """Publish; ``ended`` is called with why they are not kept, perhaps on another thread."""
        from nsqtools.client.producer import Producer

        with self._lock:
            if nsqd not in self._producers:
                self._producers[nsqd] = Producer(nsqd, self._options)
                self._producers[nsqd]._window_bytes = math.inf
            producer = self._producers[nsqd]
        try:
            producer.submit(self.topic, bodies, on_settled=lambda sent: ended(sent.error))
        except (PublishError, ConfigurationError) as exc:  # no room, or too large
            ended(exc)

    def stop(self) -> None:
        """Close the connections, when what is outstanding has settled."""
        ends_s = time.monotonic() + self._options.publish_timeout_s  # of all of them
        with self._lock:
            producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.stop(max(0.0, ends_s - time.monotonic()))
