"""Tail and peek: every message of some topics to one writer, or a look at messages of a channel.

A tail finishes messages only once they are written. One consumer has all topics, and one thread
writes: lines of different topics cannot tear each other. A batch is encoded and written whole, then
finished in one go. Messages that a filter leaves out are finished unwritten; messages beyond a
count, and whatever could not be written, are requeued at once and without backoff. `LimitWatch`
decides when a stream ends by itself: after N messages, when idle, after a time.

A peek receives, shows, and gives back. nsqd knows no other way to show a message than to deliver
it, so the attempts of each grow by one, and the channel's consumers do without it meanwhile. All
are held until the connections are done delivering: one that is given back earlier would come again
at once.
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
    """Why a stream ended."""

    COUNT = "count"
    IDLE = "idle"
    TIME = "time"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Each None means without limit. Times are seconds."""

    count: int | None = None
    idle_s: float | None = None
    for_s: float | None = None


UNLIMITED = RunLimits()


class LimitWatch:
    """The limits of one run that began at ``now``; times are readings of the caller's clock."""

    def __init__(self, limits: RunLimits, now: float) -> None:
        self.count = 0  # messages taken
        self._limits = limits
        self._ends_at = math.inf if limits.for_s is None else now + limits.for_s
        self._idle_s = math.inf if limits.idle_s is None else limits.idle_s
        self.idle_since = now

    def left_s(self, now: float) -> float:
        """Return the seconds until the run has to end."""
        return max(0.0, self._ends_at - now)

    def saw_message(self, now: float) -> None:
        """Something came: the stream is not idle."""
        self.idle_since = now

    def room_for(self, count: int) -> int:
        """Return how many of ``count`` messages may still be taken, and count them."""
        if self._limits.count is not None:
            count = min(count, self._limits.count - self.count)
        self.count += count
        return count

    def end(self, now: float) -> End | None:
        """Return the limit that is reached, if one is."""
        if self._limits.count is not None and self.count >= self._limits.count:
            return End.COUNT
        if now >= self._ends_at:
            return End.TIME
        return End.IDLE if now - self.idle_since >= self._idle_s else None

    def wait_s(self, now: float) -> float | None:
        """Return how long to wait for a message before looking at `end` again."""
        end = min(self._ends_at, self.idle_since + self._idle_s)
        return None if end == math.inf else max(0.0, end - now)

    @property
    def falls_short(self) -> bool:
        """Tell whether a count was asked for and not reached."""
        return self._limits.count is not None and self.count < self._limits.count


TICK_S = 0.25

Encode = Callable[[str, str, Iterable[Message]], bytes]
"""From topic, nsqd and messages to the bytes to write."""


class Tail:
    """One tail of one or more topics. `run` it on one thread; `stop` it from any.

    ``on_tick`` is called there a few times a second, to show progress.
    ``look`` is as for `Consumer.look_before_subscribing`. What waits at an nsqd that is met again
    was published meanwhile, for this tail, too.
    With ``not_waited_for`` silence ends it only while every topic has a connection, but for those
    that this returns of the ones without.
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
        not_waited_for: Callable[[Set[str]], Set[str]] | None = None,
        look: Callable[[str, Address], Callable[[], None] | None] | None = None,
    ) -> None:
        self._limits = limits
        if limits.count is not None and keep is None:
            # what is in flight beyond the count would only have its attempts raised
            wanted = min(options.max_in_flight, limits.count)
            options = replace(options, max_in_flight=max(len(topics), wanted))
        self._write = write
        self._encode = encode
        self._keep = keep
        self._on_tick = on_tick
        self._not_waited_for = not_waited_for
        self._look = look
        self._next_tick = 0.0
        self._consumer = make_consumer(connection, topics, channel, options)
        self.watch = LimitWatch(limits, 0.0)

    @property
    def received(self) -> int:
        """How many messages came, with those that are left out."""
        return self._consumer.stats.received

    @property
    def connections(self) -> dict[str, list[str]]:
        """The nsqd that each topic is consumed from now."""
        return self._consumer.connections_by_topic()

    def look_up_soon(self) -> None:
        """Ask nsqlookupd in a second or a few, and not only when its interval has passed."""
        self._consumer.look_up_soon()

    def run(self) -> End:
        """Tail until a limit is reached or `stop` is called; return what ended it.

        Raises the connection error when no nsqd can be reached at the start, and what ``write``
        raises; the messages not written are requeued then.
        """
        self.watch = LimitWatch(self._limits, time.monotonic())
        try:
            if self._look is not None:
                self._consumer.look_before_subscribing(self._look)
            left_s = self.watch.left_s(time.monotonic())
            self._consumer.start(fail_fast=True, wait_s=left_s, for_all=False)
            return self._pump()
        finally:
            self._consumer.stop()

    def stop(self) -> None:
        """Ask `run` to end: what is being written is finished, the rest requeued."""
        self._consumer.begin_stop()

    def end_after_delivered(self) -> None:
        """Ask `run` to end with what nsqd has sent already: that is still written."""
        self._consumer.begin_stop(drain=True)

    def _pump(self) -> End:
        while True:
            now = time.monotonic()
            end = self.watch.end(now)
            if end is not None and end is not End.IDLE:
                return end
            # one more look: a process that stood still has not heard that nothing came
            wait_s = self.watch.wait_s(now) if end is None else TICK_S
            entry = self._consumer.backlog.get(self._tick(now, wait_s))
            if isinstance(entry, Stopped):
                entry.consumer.raise_failure()
                return End.STOPPED
            if isinstance(entry, Batch):
                self._pass_on(entry)  # which may take as long as its reader likes
                self.watch.saw_message(time.monotonic())
            elif end is End.IDLE:
                if not self._consumer.has_tried_all or self._is_connecting():
                    self.watch.saw_message(now)
                elif self._consumer.had_turns(self.watch.idle_since):
                    return end

    def _is_connecting(self) -> bool:
        if self._not_waited_for is None:
            return False
        cut_off = {topic for topic, addresses in self.connections.items() if not addresses}
        return not cut_off <= self._not_waited_for(cut_off)

    def _tick(self, now: float, wait_s: float | None) -> float | None:
        """Call ``on_tick`` when it is time to; return how long to wait for messages at most."""
        if self._on_tick is None:
            return wait_s
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._on_tick(self)
        return TICK_S if wait_s is None else min(wait_s, TICK_S)

    def _pass_on(self, batch: Batch) -> None:
        try:
            kept = batch if self._keep is None else [m for m in batch if self._keep(m)]
            room = self.watch.room_for(len(kept))
            if room < len(kept):
                beyond = kept[room]
                kept = kept[:room]
                for message in batch[batch.index(beyond) :]:
                    message.requeue(0, backoff=False)
            if kept:
                self._write(self._encode(batch.topic, batch.nsqd, kept))
        except BaseException:
            batch.requeue(0, backoff=False)
            raise
        batch.finish()


LEAST_IN_FLIGHT = 8
"""With fewer in flight than there are nsqd, they deliver in turn."""
HOLD_SHARE = 0.5
"""Of msg_timeout: how long messages are held while others are looked at."""
GROWS_S = 1.5
"""The number in flight, which starts small, grows at least once a second: longer than silence."""


class Peeked(NamedTuple):
    """How many messages were delivered and given back, and how many of them were shown.

    ``is_whole`` is False when there may be more to show than was looked at.
    """

    looked_at: int
    shown: int
    is_whole: bool = True


def peek(
    topic: str,
    channel: str,
    connection: ConnectionSettings,
    count: int,
    show: Callable[[Sequence[Message]], None],
    *,
    keep: Callable[[Message], bool] | None = None,
    look_at: int = 0,
    there: int | None = None,
    options: ClientOptions,
    idle_s: float,
    for_s: float = math.inf,
    on_start: Callable[[Consumer], object] = lambda consumer: None,
) -> Peeked:
    """Show the first ``count`` messages that ``keep`` accepts, of at most ``look_at``.

    Ends earlier when it has the ``there`` messages that the channel had (None: not known), when
    none came for ``idle_s``, after ``for_s``, before nsqd would deliver the first one again, which
    would then be seen twice, and when the consumer that ``on_start`` gets is stopped. Topic and
    channel must exist: subscribing creates them. Raises the connection error when no nsqd can be
    reached, and what ``keep`` and ``show`` raise; every message is given back in any case.
    """
    most = count if keep is None else max(count, look_at)
    least = most if there is None else min(most, there)
    nsqds = connection.nsqd_tcp_addresses
    spread = LEAST_IN_FLIGHT if connection.lookupd_http_addresses else len(nsqds)
    # of a sample nsqd would discard the rest
    options = replace(options, max_in_flight=max(most, spread), sample_rate=0)
    consumer = make_consumer(connection, topic, channel, options)
    held: list[Batch] = []
    kept: list[Message] = []

    def hold(batch: Batch) -> None:
        held.append(batch)
        kept.extend(each for each in batch if keep is None or keep(each))

    consumer.gather(0, most)
    consumer.start(fail_fast=True)
    with consumer:
        on_start(consumer)
        try:
            silent_since = time.monotonic()
            ends_at = silent_since + for_s
            is_whole = False
            while len(kept) < count and sum(map(len, held)) < least:
                wait_s = min(idle_s, ends_at - time.monotonic())
                batch = consumer.next_batch(wait_s) if wait_s > 0 else None
                if batch is None and wait_s == idle_s:
                    if consumer.is_starved:
                        left_s = max(0.0, ends_at - time.monotonic())
                        batch = consumer.next_batch(min(GROWS_S, left_s))
                    elif not consumer.had_turns(silent_since):
                        continue
                if batch is None:
                    is_whole = wait_s == idle_s and not consumer.is_starved
                    break
                hold(batch)
                silent_since = time.monotonic()
                first = held[0][0]
                hold_s = HOLD_SHARE * (first.deadline - first.received_at)
                ends_at = min(ends_at, first.received_at + hold_s)
            consumer.begin_stop(drain=True)
            for batch in iter(consumer.next_batch, None):
                hold(batch)
            shown = kept[:count]
            show(shown)
        finally:
            for batch in held:
                batch.requeue(0, backoff=False)
    looked_at = sum(map(len, held))
    is_whole |= there is not None and looked_at >= there
    return Peeked(looked_at, len(shown), is_whole or len(shown) == count)
