"""What waits in a topic or a channel: some messages in memory, the rest on disk, in order.

Memory holds the older part and the disk the newer one, so the order is first in, first out also
when the queue overflowed (the Go nsqd reads both at random). An ephemeral queue has no disk: what
does not fit is dropped, newest first. What is deferred is in memory, a heap by due time.

The memory may hold more than its limit between `put` and `overflow`, by as much as the waiting
consumers have room for: the owner offers the messages to them in between, so that nothing goes to
disk, or is dropped, that could be delivered.

When the disk is nearly full publishes are refused. Messages that consumers give back are kept all
the same: they have been accepted.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.disk_queue import DiskQueue, Mark
from nsqtools.server.queues.queue_files import LENGTH_SIZE, Block, encode_length
from nsqtools.server.queues.queued_message import ID_AT, from_record, to_record

_RESERVE = 64 << 20  # --durable writes for what is finished, too
_CLOSE_COUNT = 1000  # written at a time when the queue closes
_CLOSE_BYTES = 1 << 20


class BackendError(Exception):
    """The disk did not take messages; the text is Go's, for error frames and /ping."""


class DiskHealth:
    """Whether messages can be stored. ``error`` is the text of the last disk write if it failed;
    ``low`` says that the disk is nearly full, as `look_at_disk` found it: publishes are refused.
    """

    def __init__(self, options: NsqdOptions) -> None:
        self.error = self.low = ""
        self.refused_count = 0  # publishes
        self.spare_bytes: Callable[[], int] = int  # of files that are there already
        self._data_path = Path(options.data_path)
        self._wanted = options.min_disk_free or (_RESERVE if options.durable else 0)

    @property
    def text(self) -> str:
        """``OK`` or ``NOK - reason``."""
        return f"NOK - {self.error or self.low}" if not self.is_well else "OK"

    @property
    def is_well(self) -> bool:
        """Whether messages can be stored."""
        return not (self.error or self.low)

    def admit(self) -> None:
        """Raise `BackendError` while publishes are refused."""
        if self.low:
            self.refused_count += 1
            raise BackendError(self.low)

    def expect(self, size: int) -> None:
        """Raise `BackendError` when the disk has no room for as many bytes."""
        with suppress(OSError):
            if self.free_bytes() < size:
                self.refused_count += 1
                raise BackendError("no space left on device")

    def free_bytes(self) -> int:
        """Return what the file system of the data path has left. Raises ``OSError``."""
        return shutil.disk_usage(self._data_path).free

    def look_at_disk(self) -> None:
        """Refuse publishes from now on if the disk is nearly full, and say so in /ping."""
        try:
            free = self.free_bytes() + self.spare_bytes()
        except OSError:
            return
        is_low = free < self._wanted
        low = f"{free} bytes free on the disk, fewer than the {self._wanted} of --min-disk-free"
        self.low = low if is_low else ""


class Undo(NamedTuple):
    """Messages that a `QueueBacklog.put` left in memory, and the position of the disk before."""

    in_memory: int
    on_disk: Mark | None


class QueueBacklog:
    """The messages of one topic or channel; ``disk`` is None when it is ephemeral."""

    unsettled = 0  # messages that were finished, and count as in flight until it is written

    def __init__(self, mem_queue_size: int, disk: DiskQueue | None, health: DiskHealth) -> None:
        self.disk = disk
        self.mem_queue_size = mem_queue_size
        self.deferred_count = 0
        self._health = health
        self._memory: deque[bytes] = deque()
        self._deferred: list[tuple[float, int, bytes]] = []  # by due time, then arrival
        self._arrivals = count()
        self._room: Callable[[], int] = int  # these three are of a channel
        self._wake: Callable[[], None] = lambda: None
        self._watch_at: Callable[[float], None] = lambda when_s: None

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

    def put(self, messages: Sequence[bytes], blocks: Sequence[Block] = ()) -> Undo:
        """Append messages, all or none, and return what `undo` takes. Raises `BackendError`.

        ``blocks`` are what `encoded` returns for the messages, if that is known: then they stay
        together. Without ``messages`` they go to disk.
        """
        disk, memory = self.disk, self._memory
        if blocks and not messages:
            if disk is not None:
                return Undo(0, self._put_on_disk(disk, blocks))
            messages = decoded(blocks)
        count, fits = len(messages), len(messages)
        if disk is not None:
            if disk.has_unread or not self.mem_queue_size:
                fits = 0
            elif len(memory) + count > self.mem_queue_size:
                fits = min(count, max(0, self.mem_queue_size + self._room() - len(memory)))
            if fits < count:
                fits = 0 if blocks else fits
                mark = self._put_on_disk(disk, blocks or [encoded(messages[fits:])])
                self.put_in_memory(messages[:fits])
                return Undo(fits, mark)
        memory.extend(messages)
        return Undo(count, None)

    def put_one_in_memory(self, message: bytes) -> bool:
        """Append a message if it stays in memory; return whether it does."""
        memory = self._memory
        if len(memory) >= self.mem_queue_size or (self.disk is not None and self.disk.has_unread):
            return False
        memory.append(message)
        return True

    def takes_all_in_memory(self, count: int) -> bool:
        """Return whether this number of messages would all stay in memory."""
        fits = len(self._memory) + count <= self.mem_queue_size
        return self.disk is None or (fits and not self.disk.has_unread)

    def undo(self, put: Undo) -> None:
        """Take back the messages of a `put`, after which nothing else may have happened."""
        for _ in range(put.in_memory):
            self._memory.pop()
        if put.on_disk is not None and self.disk is not None:
            self.disk.undo(put.on_disk)

    def put_in_memory(self, messages: Sequence[bytes]) -> None:
        """Append messages whatever the limit: for those that must outlive a disk error."""
        self._memory.extend(messages)

    def put_back(self, messages: list[bytes]) -> None:
        """Return messages of `get` to where they were: before all others, in memory."""
        self._memory.extendleft(reversed(messages))

    def overflow(self) -> None:
        """Move to disk what is over the limit, or drop it without a disk.

        Raises `BackendError` when the disk fails; then it stays in memory whatever the limit.
        """
        surplus = [self._memory.pop() for _ in range(len(self._memory) - self.mem_queue_size)]
        surplus.reverse()
        if not surplus or self.disk is None:
            return
        try:
            self._put_on_disk(self.disk, [encoded(surplus)])
        except BackendError:
            self.put_in_memory(surplus)
            raise

    def _put_on_disk(self, disk: DiskQueue, blocks: Sequence[Block]) -> Mark:
        try:
            mark = disk.put(blocks)
        except OSError as exc:
            self._health.error = disk.describe(exc)
            raise BackendError(self._health.error) from exc
        self._health.error = ""
        return mark

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

    def serve(
        self, room: Callable[[], int], wake: Callable[[], None], watch: Callable[[float], None]
    ) -> None:
        """Belong to a channel, which has these methods.

        ``room`` says how many of what is in memory consumers would take at once. What is in a
        database comes later, and calls the others then.
        """
        self._room, self._wake, self._watch_at = room, wake, watch

    def defer(self, message: bytes, due_s: float) -> None:
        """Keep a message of a channel until ``due_s``."""
        heappush(self._deferred, (due_s, next(self._arrivals), message))
        self.deferred_count += 1

    def next_due_s(self) -> float | None:
        """Return when the next deferred message is due, None when there is none."""
        return self._deferred[0][0] if self._deferred else None

    def take_due(self, now_s: float, limit: int) -> list[bytes]:
        """Remove and return deferred messages that are due, up to a limit."""
        due: list[bytes] = []
        while self._deferred and self._deferred[0][0] <= now_s and len(due) < limit:
            due.append(heappop(self._deferred)[2])
        self.deferred_count -= len(due)
        return due

    def delivered(self, messages: Sequence[bytes]) -> None:
        """Note that messages are in flight: nothing on the disk of a queue says so."""

    def finished(self, message_ids: Iterable[bytes]) -> None:
        """Note that messages which were delivered are done."""

    def empty(self) -> deque[Any]:
        """Drop everything; return what was in memory, which takes a while to free."""
        dropped: deque[Any] = self._memory
        self._memory = deque()
        dropped += self._deferred
        self._deferred.clear()
        self.deferred_count = 0
        if self.disk is not None:
            self.disk.empty()
        return dropped

    def delete(self) -> deque[Any]:
        """Drop everything for good; return as `empty` does."""
        return QueueBacklog.empty(self)

    def close(self, given_back: Iterable[list[bytes]] = ()) -> None:
        """Write the memory to disk, what is deferred, and what is given back. Raises ``OSError``.

        A step at a time, and what is written leaves the memory: when everything is full, stopping
        must not need as much again.
        """
        if self.disk is not None:
            deferred = iter(partial(self.take_due, inf, _CLOSE_COUNT), [])
            try:
                for messages in chain([[]], given_back, deferred):
                    self._memory.extend(messages)
                    while self._memory:
                        step = self.get(_CLOSE_COUNT, _CLOSE_BYTES)
                        self.disk.put([encoded(step)])
            finally:
                self.disk.close()
        self._memory.clear()


def decoded(blocks: Sequence[Block]) -> list[bytes]:
    """Return the waiting messages that `encoded` took."""
    messages = []
    for block in blocks:
        position = 0
        for size in block.sizes:
            messages.append(from_record(block.data[position + LENGTH_SIZE : position + size]))
            position += size
    return messages


def encoded(messages: Iterable[bytes]) -> Block:
    """Return waiting messages as they are in the files of a disk queue."""
    head = start = b""  # what messages that were published together have in common
    records = []
    for message in messages:
        if message[4:ID_AT] != head:
            head = message[4:ID_AT]
            start = to_record(message[:ID_AT])
        records.append(encode_length(len(message) - 8) + start + message[ID_AT:])
    sizes = list(map(len, records))
    return Block(b"".join(records), sizes, (min(sizes), max(sizes)))
