"""Archive topics: what ``nsq to-file`` runs.

Each topic has a `TopicArchiver`. `Archiver` starts them (those given, and those that a pattern
finds, now and later), watches limits, and stops them. A deleted topic is dropped rather than
brought back: its files are finished, and its consumer ends before it would subscribe again, which
would create it. When the topic is there again, so is its archiver. The trouble of one topic,
whatever the system refuses it, is logged and tried again; it never ends the others.

`Consumers` makes the consumers. Each asks nsqlookupd which nsqd have its topic, and a thousand of
them ask often: those of a fleet begin with what the discovery of topics has just found, and ask
seldom.

`Waiting` has the topics beyond the limit of open files. A topic takes a connection to each nsqd
that has it. Its files are open only while something is written, by the few threads that write, so a
small reserve is enough for any number of topics. Connections must never use it up: what is
delivered and cannot be written only goes in circles. Topics that do not fit wait for their turn:
those that have been quiet for a while are stopped, after their files are finished, and wait in
their place. nsqd keeps what is published meanwhile.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from nsqtools.archive.journal import Journal, TopicLock, journals_below, stem_of
from nsqtools.archive.part_file import recover
from nsqtools.archive.topic_archiver import Quota, TopicArchiver, Turns, share_of_memory
from nsqtools.archive.topic_writer import ArchiveSettings, ArchiveSource, ArchiveTotals, TopicWriter
from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import Deletions, TopicDiscovery, Troubles, UnlistedTopics
from nsqtools.errors import NotFoundError, NsqError, OutputError
from nsqtools.protocol.names import Address
from nsqtools.tail.tail import End, RunLimits

log = logging.getLogger("nsqtools")

FLEET_POLL_S = 0.2  # between the lookups of all topics of a fleet
LONGEST_POLL_S = 300.0  # the client's limit

RESERVE = 48  # files of the writing threads, connections being made, requests to daemons

REST_AFTER_S = 5.0  # without a message
REST_SHARE = 4  # at most one of so many topics at a time

MANY = 1 << 20

TICK_S = 0.5
PATTERN = "--topic-pattern"  # in trouble, when no daemon answers; no topic has such a name
RETRY_S = 5.0  # how often topics that are missing or do not fit are tried again


@dataclass(frozen=True, slots=True)
class TopicState:
    """The state of one topic."""

    totals: ArchiveTotals
    held: int = 0
    is_failing: bool = False


class Archiver:
    """`run` on one thread; `stop`, `rotate`, `pause` and `resume` from any.

    ``limits.idle_s`` means that every topic is connected and received nothing for that time; those
    that no nsqd has are not waited for (`UnlistedTopics`).
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
        self._turns = Turns()
        self._folder_locks = settings.directories.locks()
        self._ended: dict[str, ArchiveTotals] = {}
        self._unwritten: list[NsqError] = []
        self._changed = threading.Event()
        self._is_stopping = False
        self._is_paused = False
        self._has_discovered = False
        self._deletions = Deletions(source.connection)
        self._unlisted = UnlistedTopics(source.connection)
        self._consumers = Consumers(source, self._deletions.suspect, is_fleet=discovery is not None)
        self._absent: set[str] = set()  # topics given that wait until they are there again
        self._deleted: list[str] = []
        self._troubles = Troubles()
        direct = len(source.connection.nsqd_tcp_addresses)
        self._waiting = Waiting(direct, self._limits.idle_s or 0.0)

    # -- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more, write what was delivered, finish the files."""
        self._is_stopping = True
        self._changed.set()

    def rotate(self) -> None:
        """Finish all files now."""
        for archiver in self._running():
            archiver.rotate()

    def pause(self) -> None:
        """Take no more messages, of any topic, until `resume`; what is in flight is written."""
        self._is_paused = True
        for archiver in self._running():
            archiver.pause()

    def resume(self) -> None:
        """Take messages again."""
        self._is_paused = False
        for archiver in self._running():
            archiver.resume()

    @property
    def states(self) -> dict[str, TopicState]:
        """The state of each topic that is or was archived in this run."""
        states = {topic: TopicState(totals) for topic, totals in list(self._ended.items())}
        for archiver in self._running():
            topic, writer = archiver.topic, archiver.writer
            totals = writer.totals.plus(self._ended.get(topic, ArchiveTotals()))
            states[topic] = TopicState(totals, writer.held_count, archiver.last_error is not None)
        for topic in self._waiting.topics:
            states[topic] = TopicState(self._ended.get(topic, ArchiveTotals()), is_failing=True)
        return states

    @property
    def totals(self) -> ArchiveTotals:
        """The counts of all topics together."""
        totals = (state.totals for state in self.states.values())
        return functools.reduce(ArchiveTotals.plus, totals, ArchiveTotals())

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
        try:
            self._settings.directories.make()
            for path in recover(self._settings.directories):
                self._on_finished(path)
        except OSError as exc:
            raise _unusable(exc) from exc
        try:
            self._begin_all(self._topics, fail_fast=True)
            end = self._watch()
        except BaseException:
            self._end_all(drain=True)
            raise
        self._end_all(drain=end is not End.COUNT)
        if self._unwritten:
            raise self._unwritten[0]
        if self._deleted and end is End.STOPPED and not self._is_stopping:
            raise NotFoundError(f"topic {', '.join(self._deleted)} was deleted")
        if end is End.IDLE:
            self._unlisted.refuse(self._topics)
        return end

    def _begin_all(self, topics: Iterable[str], *, fail_fast: bool = False) -> None:
        """Begin with the topics that fit; the others wait.

        With ``fail_fast`` the first error is raised; otherwise the trouble of a topic (directory,
        descriptors) is not that of the others.
        """
        fitting = self._waiting.fitting(topics, self._running())
        if not fitting:
            return
        self._consumers.expect(len(self._archivers) + len(fitting))
        try:
            journals = journals_below(self._settings.directories.work)
        except OSError as exc:
            if fail_fast:
                raise _unusable(exc) from exc
            journals = {}
        for topic in fitting:
            try:
                self._begin(topic, journals, fail_fast=fail_fast)
            except (NsqError, OSError) as exc:
                if fail_fast:
                    raise
                self._troubles.has(topic, f"topic {topic} is not archived: {exc}; trying again")
                if topic in self._archivers:
                    self._archivers[topic].consumer.abort()
                self._forget(topic)
                continue
            self._absent.discard(topic)
            self._troubles.over(topic)
        memory_bytes = share_of_memory(len(self._archivers))
        for archiver in self._running():
            archiver.memory_bytes = memory_bytes

    def _begin(self, topic: str, journals: Mapping[str, list[str]], *, fail_fast: bool) -> None:
        source, work = self._source, self._settings.directories.work
        now = self._settings.moment(time.time())
        self._settings.naming.stem(topic, now, now)  # a topic may be called ".."
        try:
            lock = TopicLock(self._folder_locks, work, topic, source.channel)
        except OSError as exc:
            raise _unusable(exc) from exc
        try:
            archiver = self._made(topic, lock, journals)
        except BaseException:
            lock.release()
            raise
        self._archivers[topic] = archiver
        archiver.start(fail_fast=fail_fast)
        if self._is_paused:
            archiver.pause()
        log.info("archiving topic %s, channel %s", topic, source.channel)

    def _made(
        self, topic: str, lock: TopicLock, journals: Mapping[str, list[str]]
    ) -> TopicArchiver:
        source, settings = self._source, self._settings
        try:
            journal = Journal(
                settings.directories.work,
                topic,
                source.channel,
                earlier=journals.get(stem_of(topic, source.channel), ()),
                run=f"{time.time_ns():x}",  # a topic may end, and begin again
                size=max(2 * source.options.max_in_flight, 1000),
                is_durable=settings.directories.have_member,
                now_s=time.time(),
            )
        except OSError as exc:
            raise _unusable(exc) from exc
        writer = TopicWriter(topic, settings, journal, self._on_finished, self._folder_locks, lock)
        archiver = TopicArchiver(
            topic,
            self._consumers.make,
            source.options.max_in_flight,
            writer,
            settings.flush,
            self._quota,
            self._turns,
            self._changed.set,
        )
        quiet_since_s = self._waiting.quiet_since_s
        archiver.last_message_s = quiet_since_s.get(topic, archiver.last_message_s)
        return archiver

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
            if now >= retry_at:
                retry_at = now + min(self._refresh_s, RETRY_S)
                if self._absent:
                    self._begin_all(sorted(self._deletions.found_again(self._absent)))
                self._share_descriptors()
            if end := self._end(began, now):
                return end
            self._on_tick()
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _end(self, began: float, now: float) -> End | None:
        limits = self._limits
        is_any = self._archivers or self._absent or self._waiting.topics or self._discovery
        if self._is_stopping or not is_any:
            return End.STOPPED
        if limits.count is not None and self.totals.messages >= limits.count:
            return End.COUNT
        if limits.for_s is not None and now - began >= limits.for_s:
            return End.TIME
        if limits.idle_s is not None and not self._waiting.unseen:
            running = self._running()
            cut_off = {each.topic for each in running if not each.consumer.connections}
            unlisted = self._unlisted.among(cut_off)
            awaited = [each for each in running if each.topic not in unlisted]
            idle_since = [archiver.is_idle_since_s for archiver in awaited]
            if all(since is not None and now - since >= limits.idle_s for since in idle_since):
                return End.IDLE
        return None

    def _refresh(self, discovery: TopicDiscovery) -> None:
        try:
            known = discovery.ask()
        except (NsqError, OSError) as exc:
            if not self._has_discovered:
                raise
            self._troubles.has(PATTERN, f"no topics were found: {exc}; trying again")
            return
        self._troubles.over(PATTERN)
        self._has_discovered = True
        for topic in known.spread & self._archivers.keys():
            self._archivers[topic].consumer.look_up_soon()
        others = {*self._archivers, *self._topics, *self._waiting.topics}
        self._consumers.looked_up = known.nsqd
        self._begin_all(sorted(known.names - others))
        self._consumers.looked_up = {}  # later they may be elsewhere
        if known.is_complete:
            self._waiting.forget(self._waiting.topics - known.names - set(self._topics))
            for topic in set(self._archivers) - known.names - set(self._topics):
                self._deletions.suspect(topic)

    def _share_descriptors(self) -> None:
        """Begin with topics that waited, and let quiet ones wait in their place."""
        for archiver in self._waiting.to_rest(self._running()):
            archiver.stop()
        self._begin_all(self._waiting.take())

    def _let_deleted_go(self) -> None:
        """Let go of topics that lost their connections and that no nsqd has."""

        def is_cut_off(topic: str) -> bool:
            archiver = self._archivers.get(topic)
            return archiver is not None and not archiver.consumer.connections

        for topic in self._deletions.confirmed(is_cut_off):
            waits = topic in self._topics and not self._exits_when_deleted
            what = "waiting until it is there again" if waits else "it is not archived any more"
            log.warning("topic %s was deleted; %s", topic, what)
            self._deleted.append(topic)
            self._archivers[topic].stop()

    # -- ending ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Forget the topics that have ended; those given begin again when they are there."""
        for archiver in self._running():
            if not archiver.is_over or not archiver.join(0):
                continue
            topic, failure = archiver.topic, archiver.failure
            self._forget(topic)
            if self._waiting.has_rested(topic):
                continue
            if failure is not None and not isinstance(failure, NsqError | OSError):
                raise failure
            if failure is not None:
                log.error("topic %s: %s; trying again", topic, failure)
            if topic in self._topics and (failure or not self._exits_when_deleted):
                self._absent.add(topic)

    def _end_all(self, *, drain: bool) -> None:
        """Stop all topics at the same time, and wait for them."""
        archivers = self._running()
        for archiver in archivers:
            archiver.stop(drain=drain)
        for archiver in archivers:
            while not archiver.join(TICK_S):
                self._on_tick()
            self._forget(archiver.topic)
            if archiver.last_error is not None:
                self._unwritten.append(archiver.last_error)
        self._turns.end()
        self._folder_locks.close()
        self._on_tick()

    def _forget(self, topic: str) -> None:
        archiver = self._archivers.pop(topic, None)
        if archiver is not None:
            archiver.writer.close()
            before = self._ended.get(topic, ArchiveTotals())
            self._ended[topic] = before.plus(archiver.writer.totals)


def _unusable(error: OSError) -> OutputError:
    return OutputError(f"cannot use {error.filename} ({error.strerror})")


# -- consumers ----------------------------------------------------------------------------------


class Consumers:
    """Makes them. ``on_lost`` is called with the topic of each connection that fails or is lost.

    With ``is_fleet`` the discovery of topics finds out where they are; a poll interval that a user
    chose is kept. ``looked_up`` are the nsqd that have just been found, by topic.
    """

    def __init__(
        self, source: ArchiveSource, on_lost: Callable[[str], None], *, is_fleet: bool
    ) -> None:
        self.looked_up: Mapping[str, Iterable[Address]] = {}
        self._source = source
        self._on_lost = on_lost
        self._is_fleet = is_fleet and "lookupd_poll_interval" not in source.connection.options
        self._topics = 0
        self._options: dict[int, ClientOptions] = {}  # checking them takes longer than the rest

    def expect(self, topics: int) -> None:
        """Note how many topics are archived now."""
        if topics != self._topics:
            self._topics = topics
            self._options.clear()

    def make(self, topic: str, max_in_flight: int, backlog: Backlog) -> Consumer:
        """Return the consumer of a topic."""
        connection = self._source.connection
        return Consumer(
            topic,
            self._source.channel,
            nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
            lookupd_http_addresses=connection.lookupd_http_addresses,
            options=self._options_for(max_in_flight),
            address_map=connection.address_map,
            on_error=lambda error: self._on_lost(topic),
            _backlog=backlog,
            _looked_up=self.looked_up.get(topic, ()),
        )

    def _options_for(self, max_in_flight: int) -> ClientOptions:
        options = self._options.get(max_in_flight)
        if options is None:
            options = replace(self._source.options, max_in_flight=max_in_flight)
            if self._is_fleet:
                wanted_s = min(self._topics * FLEET_POLL_S, LONGEST_POLL_S)
                interval_s = max(options.lookupd_poll_interval_s, wanted_s)
                options = replace(options, lookupd_poll_interval_s=interval_s)
            self._options[max_in_flight] = options
        return options


# -- topics that do not fit ---------------------------------------------------------------------


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


class Waiting:
    """The topics that do not fit.

    ``direct`` is how many nsqd are given by address. A topic rests after ``rest_after_s`` without
    a message.
    """

    def __init__(self, direct: int, rest_after_s: float = 0.0) -> None:
        self._cost = max(1, direct)  # descriptors of a topic
        self._rest_after_s = max(REST_AFTER_S, rest_after_s)
        self._topics: dict[str, None] = {}  # the one that has waited longest first
        self._resting: set[str] = set()
        self.quiet_since_s: dict[str, float] = {}  # of those that were archived until then
        self._reported = 0

    @property
    def topics(self) -> Set[str]:
        return set(self._topics)

    @property
    def unseen(self) -> Set[str]:
        """Those that were not archived yet."""
        return self._topics.keys() - self.quiet_since_s.keys()

    def fitting(self, topics: Iterable[str], archivers: Sequence[TopicArchiver]) -> list[str]:
        """Return those of some topics that can begin; the others wait from now on.

        Raises `OutputError` when not even one topic fits.
        """
        topics = list(topics)
        if not topics:
            return []
        room = max(0, self._room(archivers) // self._cost)
        if room == 0 and not archivers:
            raise OutputError(
                "the limit of open files is too low to archive even one topic",
                hint="Raise it: ulimit -n, or LimitNOFILE= of the systemd unit.",
            )
        self._topics.update(dict.fromkeys(topics[room:]))
        if len(self._topics) > self._reported:
            log.error(
                "%d topics wait until others are quiet, as the limit of open files is reached "
                "(raise ulimit -n): %s",
                len(self._topics),
                ", ".join(self._topics),
            )
        self._reported = len(self._topics)
        return topics[:room]

    def take(self) -> list[str]:
        """Return all that wait, in their order; `fitting` has them wait again."""
        topics = list(self._topics)
        self._topics.clear()
        return topics

    def forget(self, topics: Iterable[str]) -> None:
        """These are gone."""
        for topic in topics:
            self._topics.pop(topic, None)

    def to_rest(self, archivers: Sequence[TopicArchiver]) -> list[TopicArchiver]:
        """Return those to be stopped for the benefit of those that wait."""
        surplus = -(self._room(archivers) // self._cost) if archivers else 0
        wanted = max(surplus, min(len(self._topics), -(-len(archivers) // REST_SHARE)))
        if wanted <= 0:
            return []
        now = time.monotonic()
        quiet = [
            (since, archiver)
            for archiver in archivers
            if (since := archiver.is_idle_since_s) is not None and now - since >= self._rest_after_s
        ]
        quiet.sort(key=lambda each: each[0])
        for since, archiver in quiet[:wanted]:
            self._resting.add(archiver.topic)
            self.quiet_since_s[archiver.topic] = since
        return [archiver for _, archiver in quiet[:wanted]]

    def has_rested(self, topic: str) -> bool:
        """A topic has ended: return whether it was to rest; then it waits for its next turn."""
        if topic not in self._resting:
            return False
        self._resting.discard(topic)
        self._topics[topic] = None
        return True

    def _room(self, archivers: Sequence[TopicArchiver]) -> int:
        """How many descriptors are free, less those of connections that are still to be made."""
        connections = [len(archiver.consumer.connections) for archiver in archivers]
        self._cost = max(self._cost, *connections, 1)
        return free_descriptors() - sum(self._cost - count for count in connections)
