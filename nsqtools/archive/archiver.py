"""Archive topics: what ``nsq to-file`` runs.

Each topic has a `TopicArchiver`. This one starts them (those given, and those that a pattern finds,
now and later), watches limits, and stops them. A deleted topic is dropped rather than
brought back: its files are finished, and its consumer ends before it would subscribe again, which
would create it. When the topic is there again, so is its archiver.

The trap is to take a topic for deleted that is not: nobody would archive it. So only nsqd decides,
and only once the topic has no connection; an nsqlookupd that was restarted has nothing to say.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsqtools.archive.archive_settings import ArchiveSettings
from nsqtools.archive.discovery import TopicDiscovery
from nsqtools.archive.finishing import recover
from nsqtools.archive.journal import Journal
from nsqtools.archive.layout import index_of, read_index
from nsqtools.archive.notify import TopicState
from nsqtools.archive.topic_archiver import Quota, TopicArchiver
from nsqtools.archive.topic_lock import TopicLock
from nsqtools.archive.topic_writer import ArchiveTotals, TopicWriter
from nsqtools.client.backlog import Backlog
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.directory import open_cluster
from nsqtools.cluster.topics import topics_on_nsqds
from nsqtools.errors import NotFoundError, NsqError, OutputError
from nsqtools.tail.run_limits import End, RunLimits

log = logging.getLogger("nsqtools")

TICK_S = 0.5
RETRY_S = 5.0  # how often it is asked whether a topic is there again


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """Where messages come from."""

    channel: str
    connection: ConnectionSettings
    options: ClientOptions


class Archiver:
    """`run` on one thread; `stop`, `rotate`, `pause` and `resume` from any.

    ``limits.idle_s`` means that every topic is connected and received
    nothing for that time.
    ``on_finished`` is called with each file that is complete, ``on_tick`` twice a second.
    """

    def __init__(
        self,
        topics: Sequence[str],
        source: ArchiveSource,
        settings: ArchiveSettings,
        *,
        discovery: TopicDiscovery | None = None,
        refresh_s: float = 60.0,
        limits: RunLimits | None = None,
        exits_when_deleted: bool = False,
        on_finished: Callable[[Path], None] = lambda path: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or RunLimits()
        if self._limits.count is not None:
            # what is in flight beyond the count would only have its attempts raised
            wanted = min(source.options.max_in_flight, self._limits.count)
            source = replace(source, options=replace(source.options, max_in_flight=wanted))
        self._topics = topics
        self._source = source
        self._settings = settings
        self._discovery = discovery
        self._refresh_s = refresh_s
        self._exits_when_deleted = exits_when_deleted
        self._on_finished = on_finished
        self._on_tick = on_tick
        self._quota = Quota(self._limits.count)
        self._archivers: dict[str, TopicArchiver] = {}
        self._locks: dict[str, TopicLock] = {}
        self._ended: dict[str, ArchiveTotals] = {}
        self._unwritten: list[NsqError] = []
        self._changed = threading.Event()
        self._is_stopping = False
        self._has_discovered = False
        self._suspects: queue.SimpleQueue[str] = queue.SimpleQueue()  # topics that may be deleted
        self._absent: set[str] = set()  # topics given that wait until they are there again
        self._deleted: list[str] = []

    # -- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more, write what was delivered, finish the files."""
        self._is_stopping = True
        self._changed.set()

    def rotate(self) -> None:
        """Finish all files now."""
        for archiver in list(self._archivers.values()):
            archiver.rotate()

    def pause(self) -> None:
        """Take no more messages, of any topic, until `resume`; what is in flight is written."""
        for archiver in self._running():
            archiver.pause()

    def resume(self) -> None:
        """Take messages again."""
        for archiver in self._running():
            archiver.resume()

    @property
    def states(self) -> dict[str, TopicState]:
        """The state of each topic that is or was archived in this run."""
        states = {topic: TopicState(totals) for topic, totals in list(self._ended.items())}
        for archiver in self._running():
            writer = archiver.writer
            totals = writer.totals.plus(self._ended.get(archiver.topic, ArchiveTotals()))
            is_failing = archiver.last_error is not None
            states[archiver.topic] = TopicState(totals, writer.held_count, is_failing)
        return states

    @property
    def totals(self) -> ArchiveTotals:
        """The counts of all topics together."""
        return functools.reduce(
            ArchiveTotals.plus, [state.totals for state in self.states.values()], ArchiveTotals()
        )

    @property
    def falls_short(self) -> bool:
        """Whether a count was asked for and not reached."""
        return self._limits.count is not None and self.totals.messages < self._limits.count

    def _running(self) -> list[TopicArchiver]:
        return list(self._archivers.values())

    # -- running --------------------------------------------------------------------------------

    def run(self) -> End:
        """Archive until a limit is reached or `stop` is called; return what ended it.

        Raises `NotFoundError` when every topic was deleted and that is to end it, `OutputError`
        when a directory cannot be used, `ConfigurationError` when another process archives the
        same, the connection error when a topic that was given cannot be
        reached at the start or nobody can be asked for the topics of a pattern, and the last error
        of writing when it did not work at the end.
        """
        try:
            self._settings.directories.make()
            for path in recover(self._settings.directories):
                self._on_finished(path)
        except OSError as exc:
            raise OutputError(f"cannot use {exc.filename} ({exc.strerror})") from exc
        try:
            for topic in self._topics:
                self._begin(topic, fail_fast=True)
            end = self._watch()
        except BaseException:
            self._end_all(drain=True)
            raise
        self._end_all(drain=end is not End.COUNT)
        if self._unwritten:
            raise self._unwritten[0]
        if self._deleted and end is End.STOPPED and not self._is_stopping:
            raise NotFoundError(f"topic {', '.join(self._deleted)} was deleted")
        return end

    def _begin(self, topic: str, *, fail_fast: bool) -> None:
        source, work = self._source, self._settings.directories.work
        now = self._settings.moment(time.time())
        self._settings.naming.stem(topic, now, now)  # a topic may be called ".."
        try:
            lock = self._locks[topic] = TopicLock(work, topic, source.channel)
            journal = Journal(
                work,
                topic,
                source.channel,
                run=f"{time.time_ns():x}",  # a topic may end, and begin again
                size=max(2 * source.options.max_in_flight, 1000),
                is_durable=self._is_durable,
                now_s=time.time(),
            )
        except OSError as exc:
            raise OutputError(f"cannot use {exc.filename} ({exc.strerror})") from exc
        writer = TopicWriter(topic, self._settings, journal, self._on_finished, lock.next_head)
        archiver = TopicArchiver(
            topic,
            self._make_consumer,
            source.options.max_in_flight,
            writer,
            self._settings.flush,
            self._quota,
            self._changed.set,
        )
        self._archivers[topic] = archiver
        archiver.start(fail_fast=fail_fast)
        log.info("archiving topic %s, channel %s", topic, source.channel)

    def _make_consumer(self, topic: str, max_in_flight: int, backlog: Backlog) -> Consumer:
        source = self._source
        return Consumer(
            topic,
            source.channel,
            nsqd_tcp_addresses=source.connection.nsqd_tcp_addresses,
            lookupd_http_addresses=source.connection.lookupd_http_addresses,
            options=replace(source.options, max_in_flight=max_in_flight),
            address_map=source.connection.address_map,
            on_error=lambda error: self._suspects.put(topic),
            backlog=backlog,
        )

    def _is_durable(self, name: str, offset: int, length: int) -> bool:
        """Look a member up in the index of its file, in progress or finished."""
        path = self._settings.directories.work / name
        for place in (path, self._settings.directories.final(path)):
            members = read_index(index_of(place)) or []
            if any((member.offset, member.length) == (offset, length) for member in members):
                return True
        return False

    # -- watching -------------------------------------------------------------------------------

    def _watch(self) -> End:
        began = time.monotonic()
        refresh_at = retry_at = began
        while True:
            now = time.monotonic()
            if self._discovery is not None and now >= refresh_at:
                refresh_at = now + self._refresh_s
                self._refresh(self._discovery)
            self._let_deleted_go()
            self._reap()
            if self._absent and now >= retry_at:
                retry_at = now + min(self._refresh_s, RETRY_S)
                self._begin_those_that_are_back()
            if end := self._end(began, now):
                return end
            self._on_tick()
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _end(self, began: float, now: float) -> End | None:
        limits = self._limits
        if self._is_stopping or not (self._archivers or self._absent or self._discovery):
            return End.STOPPED
        if limits.count is not None and self.totals.messages >= limits.count:
            return End.COUNT
        if limits.for_s is not None and now - began >= limits.for_s:
            return End.TIME
        if limits.idle_s is not None:
            idle_since = [archiver.is_idle_since_s for archiver in self._running()]
            if all(since is not None and now - since >= limits.idle_s for since in idle_since):
                return End.IDLE
        return None

    def _refresh(self, discovery: TopicDiscovery) -> None:
        try:
            known = discovery.ask()
        except (NsqError, OSError) as exc:
            if not self._has_discovered:
                raise
            log.warning("no topics were found: %s; trying again", exc)
            return
        self._has_discovered = True
        for topic in sorted(known.names - set(self._archivers) - set(self._topics)):
            self._try_to_begin(topic)
        if known.is_complete:
            for topic in set(self._archivers) - known.names - set(self._topics):
                self._suspects.put(topic)

    def _try_to_begin(self, topic: str) -> None:
        """Begin with a topic; its trouble (directory, descriptors) is not that of the others."""
        try:
            self._begin(topic, fail_fast=False)
        except (NsqError, OSError) as exc:
            log.error("topic %s is not archived: %s; trying again", topic, exc)
            if (archiver := self._archivers.get(topic)) is not None:
                archiver.consumer.abort()
            self._forget(topic)
        else:
            self._absent.discard(topic)

    def _begin_those_that_are_back(self) -> None:
        with open_cluster(self._source.connection) as cluster:
            names, _ = topics_on_nsqds(cluster)
        for topic in self._absent & names:
            self._try_to_begin(topic)

    def _let_deleted_go(self) -> None:
        """Let go of topics that lost their connections and that no nsqd has."""
        suspects = set()
        while not self._suspects.empty():
            suspects.add(self._suspects.get())
        suspects = {
            topic
            for topic in suspects & set(self._archivers)
            if not self._archivers[topic].consumer.connections
        }
        if not suspects:
            return
        with open_cluster(self._source.connection) as cluster:
            names, are_all = topics_on_nsqds(cluster)
        for topic in suspects - names if are_all else ():
            waits = topic in self._topics and not self._exits_when_deleted
            what = "waiting until it is there again" if waits else "it is not archived any more"
            log.warning("topic %s was deleted; %s", topic, what)
            self._deleted.append(topic)
            self._archivers[topic].stop()

    # -- ending ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Forget the topics that have ended; those given begin again when they are there."""
        for archiver in self._running():
            if archiver.is_over and archiver.join():
                self._forget(archiver.topic)
                failure = archiver.failure
                if failure is not None and not isinstance(failure, NsqError | OSError):
                    raise failure
                if failure is not None:
                    log.error("topic %s: %s; trying again", archiver.topic, failure)
                if archiver.topic in self._topics and (failure or not self._exits_when_deleted):
                    self._absent.add(archiver.topic)

    def _end_all(self, *, drain: bool) -> None:
        """Stop all topics at the same time, and wait for them."""
        archivers = self._running()
        for archiver in archivers:
            archiver.stop(drain=drain)
        for archiver in archivers:
            archiver.join()
            self._forget(archiver.topic)
            if archiver.last_error is not None:
                self._unwritten.append(archiver.last_error)
        for topic in list(self._locks):  # of topics that could not be begun
            self._forget(topic)
        self._on_tick()

    def _forget(self, topic: str) -> None:
        archiver = self._archivers.pop(topic, None)
        if archiver is not None:
            archiver.writer.close()
            before = self._ended.get(topic, ArchiveTotals())
            self._ended[topic] = before.plus(archiver.writer.totals)
        if (lock := self._locks.pop(topic, None)) is not None:
            lock.release()
