"""Decide from its attempts whether a message is delivered, isolated or given up. Pure.

The limit protects against a message that no handler can handle. Only a handler that requeued the
message proves that. A delivery that expired in the client, lost its connection, or timed out while
a handler or its pool had it proves nothing. nsqd counts all deliveries, so `Attempts` subtracts the
unproductive ones of this process; those of other processes are unknown. Therefore a message is
given up only after a handler of this process has requeued it.

A message that kills its process leaves no time to requeue it, and nsqd's count cannot distinguish
it from the messages that were in flight at each death. So a message beyond the limit that no
handler here has requeued is a suspect: it is delivered `ISOLATED_TRIES` times with nothing else in
flight (`backlog.Quarantine`), which adds to the count of no other message. After that it is given
up unhandled, provided that it is kept: as a dead letter, or by a callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nsqtools.client.message import Batch

# Entries of about 250 bytes: 25 MB at most. Far more messages than any max_in_flight can fail
# before the oldest of them is redelivered.
MAX_RECORDS = 100_000
# Two suspects that arrive together are delivered in one order and then in the other (see
# `Quarantine`), so each of them is once the first after a death.
ISOLATED_TRIES = 2

MessageKey = tuple[str, str, bytes]
"""The identity of a message: its topic, the address of its nsqd, and its id."""

AttemptVerdict = Literal["deliver", "isolate", "give up"]


def keys_of(batch: Batch) -> Iterator[MessageKey]:
    """Yield the identity of each message."""
    topic, nsqd = batch.topic, batch.nsqd
    return ((topic, nsqd, message.id) for message in batch)


class Attempts:
    """Remembers the outcome of deliveries that did not end with a FIN.

    ``limit`` is max_attempts, 0 for none. ``keeps`` tells whether a message that is given up goes
    to a dead letter topic or a callback, so that it is not lost.
    """

    def __init__(self, limit: int, *, keeps: bool = False) -> None:
        self.limit = limit
        self._keeps = keeps
        # By message: its discounted deliveries, and whether a handler here requeued another one.
        self.records: dict[MessageKey, tuple[int, bool]] = {}

    def discount(self, key: MessageKey) -> None:
        """Record a delivery that ended without an answer of a handler."""
        discounted, has_failed = self.records.pop(key, (0, False))
        self._store(key, discounted + 1, has_failed)

    def record_failure(self, key: MessageKey, *, late: bool = False) -> None:
        """Record that a handler requeued the message.

        ``late`` means that the delivery had ended, and was discounted, before the handler's answer.
        """
        discounted, _ = self.records.pop(key, (0, False))
        self._store(key, max(0, discounted - late), True)

    def forget(self, key: MessageKey) -> None:
        """Drop the record of a finished message."""
        self.records.pop(key, None)

    def effective(self, key: MessageKey, attempts: int) -> int:
        """Return nsqd's count of ``attempts`` less the discounted deliveries."""
        return attempts - self.records.get(key, (0, False))[0]

    def verdict(self, key: MessageKey, attempts: int) -> AttemptVerdict:
        """Decide what to do with a delivery for which nsqd counted ``attempts``."""
        if not self.limit or attempts <= self.limit:
            return "deliver"
        _, has_failed = self.records.get(key, (0, False))
        excess = self.effective(key, attempts) - self.limit
        if excess > 0 and (has_failed or (self._keeps and excess > ISOLATED_TRIES)):
            return "give up"
        return "isolate" if excess > 0 and self._keeps else "deliver"

    def _store(self, key: MessageKey, discounted: int, has_failed: bool) -> None:
        if not self.limit:
            return
        self.records[key] = discounted, has_failed
        if len(self.records) > MAX_RECORDS:
            del self.records[next(iter(self.records))]
