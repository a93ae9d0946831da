"""Archive one topic: take deliveries, flush and rotate when due, as a task of a small thread pool.

Messages are flushed when the oldest unflushed one has waited for the flush interval, when enough
are held, and when nsqd waits: all deliveries are taken and at least half of ``max_in_flight`` is
held. So a busy topic is flushed at the pace of the disk while nsqd keeps sending, and an idle one
by the clock.

Each topic has its own consumer and a `Task` in the `WorkerPool`. A full disk or a slow fsync of one
topic does not delay the others. A task never runs on two threads at the same time, so its state
needs no locks. A task with a backlog stops after `SLICE_S` to let the others run. A thousand idle
topics cost one heap entry each, or none without a deadline.

A permanent error ends the topic. After a temporary one, such as a full disk, the messages are
requeued, and the backoff of the consumer (no messages, then a single one) tests whether writing
works again.
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
from nsqtools.files.durable import is_transient_error

log = logging.getLogger("nsqtools")

# A task with a backlog runs this long: another topic waits at most SLICE_S for each busy one.
SLICE_S = 0.05
# Delays between attempts to write after a failure, doubled from the base to the maximum.
RETRY_BASE_S = 1.0
RETRY_MAX_S = 30.0
# A nearly full disk accepts a few writes between failures, which does not count as a recovery.
RECOVERED_AFTER_S = 3.0
# Threads that write, for any number of topics. A topic that waits for a slow disk occupies one.
MAX_THREADS = 3


class Quota:
    """The number of messages that all topics together may still take; None for no limit."""

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
        """Return ``count`` messages that were not written."""
        with self._lock:
            self._left += count


class TopicArchiver:
    """Archives a topic from `start` until the consumer has stopped; then call `join`.

    Messages beyond the ``quota`` are requeued. ``on_end`` is called at the end; `failure` is the
    reason, unless the end was requested by `stop`.
    """

    def __init__(
        self,
        topic: str,
        make_consumer: Callable[[Backlog], Consumer],
        max_in_flight: int,
        writer: TopicWriter,
        flush: Flush,
        quota: Quota,
        pool: WorkerPool,
        on_end: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.writer = writer
        self.has_ended = False
        self._is_stopping = False
        self._is_paused = False
        self.failure: BaseException | None = None
        # The error of the last write, None if it succeeded.
        self.last_error: WriteFailed | None = None
        self.last_message_s = time.monotonic()
        self._max_in_flight = max_in_flight
        self._task = Task(pool, self._run)
        self._backlog = Backlog(on_entry=self._task.soon)
        self.consumer = make_consumer(self._backlog)
        # One batch for all of max_in_flight, so that its FINs leave together.
        self.consumer._gather(0, max_in_flight)
        self._flush = flush
        self._quota = quota
        self._on_end = on_end
        self._held_since_s = self._touched_at_s = 0.0
        self._check_at_s: float | None = None
        # Stays set until the rotation succeeds.
        self._rotates_all = False
        self._retry_at_s = 0.0
        # The reason of the last reported failure.
        self._reported = ""
        self._failed_at_s = 0.0
        self._late = 0
        self._retries = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._ended = threading.Event()

    def start(self, *, fail_fast: bool) -> None:
        """Connect and begin. With ``fail_fast`` the consumer waits for the first attempts later."""
        self.consumer.start(fail_fast=fail_fast, wait_s=0.0)
        self._task.soon()

    def rotate(self) -> None:
        """Finish the files. The next message begins new ones."""
        self._backlog.put(self._rotate_all)

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume consumption without closing connections."""
        self._backlog.put(partial(self._set_paused, is_paused))

    def stop(self, *, drain: bool = True) -> None:
        """Begin to stop: write the delivered messages, finish the files. Does not wait."""
        self._is_stopping = True
        self.consumer.begin_stop(drain=drain)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end and for closed connections; return False on a timeout."""
        until = time.monotonic() + timeout_s
        if not self._ended.wait(timeout_s):
            return False
        return self.consumer.stop(drain=True, timeout_s=max(0.0, until - time.monotonic()))

    def is_idle(self, since: float) -> bool:
        """Return whether nothing is unfinished and no message was delivered after ``since``.

        ``since`` is a reading of the monotonic clock. Every nsqd must have been able to send one
        since: a paused consumer receives nothing, whatever the depth of the channel.
        """
        is_busy = self._is_paused or self.writer.held_count or self.last_error
        if is_busy or not self.consumer.connections or self.last_message_s > since:
            return False
        return self.consumer._had_turns(self.last_message_s)

    # -- the task -------------------------------------------------------------------------------

    def _run(self) -> float | None:
        """Do the pending work; return when the next is due."""
        if self.has_ended:
            return None
        try:
            if self._take_deliveries():
                return self._next_run_s(time.monotonic())
            self._attempt(self.writer.flush)
            self._rotate_all()
            if not self._is_stopping:
                raise RuntimeError(f"the consumer of {self.topic} has ended by itself")
        except BaseException as exc:
            self.failure = exc
            self.consumer.abort()
        self.has_ended = True
        self._ended.set()
        self._on_end()
        return None

    def _take_deliveries(self) -> bool:
        """Take deliveries for `SLICE_S`; return False after the consumer has stopped."""
        if (late := self.consumer.stats.late) != self._late:
            self._late = late
            self._attempt(self.writer.on_late_finish)
        until = time.monotonic() + SLICE_S
        while (delivery := self._backlog.get(0)) is not None:
            if isinstance(delivery, Stopped):
                return False
            if isinstance(delivery, Batch):
                self._take(delivery)
            elif callable(delivery):
                # A request of another thread is carried out in order with the messages.
                delivery()
            now = time.monotonic()
            self._flush_or_touch(now)
            if now >= until:
                self._task.soon()
                break
        now = time.monotonic()
        self._flush_or_touch(now)
        if self._check_at_s is not None and now >= max(self._check_at_s, self._retry_at_s):
            self._check_at_s = None
            self._attempt(self._rotate)
        if self._recovers_at_s is not None and now >= self._recovers_at_s:
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
            Batch(batch._source, batch[room:]).requeue(0, backoff=False)
            batch = Batch(batch._source, batch[:room])
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
        count, flush = self.writer.held_count, self._flush
        is_due = now - self._held_since_s >= flush.interval_s
        if is_due or count >= flush.count or self.writer.held_bytes >= flush.bytes:
            return True
        is_enough = count >= self._max_in_flight // 2 or self.consumer.is_starved
        return is_enough and self._backlog.is_empty

    def _touch_interval_s(self) -> float:
        """Half of the shortest msg_timeout of the unflushed messages."""
        return min(batch._source.msg_timeout_s for batch in self.writer.held_batches()) / 2

    def _attempt(self, write: Callable[[], None], granted: int = 0) -> None:
        """Call ``write``, which may fail; return the untaken part of ``granted`` to the quota."""
        totals = self.writer.totals
        taken_before, messages, files = self.writer.taken, totals.messages, totals.files
        try:
            write()
        except WriteFailed as exc:
            if not is_transient_error(exc.number):
                raise
            now = time.monotonic()
            if exc.reason != self._reported:
                self._reported = exc.reason
                log.error("topic %s: %s; trying again", self.topic, exc)
            self.last_error, self._failed_at_s = exc, now
            self._retry_at_s = now + self._retries.next_delay_s()
        else:
            # After a failure to write messages, finishing a file is no proof of recovery.
            error = self.last_error
            if error and (totals.messages > messages or (totals.files > files and not error.count)):
                self.last_error = None
                self._retries.reset()
        self._quota.requeue_undelivered(granted - (self.writer.taken - taken_before))

    @property
    def _recovers_at_s(self) -> float | None:
        """When to report that writing works again, unless it fails before."""
        has_recovered = self._reported and self.last_error is None
        return self._failed_at_s + RECOVERED_AFTER_S if has_recovered else None

    def _next_run_s(self, now: float) -> float | None:
        times = [] if self._recovers_at_s is None else [self._recovers_at_s]
        if self.writer.held_count:
            times.append(self._held_since_s + self._flush.interval_s)
            times.append(self._touched_at_s + self._touch_interval_s())
        check_in_s = 0.0 if self._rotates_all else self.writer.check_in_s(time.time())
        if check_in_s is None:
            self._check_at_s = None
        else:
            # The earlier deadline is kept, or a topic that is always busy would never rotate.
            at_s = now + check_in_s
            self._check_at_s = min(at_s, self._check_at_s or at_s)
            times.append(max(self._check_at_s, self._retry_at_s))
        return min(times, default=None)


# -- the pool -----------------------------------------------------------------------------------


RunTask = Callable[[], float | None]
"""Does the pending work. Returns the latest time of the next run on the monotonic clock, or None if
only a delivery or a request can cause one."""


@dataclass(slots=True, eq=False)
class Task:
    """Work that is run repeatedly. `soon` requests a run, from any thread.

    ``due`` is the time of the next run, None if none is scheduled.
    """

    pool: WorkerPool
    run: RunTask
    due: float | None = None
    is_running: bool = False

    def soon(self) -> None:
        """Schedule a run that begins after this call."""
        self.pool.schedule(self)


class WorkerPool:
    """Threads that run tasks. A thread is started when no idle one is left."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._changed = threading.Condition()
        # A heap of the tasks that are not running, by due time.
        self._times: list[tuple[float, int, Task]] = []
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_over = False

    def schedule(self, task: Task) -> None:
        """See `Task.soon`."""
        with self._changed:
            self._add(task, time.monotonic())
            if not task.is_running:
                self._wake_thread()

    def _add(self, task: Task, due: float | None) -> None:
        """Schedule a run, unless an earlier one is scheduled."""
        if due is not None and (task.due is None or due < task.due):
            task.due = due
            # The thread that runs a task schedules its next run.
            if not task.is_running:
                heapq.heappush(self._times, (due, next(self._sequence), task))

    def end(self) -> None:
        """End the threads after their current tasks, and wait for them."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _wake_thread(self) -> None:
        if self._idle:
            self._changed.notify()
        elif len(self._threads) < self._max_threads:
            name = f"nsq-archive-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # At the limit of the system, the existing threads do the work.
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._next()) is not None:
            due = None
            try:
                due = task.run()
            except Exception:
                # This is a defect, because tasks handle the errors that are expected.
                log.exception("a task of an archiver failed")
            self._done(task, due)

    def _next(self) -> Task | None:
        """Wait until a task is due, and return it; None at the end."""
        with self._changed:
            while not self._is_over:
                now = time.monotonic()
                if not self._times or self._times[0][0] > now:
                    self._idle += 1
                    self._changed.wait(self._times[0][0] - now if self._times else None)
                    self._idle -= 1
                    continue
                due, _, task = heapq.heappop(self._times)
                # Otherwise the entry is outdated.
                if due == task.due and not task.is_running:
                    task.due, task.is_running = None, True
                    if self._times and (self._times[0][0] <= now or not self._idle):
                        # This task may take long.
                        self._wake_thread()
                    return task
        return None

    def _done(self, task: Task, due: float | None) -> None:
        with self._changed:
            requested, task.due, task.is_running = task.due, None, False
            self._add(task, requested)
            self._add(task, due)
            if self._times and self._times[0][2] is task:
                # The idle threads wait for a later deadline.
                self._changed.notify()
