"""How much the queues of an nsqd may hold, and what happens when there is more.

Flags of our own: Go's queues grow until the disk is full. A publish that would exceed a limit is
refused whole, or the oldest messages make room for it. Whatever the limits say, messages that
consumers give back are kept: they have been accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nsqtools.server.queues.backlog import BackendError, Backlog, DiskHealth
from nsqtools.server.settings.nsqd_options import NsqdOptions


class LimitedQueue(Protocol):
    """A topic or a channel, as far as limits go."""

    backlog: Backlog

    @property
    def limited_depth(self) -> int:
        """How many messages wait, those that are deferred included."""

    def drop_oldest(self, count: int) -> int:
        """Drop waiting messages, and return how many there were."""


@dataclass(slots=True)
class Limits:
    """The limits of one nsqd. ``disk_is_low`` is looked at by `look_at_disk`."""

    options: NsqdOptions
    health: DiskHealth
    refused_count: int = 0  # publishes
    dropped_count: int = 0  # messages
    disk_is_low: bool = False

    @property
    def are_set(self) -> bool:
        """Whether `admit` may refuse anything."""
        return self.disk_is_low or bool(self.options.max_depth or self.options.max_queue_bytes)

    def admit(self, queues: Iterable[LimitedQueue], messages: Sequence[bytes]) -> None:
        """Make room for new messages in all queues. Raises `BackendError` when it cannot be."""
        if self.disk_is_low:
            self._refuse(self.health.low)
        max_depth, max_bytes = self.options.max_depth, self.options.max_queue_bytes
        if not max_depth and not max_bytes:
            return
        count, size = len(messages), sum(map(len, messages))
        full = [
            queue
            for queue in queues
            if 0 < max_depth < queue.limited_depth + count
            or 0 < max_bytes < queue.backlog.size + size
        ]
        is_too_large = 0 < max_depth < count or 0 < max_bytes < size
        if full and (is_too_large or self.options.overflow_policy != "drop-oldest"):
            self._refuse("the queue is full")
        for queue in full:
            self._drop(queue, count, size)

    def _drop(self, queue: LimitedQueue, count: int, size: int) -> None:
        max_depth, max_bytes = self.options.max_depth, self.options.max_queue_bytes
        while (
            0 < max_depth < queue.limited_depth + count or 0 < max_bytes < queue.backlog.size + size
        ):
            surplus = queue.limited_depth + count - max_depth if max_depth else 1
            dropped = queue.drop_oldest(max(1, surplus))
            if not dropped:  # what is left is deferred
                self._refuse("the queue is full")
            self.dropped_count += dropped

    def _refuse(self, reason: str) -> None:
        self.refused_count += 1
        raise BackendError(reason)

    def look_at_disk(self) -> None:
        """Refuse publishes from now on if the disk is nearly full, and say so in /ping."""
        wanted = self.options.min_disk_free
        try:
            found = os.statvfs(self.options.data_path or ".")
        except OSError:
            return
        free = found.f_bavail * found.f_frsize
        self.disk_is_low = free < wanted
        self.health.low = (
            f"{free} bytes free on the disk, fewer than --min-disk-free" if self.disk_is_low else ""
        )
