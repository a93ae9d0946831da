"""A channel and its subscriptions: the waiting, in-flight and deferred messages.

Messages arrive in the backlog. A round of delivery is then scheduled for the end of the current
loop iteration, so that a burst of commands costs one round. A round distributes the backlog to the
consumers that have room, in rotation. One timer is set to the earliest deadline of all messages in
flight or deferred.

The messages of a consumer that disconnected stay in flight until they time out, as in nsqd.

RDY is an upper limit on the messages in flight, not a credit that deliveries use up. Output is
buffered as in nsqd. It is flushed immediately when the client has no room for another message or
the buffer is full, otherwise by a ticker of ``output_buffer_timeout``. The ticker does not start
with a message, so the first message after an idle period leaves without delay.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable, Iterator
from math import inf
from random import randrange
from typing import TYPE_CHECKING, Protocol

from nsqtools.http.loop_meter import free_in_steps, meter_of
from nsqtools.protocol.names import is_ephemeral
from nsqtools.server.queues.message_buffer import (
    BackendError,
    ChannelCallbacks,
    DiskHealth,
    QueueBacklog,
)
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    ID_AT,
    InFlightMessages,
    LatencyWindow,
    for_redelivery,
    message_ids,
    timestamp_ns,
)

if TYPE_CHECKING:
    from nsqtools.server.client_connection import ClientConnection
    from nsqtools.server.daemon_log import DaemonLog
    from nsqtools.server.durable_store import DurableStore
    from nsqtools.server.negotiation import Negotiated
    from nsqtools.server.options import NsqdOptions


# The share of one consumer in a round of delivery. It bounds how long other consumers, and other
# work of the loop, wait for it.
_SHARE_COUNT = 256
_SHARE_BYTES = 1 << 18
# The interval at which nsqd looks for messages that have timed out. With a shorter timeout, as of
# --msg-timeout=0, the loop would do nothing but deliver the same message again.
_MIN_TIMEOUT_S = 0.1
# Reading failed, and each attempt logs an error. A disk that recovers delays delivery by this.
_READ_RETRY_S = 1.0


class QueueHost(Protocol):
    """What topics and channels need of `NsqdQueues`, which imports them."""

    options: NsqdOptions
    loop: AbstractEventLoop
    log: DaemonLog
    health: DiskHealth
    durable: DurableStore | None

    def backlog(
        self,
        queue_name: str,
        is_ephemeral: bool,
        callbacks: ChannelCallbacks = ...,
    ) -> QueueBacklog: ...
    def channel_created(self, channel: Channel) -> None: ...
    def channel_deleted(self, channel: Channel) -> None: ...


class Channel:
    """One channel of a topic. ``on_idle`` is called when the last consumer has left."""

    def __init__(
        self, topic_name: str, name: str, nsqd: QueueHost, on_idle: Callable[[Channel], None]
    ) -> None:
        options = nsqd.options
        self.topic_name = topic_name
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        callbacks = ChannelCallbacks(self.room, self.wake, self.watch)
        self.backlog: QueueBacklog = nsqd.backlog(
            f"{topic_name}:{name}", self.is_ephemeral, callbacks
        )
        # Ordered: the consumer that got messages last is at the end.
        self.consumers: dict[ChannelSubscription, None] = {}
        self.latency: LatencyWindow | None = None
        if percentiles := options.e2e_processing_latency_percentile:
            window_s = options.e2e_processing_latency_window_time
            self.latency = LatencyWindow(percentiles, window_s)
        self.is_paused: bool = False
        self.message_count = self.requeue_count = self.timeout_count = 0
        self._on_idle = on_idle
        self._loop = nsqd.loop
        self._meter = meter_of(nsqd.loop)
        self._log = nsqd.log
        # One for each consumer, and for disconnected consumers until their messages time out.
        self._in_flight: set[InFlightMessages] = set()
        self._is_delivery_scheduled = False
        self._is_closed = False
        self._timer: TimerHandle | None = None
        if self.backlog.deferred_count:
            self.watch(self._loop.time())

    @property
    def in_flight_count(self) -> int:
        """The number of messages in flight, including those of disconnected consumers."""
        return sum(map(len, self._in_flight)) if self._in_flight else 0

    # consumers

    def add_consumer(self, consumer: ChannelSubscription) -> None:
        """Deliver messages to a client."""
        self.consumers[consumer] = None
        self._in_flight.add(consumer.in_flight)

    def remove_consumer(self, consumer: ChannelSubscription) -> None:
        """Remove a client that disconnected. Its messages stay in flight until they time out."""
        if self._is_closed:
            return
        del self.consumers[consumer]
        if not consumer.in_flight:
            self._in_flight.discard(consumer.in_flight)
        if not self.consumers:
            self._on_idle(self)

    def _drop_disconnected(self) -> None:
        connected = {consumer.in_flight for consumer in self.consumers}
        self._in_flight = {
            in_flight for in_flight in self._in_flight if in_flight or in_flight in connected
        }

    def in_flight_anywhere(self, message_ids: Iterable[bytes]) -> set[bytes]:
        """Return the ids of ``message_ids`` that are in flight, to any consumer."""
        ids = set(message_ids)
        return {id_ for in_flight in self._in_flight for id_ in in_flight.intersection(ids)}

    # messages

    def accept(self, count: int) -> None:
        """Deliver new messages that the topic has put into the backlog."""
        self.message_count += count
        self._deliver_or_overflow()

    def room(self) -> int:
        """Return how many messages consumers have room for now."""
        if self.is_paused:
            return 0
        return sum(max(0, consumer.room) for consumer in self.consumers)

    def committed(self, count: int, messages: list[bytes], delay_s: float) -> None:
        """Deliver new messages whose transaction is committed.

        The backlog of an ephemeral channel is not in the database and gets ``messages`` here.
        """
        self.message_count += count
        if self.is_ephemeral and delay_s:
            self._defer(messages[0], delay_s)
        elif self.is_ephemeral:
            self._requeue(messages)
        else:
            self.wake()

    def put_deferred(self, message: bytes, delay_s: float) -> None:
        """Store a new message of the topic that is due later."""
        self.message_count += 1
        self._defer(message, delay_s)

    def requeue(self, messages: list[bytes], delay_s: float) -> None:
        """Requeue messages of a consumer. They stay in memory if the disk fails."""
        self.requeue_count += len(messages)
        if not delay_s:
            self._requeue(for_redelivery(messages))
            return
        for message in for_redelivery(messages):
            self._defer(message, delay_s)

    def _defer(self, message: bytes, delay_s: float) -> None:
        due_s = self._loop.time() + delay_s
        self.backlog.defer(message, due_s)
        self.watch(due_s)

    def _deliver_or_overflow(self) -> None:
        self.wake()
        # Consumers may have room for the surplus. Only the rest is written to disk.
        if self.backlog.exceeds_memory:
            self._deliver()
            try:
                self.backlog.overflow()
            except BackendError as exc:
                # The messages stay in memory, and publishes are refused until the disk works.
                self._log_put_failure(exc)

    def _requeue(self, messages: list[bytes]) -> None:
        """Queue messages that must not be lost when the disk fails."""
        try:
            self.backlog.put(messages)
        except Exception as exc:  # any kind: no other place has these messages
            self._log_put_failure(exc)
            self.backlog.put_in_memory(messages)
        self._deliver_or_overflow()

    def _log_put_failure(self, exc: Exception) -> None:
        reason = str(exc) or repr(exc)
        self._log.error(f"CHANNEL({self.name}): failed to put message to backend - {reason}")

    def empty(self) -> None:
        """Drop all messages, including messages in flight and deferred ones."""
        for in_flight in self._in_flight:
            in_flight.clear()
        self._drop_disconnected()
        free_in_steps(self.backlog.empty())

    def set_paused(self, is_paused: bool) -> None:
        """Stop or resume delivery. Messages in flight can still be answered while paused."""
        self.is_paused = is_paused
        for consumer in self.consumers:
            consumer.flush()
        self.wake()

    # delivery

    def wake(self) -> None:
        """Schedule a round of delivery, for new messages or a consumer that has room again."""
        if not self._is_delivery_scheduled and self.consumers:
            self._is_delivery_scheduled = True
            self._meter.soon(self._run_delivery, self._loop)

    def _run_delivery(self) -> None:
        self._is_delivery_scheduled = False
        self._deliver(self._meter.share_ends_s())

    def _deliver(self, until_s: float = inf) -> None:
        """Distribute the backlog until no consumer has room or the time is ``until_s``."""
        backlog = self.backlog
        while backlog.has_messages and not self.is_paused and not self._is_closed:
            ready = [consumer for consumer in self.consumers if consumer.room > 0]
            if not ready:
                return
            # An equal share of a short backlog for each, so that one does not get all of it.
            share = max(1, min(_SHARE_COUNT, len(backlog) // len(ready)))
            now_s = self._loop.time()
            for consumer in ready:
                messages = backlog.get(min(consumer.room, share), _SHARE_BYTES)
                if not messages:
                    self.watch(now_s + _READ_RETRY_S)
                    return
                self.backlog.delivered(messages)
                self._deliver_to(consumer, messages, now_s)
                # Move the consumer to the end of the rotation.
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
        except Exception as exc:
            # One broken connection must not stop the others. Messages that are not in flight to it
            # yet go back to the front of the backlog.
            consumer.connection.fail(exc)
            self.backlog.put_back(
                [
                    message
                    for message in messages
                    if message[ID_AT:BODY_AT] not in consumer.in_flight
                ]
            )

    def watch(self, when_s: float) -> None:
        """Check the deadlines at ``when_s`` or earlier."""
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._schedule_deadlines)

    def _schedule_deadlines(self) -> None:
        self._timer = None
        self._meter.soon(self._check_deadlines, self._loop)

    def _check_deadlines(self) -> None:
        """Requeue a part of the messages whose deadline has passed, and set the timer again.

        The rest is due immediately, after the clients have been served.
        """
        if self._is_closed:
            return
        self.wake()
        self._requeue_due(self._loop.time())
        deadlines = [in_flight.next_deadline_s() for in_flight in self._in_flight]
        deadlines.append(self.backlog.next_due_s())
        next_s = min((when for when in deadlines if when is not None), default=None)
        if next_s is not None:
            self.watch(next_s)

    def _requeue_due(self, now_s: float) -> None:
        expired: list[bytes] = []
        for in_flight in self._in_flight:
            expired += in_flight.take_expired(now_s, _SHARE_COUNT - len(expired))
        if expired:
            self.timeout_count += len(expired)
            self._drop_disconnected()
            self._requeue(for_redelivery(expired))
        if due := self.backlog.take_due(now_s, _SHARE_COUNT):
            self._requeue(due)

    # the end

    def delete(self) -> None:
        """Disconnect the consumers and drop everything."""
        self._end()
        free_in_steps(self.backlog.delete())

    def close(self) -> None:
        """Disconnect the consumers and write everything to disk. Raises ``OSError``."""
        self._end()
        self.backlog.close(self._take_in_flight())

    def _take_in_flight(self) -> Iterator[list[bytes]]:
        for in_flight in self._in_flight:
            while messages := in_flight.take_expired(inf, _SHARE_COUNT):
                yield for_redelivery(messages)

    def _end(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for consumer in list(self.consumers):
            consumer.connection.close()
        self.consumers.clear()


class ChannelSubscription:
    """The subscription of one connection: its RDY count, messages in flight and output buffer."""

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
        self._timeout_s = max(_MIN_TIMEOUT_S, terms.msg_timeout_s)
        self._loop = loop
        self._epoch_s = loop.time()
        self._ticks_used = 0
        self._flush_timer: TimerHandle | None = None

    @property
    def room(self) -> int:
        """The number of messages that may be delivered now. Negative after RDY was lowered."""
        if self.connection.is_stuck:
            return 0
        return self.ready_count - len(self.in_flight) - self.channel.backlog.unwritten_finishes

    def set_ready_count(self, count: int) -> None:
        """RDY: allow ``count`` messages in flight. Messages in flight beyond that stay there."""
        self.ready_count = count
        if self.room > 0:
            self.channel.wake()
        else:
            self.flush()

    # delivery

    def deliver(self, messages: list[bytes], now_s: float) -> None:
        """Send messages, which are in flight from now on."""
        terms = self._terms
        if terms.sample_rate:
            sampled: list[bytes] = []
            dropped: list[bytes] = []
            for message in messages:
                # nsqd compares with <= as well, so it delivers one percent more than the rate.
                (sampled if randrange(100) <= terms.sample_rate else dropped).append(message)
            self.channel.backlog.finished(message_ids(dropped))
            messages = sampled
            if not messages:
                return
        self.in_flight.add(messages, now_s, self._timeout_s)
        self.message_count += len(messages)
        self.channel.watch(now_s + self._timeout_s)
        queued = self.connection.buffer(messages, sum(map(len, messages)))
        if queued >= terms.output_buffer_size or self.room <= 0:
            self.flush()
        elif self._flush_timer is None and terms.output_buffer_timeout_s:
            self._wait_for_tick(now_s)

    def _wait_for_tick(self, now_s: float) -> None:
        interval_s = self._terms.output_buffer_timeout_s
        ticks = int((now_s - self._epoch_s) / interval_s)
        # A tick passed while nothing was buffered, so this message need not wait for the next one.
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
        """Write the buffered messages to the connection."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self.connection.flush()

    # answers

    def finish(self, ids: list[bytes]) -> list[bytes]:
        """FIN: finish messages; return the ids that were not in flight to this consumer."""
        messages, failed = self.in_flight.take(ids)
        self.finish_count += len(messages)
        if self.channel.latency is not None:
            self.channel.latency.add(map(timestamp_ns, messages))
        self.channel.backlog.finished(message_ids(messages) if failed else ids)
        self.channel.wake()
        return failed

    def requeue(self, ids: list[bytes], delay_s: float) -> list[bytes]:
        """REQ: requeue messages; return the ids that were not in flight to this consumer."""
        messages, failed = self.in_flight.take(ids)
        self.requeue_count += len(messages)
        self.channel.requeue(messages, delay_s)
        self.channel.wake()
        return failed

    def touch(self, ids: list[bytes], limit_s: float) -> list[bytes]:
        """TOUCH: restart timeouts; return the ids that were not in flight to this consumer."""
        failed = self.in_flight.touch(ids, self._loop.time(), self._timeout_s, limit_s)
        deadline_s = self.in_flight.next_deadline_s()
        if deadline_s is not None:
            self.channel.watch(deadline_s)
        return failed

    # the end

    def leave(self) -> None:
        """Unsubscribe: the client has disconnected."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self.channel.remove_consumer(self)
