"""When a message was delivered too often to be delivered again. Pure.

The limit protects against a message that no handler can handle. A delivery that no handler saw
must not count: it waited here until it expired, and says nothing about the message. nsqd counts
all deliveries, so those that expired here are subtracted; those that expired in another process
cannot be known. Therefore a message that no handler of this process has seen is given up only
above twice the limit; the delivery just above is handed out alone, before all that waits, so that
whatever it does, it does to itself.
"""

from __future__ import annotations

from typing import Literal

MAX_KNOWN = 100_000

Key = tuple[str, bytes]  # of a message: the address of its nsqd, and its id
Decision = Literal["deliver", "alone", "give_up"]


class Attempts:
    """Remembers what became of deliveries that were not finished. ``limit`` 0 means never."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # deliveries that nobody saw here, and whether a handler saw another
        self._known: dict[Key, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def was_unseen(self, key: Key, count: int = 1) -> None:
        """Deliveries ended here before a handler saw them."""
        unseen, seen = self._known.pop(key, (0, False))
        self._remember(key, unseen + count, seen)

    def was_seen(self, key: Key) -> None:
        """A handler saw the message and did not finish it."""
        unseen, _ = self._known.pop(key, (0, False))
        self._remember(key, unseen, True)

    def forget(self, key: Key) -> None:
        """The message is finished."""
        self._known.pop(key, None)

    def decide(self, key: Key, attempts: int) -> Decision:
        """Return what to do with a delivery, going by nsqd's count of ``attempts``."""
        if not self._limit or attempts <= self._limit:
            return "deliver"
        unseen, was_seen = self._known.get(key, (0, False))
        counted = attempts - unseen
        if counted <= self._limit:
            return "deliver"
        if was_seen or counted > 2 * self._limit + 1:
            return "give_up"
        return "alone" if counted == 2 * self._limit + 1 else "deliver"

    def _remember(self, key: Key, unseen: int, seen: bool) -> None:
        if not self._limit:
            return
        self._known[key] = unseen, seen
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
