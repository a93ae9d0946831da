"""What waits in a topic or a channel: up to so many messages in memory, the rest on disk, in order.

Memory holds the older part and the disk the newer one, so the order is first in, first out also
when the queue overflowed (the Go nsqd reads both at random). An ephemeral queue has no disk: what
does not fit is dropped, newest first.

The memory may hold more than its limit between `put` and `overflow`: the owner offers the messages
to waiting consumers in between, so that nothing goes to disk, or is dropped, that could be
delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queued_message import from_record, to_record

_CLOSE_BYTES = 1 << 20  # written at a time when the queue closes


class BackendError(Exception):
    """The disk did not take messages; the text is Go's, for error frames and /ping."""


class Backlog:
    """The messages of one topic or channel; ``disk`` is None when it is ephemeral."""

    def __init__(self, mem_queue_size: int, disk: DiskQueue | None, health: DiskHealth) -> None:
        self.disk = disk
        self.mem_queue_size = mem_queue_size
        self._health = health
        self._memory: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._memory) + self.disk_depth

    @property
    def disk_depth(self) -> int:
        """How many messages are on disk."""
        return self.disk.depth if self.disk is not None else 0

    @property
    def has_messages(self) -> bool:
        """Whether `get` has anything to try."""
        return bool(self._memory) or (self.disk is not None and self.disk.has_unread)

    @property
    def is_over(self) -> bool:
        """Whether `overflow` is due."""
        return len(self._memory) > self.mem_queue_size

    def put(self, messages: Sequence[bytes]) -> None:
        """Append messages. Raises `BackendError` if the disk fails, maybe after the first ones."""
        if self.disk is not None and (self.disk.has_unread or not self.mem_queue_size):
            self._put_on_disk(self.disk, messages)
        else:
            self._memory.extend(messages)

    def put_in_memory(self, messages: Iterable[bytes]) -> None:
        """Append messages whatever the limit: for those that must outlive a disk error."""
        self._memory.extend(messages)

    def overflow(self, droppable: int) -> None:
        """Move to disk what is over the limit, or drop it without a disk.

        Raises `BackendError` when the disk fails. Then the newest ``droppable`` messages are
        dropped (their publisher gets an error), and the rest stays in memory whatever the limit.
        """
        surplus = [self._memory.pop() for _ in range(len(self._memory) - self.mem_queue_size)]
        surplus.reverse()
        if not surplus or self.disk is None:
            return
        try:
            self._put_on_disk(self.disk, surplus)
        except BackendError:
            self._memory.extend(surplus[: max(0, len(surplus) - droppable)])
            raise

    def _put_on_disk(self, disk: DiskQueue, messages: Sequence[bytes]) -> None:
        try:
            disk.put([to_record(message) for message in messages])
        except OSError as exc:
            self._health.error = disk.describe(exc)
            raise BackendError(self._health.error) from exc
        self._health.error = ""

    def get(self, count: int, max_bytes: int) -> list[bytes]:
        """Remove and return the oldest messages: at least one, unless files fail."""
        memory = self._memory
        if not memory and self.disk is not None and self.disk.has_unread:
            # only what is delivered now: what has left the disk does not survive a kill
            return [from_record(record) for record in self.disk.get(count, max_bytes)]
        if count >= len(memory):
            messages = list(memory)
            memory.clear()
        else:
            take = memory.popleft
            messages = [take() for _ in range(count)]
        size = sum(map(len, messages))
        while size > max_bytes and len(messages) > 1:
            size -= len(messages[-1])
            memory.appendleft(messages.pop())
        return messages

    def empty(self) -> None:
        """Drop everything. Raises ``OSError``."""
        self._memory.clear()
        if self.disk is not None:
            self.disk.empty()

    def delete(self) -> None:
        """Drop everything and leave no file. Raises ``OSError``."""
        self._memory.clear()
        if self.disk is not None:
            self.disk.delete()

    def close(self, delivered: Iterable[bytes] = ()) -> None:
        """Write the memory and the records ``delivered`` to disk. Raises ``OSError``.

        A step at a time, and what is written leaves the memory: when everything is full, stopping
        must not need as much again.
        """
        if self.disk is not None:
            for records in _in_steps(chain(self._records(), delivered)):
                self.disk.put(records)
            self.disk.close()
        self._memory.clear()

    def _records(self) -> Iterator[bytes]:
        while self._memory:
            yield to_record(self._memory.popleft())


def _in_steps(records: Iterable[bytes]) -> Iterator[list[bytes]]:
    step: list[bytes] = []
    size = 0
    for record in records:
        step.append(record)
        size += len(record)
        if size >= _CLOSE_BYTES:
            yield step
            step, size = [], 0
    if step:
        yield step


@dataclass(slots=True)
class DiskHealth:
    """``error`` is the text of the last disk write if it failed, or ``""``."""

    error: str = ""

    @property
    def text(self) -> str:
        """``OK`` or ``NOK - reason``."""
        return f"NOK - {self.error}" if self.error else "OK"
