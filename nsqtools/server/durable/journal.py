"""What happens to one queue, a topic's or a channel's, as records of the log."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nsqtools.server.durable.log import DurableLog
from nsqtools.server.durable.records import (
    Deferred,
    Delivered,
    Dropped,
    Finished,
    Kept,
    QueueBegins,
    Stage,
    attempts_of,
)
from nsqtools.server.durable.unconfirmed import Unconfirmed
from nsqtools.server.queues.logged_disk_queue import LoggedDiskQueue


class QueueJournal:
    """The records of one queue. ``number`` is what others name it by."""

    def __init__(self, name: str, disk: LoggedDiskQueue, log: DurableLog) -> None:
        self.name = name
        self.disk = disk
        self.log = log
        self.begin()

    def begin(self) -> None:
        """Write that there is a queue with these positions: a new one, or an emptied one."""
        self.number = self.log.next_queue_number()
        self.stand_here()

    def stand_here(self) -> None:
        """Write the positions: what was written before for this queue is void."""
        self.log.append(QueueBegins(self.number, *self.disk.positions, self.name))

    def delivered(self, messages: Sequence[bytes]) -> None:
        """Messages of the queue, from memory or disk, are in flight."""
        self.log.append(Delivered(self.number, *self.disk.positions[1:3], attempts_of(messages)))

    def deferred(self, message: bytes, delay_s: float) -> None:
        """How long a message waits; its attempts include the next one."""
        attempts = int.from_bytes(message[16:18], "big") - 1 & 0xFFFF
        self.log.append(Deferred(self.number, due_ns(delay_s), attempts, message[18:34]))

    def finished(self, message_ids: Sequence[bytes]) -> None:
        """Messages are done."""
        if message_ids:
            self.log.append(Finished(self.number, b"".join(message_ids)))

    def emptied(self, unconfirmed: Unconfirmed) -> None:
        """Nothing of what was before counts, but for publishes that will be confirmed."""
        waiting, deferred = unconfirmed.of(self.number)
        self.deleted()
        self.begin()
        if waiting:
            self.log.append(Kept(self.number, Stage.WAITING, 0, b"".join(waiting)))
        for message, due in deferred:
            self.log.append(Kept(self.number, Stage.DEFERRED, due, message))

    def deleted(self) -> None:
        """The queue is gone."""
        self.log.append(Dropped(self.number))


def due_ns(delay_s: float) -> int:
    """Return when a delay that begins now is over."""
    return time.time_ns() + int(delay_s * 1_000_000_000)
