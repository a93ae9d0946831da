"""Messages that wait for their time: from DPUB and from REQ with a delay. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count


class Deferred:
    """A heap by due time; equal times keep the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bytes]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[bytes]:
        return (message for _, _, message in self._heap)

    def add(self, message: bytes, due_s: float) -> None:
        """Keep the message until ``due_s``."""
        heappush(self._heap, (due_s, next(self._arrivals), message))

    def next_due_s(self) -> float | None:
        """Return when the next one is due, None when there is none."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> list[bytes]:
        """Remove and return what is due."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heappop(self._heap)[2])
        return due

    def clear(self) -> None:
        """Forget everything: the channel was emptied."""
        self._heap.clear()
