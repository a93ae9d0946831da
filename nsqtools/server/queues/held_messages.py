"""What one consumer holds until it answers or times out, and what is deferred. Pure: no clock.

Deliveries of a consumer all get the same timeout, so a dict in the order of delivery is also in the
order of the deadlines, and looking at its first entry replaces a heap. Only a TOUCH that runs into
``max_msg_timeout`` gets a deadline earlier than those before it; these few have their own heap.
Deferred messages, from DPUB and from REQ with a delay, are a heap by due time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, repeat

from nsqtools.server.queues.queued_message import message_ids


class InFlightMessages:
    """id -> (message, deadline, time of delivery), times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[bytes, float, float]] = {}
        self._capped: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._held

    def __iter__(self) -> Iterator[bytes]:
        return (message for message, _, _ in self._held.values())

    def hold(self, messages: list[bytes], now_s: float, timeout_s: float) -> None:
        """Enter messages that are being delivered."""
        self._held.update(
            zip(
                message_ids(messages),
                zip(messages, repeat(now_s + timeout_s), repeat(now_s), strict=False),
                strict=False,
            )
        )

    def take(self, message_id: bytes) -> bytes | None:
        """Remove and return a message that was answered; None when it is not held (any more)."""
        held = self._held.pop(message_id, None)
        return held[0] if held else None

    def touch(self, message_id: bytes, now_s: float, timeout_s: float, limit_s: float) -> bool:
        """Restart the timeout, not beyond ``limit_s`` after the delivery. False: not held."""
        held = self._held.pop(message_id, None)
        if held is None:
            return False
        message, _, delivered_s = held
        deadline_s = now_s + timeout_s
        if deadline_s > delivered_s + limit_s:
            deadline_s = delivered_s + limit_s
            heappush(self._capped, (deadline_s, message_id))
        self._held[message_id] = (message, deadline_s, delivered_s)
        return True

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, None when nothing is held."""
        while self._capped:
            deadline_s, message_id = self._capped[0]
            held = self._held.get(message_id)
            if held is not None and held[1] == deadline_s:
                return min(deadline_s, next(iter(self._held.values()))[1])
            heappop(self._capped)
        return next(iter(self._held.values()))[1] if self._held else None

    def of(self, message_ids: set[bytes]) -> set[bytes]:
        """Return those of some messages that are held."""
        return message_ids & self._held.keys()

    def take_expired(self, now_s: float, limit: int) -> list[bytes]:
        """Remove and return what has timed out, up to a limit."""
        expired: list[bytes] = []
        while self._capped and self._capped[0][0] <= now_s and len(expired) < limit:
            deadline_s, message_id = heappop(self._capped)
            held = self._held.get(message_id)
            if held is not None and held[1] == deadline_s:
                del self._held[message_id]
                expired.append(held[0])
        due: list[bytes] = []
        for message_id, (_, deadline_s, _) in self._held.items():
            if deadline_s > now_s or len(expired) + len(due) >= limit:
                break
            due.append(message_id)
        expired += [self._held.pop(message_id)[0] for message_id in due]
        return expired

    def clear(self) -> None:
        """Forget everything: the channel was emptied."""
        self._held.clear()
        self._capped.clear()


class DeferredMessages:
    """A heap by due time; equal times keep the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bytes]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[bytes]:
        return (message for _, _, message in self._heap)

    def with_times(self) -> list[tuple[bytes, float]]:
        """Return the messages, and when they are due."""
        return [(message, due_s) for due_s, _, message in self._heap]

    def add(self, message: bytes, due_s: float) -> None:
        """Keep the message until ``due_s``."""
        heappush(self._heap, (due_s, next(self._arrivals), message))

    def next_due_s(self) -> float | None:
        """Return when the next one is due, None when there is none."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float, limit: int) -> list[bytes]:
        """Remove and return what is due, up to a limit."""
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_s and len(due) < limit:
            due.append(heappop(self._heap)[2])
        return due

    def clear(self) -> list[tuple[float, int, bytes]]:
        """Forget everything; return it, for it takes a while to free."""
        dropped, self._heap = self._heap, []
        return dropped
