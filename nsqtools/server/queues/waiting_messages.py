"""The waiting messages of a queue in memory, and publishes whose frames are not made yet. Pure.

The messages of an MPUB stay together in the received bytes, and all channels of the topic share
them. Their frames are made for the first delivery, or for the disk. So publishing takes no object
and no copy per message, and a message that waits takes its size on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, overload

from nsqtools.protocol.requests import sized_bodies
from nsqtools.server.queues.queued_message import MessageIds, new_messages


class MessageBatch(Sequence[bytes]):
    """The messages of one publish: ``count`` sized bodies, of ``size`` bytes without the sizes."""

    __slots__ = ("_count", "_data", "_frames", "_ids", "_timestamp_ns", "size")

    def __init__(self, data: bytes, count: int, ids: MessageIds, timestamp_ns: int) -> None:
        self.size = len(data) - 4 * count
        self._count = count
        self._data = data
        self._ids = ids
        self._timestamp_ns = timestamp_ns
        self._frames: list[bytes] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self.frames()[index]

    def frames(self) -> list[bytes]:
        """Return the frames, which replace the received bytes."""
        if self._data:
            bodies = sized_bodies(self._data, self._count)
            ids = self._ids.take(self._count, 0)
            self._frames, self._data = new_messages(bodies, ids, self._timestamp_ns), b""
        return self._frames


class WaitingMessages:
    """Messages in order; ``count`` is their number."""

    def __init__(self) -> None:
        self._items: deque[bytes | MessageBatch] = deque()
        self.count = 0
        self._batch_count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, message: bytes) -> None:
        """Append one message."""
        self._items.append(message)
        self.count += 1

    def extend(self, messages: Sequence[bytes]) -> None:
        """Append messages."""
        self.count += len(messages)
        if type(messages) is MessageBatch:
            self._items.append(messages)
            self._batch_count += 1
        else:
            self._items.extend(messages)

    def put_back(self, messages: Sequence[bytes]) -> None:
        """Return messages to their place in front of all others."""
        self._items.extendleft(reversed(messages))
        self.count += len(messages)

    def take(self, count: int) -> list[bytes]:
        """Remove and return the first messages, at most ``count``."""
        items = self._items
        messages: list[bytes] = []
        count = min(count, self.count)
        while self._batch_count and len(messages) < count:
            item = items.popleft()
            if isinstance(item, MessageBatch):
                self._batch_count -= 1
                messages += item.frames()
            else:
                messages.append(item)
        if len(messages) > count:
            items.extendleft(reversed(messages[count:]))
            del messages[count:]
        pop: Callable[[], Any] = items.popleft
        messages += [pop() for _ in range(count - len(messages))]
        self.count -= count
        return messages

    def take_last(self, count: int) -> list[bytes]:
        """Remove and return the last messages; there must be ``count``."""
        items = self._items
        messages: list[bytes] = []
        while len(messages) < count:
            item = items.pop()
            if isinstance(item, MessageBatch):
                self._batch_count -= 1
                items.extend(item.frames())
            else:
                messages.append(item)
        self.count -= count
        messages.reverse()
        return messages

    def drop_last(self, count: int) -> None:
        """Remove the last messages; there must be ``count``. A whole batch needs no frames."""
        while count and type(batch := self._items[-1]) is MessageBatch and len(batch) <= count:
            self._items.pop()
            self._batch_count -= 1
            self.count -= len(batch)
            count -= len(batch)
        self.take_last(count)

    def clear(self) -> deque[Any]:
        """Remove everything, and return it, because it takes a while to free."""
        items, self._items = self._items, deque()
        self.count = self._batch_count = 0
        return items
