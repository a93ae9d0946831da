"""A channel: what waits for its consumers, what they hold, and what is deferred.

Messages arrive by `put`; a turn of delivery is scheduled for the end of the present loop step, so
that a burst of commands costs one turn. A turn deals the backlog to the consumers that have room,
in rotation. One timer stands at the earliest deadline of anything in flight or deferred.

The messages of a consumer that went away stay in flight until they time out, as in nsqd.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from nsqtools.protocol.names import is_ephemeral
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.backlog import BackendError, Backlog
from nsqtools.server.queues.held_messages import DeferredMessages, InFlightMessages
from nsqtools.server.queues.latency import LatencyWindow
from nsqtools.server.queues.queued_message import again, delivered_to_record, to_record

_TURN_COUNT = 256  # messages for one consumer before the next one has its turn
_TURN_BYTES = 1 << 18
_TURN_S = 0.002  # before the other channels and clients have theirs


class ConsumerLimit(Exception):
    """``--max-channel-consumers`` are there already."""


class ChannelConsumer(Protocol):
    """What a channel knows of the client at the other end of a connection."""

    in_flight: InFlightMessages

    @property
    def room(self) -> int:
        """How many more messages may be delivered now."""

    def deliver(self, messages: list[bytes], now_s: float) -> None:
        """Send messages, which count as in flight from now on."""

    def flush(self) -> None:
        """Send what is buffered: the channel does not flow any more."""

    def disconnect(self) -> None:
        """Close the connection: the channel is going away."""


class Channel:
    """One channel of a topic. ``on_left`` is called when the last consumer has left."""

    def __init__(
        self,
        topic_name: str,
        name: str,
        backlog: Backlog,
        loop: AbstractEventLoop,
        log: DaemonLog,
        *,
        latency: LatencyWindow | None,
        max_consumers: int,
    ) -> None:
        self.topic_name = topic_name
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.backlog = backlog
        self.deferred = DeferredMessages()
        self.consumers: dict[ChannelConsumer, None] = {}  # in the order of their turns
        self.latency = latency
        self.is_paused = False
        self.message_count = self.requeue_count = self.timeout_count = 0
        self.on_left: Callable[[Channel], None] = lambda _: None
        self._loop = loop
        self._log = log
        self._max_consumers = max_consumers
        # of the consumers, and of those that went away
        self._in_flight: dict[int, InFlightMessages] = {}
        self._turn_scheduled = False
        self._is_closed = False
        self._timer: TimerHandle | None = None

    @property
    def in_flight_count(self) -> int:
        """How many messages consumers hold."""
        return sum(map(len, self._in_flight.values()))

    # consumers

    def add_consumer(self, consumer: ChannelConsumer) -> None:
        """Let a client consume. Raises `ConsumerLimit`."""
        if 0 < self._max_consumers <= len(self.consumers):
            raise ConsumerLimit(
                f"consumers for {self.topic_name}:{self.name} exceeds limit of "
                f"{self._max_consumers}"
            )
        self.consumers[consumer] = None
        self._in_flight[id(consumer.in_flight)] = consumer.in_flight

    def remove_consumer(self, consumer: ChannelConsumer) -> None:
        """Forget a client that went away; what it held times out in its own time."""
        if self._is_closed:
            return
        del self.consumers[consumer]
        if not consumer.in_flight:
            del self._in_flight[id(consumer.in_flight)]
        if not self.consumers:
            self.on_left(self)

    def _drop_abandoned(self) -> None:
        present = {id(consumer.in_flight) for consumer in self.consumers}
        self._in_flight = {
            key: held for key, held in self._in_flight.items() if held or key in present
        }

    def why_not_in_flight(self, message_id: bytes) -> str:
        """Return why a consumer that does not hold the message cannot answer it."""
        if any(message_id in held for held in self._in_flight.values()):
            return "client does not own message"
        return "ID not in flight"

    # messages

    def put(self, messages: list[bytes]) -> None:
        """Take new messages from the topic. Raises `BackendError`."""
        self.message_count += len(messages)
        self.backlog.put(messages)
        self._deliver_or_overflow(len(messages))

    def put_deferred(self, message: bytes, delay_s: float) -> None:
        """Take a new message from the topic that is due later."""
        self.message_count += 1
        self._defer(message, delay_s)

    def requeue(self, message: bytes, delay_s: float) -> None:
        """Take back what a consumer gave back. It is kept in memory if the disk fails."""
        self.requeue_count += 1
        if delay_s:
            self._defer(again(message), delay_s)
        else:
            self._queue_again([again(message)])

    def _defer(self, message: bytes, delay_s: float) -> None:
        due_s = self._loop.time() + delay_s
        self.deferred.add(message, due_s)
        self.watch(due_s)

    def _deliver_or_overflow(self, droppable: int) -> None:
        self.wake()
        if self.backlog.is_over:
            self._deliver()
            self.backlog.overflow(droppable)

    def _queue_again(self, messages: list[bytes]) -> None:
        """Queue messages that must not get lost when the disk fails."""
        try:
            self.backlog.put(messages)
        except BackendError as exc:
            self._say_failed(exc)
            self.backlog.put_in_memory(messages)
        try:
            self._deliver_or_overflow(droppable=0)
        except BackendError as exc:
            self._say_failed(exc)

    def _say_failed(self, exc: BackendError) -> None:
        self._log.error(f"CHANNEL({self.name}): failed to put message to backend - {exc}")

    def empty(self) -> None:
        """Drop all messages, those in flight and deferred included. Raises ``OSError``."""
        for held in self._in_flight.values():
            held.clear()
        self._drop_abandoned()
        self.deferred.clear()
        self.backlog.empty()

    def pause(self) -> None:
        """Deliver nothing until `unpause`; what is in flight may still be answered."""
        self.is_paused = True
        for consumer in self.consumers:
            consumer.flush()

    def unpause(self) -> None:
        """Deliver again."""
        self.is_paused = False
        self.wake()

    # delivery

    def wake(self) -> None:
        """Have a turn of delivery soon: there are new messages, or a consumer has room again."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_scheduled = False
        self._deliver(self._loop.time() + _TURN_S)

    def _deliver(self, until_s: float = inf) -> None:
        """Deal the backlog out, until nobody has room or the turn is over."""
        backlog = self.backlog
        while backlog.has_messages and not self.is_paused and not self._is_closed:
            ready = [consumer for consumer in self.consumers if consumer.room > 0]
            if not ready:
                return
            share = max(1, min(_TURN_COUNT, len(backlog) // len(ready)))
            now_s = self._loop.time()
            if now_s >= until_s:
                self.wake()
                return
            for consumer in ready:
                messages = backlog.get(min(consumer.room, share), _TURN_BYTES)
                if not messages:
                    return
                consumer.deliver(messages, now_s)
                # whoever was served last is asked last
                del self.consumers[consumer]
                self.consumers[consumer] = None

    def watch(self, when_s: float) -> None:
        """Have the timer look at deadlines at ``when_s`` or before."""
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        expired = [
            message for held in self._in_flight.values() for message in held.take_expired(now_s)
        ]
        if expired:
            self.timeout_count += len(expired)
            self._drop_abandoned()
            self._queue_again([again(message) for message in expired])
        due = self.deferred.take_due(now_s)
        if due:
            self._queue_again(due)
        deadlines = [held.next_deadline_s() for held in self._in_flight.values()]
        deadlines.append(self.deferred.next_due_s())
        next_s = min((when for when in deadlines if when is not None), default=None)
        if next_s is not None:
            self.watch(next_s)

    # the end

    def delete(self) -> None:
        """Disconnect the consumers and drop everything. Raises ``OSError``."""
        self._end()
        self.backlog.delete()

    def close(self) -> None:
        """Disconnect the consumers and write everything to disk. Raises ``OSError``."""
        self._end()
        self.backlog.close(self._unfinished())

    def _unfinished(self) -> Iterable[bytes]:
        for held in self._in_flight.values():
            yield from map(delivered_to_record, held)
        yield from map(to_record, self.deferred)

    def _end(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for consumer in list(self.consumers):
            consumer.disconnect()
        self.consumers.clear()
