"""A topic: gives messages their identity and copies them to its channels.

While messages flow, publishing puts them straight into the channels and the topic's own backlog
stays empty. It fills when there is no channel, the topic is paused, or the topic has not started
(nsqd asks nsqlookupd for the channels of a new topic before its first message may flow).
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, Event, sleep
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nsqtools.protocol.names import is_ephemeral
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable.checkpoint import InMemory
from nsqtools.server.durable.journal import QueueJournal, due_ns
from nsqtools.server.durable.records import Published
from nsqtools.server.durable.unconfirmed import Unconfirmed
from nsqtools.server.loop_meter import free_in_steps, meter_of
from nsqtools.server.queues.backlog import BackendError, Limits, QueueBacklog, Undo, encoded
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.queue_files import Block
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    MessageIds,
    message_ids,
    new_message,
    new_messages,
)

_STEP_COUNT = 1000  # messages of a backlog to copy before other work of the loop gets its turn
_STEP_BYTES = 1 << 22
_RETRY_S = 1.0  # after the disk of a channel failed


class Prepared(NamedTuple):
    """Many new messages, and their bytes on disk, if these are needed."""

    messages: list[bytes]
    blocks: list[Block]


class Topic:
    """One topic. ``make_channel`` builds a channel from the names of topic and channel."""

    def __init__(
        self,
        name: str,
        backlog: QueueBacklog,
        ids: MessageIds,
        loop: AbstractEventLoop,
        log: DaemonLog,
        make_channel: Callable[[str, str], Channel],
        limits: Limits,
        journal: QueueJournal | None = None,
    ) -> None:
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.backlog = backlog
        self.channels: dict[str, Channel] = {}
        self.is_paused = False
        self.message_count = self.message_bytes = 0
        self.on_channel_created: Callable[[Channel], None] = lambda _: None
        self.on_channel_deleted: Callable[[Channel], None] = lambda _: None
        self._ids = ids
        self._loop = loop
        self._meter = meter_of(loop)
        self._log = log
        self._make_channel = make_channel
        self.journal = journal
        self._limits = limits
        self.unconfirmed = Unconfirmed()
        self.due_ns: dict[bytes, int] = {}  # of messages on disk, by id
        self._deferred: deque[tuple[bytes, float]] = deque()  # waiting for a channel, with delay
        self._mem_queue_size = backlog.mem_queue_size
        self.started = Event()  # once its channels elsewhere in the cluster are known
        self.is_closed = False
        self._step_scheduled = False

    @property
    def depth(self) -> int:
        """How many messages wait in the topic itself."""
        return len(self.backlog) + len(self._deferred)

    @property
    def _flows(self) -> bool:
        return bool(self.channels) and not self.is_paused and self.started.is_set()

    def start(self) -> None:
        """Let messages flow, after the channels that are known elsewhere have been created."""
        self.started.set()
        self._wake()

    # publishing

    def publish(self, bodies: Sequence[bytes]) -> None:
        """Queue new messages, all or none. Raises `BackendError`."""
        self.put(self.new_messages(bodies))

    def new_messages(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Return the messages that `put` takes."""
        now_ns = time.time_ns()
        return new_messages(bodies, self._ids.take(len(bodies), now_ns), now_ns)

    def publish_one(self, body: bytes) -> None:
        """Queue one new message. Raises `BackendError`."""
        now_ns = time.time_ns()
        message = new_message(body, self._ids.take_one(now_ns), now_ns)
        is_simple = not (self._flows or self.is_ephemeral or self._limits.are_set)
        if is_simple and self.backlog.put_one_in_memory(message):
            self.message_count += 1
            self.message_bytes += len(body)
        else:
            self.put([message])

    async def prepare_in_steps(self, bodies: Sequence[bytes]) -> Prepared:
        """Return what `put` takes; other work of the loop gets its turn in between."""
        messages: list[bytes] = []
        blocks: list[Block] = []
        stays = all(each.backlog.takes_all_in_memory(len(bodies)) for each in self._targets())
        for start in range(0, len(bodies), _STEP_COUNT):
            step = self.new_messages(bodies[start : start + _STEP_COUNT])
            messages += step
            await sleep(0)
            if not stays:
                blocks.append(encoded(step))
                await sleep(0)
        return Prepared(messages, blocks)

    def put(self, messages: list[bytes], blocks: Sequence[Block] = ()) -> None:
        """Queue messages, in all channels or in none. Raises `BackendError`."""
        if self._limits.are_set:
            self._limits.admit(self._targets(), messages)
        if self._flows and not self.backlog.has_messages:
            self._copy(messages, blocks)
        else:
            self.backlog.put(messages, blocks=blocks)
            self._drop_surplus()
        self.message_count += len(messages)
        self.message_bytes += sum(map(len, messages)) - len(messages) * BODY_AT

    def _targets(self) -> Iterable[Topic | Channel]:
        return self.channels.values() if self._flows else [self]

    @property
    def limited_depth(self) -> int:
        """How many messages wait, those that are deferred included."""
        return self.depth

    def drop_oldest(self, count: int) -> int:
        """Drop waiting messages, and return how many there were."""
        dropped = self.backlog.get(count, _STEP_BYTES)
        if self.journal is not None and dropped:
            self.journal.delivered(())  # the disk was read
            self.journal.finished(message_ids(dropped))
        return len(dropped)

    def put_durably(
        self,
        messages: list[bytes],
        delay_s: float,
        done: Callable[[BackendError | None], None],
        blocks: Sequence[Block] = (),
    ) -> None:
        """Write messages to the durable log, queue them when they are on disk, and call back."""
        assert self.journal is not None
        try:
            self._limits.admit(self._targets(), messages)
        except BackendError as exc:
            done(exc)
            return
        channels = None
        if self._flows and not self.backlog.has_messages:
            channels = list(self.channels.values())
            numbers = [each.journal.number for each in channels if each.journal is not None]
        else:
            numbers = [self.journal.number]

        def confirmed(error: OSError | None) -> None:
            if error is not None:
                done(self.backlog.failed(f"write: {error.strerror or error}"))
                return
            self.backlog.succeeded()
            self._put_confirmed(channels, messages, delay_s, blocks)
            done(None)

        if numbers:
            when_ns = due_ns(delay_s) if delay_s else 0
            self.unconfirmed.publish(self.journal.log, numbers, messages, when_ns, confirmed)
        else:  # all channels are ephemeral
            confirmed(None)

    def _put_confirmed(
        self,
        channels: list[Channel] | None,
        messages: list[bytes],
        delay_s: float,
        blocks: Sequence[Block],
    ) -> None:
        if self.is_closed:
            return  # deleted
        if channels is None and delay_s:
            self._deferred += [(message, delay_s) for message in messages]
            self._wake()
        elif channels is None:
            self.backlog.put_whatever(messages, blocks)
            self._wake()
        for channel in channels or ():
            if self.channels.get(channel.name) is not channel:
                continue  # deleted meanwhile
            if delay_s:
                channel.put_deferred(messages[0], delay_s)
            else:
                channel.put_confirmed(messages, blocks)
        self.message_count += len(messages)
        self.message_bytes += sum(map(len, messages)) - len(messages) * BODY_AT

    def _drop_surplus(self) -> None:
        if self.backlog.is_over and self.is_ephemeral:
            self.backlog.overflow()

    def publish_deferred(self, body: bytes, delay_s: float) -> None:
        """Queue a new message whose delay starts when a channel gets it. Raises `BackendError`."""
        self.put_deferred(self.new_messages([body])[0], delay_s)

    def put_deferred(self, message: bytes, delay_s: float) -> None:
        """Queue a message whose delay starts when a channel gets it. Raises `BackendError`.

        A message that has to wait on disk for a channel loses its delay, as in nsqd.
        """
        if not self._flows and self.depth >= self._mem_queue_size:
            self.put([message])
            return
        self._limits.admit(self._targets(), [message])
        self._deferred.append((message, delay_s))
        self._copy_deferred()
        self.message_count += 1
        self.message_bytes += len(message) - BODY_AT

    def _copy(self, messages: list[bytes], blocks: Sequence[Block] = ()) -> None:
        done: list[tuple[Channel, Undo]] = []
        for channel in self.channels.values():
            try:
                done.append((channel, channel.put(messages, blocks)))
            except Exception as exc:
                if isinstance(exc, BackendError):
                    self._log.error(f"TOPIC({self.name}) ERROR: failed to put - {exc}")
                for changed, undo in done:
                    changed.backlog.undo(undo)
                raise
        for channel, _ in done:
            channel.accept(len(messages))

    def _copy_deferred(self) -> None:
        while self._deferred and self._flows:
            message, delay_s = self._deferred.popleft()
            for channel in self.channels.values():
                channel.put_deferred(message, delay_s)
            self._log_copied([message], due_ns(delay_s))

    def _log_copied(self, messages: list[bytes], when_ns: int) -> None:
        """Write that messages of the topic are in the channels now."""
        if self.journal is None:
            return
        journals = [each.journal for each in self.channels.values() if each.journal is not None]
        numbers = tuple(journal.number for journal in journals)
        self.journal.log.append(Published(when_ns, numbers, b"".join(messages)))
        self.journal.delivered(())  # the disk was read
        self.journal.finished(message_ids(messages))

    def _defer_again(self, messages: list[bytes]) -> list[bytes]:
        """Take out messages from disk that were deferred before a restart; return the others."""
        now_ns = time.time_ns()
        others = []
        for message, message_id in zip(messages, message_ids(messages), strict=True):
            delay_s = (self.due_ns.pop(message_id, 0) - now_ns) / 1_000_000_000
            if delay_s > 0:
                self._deferred.append((message, delay_s))
            else:
                others.append(message)
        return others

    def _wake(self) -> None:
        if not self._step_scheduled:
            self._step_scheduled = True
            self._meter.soon(self._step, self._loop)

    def _step(self) -> None:
        self._step_scheduled = False
        if self.is_closed or not self._flows:
            return
        self._copy_deferred()
        messages = self.backlog.get(_STEP_COUNT, _STEP_BYTES)
        if self.due_ns:
            messages = self._defer_again(messages)
            self._copy_deferred()
        try:
            self._copy(messages)
            self._log_copied(messages, 0)
        except Exception as exc:
            self.backlog.put_back(messages)
            if not isinstance(exc, BackendError):
                raise
            self._loop.call_later(_RETRY_S, self._wake)
            return
        if self.backlog.has_messages:
            self._wake()

    # channels

    def get_channel(self, name: str) -> Channel:
        """Return the channel, created if there was none."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self._make_channel(self.name, name)
            channel.on_left = self._consumers_left
            channel.unconfirmed = self.unconfirmed
            self.channels[name] = channel
            self._log.info(f"TOPIC({self.name}): new channel({name})")
            self.on_channel_created(channel)
            self._wake()
        return channel

    def delete_channel(self, name: str) -> None:
        """Delete a channel with its messages. Raises ``KeyError``."""
        channel = self.channels.pop(name)
        self._log.info(f"TOPIC({self.name}): deleting channel {name}")
        channel.delete()
        self.on_channel_deleted(channel)

    def _consumers_left(self, channel: Channel) -> None:
        if channel.is_ephemeral and self.channels.get(channel.name) is channel:
            self.delete_channel(channel.name)

    def empty(self) -> None:
        """Drop the topic's own messages, not those of its channels."""
        self._deferred.clear()
        free_in_steps(self.backlog.empty(), self._loop)
        self.due_ns.clear()
        if self.journal is not None:
            self.journal.emptied(self.unconfirmed)

    def pause(self) -> None:
        """Keep messages in the topic until `unpause`."""
        self.is_paused = True

    def unpause(self) -> None:
        """Copy messages to channels again."""
        self.is_paused = False
        self._wake()

    # the end

    def delete(self) -> None:
        """Delete the topic and its channels, and leave no file."""
        self.is_closed = True
        for name in list(self.channels):
            self.delete_channel(name)
        self._deferred.clear()
        free_in_steps(self.backlog.delete(), self._loop)
        if self.journal is not None:
            self.journal.deleted()

    def in_memory(self) -> InMemory:
        """Return what is not on disk, for the durable log."""
        assert self.journal is not None
        waiting, deferred = self.unconfirmed.of(self.journal.number)
        held = [(message, due_ns(delay_s)) for message, delay_s in self._deferred]
        return InMemory(self.backlog.in_memory() + waiting, [], held + deferred)

    def due_times(self) -> dict[bytes, int]:
        """Return when messages are due that a restart would deliver at once."""
        held = self._deferred if self.journal is not None else ()
        return self.due_ns | {message[18:34]: due_ns(delay_s) for message, delay_s in held}

    def close(self) -> bool:
        """Write everything to disk; what fails is logged and does not stop the rest.

        Returns whether nothing failed.
        """
        self.is_closed = is_written = True
        self.backlog.put_in_memory([message for message, _ in self._deferred])
        closings = [(f"CHANNEL({each.name})", each.close) for each in self.channels.values()]
        for what, close in [*closings, (f"TOPIC({self.name})", self.backlog.close)]:
            try:
                close()
            except Exception as exc:  # of any kind: the others have messages, too
                self._log.error(f"{what}: failed to close - {str(exc) or repr(exc)}")
                is_written = False
        return is_written
