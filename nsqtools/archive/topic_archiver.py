"""One topic's turns: take what was delivered, and know when it is time to do what.

Messages are flushed when the interval of the oldest held one is over, when enough is held, and when
nsqd waits: everything delivered is taken and at least half of what may be in flight is held. So a
busy topic is flushed at the pace of the disk while nsqd sends on, a quiet one by the clock.

A topic has a consumer of its own, and its turns on one of a few threads (`Turns`): its trouble (a
full disk under its directory, a slow fsync) does not touch the others. A topic never has two turns
at once, so what belongs to it needs no locks. A turn of a topic with a backlog ends after
`SLICE_S`, so that the others get theirs. A thousand quiet topics cost nothing but their entry in a
heap, and those with nothing to wait for not even that.

An error that cannot pass ends the topic. At others, such as a full disk, the
messages go back to nsqd, whose backoff - no messages, then a single one, and
again - finds out when writing works again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nsqtools.archive.topic_writer import Flush, TopicWriter, WriteFailed
from nsqtools.client.backlog import Backlog
from nsqtools.client.connecting import RetryDelays
from nsqtools.client.consumer import Consumer, Stopped
from nsqtools.client.message import Batch
from nsqtools.files.durable import can_pass

log = logging.getLogger("nsqtools")

SLICE_S = 0.05
RETRY_BASE_S = 1.0
RETRY_MAX_S = 30.0
SETTLED_S = 3.0  # a disk that is nearly full takes a little now and then
MAX_THREADS = 3


class Quota:
    """How many messages may still be taken, by all topics together; None is without limit."""

    def __init__(self, count: int | None) -> None:
        self._left = sys.maxsize if count is None else count
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        """Return how many of ``count`` messages may be taken."""
        with self._lock:
            count = min(count, self._left)
            self._left -= count
            return count

    def requeue_undelivered(self, count: int) -> None:
        """Note that ``count`` messages were not written."""
        with self._lock:
            self._left += count


class TopicArchiver:
    """Archives until the consumer has stopped. Made, `start`ed, later `stop`ped and `join`ed.

    What is beyond the ``quota`` goes back to nsqd. ``on_end`` is called when it is over; `failure`
    is the reason then, if it was not `stop`.
    """

    def __init__(
        self,
        topic: str,
        make_consumer: Callable[[Backlog], Consumer],
        max_in_flight: int,
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
        self.last_error: WriteFailed | None = None  # None since writing works again
        self.last_message_s = time.monotonic()
        self._max_in_flight = max_in_flight
        self._turns = Scheduled(turns, self._turn)
        self._backlog = Backlog(on_entry=self._turns.soon)
        self.consumer = make_consumer(self._backlog)
        self.consumer.gather(0, max_in_flight)  # all that there is room for is finished together
        self._flush = flush
        self._quota = quota
        self._on_end = on_end
        self._held_since_s = self._touched_at_s = 0.0
        self._check_at_s: float | None = None
        self._rotates_all = False  # until it works
        self._retry_at_s = 0.0
        self._reported = ""  # why writing fails
        self._failed_at_s = 0.0
        self._late = 0
        self._retries = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._ended = threading.Event()

    def start(self, *, fail_fast: bool) -> None:
        """Connect and begin; with ``fail_fast`` the first tries are waited for later."""
        self.consumer.start(fail_fast=fail_fast, wait_s=0.0)
        self._turns.soon()

    def rotate(self) -> None:
        """Finish the files now; the next message begins new ones."""
        self._backlog.put(self._rotate_all)

    def set_paused(self, is_paused: bool) -> None:
        """Take no more, or take messages again; the connections stay."""
        self._backlog.put(partial(self._set_paused, is_paused))

    def stop(self, *, drain: bool = True) -> None:
        """Take no more, write what was delivered, finish the files. Returns at once."""
        self._is_stopping = True
        self.consumer.begin_stop(drain=drain)

    def join(self, timeout_s: float) -> bool:
        """Wait until it is over and the connections are closed; return whether they are."""
        until = time.monotonic() + timeout_s
        if not self._ended.wait(timeout_s):
            return False
        return self.consumer.stop(drain=True, timeout_s=max(0.0, until - time.monotonic()))

    def is_idle(self, since: float) -> bool:
        """Tell whether nothing is under way, and no message has come after ``since``, a reading of
        the monotonic clock, though every nsqd could have sent one.

        While it is paused nothing comes, which says nothing about the channel.
        """
        is_busy = self._is_paused or self.writer.held_count or self.last_error
        if is_busy or not self.consumer.connections or self.last_message_s > since:
            return False
        return self.consumer.had_turns(self.last_message_s)

    # -- a turn ---------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """Do what there is to do; return when there may be something next."""
        if self.is_over:
            return None
        try:
            if self._take_deliveries():
                return self._next_turn_s(time.monotonic())
            self._attempt(self.writer.flush)
            self._rotate_all()
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
        if (late := self.consumer.stats.late) != self._late:
            self._late = late
            self._attempt(self.writer.fins_were_lost)
        until = time.monotonic() + SLICE_S
        while (delivery := self._backlog.get(0)) is not None:
            if isinstance(delivery, Stopped):
                return False
            if isinstance(delivery, Batch):
                self._take(delivery)
            elif callable(delivery):  # what another thread asks for, among the messages
                delivery()
            now = time.monotonic()
            self._flush_or_touch(now)
            if now >= until:
                self._turns.soon()
                break
        now = time.monotonic()
        self._flush_or_touch(now)
        if self._check_at_s is not None and now >= max(self._check_at_s, self._retry_at_s):
            self._check_at_s = None
            self._attempt(self._rotate)
        if self._settles_at_s is not None and now >= self._settles_at_s:
            self._reported = ""
            log.warning("topic %s: writing works again", self.topic)
        return True

    def _rotate_all(self) -> None:
        self._rotates_all = True
        self._attempt(self._rotate)

    def _rotate(self) -> None:
        self.writer.rotate(time.time(), all_files=self._rotates_all)
        self._rotates_all = False

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self.last_message_s = time.monotonic()
        self.consumer.set_max_in_flight(0 if is_paused else self._max_in_flight)

    def _take(self, batch: Batch) -> None:
        self.last_message_s = time.monotonic()
        room = self._quota.take(len(batch))
        if room < len(batch):
            Batch(batch.source, batch[room:]).requeue(0, backoff=False)
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
            self._attempt(self.writer.flush)
        elif now - self._touched_at_s >= self._touch_interval_s():
            self.writer.touch()
            self._touched_at_s = now

    def _is_time_to_flush(self, now: float) -> bool:
        held, flush = self.writer.held_count, self._flush
        is_due = now - self._held_since_s >= flush.interval_s
        if is_due or held >= flush.count or self.writer.held_bytes >= flush.bytes:
            return True
        is_enough = held >= self._max_in_flight // 2 or self.consumer.is_starved
        return is_enough and self._backlog.is_empty

    def _touch_interval_s(self) -> float:
        """Half of the shortest timeout of what is held."""
        return min(batch.source.msg_timeout_s for batch in self.writer.held()) / 2

    def _attempt(self, write: Callable[[], None], granted: int = 0) -> None:
        """Do something that may fail; what was granted and not taken goes back to the quota."""
        totals, taken = self.writer.totals, self.writer.taken
        messages, files = totals.messages, totals.files
        try:
            write()
        except WriteFailed as exc:
            if not can_pass(exc.number):
                raise
            now = time.monotonic()
            if exc.reason != self._reported:
                self._reported = exc.reason
                log.error("topic %s: %s; trying again", self.topic, exc)
            self.last_error, self._failed_at_s = exc, now
            self._retry_at_s = now + self._retries.next_delay_s()
        else:
            error = self.last_error  # of messages: a file that is finished says nothing of them
            if error and (totals.messages > messages or (totals.files > files and not error.count)):
                self.last_error = None
                self._retries.reset()
        self._quota.requeue_undelivered(granted - (self.writer.taken - taken))

    @property
    def _settles_at_s(self) -> float | None:
        """When it is to be said that writing works again, if nothing fails until then."""
        is_over = self._reported and self.last_error is None
        return self._failed_at_s + SETTLED_S if is_over else None

    def _next_turn_s(self, now: float) -> float | None:
        times = [] if self._settles_at_s is None else [self._settles_at_s]
        if self.writer.held_count:
            times.append(self._held_since_s + self._flush.interval_s)
            times.append(self._touched_at_s + self._touch_interval_s())
        check_in_s = 0.0 if self._rotates_all else self.writer.check_in_s(time.time())
        if check_in_s is None:
            self._check_at_s = None
        else:  # a topic that always has turns is checked, too
            at_s = now + check_in_s
            self._check_at_s = min(at_s, self._check_at_s or at_s)
            times.append(max(self._check_at_s, self._retry_at_s))
        return min(times, default=None)


# -- turns --------------------------------------------------------------------------------------


Turn = Callable[[], float | None]
"""Does what there is to do. Returns when the next turn is due at the latest, by the monotonic
clock, or None when only something that comes can make work."""


@dataclass(slots=True, eq=False)
class Scheduled:
    """Something that has turns. `soon` asks for one, from any thread.

    ``due`` is when it has its next turn, None if none is wanted.
    """

    turns: Turns
    turn: Turn
    due: float | None = None
    is_running: bool = False

    def soon(self) -> None:
        """Have a turn after this call."""
        self.turns.want(self)


class Turns:
    """The threads; they are started when there is work for them."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._times: list[tuple[float, int, Scheduled]] = []  # of those that do not run
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_over = False

    def want(self, scheduled: Scheduled) -> None:
        """See `Scheduled.soon`."""
        with self._changed:
            self._add(scheduled, time.monotonic())
            if not scheduled.is_running:
                self._find_a_thread()

    def _add(self, scheduled: Scheduled, due: float | None) -> None:
        """Note when a turn is due, if one is, and none before."""
        if due is not None and (scheduled.due is None or due < scheduled.due):
            scheduled.due = due
            if not scheduled.is_running:  # the thread that runs it will see
                heapq.heappush(self._times, (due, next(self._sequence), scheduled))

    def end(self) -> None:
        """End the threads after the turns they are at, and wait for them."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _find_a_thread(self) -> None:
        if self._idle:
            self._changed.notify()
        elif len(self._threads) < self._max_threads:
            name = f"nsq-archive-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no threads are left: those there are will do
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while (scheduled := self._next()) is not None:
            due = None
            try:
                due = scheduled.turn()
            except Exception:  # a defect: turns report what can go wrong themselves
                log.exception("a turn failed")
            self._done(scheduled, due)

    def _next(self) -> Scheduled | None:
        """Wait for the next to have a turn; None at the end."""
        with self._changed:
            while not self._is_over:
                now = time.monotonic()
                if not self._times or self._times[0][0] > now:
                    self._idle += 1
                    self._changed.wait(self._times[0][0] - now if self._times else None)
                    self._idle -= 1
                    continue
                due, _, scheduled = heapq.heappop(self._times)
                if due == scheduled.due and not scheduled.is_running:  # else it had an earlier one
                    scheduled.due, scheduled.is_running = None, True
                    if self._times and (self._times[0][0] <= now or not self._idle):
                        self._find_a_thread()  # this turn may take long
                    return scheduled
        return None

    def _done(self, scheduled: Scheduled, due: float | None) -> None:
        with self._changed:
            wanted, scheduled.due, scheduled.is_running = scheduled.due, None, False
            self._add(scheduled, wanted)
            self._add(scheduled, due)
            if self._times and self._times[0][2] is scheduled:
                self._changed.notify()  # who is idle waits for a later one
