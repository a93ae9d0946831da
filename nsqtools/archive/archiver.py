"""Archive many topics: the engine of ``nsq to-file``.

`Archiver` starts a `TopicArchiver` for each topic that is named or matches the pattern, also for
topics that appear later. It watches the limits of the run and stops the topics. If a topic is
deleted, its files are finished and its consumer is stopped before it subscribes again, which would
create the topic. If the topic is created again, it gets a new archiver. A failure of one topic is
logged and retried, and does not stop the others.

Each consumer polls nsqlookupd for the nsqd of its topic. A thousand topics would poll very often,
so the consumers of a pattern start with the result of the discovery of topics and then poll rarely.
They also share one budget of memory.

A topic needs one connection to each of its nsqd. Its files are open only while they are written, by
a few threads, so a small reserve of descriptors is enough for any number of topics. Connections
must not use it up, because a message that is delivered and cannot be written is only requeued.
Topics beyond the limit of open files are logged and start when descriptors are free; nsqd queues
their messages until then.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

from nsqtools.archive.journal import Journal, TopicLock, journals_below, stem_of
from nsqtools.archive.part_file import recover_parts
from nsqtools.archive.place import translating_errors
from nsqtools.archive.topic_archiver import Quota, Task, TopicArchiver, WorkerPool
from nsqtools.archive.topic_writer import (
    ArchiveSettings,
    ArchiveTotals,
    TopicWriter,
    WriteFailed,
)
from nsqtools.client.backlog import Backlog
from nsqtools.client.change_log import ChangeLog
from nsqtools.client.consumer import Consumer, make_consumer, start_all
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import NotFoundError, NsqError, OutputError
from nsqtools.files.durable import OBSTACLE_ERRORS
from nsqtools.protocol.names import Address
from nsqtools.protocol.text import counted
from nsqtools.records.prometheus import Metric, metric_of
from nsqtools.tail import End, RunLimits

log = logging.getLogger("nsqtools")

# Each topic of a pattern polls nsqlookupd so rarely that all topics together poll 5 times a second.
POLL_SPACING_S = 0.2
# The maximum of the client's option.
MAX_POLL_INTERVAL_S = 300.0
# Bytes of messages in flight: of all topics together, and the minimum of one topic.
MAX_IN_FLIGHT_BYTES = 128 << 20
MIN_TOPIC_BYTES = 1 << 20

# Descriptors for the files of the writing threads, connections in progress, and HTTP requests.
RESERVED_DESCRIPTORS = 48
# The number of descriptors to assume if the system has no limit.
UNLIMITED_DESCRIPTORS = 1 << 20

TICK_S = 0.5
# Time between attempts to start the topics that wait for descriptors or failed to start.
RETRY_S = 5.0
# The key of the report that topics wait for descriptors. No topic can have this name.
OPEN_FILES = "--open-files"


Journals = Callable[[], Mapping[str, list[str]]]


@dataclass(frozen=True, slots=True)
class TopicState:
    """The state of one topic."""

    totals: ArchiveTotals
    held: int = 0
    is_failing: bool = False
    problem: str = ""
    """The reason of the last failure to write, in the words of the operating system."""


class Archiver:
    """Archives topics. Call `run` on one thread; `stop`, `rotate` and `set_paused` from any.

    Args:
        limits: ``idle_s`` ends the run when every topic is connected and has received nothing for
            that time. Topics that no nsqd has are left out (`UnlistedTopics`).
        on_finished: called with the path of each finished file.
    """

    def __init__(
        self,
        topics: ConsumedTopics,
        channel: str,
        options: ClientOptions,
        settings: ArchiveSettings,
        *,
        limits: RunLimits | None = None,
        on_finished: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._limits = limits or RunLimits()
        if self._limits.count is not None:
            # Messages in flight beyond the count would be requeued, with one more attempt.
            max_in_flight = min(options.max_in_flight, self._limits.count)
            options = replace(options, max_in_flight=max_in_flight)
        self._topics = topics
        self._channel = channel
        self._settings = settings
        self._on_finished = on_finished
        self._quota = Quota(self._limits.count)
        self._archivers: dict[str, TopicArchiver] = {}
        self._pool = WorkerPool()
        self._folder_locks = settings.directories.locks()
        self._ended: dict[str, ArchiveTotals] = {}
        self._write_error: NsqError | None = None
        # Topics whose files cannot be written in this run.
        self._abandoned: set[str] = set()
        # Topics that could not be started, with the reason.
        self._start_failures: dict[str, str] = {}
        self._changed = threading.Event()
        self._is_stopping = False
        self._is_paused = False
        # The nsqd of each topic by the last discovery, and those that new consumers start with.
        self._nsqd: Mapping[str, set[Address]] = {}
        self._looked_up: Mapping[str, Iterable[Address]] = {}
        # The options of the caller, and those of each consumer.
        self._base_options = self._options = options
        self._change_log = ChangeLog()
        # Topics beyond the limit of open files.
        self._waiting: list[str] = []
        self._retry_at = 0.0
        # The errors of the nsqd that cannot be reached.
        self.connection_errors: list[str] = []
        self._descriptors_per_topic = max(1, len(topics.connection.nsqd_tcp_addresses))

    # -- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop consuming, write the delivered messages, and finish the files. Does not wait."""
        self._is_stopping = True
        self._changed.set()

    def rotate(self) -> None:
        """Finish all files in progress."""
        for archiver in self._running():
            archiver.rotate()

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume consumption of all topics. Messages in flight are written."""
        self._is_paused = is_paused
        for archiver in self._running():
            archiver.set_paused(is_paused)

    @property
    def states(self) -> dict[str, TopicState]:
        """The state of each topic that is or was archived in this run."""
        states = {topic: TopicState(totals) for topic, totals in list(self._ended.items())}
        for archiver in self._running():
            topic, writer = archiver.topic, archiver.writer
            totals = writer.totals + self._ended.get(topic, ArchiveTotals())
            error = archiver.last_error
            states[topic] = TopicState(
                totals, writer.held_count, error is not None, error.reason if error else ""
            )
        for topic in self._waiting:
            states[topic] = TopicState(self._ended.get(topic, ArchiveTotals()), is_failing=True)
        return states

    @property
    def totals(self) -> ArchiveTotals:
        """The sum of the counts of all topics."""
        return sum((state.totals for state in self.states.values()), ArchiveTotals())

    @property
    def falls_short(self) -> bool:
        """Whether the run has a count that was not reached."""
        return self._limits.count is not None and self.totals.messages < self._limits.count

    @property
    def health(self) -> tuple[bool, str]:
        """Whether every topic can be written, and a line that names the topics that cannot."""
        if failing := sorted(topic for topic, state in self.states.items() if state.is_failing):
            return (
                False,
                f"{counted(len(failing), 'topic')} not archived: {', '.join(failing[:10])}",
            )
        return True, f"archiving {counted(len(self._archivers), 'topic')}"

    def metrics(self) -> list[Metric]:
        """Return the counts of all topics, for Prometheus."""
        states = self.states
        metrics = []
        for name, help, field in METRICS:
            values = [({"topic": topic}, int(attrgetter(field)(states[topic]))) for topic in states]
            metrics.append(metric_of(PREFIX + name, help, values))
        name, now = f"{PREFIX}last_seen_seconds", f"{time.time():.3f}"
        return [*metrics, metric_of(name, "Time of these metrics.", [({}, now)])]

    def _running(self) -> list[TopicArchiver]:
        return list(self._archivers.values())

    # -- running --------------------------------------------------------------------------------

    def run(self, on_tick: Callable[[], None] = lambda: None) -> End:
        """Archive until a limit is reached or `stop` is called; return the reason of the end.

        ``on_tick`` is called every `TICK_S`, and at the end.

        Raises:
            NotFoundError: every topic was deleted, and the run ends with that; or the run ends when
                topics are idle, and no nsqd has one that was named.
            OutputError: a directory cannot be used, or the last write failed.
            ConfigurationError: another process archives the same topic and channel.
            NsqError: the connection error of the start: a named topic cannot be reached, or no
                daemon lists the topics of a pattern.
        """
        end: End | None = None
        # Starts a thread now: without one, no topic could end.
        Task(self._pool, lambda: None).soon()
        try:
            self._settings.directories.prepare()
            with translating_errors("use", self._settings.directories.work):
                for path in recover_parts(self._settings.directories):
                    self._on_finished(path)
            self._start_all(self._topics.given, fail_fast=True)
            self._topics.start(self._is_connected, ends_idle=self._limits.idle_s is not None)
            end = self._watch(on_tick)
        finally:
            self._topics.stopping.set()
            self._end_all(on_tick, drain=end is not End.COUNT)
        if self._write_error:
            raise self._write_error
        if end is End.STOPPED and not self._is_stopping:
            raise NotFoundError(f"topic {', '.join(self._topics.given)} was deleted")
        if end is End.IDLE:
            self._topics.unlisted.refuse(self._topics.given)
            if self._waiting:
                raise _open_files_error(f"archive {', '.join(self._waiting)} as well")
            if self._start_failures:
                raise OutputError(next(iter(self._start_failures.values())))
        return end

    def _start_all(self, topics: Iterable[str], *, fail_fast: bool = False) -> None:
        """Start as many topics as the limit of open files allows; the others wait.

        With ``fail_fast`` the first error is raised; otherwise it is logged, and the other topics
        start.
        """
        fitting = self._within_fd_limit(topics)
        if not fitting:
            return
        self._options = self._shared_options(len(self._archivers) + len(fitting))
        work = self._settings.directories.work
        # Called for the first topic, whose failure is reported as any other.
        journals = functools.cache(lambda: journals_below(work))
        for topic in fitting:
            try:
                self._start(topic, journals, fail_fast=fail_fast)
            except (NsqError, OSError) as exc:
                if fail_fast:
                    raise
                self._start_failures[topic] = f"topic {topic} is not archived: {exc}"
                self._change_log.report(topic, f"{self._start_failures[topic]}; trying again")
                if topic in self._archivers:
                    self._archivers[topic].consumer.abort()
                self._forget(topic)
                self._topics.postpone(topic)
                continue
            self._start_failures.pop(topic, None)
            self._change_log.resolve(topic)
        if fail_fast:
            start_all([self._archivers[topic].consumer for topic in fitting])

    def _within_fd_limit(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that have enough descriptors; the others wait.

        Raises `OutputError` if not even one topic has.
        """
        topics = list(topics)
        running = self._running()
        connections = [len(archiver.consumer.connections) for archiver in running]
        # Every topic may be on as many nsqd as the topic that is on most of them.
        self._descriptors_per_topic = max(self._descriptors_per_topic, *connections, 1)
        unconnected = sum(self._descriptors_per_topic - count for count in connections)
        room = max(0, (free_descriptors() - unconnected) // self._descriptors_per_topic)
        if topics and not room and not running:
            raise _open_files_error("archive even one topic")
        self._waiting = topics[room:]
        if self._waiting:
            topics_waiting = counted(len(self._waiting), "topic")
            problem = f"{topics_waiting} waiting, as the limit of open files is reached"
            names = ", ".join(self._waiting)
            self._change_log.report(OPEN_FILES, f"{problem} (raise ulimit -n): {names}")
        else:
            self._change_log.resolve(OPEN_FILES)
        return topics[:room]

    def _shared_options(self, topics: int) -> ClientOptions:
        """Return the options of each consumer if there are ``topics``.

        A poll interval that the user chose is kept.
        """
        options = self._base_options
        share = max(MIN_TOPIC_BYTES, MAX_IN_FLIGHT_BYTES // topics)
        options = replace(
            options, max_in_flight_bytes=min(options.max_in_flight_bytes, share) or share
        )
        is_chosen = "lookupd_poll_interval" in self._topics.connection.options
        if is_chosen or self._topics.pattern is None:
            return options
        spaced_s = min(topics * POLL_SPACING_S, MAX_POLL_INTERVAL_S)
        interval_s = max(options.lookupd_poll_interval_s, spaced_s)
        return replace(options, lookupd_poll_interval_s=interval_s)

    def _start(self, topic: str, journals: Journals, *, fail_fast: bool) -> None:
        channel, settings = self._channel, self._settings
        directories = settings.directories
        now = settings.moment(time.time())
        # Raises for a topic called "..", before anything is created.
        stem = settings.naming.stem(topic, now, now)
        directories.check_name(stem)
        with translating_errors("use", directories.work), ExitStack() as undo:
            lock = TopicLock(self._folder_locks, directories.work, topic, channel)
            undo.callback(lock.release)
            journal = Journal(
                directories.work,
                topic,
                channel,
                earlier=journals().get(stem_of(topic, channel), ()),
                # A topic may end and start again within the process, so the time identifies a run.
                run=f"{time.time_ns():x}",
                size=max(2 * self._base_options.max_in_flight, 1000),
                is_durable=directories.have_member,
                now_s=time.time(),
            )
            archiver = TopicArchiver(
                topic,
                functools.partial(self._consumer, topic),
                self._options.max_in_flight,
                TopicWriter(topic, settings, journal, self._on_finished, lock),
                settings.flush,
                self._quota,
                self._pool,
                self._changed.set,
            )
            undo.pop_all()
        self._archivers[topic] = archiver
        archiver.start(fail_fast=fail_fast)
        if self._is_paused:
            archiver.set_paused(True)
        log.info("archiving topic %s, channel %s", topic, channel)

    def _consumer(self, topic: str, backlog: Backlog) -> Consumer:
        return make_consumer(
            self._topics.connection,
            topic,
            self._channel,
            self._options,
            backlog=backlog,
            on_error=lambda error: self._topics.suspect(topic),
            looked_up=self._looked_up.get(topic, ()),
        )

    # -- watching -------------------------------------------------------------------------------

    def _watch(self, on_tick: Callable[[], None]) -> End:
        started_at = time.monotonic()
        while True:
            now = time.monotonic()
            self._remove_ended()
            self._sync_topics(now)
            errors = chain.from_iterable(a.consumer.errors() for a in self._running())
            self.connection_errors = sorted(set(map(str, errors)))
            if end := self._end(started_at, now):
                return end
            on_tick()
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _sync_topics(self, now: float) -> None:
        """Start and stop topics by the last discovery."""
        previous, self._nsqd = self._nsqd, self._topics.nsqd
        current = self._topics.current()
        for topic in self._archivers.keys() - current:
            self._archivers[topic].stop()
        for topic in self._nsqd.keys() & self._archivers.keys():
            if self._nsqd[topic] - previous.get(topic, set()):
                self._archivers[topic].consumer._look_up_soon()
        absent = current - self._archivers.keys() - self._abandoned
        if absent.difference(self._waiting) or now >= self._retry_at:
            self._retry_at = now + RETRY_S
            # The result of an earlier discovery may be outdated, so consumers ask themselves then.
            self._looked_up = {} if self._nsqd is previous else self._nsqd
            self._start_all(sorted(absent))

    def _is_connected(self, topic: str) -> bool:
        archiver = self._archivers.get(topic)
        return archiver is not None and bool(archiver.consumer.connections)

    def _end(self, started_at: float, now: float) -> End | None:
        limits = self._limits
        if self._is_stopping or not (self._archivers or self._topics.has_candidates):
            return End.STOPPED
        if limits.count is not None and self.totals.messages >= limits.count:
            return End.COUNT
        if limits.for_s is not None and now - started_at >= limits.for_s:
            return End.TIME
        if limits.idle_s is not None:
            unlisted = self._topics.unlisted.topics
            awaited = [
                a for a in self._running() if a.topic not in unlisted or a.consumer.connections
            ]
            if all(archiver.is_idle(now - limits.idle_s) for archiver in awaited):
                return End.IDLE
        return None

    # -- ending ---------------------------------------------------------------------------------

    def _remove_ended(self) -> None:
        """Remove the topics that have ended. They start again if they are created again."""
        for archiver in self._running():
            if not archiver.has_ended or not archiver.join(0):
                continue
            topic, failure = archiver.topic, archiver.failure
            self._forget(topic)
            if failure is not None and not isinstance(failure, NsqError | OSError):
                raise failure
            if isinstance(failure, WriteFailed) and self._is_final(failure):
                log.error("topic %s: %s", topic, failure)
                self._write_error = self._write_error or failure
                self._abandoned.add(topic)
            elif failure is not None:
                log.error("topic %s: %s; trying again", topic, failure)
                self._topics.postpone(topic)

    def _is_final(self, failure: WriteFailed) -> bool:
        """Return whether to abandon a topic, for a permanent failure to write.

        A run with an end (``idle_s``) continues with the other topics. Any other run raises the
        failure, unless the user can remove its cause while the run retries.
        """
        if self._limits.idle_s is not None:
            return True
        if failure.number not in OBSTACLE_ERRORS:
            raise failure
        return False

    def _end_all(self, on_tick: Callable[[], None], *, drain: bool) -> None:
        """Stop all topics at the same time, and wait until they have ended."""
        archivers = self._running()
        for archiver in archivers:
            archiver.stop(drain=drain)
        for archiver in archivers:
            while not archiver.join(TICK_S):
                on_tick()
            self._forget(archiver.topic)
            failure = archiver.failure if isinstance(archiver.failure, WriteFailed) else None
            self._write_error = self._write_error or failure or archiver.last_error
        self._pool.end()
        self._folder_locks.close()
        on_tick()

    def _forget(self, topic: str) -> None:
        archiver = self._archivers.pop(topic, None)
        if archiver is not None:
            archiver.writer.close()
            previous = self._ended.get(topic, ArchiveTotals())
            self._ended[topic] = previous + archiver.writer.totals


def _open_files_error(purpose: str) -> OutputError:
    return OutputError(
        f"the limit of open files is too low to {purpose}",
        hint="Raise it: ulimit -n, or LimitNOFILE= of the systemd unit.",
    )


def free_descriptors() -> int:
    """Return the number of descriptors left for connections; negative if the reserve is in use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > UNLIMITED_DESCRIPTORS:
        return UNLIMITED_DESCRIPTORS
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        # Listing needs a descriptor, and none is left.
        used = soft
    return soft - used - RESERVED_DESCRIPTORS


# -- metrics ------------------------------------------------------------------------------------


PREFIX = "nsq_to_file_"
# Name, help, and the attribute of `TopicState`.
METRICS = (
    ("messages_total", "Messages written.", "totals.messages"),
    ("bytes_total", "Bytes written to disk.", "totals.bytes"),
    ("files_total", "Files finished.", "totals.files"),
    (
        "already_written_total",
        "Redelivered messages that had been written.",
        "totals.already_written",
    ),
    ("write_failures_total", "Failures to write.", "totals.failures"),
    ("ambiguous_bodies_total", "Bodies that contain the delimiter.", "totals.ambiguous"),
    ("held_messages", "Messages not on disk yet.", "held"),
    ("failing", "1 while writing fails.", "is_failing"),
)
