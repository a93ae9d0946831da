"""One topic's turns: take what was delivered, and know when it is time to do what.

Messages are flushed when the interval of the oldest held one is over, when enough is held, and
when nsqd waits: everything delivered is taken and at least half of what may be in flight is held.
So a busy topic is flushed at the pace of the disk while nsqd sends on, a quiet one by the clock.

A topic has a consumer of its own, and its turns on one of a few threads (`Turns`): its trouble (a
full disk under its directory, a slow fsync) does not touch the others. A turn of a topic with a
backlog ends after `SLICE_S`, so that the others get theirs. When writing fails the messages go back
to nsqd, whose backoff - no messages, then a single one, and again - finds out when writing works
again.

NSQ limits what is in flight by count, not by bytes: 2500 messages of 200 bytes are nothing, 2500 of
a megabyte are more than many machines have. A topic begins with few, and is allowed as many as fit
into its share of memory at the size of the last ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from nsqtools.archive.archive_settings import Flush
from nsqtools.archive.topic_writer import TopicWriter, WriteFailed
from nsqtools.archive.troubles import WriteTrouble
from nsqtools.archive.turns import Turns
from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer, Stopped
from nsqtools.client.message import Batch
from nsqtools.client.reconnect import RetryDelays
from nsqtools.errors import NsqError

log = logging.getLogger("nsqtools")

SLICE_S = 0.05
RETRY_BASE_S = 1.0
RETRY_MAX_S = 30.0
FIRST_COUNT = 64  # in flight, before a message was seen
MEMORY_BYTES = 32 << 20  # of one topic
FLEET_BYTES = 128 << 20  # of all together
LEAST_BYTES = 1 << 20

# put in the backlog among the messages
ROTATE = object()
PAUSE = object()
RESUME = object()


class Quota:
    """How many messages may still be taken, by all topics together; None is without limit."""

    def __init__(self, count: int | None) -> None:
        self._left = count
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        """Return how many of so many may be taken."""
        with self._lock:
            if self._left is None:
                return count
            granted = min(count, self._left)
            self._left -= granted
            return granted

    def give_back(self, count: int) -> None:
        """So many were not written after all."""
        with self._lock:
            if self._left is not None:
                self._left += count


def share_of_memory(topics: int) -> int:
    """Return how many bytes each of so many topics may hold."""
    return max(LEAST_BYTES, min(MEMORY_BYTES, FLEET_BYTES // max(1, topics)))


class InFlightLimit:
    """``count`` messages may be in flight now, and never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = min(most, FIRST_COUNT)
        self.memory_bytes = MEMORY_BYTES

    def saw(self, count: int, size: int) -> bool:
        """``count`` messages took ``size`` bytes of text; return whether `count` has changed.

        It changes when it is wrong by half: a small difference does not resend RDY.
        """
        fitting = min(self._most, max(1, self.memory_bytes * count // max(1, size)))
        is_near = self.count <= fitting * 2 and fitting <= self.count * 2
        if fitting == self.count or (is_near and fitting != self._most):
            return False
        self.count = fitting
        return True


class TopicArchiver:
    """Archives until the consumer has stopped. Made, `start`ed, later `stop`ped and `join`ed.

    What is beyond the ``quota`` goes back to nsqd. ``on_end`` is called when it is over; `failure`
    is the reason then, if it was not `stop`.
    """

    def __init__(
        self,
        topic: str,
        make_consumer: Callable[[str, int, Backlog], Consumer],
        most_in_flight: int,
        writer: TopicWriter,
        flush: Flush,
        quota: Quota,
        turns: Turns,
        on_end: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.writer = writer
        self.is_over = False
        self._is_stopping = False
        self._is_paused = False
        self.failure: BaseException | None = None
        self.last_error: NsqError | None = None  # of writing; None since it works again
        self.last_message_s = time.monotonic()
        self.in_flight = InFlightLimit(most_in_flight)
        self._turns = turns.add(self._turn)
        self._backlog = Backlog(on_entry=self._turns.soon)
        self.consumer = make_consumer(topic, self.in_flight.count, self._backlog)
        self._flush = flush
        self._quota = quota
        self._on_end = on_end
        self._held_since_s = self._touched_at_s = 0.0
        self._check_at_s: float | None = None
        self._retry_at_s = 0.0
        self._trouble = WriteTrouble()
        self._late = 0
        self._retries = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._ended = threading.Event()

    def start(self, *, fail_fast: bool) -> None:
        """Connect and begin. Raises the connection error with ``fail_fast``."""
        self.consumer.start(fail_fast=fail_fast)
        self._turns.soon()

    def rotate(self) -> None:
        """Finish the files now; the next message begins new ones."""
        self._backlog.put(ROTATE)

    def pause(self) -> None:
        """Take no more until `resume`; the connections stay."""
        self._backlog.put(PAUSE)

    def resume(self) -> None:
        """Take messages again."""
        self._backlog.put(RESUME)

    def stop(self, *, drain: bool = True) -> None:
        """Take no more, write what was delivered, finish the files. Returns at once."""
        self._is_stopping = True
        self.consumer.begin_stop(drain=drain)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over and the connections are closed; return whether they are."""
        began = time.monotonic()
        if not self._ended.wait(timeout_s):
            return False
        if timeout_s is not None:
            timeout_s = max(0.0, began + timeout_s - time.monotonic())
        return self.consumer.stop(drain=True, timeout_s=timeout_s)

    @property
    def is_idle_since_s(self) -> float | None:
        """When the last message came, by the monotonic clock; None while something is under way.

        While it is paused nothing comes, which says nothing about the channel.
        """
        if self._is_paused:
            return None
        if self.writer.held_count or self.last_error or not self.consumer.connections:
            return None
        return self.last_message_s

    # -- a turn ---------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """Do what there is to do; return when there may be something next."""
        if self.is_over:
            return None
        try:
            if self._take_deliveries():
                return self._next_turn_s(time.monotonic())
            self._attempt(self.writer.flush)
            self._attempt(lambda: self.writer.rotate(time.time(), all_files=True))
            if not self._is_stopping:
                raise RuntimeError(f"the consumer of {self.topic} has ended by itself")
        except BaseException as exc:
            self.failure = exc
            self.consumer.abort()
        self.is_over = True
        self._ended.set()
        self._on_end()
        return None

    def _take_deliveries(self) -> bool:
        """Take what has come, for a while; return False when there will be no more."""
        self._note_late_answers()
        until = time.monotonic() + SLICE_S
        try:
            while (delivery := self._backlog.get(0)) is not None:
                if isinstance(delivery, Stopped):
                    return False
                self._handle(delivery)
                now = time.monotonic()
                self._flush_or_touch(now)
                if now >= until:
                    self._turns.soon()
                    break
        finally:
            self._backlog.leave()
        now = time.monotonic()
        self._flush_or_touch(now)
        if self._check_at_s is not None and now >= max(self._check_at_s, self._retry_at_s):
            self._check_at_s = None
            self._attempt(lambda: self.writer.rotate(time.time()))
        if self._trouble.is_over(now):
            log.warning("topic %s: writing works again", self.topic)
        return True

    def _handle(self, delivery: object) -> None:
        if isinstance(delivery, Batch):
            self._take(delivery)
        elif delivery is ROTATE:
            self._attempt(lambda: self.writer.rotate(time.time(), all_files=True))
        elif delivery is PAUSE or delivery is RESUME:
            self._is_paused = delivery is PAUSE
            self.last_message_s = time.monotonic()
            self.consumer.set_max_in_flight(0 if self._is_paused else self.in_flight.count)

    def _take(self, batch: Batch) -> None:
        self.last_message_s = time.monotonic()
        room = self._quota.take(len(batch))
        if room < len(batch):
            for message in batch[room:]:
                message.requeue(0, backoff=False)
            batch = Batch(batch.source, batch[:room])
        if not batch:
            return
        if not self.writer.held_count:
            self._held_since_s = self._touched_at_s = self.last_message_s
        self._attempt(lambda: self.writer.take(batch, time.time()), granted=room)

    def _flush_or_touch(self, now: float) -> None:
        if not self.writer.held_count:
            return
        if self._is_time_to_flush(now):
            self._adapt()
            self._attempt(self.writer.flush)
        elif now - self._touched_at_s >= self._touch_interval_s():
            self.writer.touch()
            self._touched_at_s = now

    def _is_time_to_flush(self, now: float) -> bool:
        held, flush = self.writer.held_count, self._flush
        if held >= flush.count or self.writer.held_bytes >= flush.bytes:
            return True
        if now - self._held_since_s >= flush.interval_s:
            return True
        is_enough = held >= self.in_flight.count // 2 or self.consumer.is_starved
        return is_enough and self._backlog.is_empty

    def _adapt(self) -> None:
        """Have as many messages in flight as fit into memory, going by those that are held."""
        changed = self.in_flight.saw(self.writer.held_count, self.writer.held_bytes)
        if changed and not self._is_paused:
            self.consumer.set_max_in_flight(self.in_flight.count)

    def _touch_interval_s(self) -> float:
        """Half of the shortest timeout of what is held."""
        return min(batch.source.msg_timeout_s for batch in self.writer.held()) / 2

    def _note_late_answers(self) -> None:
        if (late := self.consumer.stats.late) != self._late:
            self._late = late
            self._attempt(self.writer.fins_were_lost)

    def _attempt(self, write: Callable[[], None], granted: int = 0) -> None:
        """Do something that may fail; what was granted and not taken goes back to the quota."""
        taken, progress = self.writer.taken, self.writer.progress
        try:
            write()
        except WriteFailed as exc:
            now = time.monotonic()
            if self._trouble.failed(exc.reason, now):
                log.error("topic %s: %s; trying again", self.topic, exc)
            self.last_error = exc
            self._retry_at_s = now + self._retries.next_delay_s()
        else:
            if self.last_error and self.writer.progress != progress:
                self.last_error = None
                self._trouble.worked()
                self._retries.reset()
        self._quota.give_back(granted - (self.writer.taken - taken))

    def _next_turn_s(self, now: float) -> float | None:
        times = []
        if (settles_at := self._trouble.settles_at) is not None:
            times.append(settles_at)
        if self.writer.held_count:
            times.append(self._held_since_s + self._flush.interval_s)
            times.append(self._touched_at_s + self._touch_interval_s())
        if (check_in_s := self.writer.check_in_s(time.time())) is None:
            self._check_at_s = None
        else:  # a topic that always has turns is checked, too
            known_s = self._check_at_s
            self._check_at_s = min(
                now + check_in_s, now + check_in_s if known_s is None else known_s
            )
            times.append(max(self._check_at_s, self._retry_at_s))
        return min(times, default=None)
