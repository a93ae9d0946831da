"""Archive topics: what ``nsq to-file`` runs.

Each topic has a `TopicArchiver`. `Archiver` starts them (those given, and those that a pattern
finds, now and later), watches limits, and stops them. A deleted topic is dropped rather than
brought back: its files are finished, and its consumer ends before it would subscribe again, which
would create it. When the topic is there again, so is its archiver. The trouble of one topic,
whatever the system refuses it, is logged and tried again; it never ends the others.

Each consumer asks nsqlookupd which nsqd have its topic, and a thousand of them ask often: those of
a fleet begin with what the discovery of topics has just found, and ask seldom. They share memory.

A topic takes a connection to each nsqd that has it. Its files are open only while something is
written, by the few threads that write, so a small reserve is enough for any number of topics.
Connections must never use it up: what is delivered and cannot be written only goes in circles.
Topics beyond the limit of open files are named, and begin when there is room for them; nsqd keeps
what is published meanwhile.

The command of ``--on-file`` (`FileHook`) is split as a shell would, ``{path}`` in its words becomes
the file's path, and no shell sees the result: a topic's name cannot become a command. The commands
run one after the other, beside the archiving.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import resource
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from nsqtools.archive.journal import Journal, TopicLock, journals_below, stem_of
from nsqtools.archive.part_file import recover
from nsqtools.archive.place import translating_errors
from nsqtools.archive.topic_archiver import Quota, Task, TopicArchiver, WorkerPool
from nsqtools.archive.topic_writer import (
    ArchiveSettings,
    ArchiveTotals,
    TopicWriter,
    WriteFailed,
)
from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer, make_consumer, start_all
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import ChangeLog, ConsumedTopics
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError, OutputError
from nsqtools.files.durable import OBSTACLE_ERRORS
from nsqtools.protocol.names import Address
from nsqtools.records.prometheus import Metric, metric_of
from nsqtools.tail.tail import End, RunLimits

log = logging.getLogger("nsqtools")

FLEET_POLL_S = 0.2  # between the lookups of all topics of a fleet
LONGEST_POLL_S = 300.0  # the client's limit
FLEET_BYTES = 128 << 20  # of the messages in flight of all topics together
LEAST_BYTES = 1 << 20  # of one topic

RESERVE = 48  # files of the writing threads, connections being made, requests to daemons
MANY = 1 << 20

TICK_S = 0.5
OPEN_FILES = "--open-files"  # in trouble, when topics wait for room; no topic has such a name
LONG_S = 5.0  # of a command at the end
STDERR_TAIL = 4096  # bytes of what a command said last
RETRY_S = 5.0  # how often topics that do not fit are tried again


Journals = Callable[[], Mapping[str, list[str]]]


@dataclass(frozen=True, slots=True)
class TopicState:
    """The state of one topic."""

    totals: ArchiveTotals
    held: int = 0
    is_failing: bool = False
    problem: str = ""
    """Why nothing can be written now, as the system says it."""


class Archiver:
    """`run` on one thread; `stop`, `rotate` and `set_paused` from any.

    ``limits.idle_s`` means that every topic is connected and received nothing for that time; those
    that no nsqd has are not waited for (`UnlistedTopics`).
    ``on_finished`` is called with each file that is complete, ``on_tick`` twice a second.
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
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or RunLimits()
        if self._limits.count is not None:
            # what is in flight beyond the count would only have its attempts raised
            wanted = min(options.max_in_flight, self._limits.count)
            options = replace(options, max_in_flight=wanted)
        self._topics = topics
        self._channel = channel
        self._settings = settings
        self._on_finished = on_finished
        self._on_tick = on_tick
        self._quota = Quota(self._limits.count)
        self._archivers: dict[str, TopicArchiver] = {}
        self._pool = WorkerPool()
        self._folder_locks = settings.directories.locks()
        self._ended: dict[str, ArchiveTotals] = {}
        self._unwritten: NsqError | None = None
        self._given_up: set[str] = set()  # whose files cannot be written in this run
        self._not_begun: dict[str, str] = {}  # why
        self._changed = threading.Event()
        self._is_stopping = False
        self._is_paused = False
        self._nsqd: Mapping[str, set[Address]] = {}  # as they were named last, by topic
        self._looked_up: Mapping[str, Iterable[Address]] = {}  # those just found
        self._options = self._given_options = options
        self._change_log = ChangeLog()
        self._waiting: list[str] = []  # topics beyond the limit of open files
        self._retry_at = 0.0
        self.unreached: list[str] = []  # why nsqd could not be reached when last looked at
        self._cost = max(1, len(topics.connection.nsqd_tcp_addresses))  # descriptors of a topic

    # -- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more, write what was delivered, finish the files."""
        self._is_stopping = True
        self._changed.set()

    def rotate(self) -> None:
        """Finish all files now."""
        for archiver in self._running():
            archiver.rotate()

    def set_paused(self, is_paused: bool) -> None:
        """Take no more messages, of any topic, or take them again; what is in flight is written."""
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
        """The counts of all topics together."""
        return sum((state.totals for state in self.states.values()), ArchiveTotals())

    @property
    def falls_short(self) -> bool:
        """Whether a count was asked for and not reached."""
        return self._limits.count is not None and self.totals.messages < self._limits.count

    @property
    def health(self) -> tuple[bool, str]:
        """Whether every topic can be written, and a line that says which cannot."""
        if failing := sorted(topic for topic, state in self.states.items() if state.is_failing):
            return False, f"{len(failing)} topics are not archived: {', '.join(failing[:10])}"
        return True, f"archiving {len(self._archivers)} topics"

    def metrics(self) -> list[Metric]:
        """Return the counts of all topics, for Prometheus."""
        states = self.states
        metrics = []
        for name, help, what in METRICS:
            values = [({"topic": topic}, int(attrgetter(what)(states[topic]))) for topic in states]
            metrics.append(metric_of(PREFIX + name, help, values))
        name, when = f"{PREFIX}last_seen_seconds", f"{time.time():.3f}"
        return [*metrics, metric_of(name, "When this was written.", [({}, when)])]

    def _running(self) -> list[TopicArchiver]:
        return list(self._archivers.values())

    # -- running --------------------------------------------------------------------------------

    def run(self) -> End:
        """Archive until a limit is reached or `stop` is called; return what ended it.

        Raises `NotFoundError` when every topic was deleted and that is to end it, and when a topic
        that was given is on no nsqd while the other topics were idle, `OutputError`
        when a directory cannot be used, `ConfigurationError` when another process archives the
        same, the connection error when a topic that was given cannot be reached at the start or
        no daemon answers which topics a pattern matches, and the last error of writing when it did
        not work at the end.
        """
        end: End | None = None
        Task(
            self._pool, lambda: None
        ).soon()  # Starts a thread now: without one, no topic could end.
        try:
            with translating_errors("use", self._settings.directories.work):
                self._settings.directories.make()
                self._settings.directories.try_out()
                for path in recover(self._settings.directories):
                    self._on_finished(path)
            self._begin_all(self._topics.given, fail_fast=True)
            self._topics.start(self._is_connected, ends_idle=self._limits.idle_s is not None)
            end = self._watch()
        finally:
            self._topics.stopping.set()
            self._end_all(drain=end is not End.COUNT)
        if self._unwritten:
            raise self._unwritten
        if end is End.STOPPED and not self._is_stopping:
            raise NotFoundError(f"topic {', '.join(self._topics.given)} was deleted")
        if end is End.IDLE:
            self._topics.unlisted.refuse(self._topics.given)
            if self._waiting:
                raise _too_few_files(f"archive {', '.join(self._waiting)} as well")
            if self._not_begun:
                raise OutputError(next(iter(self._not_begun.values())))
        return end

    def _begin_all(self, topics: Iterable[str], *, fail_fast: bool = False) -> None:
        """Begin with the topics that fit; the others wait.

        With ``fail_fast`` the first error is raised; otherwise the trouble of a topic (directory,
        descriptors) is not that of the others.
        """
        fitting = self._within_fd_limit(topics)
        if not fitting:
            return
        self._options = self._options_of_each(len(self._archivers) + len(fitting))
        work = self._settings.directories.work
        journals = functools.cache(lambda: journals_below(work))  # read where a failure is reported
        for topic in fitting:
            try:
                self._begin(topic, journals, fail_fast=fail_fast)
            except (NsqError, OSError) as exc:
                if fail_fast:
                    raise
                self._not_begun[topic] = f"topic {topic} is not archived: {exc}"
                self._change_log.report(topic, f"{self._not_begun[topic]}; trying again")
                if topic in self._archivers:
                    self._archivers[topic].consumer.abort()
                self._forget(topic)
                self._topics.postpone(topic)
                continue
            self._not_begun.pop(topic, None)
            self._change_log.resolve(topic)
        if fail_fast:
            start_all([self._archivers[topic].consumer for topic in fitting])

    def _within_fd_limit(self, topics: Iterable[str]) -> list[str]:
        """Return those topics that can begin; the others wait.

        Raises `OutputError` when not even one topic fits.
        """
        wanted = list(topics)
        running = self._running()
        connections = [len(archiver.consumer.connections) for archiver in running]
        self._cost = max(self._cost, *connections, 1)
        still_to_come = sum(self._cost - count for count in connections)
        room = max(0, (free_descriptors() - still_to_come) // self._cost)
        if wanted and not room and not running:
            raise _too_few_files("archive even one topic")
        self._waiting = wanted[room:]
        if self._waiting:
            what = f"{len(self._waiting)} topics wait, as the limit of open files is reached"
            names = ", ".join(self._waiting)
            self._change_log.report(OPEN_FILES, f"{what} (raise ulimit -n): {names}")
        else:
            self._change_log.resolve(OPEN_FILES)
        return wanted[:room]

    def _options_of_each(self, topics: int) -> ClientOptions:
        """Return the options of each consumer of ``topics``; a poll interval that a user chose is
        kept."""
        options = self._given_options
        share = max(LEAST_BYTES, FLEET_BYTES // topics)
        options = replace(
            options, max_in_flight_bytes=min(options.max_in_flight_bytes, share) or share
        )
        is_chosen = "lookupd_poll_interval" in self._topics.connection.options
        if is_chosen or self._topics.pattern is None:
            return options
        wanted_s = min(topics * FLEET_POLL_S, LONGEST_POLL_S)
        interval_s = max(options.lookupd_poll_interval_s, wanted_s)
        return replace(options, lookupd_poll_interval_s=interval_s)

    def _begin(self, topic: str, journals: Journals, *, fail_fast: bool) -> None:
        channel, settings = self._channel, self._settings
        directories = settings.directories
        now = settings.moment(time.time())
        stem = settings.naming.stem(topic, now, now)  # a topic may be called ".."
        directories.check_name(stem)
        with translating_errors("use", directories.work), ExitStack() as undo:
            lock = TopicLock(self._folder_locks, directories.work, topic, channel)
            undo.callback(lock.release)
            journal = Journal(
                directories.work,
                topic,
                channel,
                earlier=journals().get(stem_of(topic, channel), ()),
                run=f"{time.time_ns():x}",  # a topic may end, and begin again
                size=max(2 * self._given_options.max_in_flight, 1000),
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

    def _watch(self) -> End:
        began = time.monotonic()
        while True:
            now = time.monotonic()
            self._reap()
            self._sync_topics(now)
            running = self._running()
            self.unreached = sorted({str(e) for each in running for e in each.consumer.errors()})
            if end := self._end(began, now):
                return end
            self._on_tick()
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _sync_topics(self, now: float) -> None:
        """Begin and end topics as the daemons have answered."""
        before, self._nsqd = self._nsqd, self._topics.nsqd
        wanted = self._topics.current()
        for topic in self._archivers.keys() - wanted:
            self._archivers[topic].stop()
        for topic in self._nsqd.keys() & self._archivers.keys():
            if self._nsqd[topic] - before.get(topic, set()):
                self._archivers[topic].consumer.look_up_soon()
        absent = wanted - self._archivers.keys() - self._given_up
        if absent.difference(self._waiting) or now >= self._retry_at:
            self._retry_at = now + RETRY_S
            self._looked_up = {} if self._nsqd is before else self._nsqd
            self._begin_all(sorted(absent))

    def _is_connected(self, topic: str) -> bool:
        archiver = self._archivers.get(topic)
        return archiver is not None and bool(archiver.consumer.connections)

    def _end(self, began: float, now: float) -> End | None:
        limits = self._limits
        if self._is_stopping or not (self._archivers or self._topics.has_candidates):
            return End.STOPPED
        if limits.count is not None and self.totals.messages >= limits.count:
            return End.COUNT
        if limits.for_s is not None and now - began >= limits.for_s:
            return End.TIME
        if limits.idle_s is not None:
            running = self._running()
            unlisted = self._topics.unlisted.found
            awaited = [
                each for each in running if each.topic not in unlisted or each.consumer.connections
            ]
            if all(each.is_idle(now - limits.idle_s) for each in awaited):
                return End.IDLE
        return None

    # -- ending ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Forget the topics that have ended; they begin again when they are there."""
        for archiver in self._running():
            if not archiver.is_over or not archiver.join(0):
                continue
            topic, failure = archiver.topic, archiver.failure
            self._forget(topic)
            if failure is not None and not isinstance(failure, NsqError | OSError):
                raise failure
            if isinstance(failure, WriteFailed) and self._is_final(failure):
                log.error("topic %s: %s", topic, failure)
                self._unwritten = self._unwritten or failure
                self._given_up.add(topic)
            elif failure is not None:
                log.error("topic %s: %s; trying again", topic, failure)
                self._topics.postpone(topic)

    def _is_final(self, failure: WriteFailed) -> bool:
        """Return whether a topic is given up. A job that is to end goes on with the others, and a
        daemon ends with it, unless somebody can help it meanwhile."""
        if self._limits.idle_s is not None:
            return True
        if failure.number not in OBSTACLE_ERRORS:
            raise failure
        return False

    def _end_all(self, *, drain: bool) -> None:
        """Stop all topics at the same time, and wait for them."""
        archivers = self._running()
        for archiver in archivers:
            archiver.stop(drain=drain)
        for archiver in archivers:
            while not archiver.join(TICK_S):
                self._on_tick()
            self._forget(archiver.topic)
            failure = archiver.failure if isinstance(archiver.failure, WriteFailed) else None
            self._unwritten = self._unwritten or failure or archiver.last_error
        self._pool.end()
        self._folder_locks.close()
        self._on_tick()

    def _forget(self, topic: str) -> None:
        archiver = self._archivers.pop(topic, None)
        if archiver is not None:
            archiver.writer.close()
            before = self._ended.get(topic, ArchiveTotals())
            self._ended[topic] = before + archiver.writer.totals


def _too_few_files(what: str) -> OutputError:
    return OutputError(
        f"the limit of open files is too low to {what}",
        hint="Raise it: ulimit -n, or LimitNOFILE= of the systemd unit.",
    )


def free_descriptors() -> int:
    """Return how many may still be taken for connections; negative when there are too many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > MANY:
        return MANY
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:  # not one is left to look with
        used = soft
    return soft - used - RESERVE


# -- what is reported ---------------------------------------------------------------------------


class FileHook:
    """Runs ``command`` for each path given to `put`. Raises `ConfigurationError` for no command."""

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as exc:
            raise ConfigurationError(f"the command {command!r} cannot be read: {exc}") from None
        if not self._words:
            raise ConfigurationError("the command for finished files is empty")
        self.failures = 0
        self._paths: queue.SimpleQueue[Path | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nsq-on-file", daemon=True)
        self._thread.start()

    def put(self, path: Path | str) -> None:
        """Have the command run for a file, or the URL of one; returns at once."""
        self._paths.put(path)

    def close(self) -> None:
        """Wait for the commands that are due."""
        self._paths.put(None)
        self._thread.join(LONG_S)
        if self._thread.is_alive():
            log.warning("waiting for the commands for finished files")
        self._thread.join()

    def _run(self) -> None:
        while (path := self._paths.get()) is not None:
            if reason := self._failure([word.replace("{path}", str(path)) for word in self._words]):
                self.failures += 1
                log.error("the command for %s failed (%s)", path, reason)

    @staticmethod
    def _failure(words: Sequence[str]) -> str:
        from subprocess import DEVNULL, PIPE, Popen

        said = b""
        try:
            with Popen(  # ^C is for us
                words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
            ) as process:
                while some := process.stderr.read1(STDERR_TAIL):  # type: ignore[union-attr]
                    said = (said + some)[-STDERR_TAIL:]
        except OSError as exc:
            return f"{words[0]}: {exc.strerror}"
        last = said.decode("utf-8", "backslashreplace").strip().splitlines()[-1:]
        return " ".join([f"status {process.returncode}", *last]) if process.returncode else ""


PREFIX = "nsq_to_file_"
METRICS = (  # name, help, and what of the `TopicState` of a topic
    ("messages_total", "Messages written.", "totals.messages"),
    ("bytes_total", "Bytes written, as on disk.", "totals.bytes"),
    ("files_total", "Files finished.", "totals.files"),
    ("already_written_total", "Messages that came again, not written.", "totals.already_written"),
    ("write_failures_total", "Failures to write.", "totals.failures"),
    ("ambiguous_bodies_total", "Bodies that contain the delimiter.", "totals.ambiguous"),
    ("held_messages", "Messages not on disk yet.", "held"),
    ("failing", "1 while writing fails.", "is_failing"),
)
