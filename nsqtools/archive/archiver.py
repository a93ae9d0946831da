"""Archive topics: what ``nsq to-file`` runs.

Each topic has a `TopicArchiver`. This one starts them (those given, and those that a pattern finds,
now and later), watches limits, and stops them. A topic that was deleted is let go rather than
brought back: when its connection is lost and it is gone from wherever topics can be looked up, its
files are finished and its consumer ends before it would subscribe again, which would create it.
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
from typing import Any

from nsqtools.archive.archive_settings import ArchiveSettings
from nsqtools.archive.discovery import TopicDiscovery
from nsqtools.archive.finishing import recover
from nsqtools.archive.journal import Journal
from nsqtools.archive.layout import index_of, read_index
from nsqtools.archive.notify import TopicState
from nsqtools.archive.topic_archiver import Quota, TopicArchiver
from nsqtools.archive.topic_lock import TopicLock
from nsqtools.archive.topic_writer import ArchiveTotals, TopicWriter
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.directory import open_cluster
from nsqtools.cluster.topics import inspect_topic
from nsqtools.errors import NsqError, OutputError
from nsqtools.tail.run_limits import End, RunLimits

log = logging.getLogger("nsqtools")

TICK_S = 0.5


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
        self._run_name = f"{time.time_ns():x}"

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

        Raises `OutputError` when a directory cannot be used, `ConfigurationError` when another
        process archives the same, the connection error when a topic that was given cannot be
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
                run=self._run_name,
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

    def _make_consumer(
        self, topic: str, max_in_flight: int, deliveries: queue.SimpleQueue[Any]
    ) -> Consumer:
        source = self._source
        return Consumer(
            topic,
            source.channel,
            nsqd_tcp_addresses=source.connection.nsqd_tcp_addresses,
            lookupd_http_addresses=source.connection.lookupd_http_addresses,
            options=replace(source.options, max_in_flight=max_in_flight),
            address_map=source.connection.address_map,
            on_error=lambda error: self._suspects.put(topic),
            deliveries=deliveries,
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
        refresh_at = began
        while True:
            now = time.monotonic()
            if self._discovery is not None and now >= refresh_at:
                refresh_at = now + self._refresh_s
                self._refresh(self._discovery)
            self._let_deleted_go()
            self._reap()
            if end := self._end(began, now):
                return end
            self._on_tick()
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _end(self, began: float, now: float) -> End | None:
        limits = self._limits
        if self._is_stopping or not (self._archivers or self._discovery):
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
        except NsqError as exc:
            if not self._has_discovered:
                raise
            log.warning("no topics were found: %s; trying again", exc)
            return
        self._has_discovered = True
        for topic in sorted(known.names - set(self._archivers) - set(self._topics)):
            try:
                self._begin(topic, fail_fast=False)
            except NsqError as exc:  # its directory, or another process: the others go on
                log.error("topic %s is not archived: %s", topic, exc)
                self._forget(topic)
        if known.is_complete:
            for topic in set(self._archivers) - known.names - set(self._topics):
                self._let_go(topic)

    def _let_deleted_go(self) -> None:
        """Look up the topics that lost a connection."""
        suspects = set()
        while not self._suspects.empty():
            suspects.add(self._suspects.get())
        if not (suspects := suspects & set(self._archivers)):
            return
        with open_cluster(self._source.connection) as cluster:
            reports = [inspect_topic(cluster, topic) for topic in suspects]
        for report in reports:
            if report.asked and not report.failed and not report.exists:
                self._let_go(report.topic)

    def _let_go(self, topic: str) -> None:
        log.warning("topic %s was deleted; it is not archived any more", topic)
        self._archivers[topic].stop()

    # -- ending ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take leave of the topics that have ended."""
        for archiver in self._running():
            if archiver.is_over and archiver.join():
                self._forget(archiver.topic)
                if archiver.failure is not None:
                    raise archiver.failure

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
