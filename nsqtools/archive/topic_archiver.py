"""The thread that archives one topic: takes deliveries, and knows when it is time to do what.

Messages are flushed when the interval of the oldest held one is over, when enough is held, and
when nsqd waits: everything delivered is taken and at least half of what may be in flight is held.
So a busy topic is flushed at the pace of the disk while nsqd sends on, a quiet one by the clock.

A topic has a thread and a consumer of its own: its trouble (a full disk under its directory, a slow
fsync) does not touch the others. When writing fails the messages go back to nsqd, whose backoff -
no messages, then a single one, and again - finds out when writing works again.

NSQ limits what is in flight by count, not by bytes: 2500 messages of 200 bytes are nothing, 2500 of
a megabyte are more than many machines have. A topic begins with few, and is allowed as many as fit
into memory at the size of the last ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from nsqtools.archive.archive_settings import Flush
from nsqtools.archive.topic_writer import TopicWriter, WriteFailed
from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer, Stopped
from nsqtools.client.message import Batch
from nsqtools.client.reconnect import RetryDelays
from nsqtools.errors import NsqError

log = logging.getLogger("nsqtools")

TICK_S = 1.0  # how often it is asked whether a file's time is over
RETRY_BASE_S = 1.0
RETRY_MAX_S = 30.0
FIRST_COUNT = 64  # in flight, before a message was seen
MEMORY_BYTES = 32 << 20

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


class InFlightLimit:
    """``count`` messages may be in flight now, and never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = min(most, FIRST_COUNT)

    def saw(self, count: int, size: int) -> bool:
        """``count`` messages took ``size`` bytes of text; return whether `count` has changed.

        It changes when it is wrong by half: a small difference does not resend RDY.
        """
        fitting = min(self._most, max(1, MEMORY_BYTES * count // max(1, size)))
        is_near = self.count <= fitting * 2 and fitting <= self.count * 2
        if fitting == self.count or (is_near and fitting != self._most):
            return False
        self.count = fitting
        return True


class TopicArchiver:
    """Archives until the consumer has stopped. Made, `start`ed, later `stop`ped and `join`ed.

    What is beyond the ``quota`` goes back to nsqd. ``on_end`` is called on the thread when it is
    over; `failure` is the reason then, if it was not `stop`.
    """

    def __init__(
        self,
        topic: str,
        make_consumer: Callable[[str, int, Backlog], Consumer],
        most_in_flight: int,
        writer: TopicWriter,
        flush: Flush,
        quota: Quota,
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
        self._backlog = Backlog()
        self._in_flight = InFlightLimit(most_in_flight)
        self.consumer = make_consumer(topic, self._in_flight.count, self._backlog)
        self._flush = flush
        self._quota = quota
        self._on_end = on_end
        self._held_since_s = self._touched_at_s = 0.0
        self._tick_at_s = self._retry_at_s = 0.0
        self._late = 0
        self._retries = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._thread = threading.Thread(target=self._run, name=f"nsq-archive-{topic}")

    def start(self, *, fail_fast: bool) -> None:
        """Connect and begin. Raises the connection error with ``fail_fast``."""
        self.consumer.start(fail_fast=fail_fast)
        self._thread.start()

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
        """Wait until it is over; return whether it is."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_idle_since_s(self) -> float | None:
        """When the last message came, by the monotonic clock; None while something is under way."""
        if self.writer.held_count or self.last_error or not self.consumer.connections:
            return None
        return self.last_message_s

    # -- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._attempt(self.writer.flush)
            self._attempt(lambda: self.writer.rotate(time.time(), all_files=True))
            if not self._is_stopping:
                raise RuntimeError(f"the consumer of {self.topic} has ended by itself")
            self.consumer.stop(drain=True)
        except BaseException as exc:
            self.failure = exc
            self.consumer.abort()
        finally:
            self.is_over = True
            self._on_end()

    def _turn(self) -> bool:
        """Handle one delivery, or what it is time for; return False when there will be no more."""
        delivery = self._backlog.get(self._wait_s(time.monotonic()))
        if isinstance(delivery, Stopped):
            return False
        if isinstance(delivery, Batch):
            self._take(delivery)
        elif delivery is ROTATE:
            self._attempt(lambda: self.writer.rotate(time.time(), all_files=True))
        elif delivery is PAUSE or delivery is RESUME:
            self._is_paused = delivery is PAUSE
            self.consumer.set_max_in_flight(0 if self._is_paused else self._in_flight.count)
        now = time.monotonic()
        if self.writer.held_count:
            if self._is_time_to_flush(now):
                self._adapt()
                self._attempt(self.writer.flush)
            else:
                self._touch_in_time(now)
        if now >= self._tick_at_s:
            self._tick(now)
        return True

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

    def _is_time_to_flush(self, now: float) -> bool:
        held, flush = self.writer.held_count, self._flush
        if held >= flush.count or self.writer.held_bytes >= flush.bytes:
            return True
        if now - self._held_since_s >= flush.interval_s:
            return True
        is_enough = held >= self._in_flight.count // 2 or self.consumer.is_starved
        return is_enough and self._backlog.is_empty

    def _adapt(self) -> None:
        """Have as many messages in flight as fit into memory, going by those that are held."""
        changed = self._in_flight.saw(self.writer.held_count, self.writer.held_bytes)
        if changed and not self._is_paused:
            self.consumer.set_max_in_flight(self._in_flight.count)

    def _touch_in_time(self, now: float) -> None:
        if now - self._touched_at_s >= self._touch_interval_s():
            self.writer.touch()
            self._touched_at_s = now

    def _touch_interval_s(self) -> float:
        """Half of the shortest timeout of what is held."""
        return min(batch.source.msg_timeout_s for batch in self.writer.held()) / 2

    def _tick(self, now: float) -> None:
        self._tick_at_s = now + TICK_S
        if (late := self.consumer.stats.late) != self._late:
            self._late = late
            self._attempt(self.writer.fins_were_lost)
        if now >= self._retry_at_s:
            self._attempt(lambda: self.writer.rotate(time.time()))

    def _attempt(self, write: Callable[[], None], granted: int = 0) -> None:
        """Do something that may fail; what was granted and not taken goes back to the quota."""
        taken, progress = self.writer.taken, self.writer.progress
        try:
            write()
        except WriteFailed as exc:
            log.error("topic %s: %s; trying again", self.topic, exc)
            self.last_error = exc
            self._retry_at_s = time.monotonic() + self._retries.next_delay_s()
        else:
            if self.last_error and self.writer.progress != progress:
                log.warning("topic %s: writing works again", self.topic)
                self.last_error = None
                self._retries.reset()
        self._quota.give_back(granted - (self.writer.taken - taken))

    def _wait_s(self, now: float) -> float:
        times = [self._tick_at_s]
        if self.writer.held_count:
            times.append(self._held_since_s + self._flush.interval_s)
            times.append(self._touched_at_s + self._touch_interval_s())
        return max(0.0, min(times) - now)
