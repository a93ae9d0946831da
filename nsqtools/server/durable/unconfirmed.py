"""Publishes of one topic that are not known to be on disk, and so are in no queue yet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from nsqtools.server.durable.log import Confirmed, DurableLog
from nsqtools.server.durable.records import Published


class Unconfirmed:
    """What a checkpoint must not miss: it is in no queue, and its record is before that."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[frozenset[int], list[bytes], int]] = {}
        self._tokens = count()

    def publish(
        self,
        log: DurableLog,
        numbers: Sequence[int],
        messages: list[bytes],
        due_ns: int,
        confirmed: Confirmed,
    ) -> None:
        """Write messages for the queues with these numbers; ``confirmed`` is called later."""
        token = next(self._tokens)
        self._waiting[token] = frozenset(numbers), messages, due_ns

        def done(error: OSError | None) -> None:
            del self._waiting[token]
            confirmed(error)

        log.commit(Published(due_ns, tuple(numbers), b"".join(messages)), done)

    def of(self, number: int) -> tuple[list[bytes], list[tuple[bytes, int]]]:
        """Return the messages for a queue, and those that are deferred with their time."""
        waiting: list[bytes] = []
        deferred: list[tuple[bytes, int]] = []
        for numbers, messages, due_ns in self._waiting.values():
            if number in numbers and due_ns:
                deferred += [(message, due_ns) for message in messages]
            elif number in numbers:
                waiting += messages
        return waiting, deferred
