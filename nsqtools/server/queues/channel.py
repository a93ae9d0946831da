"""A channel and the subscriptions to it: what waits, what consumers hold, and what is deferred.

Messages arrive in its backlog; a turn of delivery is scheduled for the end of the present loop
step, so that a burst of commands costs one turn. A turn deals the backlog to the consumers that
have room, in rotation. One timer is set to the earliest deadline of anything in flight or deferred.

The messages of a consumer that went away stay in flight until they time out, as in nsqd.

RDY is a ceiling on the messages in flight, not a credit that is used up. Output is buffered as nsqd
does it: at once when the client has no room for more, when the buffer is full, and else with a
ticker of ``output_buffer_timeout`` that runs freely, so the first message after a quiet time leaves
without delay.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable, Iterator
from math import inf
from random import randrange
from typing import TYPE_CHECKING, Protocol

from nsqtools.http.loop_meter import free_in_steps, meter_of
from nsqtools.protocol.names import is_ephemeral
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.message_buffer import BackendError, DiskHealth, QueueBacklog
from nsqtools.server.queues.queued_message import (
    InFlightMessages,
    LatencyWindow,
    again,
    message_ids,
    timestamp_ns,
)

if TYPE_CHECKING:
    from nsqtools.server.client_connection import ClientConnection
    from nsqtools.server.durable_store import DurableStore
    from nsqtools.server.negotiation import Negotiated


_TURN_COUNT = 256  # messages for one consumer before the next one has its turn
_TURN_BYTES = 1 << 18
_AGAIN_S = 1.0  # after nothing could be read from the disk


class QueueHost(Protocol):
    """What topics and channels need of their nsqd: `NsqdQueues`, which imports them."""

    options: NsqdOptions
    loop: AbstractEventLoop
    log: DaemonLog
    health: DiskHealth
    durable: DurableStore | None

    def backlog(self, queue_name: str, is_ephemeral: bool) -> QueueBacklog: ...
    def channel_created(self, channel: Channel) -> None: ...
    def channel_deleted(self, channel: Channel) -> None: ...


class Channel:
    """One channel of a topic. ``on_left`` is called when the last consumer has left."""

    def __init__(
        self, topic_name: str, name: str, nsqd: QueueHost, on_left: Callable[[Channel], None]
    ) -> None:
        options = nsqd.options
        self.topic_name = topic_name
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.backlog = nsqd.backlog(f"{topic_name}:{name}", self.is_ephemeral)
        self.consumers: dict[ChannelSubscription, None] = {}  # in the order of their turns
        self.latency: LatencyWindow | None = None
        if percentiles := options.e2e_processing_latency_percentile:
            window_s = options.e2e_processing_latency_window_time
            self.latency = LatencyWindow(percentiles, window_s)
        self.is_paused = False
        self.message_count = self.requeue_count = self.timeout_count = 0
        self._on_left = on_left
        self._loop = nsqd.loop
        self._meter = meter_of(nsqd.loop)
        self._log = nsqd.log
        # of the consumers, and of those that went away
        self._in_flight: set[InFlightMessages] = set()
        self._turn_scheduled = False
        self._is_closed = False
        self._timer: TimerHandle | None = None
        self.backlog.serve(self.room, self.wake, self.watch)
        if self.backlog.deferred_count:
            self.watch(self._loop.time())

    @property
    def in_flight_count(self) -> int:
        """How many messages consumers hold."""
        return sum(map(len, self._in_flight))

    # consumers

    def add_consumer(self, consumer: ChannelSubscription) -> None:
        """Let a client consume."""
        self.consumers[consumer] = None
        self._in_flight.add(consumer.in_flight)

    def remove_consumer(self, consumer: ChannelSubscription) -> None:
        """Forget a client that went away; what it held times out in its own time."""
        if self._is_closed:
            return
        del self.consumers[consumer]
        if not consumer.in_flight:
            self._in_flight.discard(consumer.in_flight)
        if not self.consumers:
            self._on_left(self)

    def _drop_abandoned(self) -> None:
        present = {consumer.in_flight for consumer in self.consumers}
        self._in_flight = {held for held in self._in_flight if held or held in present}

    def held_by_any(self, message_ids: Iterable[bytes]) -> set[bytes]:
        """Return those of some messages that are in flight, with whatever consumer."""
        wanted = set(message_ids)
        return {found for held in self._in_flight if held for found in held.of(wanted)}

    # messages

    def accept(self, count: int) -> None:
        """Deliver new messages of the topic, which are in the backlog of each channel now."""
        self.message_count += count
        self._deliver_or_overflow()

    def room(self) -> int:
        """Return how many messages consumers would take at once."""
        if self.is_paused:
            return 0
        return sum(max(0, consumer.room) for consumer in self.consumers)

    def committed(self, count: int, messages: list[bytes], delay_s: float) -> None:
        """Take new messages that are in the database of ``--durable``, if the backlog is.

        Only an ephemeral channel needs the ``messages`` themselves.
        """
        self.message_count += count
        if self.is_ephemeral and delay_s:
            self._defer(messages[0], delay_s)
        elif self.is_ephemeral:
            self._queue_again(messages)
        else:
            self.wake()

    def put_deferred(self, message: bytes, delay_s: float) -> None:
        """Take a new message from the topic that is due later."""
        self.message_count += 1
        self._defer(message, delay_s)

    def requeue(self, messages: list[bytes], delay_s: float) -> None:
        """Take back what a consumer gave back. It is kept in memory if the disk fails."""
        self.requeue_count += len(messages)
        if not delay_s:
            self._queue_again(again(messages))
            return
        for message in again(messages):
            self._defer(message, delay_s)

    def _defer(self, message: bytes, delay_s: float) -> None:
        due_s = self._loop.time() + delay_s
        self.backlog.defer(message, due_s)
        self.watch(due_s)

    def _deliver_or_overflow(self) -> None:
        self.wake()
        if self.backlog.is_over:
            self._deliver()
            try:
                self.backlog.overflow()
            except BackendError as exc:  # kept in memory: others are refused until it works
                self._say_failed(exc)

    def _queue_again(self, messages: list[bytes]) -> None:
        """Queue messages that must not get lost when the disk fails."""
        try:
            self.backlog.put(messages)
        except Exception as exc:  # of any kind: they are nowhere else
            self._say_failed(exc)
            self.backlog.put_in_memory(messages)
        self._deliver_or_overflow()

    def _say_failed(self, exc: Exception) -> None:
        reason = str(exc) or repr(exc)
        self._log.error(f"CHANNEL({self.name}): failed to put message to backend - {reason}")

    def empty(self) -> None:
        """Drop all messages, those in flight and deferred included."""
        for held in self._in_flight:
            held.clear()
        self._drop_abandoned()
        free_in_steps(self.backlog.empty())

    def set_paused(self, is_paused: bool) -> None:
        """Deliver nothing from now on, or again; what is in flight may still be answered."""
        self.is_paused = is_paused
        for consumer in self.consumers:
            consumer.flush()
        self.wake()

    # delivery

    def wake(self) -> None:
        """Have a turn of delivery soon: there are new messages, or a consumer has room again."""
        if not self._turn_scheduled and self.consumers:
            self._turn_scheduled = True
            self._meter.soon(self._take_turn, self._loop)

    def _take_turn(self) -> None:
        self._turn_scheduled = False
        self._deliver(self._meter.share_ends_s())

    def _deliver(self, until_s: float = inf) -> None:
        """Deal the backlog out, until no consumer has room or the turn is over."""
        backlog = self.backlog
        while backlog.has_messages and not self.is_paused and not self._is_closed:
            ready = [consumer for consumer in self.consumers if consumer.room > 0]
            if not ready:
                return
            share = max(1, min(_TURN_COUNT, len(backlog) // len(ready)))
            now_s = self._loop.time()
            for consumer in ready:
                messages = backlog.get(min(consumer.room, share), _TURN_BYTES)
                if not messages:
                    self.watch(now_s + _AGAIN_S)
                    return
                self.backlog.delivered(messages)
                self._deliver_to(consumer, messages, now_s)
                # the consumer that was served last is asked last
                del self.consumers[consumer]
                self.consumers[consumer] = None
                if self._loop.time() >= until_s:
                    self.wake()
                    return

    def _deliver_to(
        self, consumer: ChannelSubscription, messages: list[bytes], now_s: float
    ) -> None:
        try:
            consumer.deliver(messages, now_s)
        except Exception as exc:  # ends this consumer; what it does not hold is for others
            consumer.connection.fail(exc)
            self.backlog.put_back(
                [each for each in messages if each[18:34] not in consumer.in_flight]
            )

    def watch(self, when_s: float) -> None:
        """Have the timer look at deadlines at ``when_s`` or before."""
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._look_soon)

    def _look_soon(self) -> None:
        self._timer = None
        self._meter.soon(self._look_at_deadlines, self._loop)

    def _look_at_deadlines(self) -> None:
        """Queue again what is due, in parts, so that clients get their turns in between."""
        if self._is_closed:
            return
        self.wake()
        self._queue_what_is_due(self._loop.time())
        deadlines = [held.next_deadline_s() for held in self._in_flight]
        deadlines.append(self.backlog.next_due_s())
        next_s = min((when for when in deadlines if when is not None), default=None)
        if next_s is not None:
            self.watch(next_s)

    def _queue_what_is_due(self, now_s: float) -> None:
        expired: list[bytes] = []
        for held in self._in_flight:
            expired += held.take_expired(now_s, _TURN_COUNT - len(expired))
        if expired:
            self.timeout_count += len(expired)
            self._drop_abandoned()
            self._queue_again(again(expired))
        if due := self.backlog.take_due(now_s, _TURN_COUNT):
            self._queue_again(due)

    # the end

    def delete(self) -> None:
        """Disconnect the consumers and drop everything."""
        self._end()
        free_in_steps(self.backlog.delete())

    def close(self) -> None:
        """Disconnect the consumers and write everything to disk. Raises ``OSError``."""
        self._end()
        self.backlog.close(self._given_back())

    def _given_back(self) -> Iterator[list[bytes]]:
        for held in self._in_flight:
            while messages := held.take_expired(inf, _TURN_COUNT):
                yield again(messages)

    def _end(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for consumer in list(self.consumers):
            consumer.connection.close()
        self.consumers.clear()


class ChannelSubscription:
    """The consumer side of a connection: what may be pushed, what is held, when it is written."""

    def __init__(
        self,
        connection: ClientConnection,
        channel: Channel,
        terms: Negotiated,
        loop: AbstractEventLoop,
    ) -> None:
        self.channel = channel
        self.in_flight = InFlightMessages()
        self.ready_count = 0
        self.message_count = self.finish_count = self.requeue_count = 0
        self.connection = connection
        self._terms = terms
        self._loop = loop
        self._epoch_s = loop.time()
        self._ticks_used = 0
        self._flush_timer: TimerHandle | None = None

    @property
    def room(self) -> int:
        """How many more messages may be delivered now."""
        if self.connection.is_stuck:
            return 0
        return self.ready_count - len(self.in_flight) - self.channel.backlog.unsettled

    def set_ready_count(self, count: int) -> None:
        """RDY: allow ``count`` messages in flight. 0 stops delivery, and recalls nothing."""
        self.ready_count = count
        if self.room > 0:
            self.channel.wake()
        else:
            self.flush()

    # delivery

    def deliver(self, messages: list[bytes], now_s: float) -> None:
        """Push messages, which are in flight from now on."""
        terms = self._terms
        if terms.sample_rate:
            given = messages
            messages = [message for message in messages if randrange(100) <= terms.sample_rate]
            sampled = set(messages)
            left_out = [message for message in given if message not in sampled]
            self.channel.backlog.finished(message_ids(left_out))
            if not messages:
                return
        self.in_flight.hold(messages, now_s, terms.msg_timeout_s)
        self.message_count += len(messages)
        self.channel.watch(now_s + terms.msg_timeout_s)
        queued = self.connection.buffer(messages, sum(map(len, messages)))
        if queued >= terms.output_buffer_size or self.room <= 0:
            self.flush()
        elif self._flush_timer is None and terms.output_buffer_timeout_s:
            self._wait_for_tick(now_s)

    def _wait_for_tick(self, now_s: float) -> None:
        interval_s = self._terms.output_buffer_timeout_s
        ticks = int((now_s - self._epoch_s) / interval_s)
        if ticks > self._ticks_used:
            self._ticks_used = ticks
            self.connection.flush()
        else:
            next_s = self._epoch_s + (self._ticks_used + 1) * interval_s
            self._flush_timer = self._loop.call_at(next_s, self._on_tick)

    def _on_tick(self) -> None:
        self._flush_timer = None
        self._ticks_used += 1
        self.connection.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self.connection.flush()

    # answers

    def finish(self, ids: list[bytes]) -> list[bytes]:
        """FIN: forget messages that are done; return the ids that were not in flight here."""
        done, failed = self.in_flight.take(ids)
        self.finish_count += len(done)
        if self.channel.latency is not None:
            self.channel.latency.add(map(timestamp_ns, done))
        self.channel.backlog.finished(message_ids(done) if failed else ids)
        self.channel.wake()
        return failed

    def requeue(self, ids: list[bytes], delay_s: float) -> list[bytes]:
        """REQ: requeue messages; return the ids that were not in flight here."""
        messages, failed = self.in_flight.take(ids)
        self.requeue_count += len(messages)
        self.channel.requeue(messages, delay_s)
        self.channel.wake()
        return failed

    def touch(self, ids: list[bytes], limit_s: float) -> list[bytes]:
        """TOUCH: restart the timeouts of messages; return the ids that were not in flight here."""
        failed = self.in_flight.touch(ids, self._loop.time(), self._terms.msg_timeout_s, limit_s)
        deadline_s = self.in_flight.next_deadline_s()
        if deadline_s is not None:
            self.channel.watch(deadline_s)
        return failed

    # the end

    def leave(self) -> None:
        """The client went away."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self.channel.remove_consumer(self)
