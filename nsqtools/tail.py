"""Tail and peek: write the messages of topics as they arrive, or show messages of a channel.

A tail finishes messages after they are written. One consumer subscribes to all topics, and one
thread writes, so lines of different topics are never mixed. A batch is encoded and written as a
whole, and then finished. Filtered messages are finished unwritten. Messages beyond a count, and
unwritten messages after an error, are requeued immediately without backoff. `LimitWatch` ends a
tail after N messages, after an idle time, or after a total time.

A peek receives messages, shows them, and requeues them. nsqd can show a message only by delivering
it, so the attempts of each message grow by one, and the consumers of the channel do not get it
meanwhile. All messages stay in flight until the connections have stopped delivering: nsqd would
immediately redeliver a message that is requeued earlier.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import Consumer, Stopped, make_consumer
from nsqtools.client.message import Batch, Message
from nsqtools.client.options import ClientOptions
from nsqtools.protocol.names import Address


class End(enum.Enum):
    """The reason for the end of a tail."""

    COUNT = "count"
    IDLE = "idle"
    TIME = "time"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of a tail, None for no limit. Times are in seconds."""

    count: int | None = None
    idle_s: float | None = None
    for_s: float | None = None


UNLIMITED = RunLimits()


class LimitWatch:
    """The limits of a run that began at ``now``, by the caller's clock.

    ``count`` is the number of accepted messages.
    """

    def __init__(self, limits: RunLimits, now: float) -> None:
        self.count = 0
        self._limits = limits
        self._ends_at = math.inf if limits.for_s is None else now + limits.for_s
        self._idle_s = math.inf if limits.idle_s is None else limits.idle_s
        self.idle_since = now

    def remaining_s(self, now: float) -> float:
        """Return the seconds until the end of the total time."""
        return max(0.0, self._ends_at - now)

    def record_activity(self, now: float) -> None:
        """Record that the tail is not idle."""
        self.idle_since = now

    def room_for(self, count: int) -> int:
        """Return how many of ``count`` messages are within the limit, and count them."""
        if self._limits.count is not None:
            count = min(count, self._limits.count - self.count)
        self.count += count
        return count

    def end(self, now: float) -> End | None:
        """Return the limit that was reached, None before."""
        if self._limits.count is not None and self.count >= self._limits.count:
            return End.COUNT
        if now >= self._ends_at:
            return End.TIME
        return End.IDLE if now - self.idle_since >= self._idle_s else None

    def wait_s(self, now: float) -> float | None:
        """Return how long to wait for a message before `end` must be checked again."""
        end = min(self._ends_at, self.idle_since + self._idle_s)
        return None if end == math.inf else max(0.0, end - now)

    @property
    def falls_short(self) -> bool:
        """Whether a count was given but not reached."""
        return self._limits.count is not None and self.count < self._limits.count


# Interval of progress reports, and of checks of an idle tail.
TICK_S = 0.25

# Converts topic, nsqd and messages to the bytes to write.
Encode = Callable[[str, str, Iterable[Message]], bytes]


class Tail:
    """A tail of one or more topics. Call `run` on one thread, and `stop` on any.

    Args:
        keep: The filter of messages.
        on_tick: Called a few times a second on the thread of `run`, to show progress.
        unavailable_topics: Called with the topics without a connection. It returns those that are
            not expected to get one. If it is given, the idle limit ends the tail only while all
            other topics are connected.
        subscribe_check: As for `Consumer._look_before_subscribing`.
    """

    def __init__(
        self,
        topics: Sequence[str],
        channel: str,
        connection: ConnectionSettings,
        *,
        options: ClientOptions,
        write: Callable[[bytes], None],
        encode: Encode,
        keep: Callable[[Message], bool] | None = None,
        limits: RunLimits = UNLIMITED,
        on_tick: Callable[[Tail], None] | None = None,
        unavailable_topics: Callable[[Set[str]], Set[str]] | None = None,
        subscribe_check: Callable[[str, Address], Callable[[], None] | None] | None = None,
    ) -> None:
        self._limits = limits
        if limits.count is not None and keep is None:
            # More messages in flight would only have their attempts raised. Each topic needs one.
            needed = min(options.max_in_flight, limits.count)
            options = replace(options, max_in_flight=max(len(topics), needed))
        self._write = write
        self._encode = encode
        self._keep = keep
        self._on_tick = on_tick
        self._unavailable_topics = unavailable_topics
        self._subscribe_check = subscribe_check
        self._next_tick = 0.0
        self._consumer = make_consumer(connection, topics, channel, options)
        self.watch = LimitWatch(limits, 0.0)

    @property
    def received(self) -> int:
        """The number of received messages, including filtered ones."""
        return self._consumer.stats.received

    @property
    def connections(self) -> dict[str, list[str]]:
        """The connected nsqd of each topic."""
        return self._consumer.connections_by_topic()

    def look_up_soon(self) -> None:
        """Ask nsqlookupd within seconds instead of at the end of the poll interval."""
        self._consumer._look_up_soon()

    def run(self) -> End:
        """Tail until a limit is reached or `stop` is called; return the reason for the end.

        Raises the connection error if no nsqd can be reached at the start, and errors of ``write``
        after requeuing the unwritten messages.
        """
        self.watch = LimitWatch(self._limits, time.monotonic())
        try:
            if self._subscribe_check is not None:
                self._consumer._look_before_subscribing(self._subscribe_check)
            remaining_s = self.watch.remaining_s(time.monotonic())
            self._consumer.start(fail_fast=True, wait_s=remaining_s, for_all=False)
            return self._pump()
        finally:
            self._consumer.stop()

    def stop(self) -> None:
        """Ask `run` to end. The batch that is being written is finished, others are requeued."""
        self._consumer.begin_stop()

    def end_after_delivered(self) -> None:
        """Ask `run` to end after writing the messages that nsqd has already sent."""
        self._consumer.begin_stop(drain=True)

    def _pump(self) -> End:
        while True:
            now = time.monotonic()
            end = self.watch.end(now)
            if end is not None and end is not End.IDLE:
                return end
            # After the idle time, check the backlog once more. A process that was suspended has not
            # read its connections meanwhile.
            wait_s = self.watch.wait_s(now) if end is None else TICK_S
            entry = self._consumer._backlog.get(self._tick(now, wait_s))
            if isinstance(entry, Stopped):
                entry.consumer._raise_failure()
                return End.STOPPED
            if isinstance(entry, Batch):
                self._write_batch(entry)
                # Writing may have blocked for long, so the clock is read again.
                self.watch.record_activity(time.monotonic())
            elif end is End.IDLE:
                if not self._consumer._has_tried_all or self._is_connecting():
                    self.watch.record_activity(now)
                elif self._consumer._had_turns(self.watch.idle_since):
                    return end

    def _is_connecting(self) -> bool:
        if self._unavailable_topics is None:
            return False
        unconnected = {topic for topic, addresses in self.connections.items() if not addresses}
        return not unconnected <= self._unavailable_topics(unconnected)

    def _tick(self, now: float, wait_s: float | None) -> float | None:
        """Call ``on_tick`` if it is due; return how long to wait for messages at most."""
        if self._on_tick is None:
            return wait_s
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._on_tick(self)
        return TICK_S if wait_s is None else min(wait_s, TICK_S)

    def _write_batch(self, batch: Batch) -> None:
        try:
            kept = batch if self._keep is None else [m for m in batch if self._keep(m)]
            room = self.watch.room_for(len(kept))
            if room < len(kept):
                first_beyond = kept[room]
                kept = kept[:room]
                for message in batch[batch.index(first_beyond) :]:
                    message.requeue(0, backoff=False)
            if kept:
                self._write(self._encode(batch.topic, batch.nsqd, kept))
        except BaseException:
            batch.requeue(0, backoff=False)
            raise
        batch.finish()


# With fewer messages in flight than nsqd, the nsqd would deliver one after the other.
MIN_IN_FLIGHT = 8
# Share of msg_timeout for which the first message may stay in flight. After msg_timeout nsqd would
# redeliver it, and the peek would show it twice.
PEEK_SHARE = 0.5
# The limit of messages in flight starts small and grows at least once a second. A starved consumer
# therefore waits this long for the next message.
LIMIT_GROWTH_S = 1.5


class Peeked(NamedTuple):
    """The numbers of received and of shown messages of a peek.

    ``is_complete`` is False if the channel may have further matches.
    """

    received: int
    shown: int
    is_complete: bool = True


def peek(
    topic: str,
    channel: str,
    connection: ConnectionSettings,
    count: int,
    show: Callable[[Sequence[Message]], None],
    *,
    keep: Callable[[Message], bool] | None = None,
    max_messages: int = 0,
    depth: int | None = None,
    options: ClientOptions,
    idle_s: float,
    for_s: float = math.inf,
    on_start: Callable[[Consumer], object] = lambda consumer: None,
) -> Peeked:
    """Show the first ``count`` messages that ``keep`` accepts, of at most ``max_messages``.

    The peek ends earlier

    - with all ``depth`` messages of the channel (None: unknown),
    - after ``idle_s`` without a message, and after ``for_s``,
    - before nsqd would redeliver the first message, and
    - when the consumer that ``on_start`` gets is stopped.

    Topic and channel must exist, because subscribing creates them. Raises the connection error if
    no nsqd can be reached, and errors of ``keep`` and ``show``. Every message is requeued in any
    case.
    """
    limit = count if keep is None else max(count, max_messages)
    expected = limit if depth is None else min(limit, depth)
    nsqds = connection.nsqd_tcp_addresses
    min_in_flight = MIN_IN_FLIGHT if connection.lookupd_http_addresses else len(nsqds)
    # With a sample rate nsqd would discard the other messages.
    options = replace(options, max_in_flight=max(limit, min_in_flight), sample_rate=0)
    consumer = make_consumer(connection, topic, channel, options)
    taken: list[Batch] = []
    kept: list[Message] = []

    def take(batch: Batch) -> None:
        taken.append(batch)
        kept.extend(message for message in batch if keep is None or keep(message))

    consumer._gather(0, limit)
    consumer.start(fail_fast=True)
    with consumer:
        on_start(consumer)
        try:
            silent_since = time.monotonic()
            ends_at = silent_since + for_s
            is_complete = False
            while len(kept) < count and sum(map(len, taken)) < expected:
                wait_s = min(idle_s, ends_at - time.monotonic())
                batch = consumer.next_batch(wait_s) if wait_s > 0 else None
                if batch is None and wait_s == idle_s:
                    # The limit of messages in flight may have kept further messages at nsqd, and a
                    # connection may not have been read yet. Silence proves nothing then.
                    if consumer.is_starved:
                        remaining_s = max(0.0, ends_at - time.monotonic())
                        batch = consumer.next_batch(min(LIMIT_GROWTH_S, remaining_s))
                    elif not consumer._had_turns(silent_since):
                        continue
                if batch is None:
                    is_complete = wait_s == idle_s and not consumer.is_starved
                    break
                take(batch)
                silent_since = time.monotonic()
                first = taken[0][0]
                window_s = PEEK_SHARE * (first.deadline - first.received_at)
                ends_at = min(ends_at, first.received_at + window_s)
            consumer.begin_stop(drain=True)
            for batch in iter(consumer.next_batch, None):
                take(batch)
            matches = kept[:count]
            show(matches)
        finally:
            for batch in taken:
                batch.requeue(0, backoff=False)
    received = sum(map(len, taken))
    is_complete |= depth is not None and received >= depth
    return Peeked(received, len(matches), is_complete or len(matches) == count)
