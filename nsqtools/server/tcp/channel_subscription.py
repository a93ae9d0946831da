"""A client's subscription to a channel: what may be pushed, what is held, when output is written.

RDY is a ceiling on the messages in flight, not a credit that is used up. Output is buffered as nsqd
does it: at once when the client has no room for more, when the buffer is full, and else with a
ticker of ``output_buffer_timeout`` that runs freely, so the first message after a quiet time leaves
without delay.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from random import randrange

from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.queued_message import InFlightMessages, timestamp_ns
from nsqtools.server.tcp.client_connection import ClientConnection
from nsqtools.server.tcp.negotiation import Negotiated


class ChannelSubscription:
    """The consumer side of one connection; see `channel.Consumer`."""

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
        self._connection = connection
        self._terms = terms
        self._loop = loop
        self._epoch_s = loop.time()
        self._ticks_used = 0
        self._flush_timer: TimerHandle | None = None

    @property
    def room(self) -> int:
        """How many more messages may be delivered now."""
        if self._connection.is_stuck:
            return 0
        return self.ready_count - len(self.in_flight)

    def set_ready_count(self, count: int) -> None:
        """RDY: allow so many messages in flight. 0 stops, and recalls nothing."""
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
            self.channel.discard([message for message in given if message not in sampled])
            if not messages:
                return
        self.in_flight.hold(messages, now_s, terms.msg_timeout_s)
        self.message_count += len(messages)
        self.channel.watch(now_s + terms.msg_timeout_s)
        queued = self._connection.buffer(messages, sum(map(len, messages)))
        if queued >= terms.output_buffer_size or self.room <= 0:
            self.flush()
        elif self._flush_timer is None and terms.output_buffer_timeout_s:
            self._wait_for_tick(now_s)

    def _wait_for_tick(self, now_s: float) -> None:
        interval_s = self._terms.output_buffer_timeout_s
        ticks = int((now_s - self._epoch_s) / interval_s)
        if ticks > self._ticks_used:
            self._ticks_used = ticks
            self._connection.flush()
        else:
            next_s = self._epoch_s + (self._ticks_used + 1) * interval_s
            self._flush_timer = self._loop.call_at(next_s, self._on_tick)

    def _on_tick(self) -> None:
        self._flush_timer = None
        self._ticks_used += 1
        self._connection.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._connection.flush()

    # answers

    def finish(self, message_ids: list[bytes]) -> list[bytes]:
        """FIN: forget messages that are done; return the ids that were not in flight here."""
        take = self.in_flight.take
        latency = self.channel.latency
        failed = []
        finished = []
        message = None
        for message_id in message_ids:
            message = take(message_id)
            if message is None:
                failed.append(message_id)
            elif latency is not None:
                finished.append(timestamp_ns(message))
        if message is not None:
            self.channel.latencies.add(timestamp_ns(message))
        if failed:
            unknown = set(failed)
            message_ids = [each for each in message_ids if each not in unknown]
        self.channel.finished(message_ids)
        self.finish_count += len(message_ids)
        if latency is not None and finished:
            latency.add(finished)
        self.channel.wake()
        return failed

    def requeue(self, message_id: bytes, delay_s: float) -> bool:
        """REQ: requeue a message. False: it is not in flight here."""
        message = self.in_flight.take(message_id)
        if message is None:
            return False
        self.requeue_count += 1
        self.channel.requeue(message, delay_s)
        self.channel.wake()
        return True

    def touch(self, message_id: bytes, limit_s: float) -> bool:
        """TOUCH: restart a message's timeout. False: it is not in flight here."""
        now_s = self._loop.time()
        if not self.in_flight.touch(message_id, now_s, self._terms.msg_timeout_s, limit_s):
            return False
        deadline_s = self.in_flight.next_deadline_s()
        if deadline_s is not None:
            self.channel.watch(deadline_s)
        return True

    # the end

    def leave(self) -> None:
        """The client went away."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self.channel.remove_consumer(self)

    def disconnect(self) -> None:
        """Close the connection: the channel is going away."""
        self._connection.close()
