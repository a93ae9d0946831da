"""The waiting messages of a topic or a channel: some in memory, the rest on disk, in order.

The older messages are in memory and the newer ones on disk. So the order is first in, first out
even after an overflow, where the Go nsqd reads from both at random. An ephemeral queue has no disk:
it drops the newest messages when the memory is full. Deferred messages are in memory, in a heap
ordered by due time.

Between `put` and `overflow` the memory may exceed its limit by the number of messages that
consumers have room for. The owner delivers to them in between, so that no message is written to
disk, or dropped, that could be delivered.

When the disk is nearly full, publishes are refused. Requeued messages are still stored, because
nsqd has accepted them before.
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
from nsqtools.server.queues.waiting_messages import WaitingMessages

# --durable must be able to write when the disk is full for publishers, because finished messages
# are removed by a transaction. Its write-ahead log is brought into the file at 8 MiB.
_RESERVE = 64 << 20
# Messages that a closing queue writes in one step: the bound on the additional memory.
_CLOSE_COUNT = 1000
_CLOSE_BYTES = 1 << 20


class BackendError(Exception):
    """Messages could not be written to disk; the text is Go's, for error frames and /ping."""


class DiskHealth:
    """Whether messages can be stored.

    ``error`` is the text of the last disk write if it failed. ``low`` is the reason for refusing
    publishes while the disk is nearly full. ``spare_bytes`` returns how many bytes new messages can
    use in files that exist already.
    """

    def __init__(self, options: NsqdOptions, spare_bytes: Callable[[], int] = int) -> None:
        self.error = self.low = ""
        self.refused_publishes = 0
        self._spare_bytes = spare_bytes
        self._data_path = Path(options.data_path)
        self._required_bytes = options.min_disk_free or (_RESERVE if options.durable else 0)

    @property
    def text(self) -> str:
        """``OK`` or ``NOK - reason``."""
        return f"NOK - {self.error or self.low}" if not self.is_well else "OK"

    @property
    def is_well(self) -> bool:
        """Whether messages can be stored."""
        return not (self.error or self.low)

    def raise_if_low(self) -> None:
        """Raise `BackendError` while publishes are refused."""
        if self.low:
            self.refused_publishes += 1
            raise BackendError(self.low)

    def raise_if_too_large(self, size: int) -> None:
        """Raise `BackendError` when the disk has no room for ``size`` bytes."""
        with suppress(OSError):
            if self.free_bytes() < size:
                self.refused_publishes += 1
                raise BackendError("no space left on device")

    def free_bytes(self) -> int:
        """Return the free space of the file system of the data path. Raises ``OSError``."""
        return shutil.disk_usage(self._data_path).free

    def check_free_space(self) -> None:
        """Refuse publishes from now on if the disk is nearly full, or accept them again."""
        try:
            free = self.free_bytes() + self._spare_bytes()
        except OSError:
            return
        self.low = ""
        if free < self._required_bytes:
            self.low = (
                f"{free} bytes free on the disk, fewer than the {self._required_bytes} of "
                "--min-disk-free"
            )


class Undo(NamedTuple):
    """The messages that a `QueueBacklog.put` added to memory, and the end of the disk before it."""

    in_memory: int
    on_disk: Mark | None


class ChannelCallbacks(NamedTuple):
    """The methods of the channel that owns a backlog.

    ``room`` returns how many messages consumers have room for. A database stores messages after
    `QueueBacklog.put` returns, and then calls ``wake``, or ``watch`` with the time of a deferred
    message.
    """

    room: Callable[[], int]
    wake: Callable[[], None]
    watch: Callable[[float], None]


NO_CHANNEL = ChannelCallbacks(lambda: 0, lambda: None, lambda when_s: None)
"""For the backlog of a topic, which has no consumers and no timer."""


class QueueBacklog:
    """The messages of one topic or channel; ``disk`` is None when it is ephemeral."""

    # Finished messages that count as in flight until the database has removed them. Only the nsqd
    # of a job waits for that (`DurableStore.is_strict`): a kill must redeliver few messages.
    unwritten_finishes = 0

    def __init__(
        self,
        mem_queue_size: int,
        disk: DiskQueue | None,
        health: DiskHealth,
        callbacks: ChannelCallbacks = NO_CHANNEL,
    ) -> None:
        self.disk = disk
        self.mem_queue_size = mem_queue_size
        self.deferred_count = 0
        self._health = health
        self._memory = WaitingMessages()
        # A heap of (due time, arrival, message): equal due times keep the order of arrival.
        self._deferred: list[tuple[float, int, bytes]] = []
        self._arrivals = count()
        self._room, self._wake, self._watch_at = callbacks

    def __len__(self) -> int:
        return self._memory.count + self.disk_depth

    def depths(self) -> tuple[int, int]:
        """Return the number of messages, and how many of them are on disk."""
        disk_depth = self.disk_depth
        return self._memory.count + disk_depth, disk_depth

    @property
    def disk_depth(self) -> int:
        """The number of messages on disk."""
        return self.disk.depth if self.disk is not None else 0

    @property
    def has_messages(self) -> bool:
        """Whether `get` has memory or files to read."""
        return bool(self._memory) or (self.disk is not None and self.disk.has_unread)

    @property
    def exceeds_memory(self) -> bool:
        """Whether `overflow` must move messages to disk."""
        return self._memory.count > self.mem_queue_size

    def put(self, messages: Sequence[bytes], blocks: Sequence[Block] = ()) -> Undo:
        """Append messages, all or none, and return the argument of `undo`. Raises `BackendError`.

        ``blocks`` are the messages as `encoded` returns them, if the caller has encoded them. They
        are then kept together, in memory or on disk. Without ``messages`` they go to disk.
        """
        disk, memory = self.disk, self._memory
        if blocks and not messages:
            if disk is not None:
                return Undo(0, self._put_on_disk(disk, blocks))
            messages = decoded(blocks)
        count, fits = len(messages), len(messages)
        if disk is not None:
            # Messages on disk are older, so new ones must go behind them.
            if disk.has_unread or not self.mem_queue_size:
                fits = 0
            elif memory.count + count > self.mem_queue_size:
                fits = min(count, max(0, self.mem_queue_size + self._room() - memory.count))
            if fits < count:
                fits = 0 if blocks else fits
                mark = self._put_on_disk(disk, blocks or [encoded(messages[fits:])])
                self.put_in_memory(messages[:fits])
                return Undo(fits, mark)
        memory.extend(messages)
        return Undo(count, None)

    def put_if_memory_has_room(self, messages: Sequence[bytes]) -> bool:
        """Append messages if memory has room for all; return whether it has."""
        memory, disk = self._memory, self.disk
        fits = memory.count + len(messages) <= self.mem_queue_size
        if not fits or (disk is not None and disk.has_unread):
            return False
        memory.extend(messages)
        return True

    def takes_all_in_memory(self, count: int) -> bool:
        """Return whether memory has room for ``count`` messages."""
        fits = self._memory.count + count <= self.mem_queue_size
        return self.disk is None or (fits and not self.disk.has_unread)

    def undo(self, put: Undo) -> None:
        """Remove the messages of the last `put`, after which the queue must not have changed."""
        self._memory.drop_last(put.in_memory)
        if put.on_disk is not None and self.disk is not None:
            self.disk.undo(put.on_disk)

    def put_in_memory(self, messages: Sequence[bytes]) -> None:
        """Append messages beyond the limit: these must not be lost when the disk fails."""
        self._memory.extend(messages)

    def put_back(self, messages: list[bytes]) -> None:
        """Return messages of `get` to their place in front of all others, in memory."""
        self._memory.put_back(messages)

    def overflow(self) -> None:
        """Move the messages beyond the limit to disk, or drop them without a disk.

        Raises `BackendError` when the disk fails. The messages then stay in memory.
        """
        count = max(0, self._memory.count - self.mem_queue_size)
        if not count or self.disk is None:
            self._memory.drop_last(count)
            return
        surplus = self._memory.take_last(count)
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
        """Remove and return the oldest messages: at least one, unless reading a file fails."""
        memory = self._memory
        if not memory and self.disk is not None and self.disk.has_unread:
            # Read no more than is delivered now: a kill loses what was read from the files.
            return [from_record(record) for record in self.disk.get(count, max_bytes)]
        messages = memory.take(count)
        size = sum(map(len, messages))
        # At least one message, or one above the limit would never be delivered.
        while size > max_bytes and len(messages) > 1:
            size -= len(messages[-1])
            memory.put_back([messages.pop()])
        return messages

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
        """Note that messages are in flight. The files of a queue do not record that."""

    def finished(self, message_ids: Iterable[bytes]) -> None:
        """Note that delivered messages are finished."""

    def empty(self) -> deque[Any]:
        """Drop everything; return the messages of the memory, which take a while to free."""
        dropped = self._memory.clear()
        dropped += self._deferred
        self._deferred.clear()
        self.deferred_count = 0
        if self.disk is not None:
            self.disk.empty()
        return dropped

    def delete(self) -> deque[Any]:
        """Drop everything before the queue is deleted; return the same as `empty`."""
        return QueueBacklog.empty(self)

    def close(self, in_flight: Iterable[list[bytes]] = ()) -> None:
        """Write messages in memory, in flight and deferred to disk. Raises ``OSError``.

        Messages are written in steps and then freed: a stop must not need twice the memory.
        """
        if self.disk is not None:
            deferred = iter(partial(self.take_due, inf, _CLOSE_COUNT), [])
            try:
                # The empty list writes the memory itself first.
                for messages in chain([[]], in_flight, deferred):
                    self._memory.extend(messages)
                    while self._memory:
                        step = self.get(_CLOSE_COUNT, _CLOSE_BYTES)
                        self.disk.put([encoded(step)])
            finally:
                self.disk.close()
        self._memory.clear()


def decoded(blocks: Sequence[Block]) -> list[bytes]:
    """Return the waiting messages of blocks: the inverse of `encoded`."""
    messages = []
    for block in blocks:
        position = 0
        for size in block.sizes:
            messages.append(from_record(block.data[position + LENGTH_SIZE : position + size]))
            position += size
    return messages


def encoded(messages: Iterable[bytes]) -> Block:
    """Return waiting messages in the format of the files of a disk queue."""
    records = []
    # Messages that were published together have the same timestamp and attempts. Converting these
    # once for all of them is most of the work.
    head = start = b""
    for message in messages:
        if message[4:ID_AT] != head:
            head = message[4:ID_AT]
            start = to_record(message[:ID_AT])
        records.append(encode_length(len(message) - 8) + start + message[ID_AT:])
    sizes = list(map(len, records))
    return Block(b"".join(records), sizes, (min(sizes), max(sizes)))
