"""A topic: assigns ids and timestamps to messages and copies them to its channels.

While messages flow, a publish puts them directly into the channels, and the backlog of the topic
stays empty. The backlog fills when there is no channel, the topic is paused, or the topic has not
started: nsqd asks nsqlookupd for the channels of a new topic before it delivers the first message.
"""

from __future__ import annotations

import time
from asyncio import Event, Future
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from nsqtools.http.loop_meter import free_in_steps, in_steps, meter_of
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.requests import Batches, sized_bodies
from nsqtools.server.queues.channel import Channel, QueueHost
from nsqtools.server.queues.message_buffer import BackendError, QueueBacklog, Undo, encoded
from nsqtools.server.queues.queue_files import Block
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    RECORD_OVERHEAD,
    LargePublish,
    MessageIds,
    in_batches,
    new_messages,
)
from nsqtools.server.queues.waiting_messages import MessageBatch

if TYPE_CHECKING:
    from nsqtools.server.durable_store import DurableStore

# Messages of a backlog that one iteration of the loop copies. Clients wait for it.
_STEP_COUNT = 1000
_STEP_BYTES = 1 << 22
# Records of a large publish that are written in one iteration: 8 MiB take about 10 ms.
_PART_BYTES = 1 << 23
_BATCH_COUNT = 16  # below it, frames take less time than a `MessageBatch`
_RETRY_S = 1.0  # after the disk of a channel has failed


class Topic:
    """One topic. ``started`` is set when its channels in the rest of the cluster exist here."""

    def __init__(self, name: str, nsqd: QueueHost) -> None:
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.backlog: QueueBacklog = nsqd.backlog(name, self.is_ephemeral)
        self.channels: dict[str, Channel] = {}
        self.is_paused = False
        self.message_count = self.message_bytes = 0
        self.store = nsqd.durable
        self._nsqd = nsqd
        written_ns = self.store.written_ns if self.store is not None else 0
        self._ids = MessageIds(nsqd.options.node_id, written_ns)
        self._loop = nsqd.loop
        self._meter = meter_of(nsqd.loop)
        self._log = nsqd.log
        self._health = nsqd.health
        # (message, delay) of deferred messages that wait for a channel.
        self._deferred: deque[tuple[bytes, float]] = deque()
        self.started = Event()
        self.is_closed = False
        self._step_scheduled = False

    @property
    def depth(self) -> int:
        """The number of messages in the topic itself."""
        return len(self.backlog) + self.deferred_count

    @property
    def deferred_count(self) -> int:
        """The number of messages in the topic itself that are not due."""
        return len(self._deferred) + self.backlog.deferred_count

    @property
    def _flows(self) -> bool:
        return bool(self.channels) and not self.is_paused and self.started.is_set()

    def start(self) -> None:
        """Let messages flow, after the channels of the rest of the cluster have been created."""
        self.started.set()
        self._wake()

    # publishing

    def new_messages(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Return frames with new ids, for `put`."""
        now_ns = time.time_ns()
        return new_messages(bodies, self._ids.take(len(bodies), now_ns), now_ns)

    def publish(self, bodies: Sequence[bytes]) -> Future[None] | None:
        """Queue new messages, as `put` does. The fast way for a topic without channels."""
        return self._publish(self.new_messages(bodies), sum(map(len, bodies)))

    def publish_batch(self, data: bytes, count: int) -> Future[None] | None:
        """Queue ``count`` sized bodies that were checked, as `put` does."""
        if self.store is not None or count < _BATCH_COUNT:
            return self.publish(sized_bodies(data, count))
        now_ns = time.time_ns()
        batch = MessageBatch(data, count, self._ids.reserve(count, now_ns), now_ns)
        return self._publish(batch, batch.size)

    def _publish(self, messages: Sequence[bytes], size: int) -> Future[None] | None:
        is_simple = not (self.store or self._flows or self._health.low)
        if is_simple and self.backlog.put_if_memory_has_room(messages):
            self.message_count += len(messages)
            self.message_bytes += size
            return None
        return self.put(messages)

    async def put_in_steps(self, count: int, size: int, batches: Batches) -> Future[None] | None:
        """Queue a large publish, as `put` does, and let other work of the loop run in between.

        A million small messages need ten times the memory of the request. So messages for a
        database or for files are encoded in groups. Files get the records in parts of
        `_PART_BYTES`, because writing 80 MB blocks the loop for 0.1 s. The publish is then no
        longer all or none, and the free space is checked before. ``size`` is that of all bodies.
        """
        channels = self.channels.values()
        has_ephemeral = self.is_ephemeral or any(channel.is_ephemeral for channel in channels)
        if self.store is not None and not has_ephemeral:
            now_ns = time.time_ns()
            ids = self._ids.reserve(count, now_ns)

            def make_messages() -> Iterator[list[bytes]]:
                for bodies in batches():
                    yield new_messages(bodies, ids.take(len(bodies), 0), now_ns)

            return self.put([], large=LargePublish(count, size, make_messages))
        targets = channels if self._flows else [self]
        fits = [target.backlog.takes_all_in_memory(count) for target in targets]
        if not all(fits):
            self._health.raise_if_too_large((size + count * RECORD_OVERHEAD) * len(fits))
        messages: list[bytes] = []
        blocks: list[Block] = []
        part_count = part_size = 0
        async for bodies in in_steps(batches()):
            part = self.new_messages(bodies)
            if any(fits):
                messages += part
            if not all(fits):
                blocks.append(encoded(part))
            part_count += len(bodies)
            part_size += sum(map(len, bodies))
            if not self.store and part_size + part_count * RECORD_OVERHEAD >= _PART_BYTES:
                self.put(messages, blocks=blocks, large=LargePublish(part_count, part_size))
                messages, blocks, part_count, part_size = [], [], 0, 0
        large = LargePublish(part_count, part_size, lambda: in_batches(messages))
        return self.put(messages, blocks=blocks, large=large)

    def put(
        self,
        messages: Sequence[bytes],
        delay_s: float = 0.0,
        *,
        blocks: Sequence[Block] = (),
        large: LargePublish | None = None,
    ) -> Future[None] | None:
        """Queue messages, in all channels or in none.

        With --durable return a future that is done when they are stored. The delay starts when a
        channel gets the message. A message that waits on disk for a channel loses its delay, as in
        nsqd. Raises `BackendError`, and so does the future.
        """
        if self.is_closed:  # deleted while the messages arrived
            raise BackendError("exiting")
        self._health.raise_if_low()
        count, size = (large.count, large.size) if large else _totals(messages)
        # Messages in the backlog are older and must be copied first.
        flows = self._flows and not self.backlog.has_messages
        if self.store is not None and count and (flows or not self.is_ephemeral):
            return self._put_durably(self.store, list(messages), delay_s, flows, large)
        # In memory a message keeps its delay. Beyond the limit it goes to disk and loses it.
        if delay_s and not self.store and (self._flows or self.depth < self.backlog.mem_queue_size):
            self._deferred += [(message, delay_s) for message in messages]
            self._copy_deferred()
        elif flows:
            self._copy(messages, blocks, count)
        else:
            self.backlog.put(messages, blocks)
            # A topic has no consumers that could take the surplus, and no disk.
            if self.is_ephemeral:
                self.backlog.overflow()
        self.message_count += count
        self.message_bytes += size
        return None

    def _put_durably(
        self,
        store: DurableStore,
        messages: list[bytes],
        delay_s: float,
        flows: bool,
        large: LargePublish | None,
    ) -> Future[None]:
        count, size = (large.count, large.size) if large else _totals(messages)
        due_ns = store.due_ns(delay_s) if delay_s else 0
        channels = list(self.channels.values()) if flows else None
        stored: Future[None] = self._loop.create_future()

        def on_committed(error: BackendError | None) -> None:
            # The future is already cancelled when the daemon stops. It comes first, so that the
            # publisher gets its answer before a consumer on the same connection gets the message.
            if error is not None and not stored.done():
                stored.set_exception(error)
            elif not stored.done():
                stored.set_result(None)
            if error is None and not self.is_closed:
                self._after_commit(channels, count, messages, delay_s)
                self.message_count += count
                self.message_bytes += size

        backlogs = [queue.backlog for queue in ([self] if channels is None else channels)]
        if large is None:
            store.publish(backlogs, messages, repeat(due_ns), on_committed)
        else:
            store.publish_large(backlogs, large, on_committed)
        return stored

    def _after_commit(
        self,
        channels: list[Channel] | None,
        count: int,
        messages: list[bytes],
        delay_s: float = 0.0,
    ) -> None:
        if channels is None:
            self._wake()
        for channel in channels or ():
            if self.channels.get(channel.name) is channel:  # otherwise deleted meanwhile
                channel.committed(count, messages, delay_s)

    def _copy(self, messages: Sequence[bytes], blocks: Sequence[Block], count: int) -> None:
        puts: list[tuple[Channel, Undo]] = []
        for channel in self.channels.values():
            try:
                puts.append((channel, channel.backlog.put(messages, blocks)))
            except Exception as exc:
                if isinstance(exc, BackendError):
                    self._log.error(f"TOPIC({self.name}) ERROR: failed to put - {exc}")
                for changed, undo in puts:
                    changed.backlog.undo(undo)
                raise
        for channel, _ in puts:
            channel.accept(count)

    def _copy_deferred(self) -> None:
        while self._deferred and self._flows:
            message, delay_s = self._deferred.popleft()
            for channel in self.channels.values():
                channel.put_deferred(message, delay_s)

    def _wake(self) -> None:
        if not self._step_scheduled:
            self._step_scheduled = True
            self._meter.soon(self._step, self._loop)

    def _step(self) -> None:
        self._step_scheduled = False
        if self.is_closed or not self._flows:
            return
        if self.store is not None:
            self._move_to_channels(self.store)
            return
        self._copy_deferred()
        messages = self.backlog.get(_STEP_COUNT, _STEP_BYTES)
        if not messages and self.backlog.has_messages:
            self._loop.call_later(_RETRY_S, self._wake)
            return
        try:
            self._copy(messages, (), len(messages))
        except Exception as exc:
            self.backlog.put_back(messages)
            if not isinstance(exc, BackendError):
                raise
            self._loop.call_later(_RETRY_S, self._wake)
            return
        if self.backlog.has_messages:
            self._wake()

    def _move_to_channels(self, store: DurableStore) -> None:
        """Move messages to the channels in one transaction, then the next ones."""
        channels = list(self.channels.values())

        def on_moved(
            error: BackendError | None, messages: list[bytes], delays_s: list[float]
        ) -> None:
            self._step_scheduled = False
            if error is not None:
                self._loop.call_later(_RETRY_S, self._wake)
                return
            if not any(delays_s):
                self._after_commit(channels, len(messages), messages)
            else:
                for message, delay_s in zip(messages, delays_s, strict=True):
                    self._after_commit(channels, 1, [message], delay_s)
            if self.depth:
                self._wake()

        backlogs = [channel.backlog for channel in channels]
        self._step_scheduled = store.move(
            self.backlog, backlogs, _STEP_COUNT, _STEP_BYTES, on_moved
        )
        if self.depth and not self._step_scheduled:  # the database cannot be read
            self._loop.call_later(_RETRY_S, self._wake)

    # channels

    def get_channel(self, name: str) -> Channel:
        """Return the channel, and create it if necessary."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = Channel(
                self.name, name, self._nsqd, self.consumers_left
            )
            self._log.info(f"TOPIC({self.name}): new channel({name})")
            self._nsqd.channel_created(channel)
            self._wake()
        return channel

    def delete_channel(self, name: str) -> None:
        """Delete a channel with its messages. Raises ``KeyError``."""
        channel = self.channels.pop(name)
        self._log.info(f"TOPIC({self.name}): deleting channel {name}")
        channel.delete()
        self._nsqd.channel_deleted(channel)

    def consumers_left(self, channel: Channel) -> None:
        """Delete an ephemeral channel whose last consumer has left."""
        if channel.is_ephemeral and self.channels.get(channel.name) is channel:
            self.delete_channel(channel.name)

    def empty(self) -> None:
        """Drop the messages of the topic itself. Its channels keep their messages."""
        self._deferred.clear()
        free_in_steps(self.backlog.empty())

    def set_paused(self, is_paused: bool) -> None:
        """Keep messages in the topic, or resume copying them to the channels."""
        self.is_paused = is_paused
        self._wake()

    # the end

    def delete(self) -> None:
        """Delete the topic, its channels and all their files."""
        self.is_closed = True
        for name in list(self.channels):
            self.delete_channel(name)
        self._deferred.clear()
        free_in_steps(self.backlog.delete())

    def close(self) -> bool:
        """Write everything to disk; return whether that succeeded.

        A failure is logged and does not affect the other queues.
        """
        self.is_closed = is_whole = True
        self.backlog.put_in_memory([message for message, _ in self._deferred])
        closings = [(f"CHANNEL({name})", channel.close) for name, channel in self.channels.items()]
        for queue, close in [*closings, (f"TOPIC({self.name})", self.backlog.close)]:
            try:
                close()
            except Exception as exc:  # any kind: the other queues have messages as well
                self._log.error(f"{queue}: failed to close - {str(exc) or repr(exc)}")
                is_whole = False
        return is_whole


def _totals(messages: Sequence[bytes]) -> tuple[int, int]:
    """Return the number of messages and the size of their bodies."""
    if type(messages) is MessageBatch:
        return len(messages), messages.size
    return len(messages), sum(map(len, messages)) - len(messages) * BODY_AT
