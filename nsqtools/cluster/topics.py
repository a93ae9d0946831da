"""Topics by name: list them, select them by pattern, and check one before subscribing to it.

A pattern is a glob as in a shell (``clicks``, ``web*``), or a regular expression between slashes
that is searched for (``/^(web|app)_/``), in every command. No name of NSQ contains ``*``, ``?``,
``[`` or ``/``, so a text with one of them is always a pattern. Names come from nsqlookupd, which
has them ready; an nsqd is asked only if its address was given.

A SUB creates topic and channel. A misspelled topic would leave debris on nsqd and wait forever, and
nsqd hands the backlog of a topic without channels to its first channel: if that one is ephemeral,
every message that it does not consume is destroyed when its client leaves.

A command that consumes until a channel is empty waits while a topic has no connection, because nsqd
may be restarting. But nsqlookupd keeps the name of a topic after its last nsqd has left, and the
wait would never end. So the command ends when nsqlookupd has named no nsqd for `UNLISTED_S`, within
which a restarted nsqd, or the nsqd of a restarted nsqlookupd, registers again. An nsqd given by
address is tried without a limit, and the client reports that.

`ConsumedTopics` decides which topics the archiver and the forwarders consume: the given ones, and
those whose names match a pattern, now or later. The answers of all nsqlookupd and nsqd are united,
so a daemon that is down hides no topic that another one has. The same answers show which nsqd has a
topic, so a new consumer starts with these addresses and needs few lookups of its own.

Trap: a topic that is wrongly taken for deleted is no longer consumed, and the consumer of a deleted
topic creates it again when it reconnects. So only nsqd decides that, all of them, and only after
the topic has lost its connections. A restarted nsqlookupd has no say.
"""

from __future__ import annotations

import collections
import difflib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import chain

from nsqtools.client.change_log import ChangeLog
from nsqtools.client.connection_settings import ConnectionSettings, check_can_consume
from nsqtools.cluster.directory import Cluster, DaemonFailure, open_cluster
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.http.http_api import KnownNode, NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.names import Address, is_ephemeral
from nsqtools.protocol.stats import ChannelStats, TopicStats
from nsqtools.protocol.text import counted
from nsqtools.records.units import parse_regexp


@dataclass(slots=True)
class TopicReport:
    """The answers of all daemons about a topic.

    ``stats`` has the statistics of each nsqd with the topic; ``channels`` are on any nsqd or at any
    nsqlookupd. ``unwell`` has the health and the statistics of nsqd that cannot store messages.
    ``answered`` has the daemons that did so and ``failed`` the errors of the others. ``looked_at``
    has the TCP addresses of nsqd that answered; ``known_topics`` are names to suggest.
    """

    topic: str
    exists: bool = False
    stats: list[TopicStats] = field(default_factory=list)
    unwell: list[tuple[str, TopicStats]] = field(default_factory=list)
    channels: set[str] = field(default_factory=set)
    answered: list[str] = field(default_factory=list)
    failed: list[NsqError] = field(default_factory=list)
    looked_at: set[Address] = field(default_factory=set)
    known_topics: set[str] = field(default_factory=set)

    @property
    def backlog(self) -> int:
        """Messages queued in the topic itself, on nsqd where it has no channel."""
        return sum(stats.depth for stats in self.stats if not stats.channels)

    def of_channel(self, name: str) -> list[ChannelStats]:
        """Return the statistics of a channel on each nsqd that has it."""
        channels = chain.from_iterable(stats.channels for stats in self.stats)
        return [channel for channel in channels if channel.channel_name == name]

    def is_paused(self, channel: str) -> bool:
        """Return whether any nsqd has paused the topic or the channel."""
        queues: list[TopicStats | ChannelStats] = [*self.stats, *self.of_channel(channel)]
        return any(queue.paused for queue in queues)


def inspect_topic(cluster: Cluster, topic: str, newcomer: Address | None = None) -> TopicReport:
    """Ask all daemons about a topic: every nsqlookupd, the nsqd that they name, and those given.

    With ``newcomer``, of the named ones only the nsqd at this address is asked. Failures are part
    of the report; none is raised.
    """
    report = TopicReport(topic)
    lookups, failures = cluster.ask(cluster.lookupds, lambda lookupd: lookupd.lookup(topic))
    nodes = [
        node
        for lookup in lookups.values()
        for node in lookup.nodes
        if newcomer in (None, cluster.reachable(node.tcp))
    ]
    nsqds, impostors = cluster.nsqds_among(nodes)
    reports, failed = cluster.ask(nsqds, lambda nsqd: nsqd.stats(topic))
    answers = {address: stats.topics or () for address, stats in reports.items()}
    report.answered += [*lookups, *answers]
    names = {name for address in answers for name in cluster.names_of(address)}
    report.looked_at |= {cluster.reachable(node.tcp) for node in nodes if str(node.http) in names}
    report.looked_at |= {tcp for address, tcp in cluster.proven.items() if address in answers}
    report.failed += [failure.error for failure in (*failures, *impostors, *failed)]
    report.exists = any(lookup.is_known for lookup in lookups.values()) or any(answers.values())
    for lookup in lookups.values():
        report.channels |= lookup.channels
    report.stats = list(chain.from_iterable(answers.values()))
    for address, node_stats in reports.items():
        if not node_stats.is_well:
            text = f"{address} is not well ({node_stats.health})"
            report.unwell += [(text, topic_stats) for topic_stats in node_stats.topics or ()]
    for topic_stats in report.stats:
        report.channels |= {channel.channel_name for channel in topic_stats.channels}
    if not report.exists:
        listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
        named, _ = cluster.ask(nsqds, topic_names)
        report.known_topics = merge_names(listed) | merge_names(named)
    return report


def _topics(nsqd: NsqdHTTPClient, topic: str = "") -> tuple[TopicStats, ...]:
    return nsqd.stats(topic).topics or ()


def topic_names(nsqd: NsqdHTTPClient) -> list[str]:
    return [stats.topic_name for stats in _topics(nsqd)]


def merge_names(answers: Mapping[str, Iterable[str]]) -> set[str]:
    """Return all names in the answers of several daemons."""
    return {name for names in answers.values() for name in names}


def announced_topics(answers: Mapping[str, Iterable[KnownNode]]) -> set[str]:
    """Return the topics for which any nsqlookupd names an nsqd, even a silent one."""
    return {topic for nodes in answers.values() for node in nodes for topic in node.topics}


def describe_queue(report: TopicReport, channel: str) -> str:
    """Describe the state of a channel in a few words, for a consumer that gets no message."""
    topic, queue = report.topic, f"{report.topic}/{channel}"
    if not report.answered:
        return str(report.failed[0]) if report.failed else f"no daemon has topic {topic}"
    if not report.stats:
        return f"topic {topic} is on no nsqd yet"
    if is_new_channel(report, channel):
        return f"channel {queue} is new: it gets what is published from now on"
    if report.is_paused(channel):
        is_topic = any(stats.paused for stats in report.stats)
        return f"topic {topic} is paused" if is_topic else f"channel {queue} is paused"
    channels = report.of_channel(channel)
    waiting = sum(stats.depth for stats in channels)
    text = f"channel {queue} " + (f"has {counted(waiting, 'message')}" if waiting else "is empty")
    if in_flight := sum(stats.in_flight_count for stats in channels):
        text += f", {in_flight} in flight"
    if deferred := sum(stats.deferred_count for stats in channels):
        text += f", {deferred} deferred"
    return text


def is_new_channel(report: TopicReport, channel: str) -> bool:
    """Return whether a subscription creates the channel after others have got the backlog."""
    return bool(report.channels) and channel not in report.channels


def check_subscription(
    report: TopicReport, channel: str, *, create: bool = False, force: bool = False
) -> str:
    """Decide whether it is safe to subscribe. Return "" or one line of warning.

    Raises `NotFoundError` for a topic that no daemon has, unless ``create``; `ConfigurationError`
    if an ephemeral channel would destroy the topic's backlog, unless ``force``; and `NsqError` if
    an nsqd with a full disk would drop the backlog on its way to the channel.
    """
    topic = report.topic
    if not report.exists:
        if not report.answered:
            why = f" ({report.failed[0]})" if report.failed else ""
            return f"cannot check whether topic {topic} exists{why}; subscribing creates it"
        if create:
            return ""
        suggestion = _did_you_mean(topic, report.known_topics)
        raise NotFoundError(
            f"topic {topic} does not exist",
            hint=f"{suggestion} Use --create to subscribe anyway.".lstrip(),
        )
    for text, stats in report.unwell:
        if stats.depth and not stats.channels:
            waiting = counted(stats.depth, "message")
            raise NsqError(
                f"{text}, and would drop {waiting} of topic {topic} on their way to {channel}",
                hint="Make room on its disk first.",
            )
    if is_ephemeral(channel) and report.backlog and not force:
        # The topic has channels on other nsqd, or nsqlookupd has their names.
        where = " on an nsqd" if report.channels else ""
        count = counted(report.backlog, "message")
        raise ConfigurationError(
            f"topic {topic} has no channel and {count} waiting{where}: an ephemeral channel would"
            " destroy all messages that it does not read before you leave",
            hint="Name a channel that stays (--channel NAME), or override with --force.",
        )
    if is_ephemeral(channel) and not report.channels and report.failed and not force:
        return (
            f"cannot check whether messages wait in topic {topic} ({report.failed[0]}); "
            "messages that this run does not read are lost"
        )
    for text, stats in report.unwell:
        if channel not in {existing.channel_name for existing in stats.channels}:
            return f"{text}: channel {topic}/{channel} misses messages that it cannot write"
    return ""


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, sorted(names), n=3)
    return f"Did you mean {' or '.join(matches)}?" if matches else ""


def fetch_topics(cluster: Cluster) -> tuple[set[str], list[DaemonFailure]]:
    """Return the topics of every nsqlookupd and every given nsqd, and the failures.

    Raises the first failure if no daemon answers.
    """
    answers, failures = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    nsqds, impostors = cluster.nsqds_among()
    stats, failed = cluster.ask(nsqds, topic_names)
    failures += [*impostors, *failed]
    if failures and not answers and not stats:
        raise failures[0].error
    return merge_names(answers) | merge_names(stats), failures


def fetch_channels(cluster: Cluster, topic: str) -> list[str]:
    """Return the channels of a topic, or with ``""`` of all topics. Raises as `fetch_topics`."""

    def channels(nsqd: NsqdHTTPClient) -> list[str]:
        return [
            channel.channel_name for stats in _topics(nsqd, topic) for channel in stats.channels
        ]

    answers: dict[str, list[str]] = {}
    if topic:
        answers, _ = cluster.ask(cluster.lookupds, lambda client: client.channels(topic))
    if not answers:
        answers, _ = cluster.ask_nsqds(channels)
    return sorted(merge_names(answers))


def is_pattern(text: str) -> bool:
    """Return whether the text can match several names."""
    return any(mark in text for mark in "*?[/")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether a pattern matches the name; without patterns every name matches.

    Raises `ConfigurationError` for an invalid regular expression.
    """
    return not patterns or any(_matcher(pattern)(name) for pattern in patterns)


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[str], bool]:
    if not (len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")):
        return lambda name: fnmatchcase(name, pattern)
    try:
        expression = parse_regexp(pattern[1:-1])
    except ValueError as error:
        raise ConfigurationError(f"invalid regular expression {pattern} ({error})") from error
    return lambda name: expression.search(name) is not None


def select_names(
    subject: str,
    patterns: Iterable[str],
    names: Collection[str],
    failures: Iterable[DaemonFailure] = (),
) -> list[str]:
    """Return the names that match any pattern, sorted. ``subject`` is "topic" or "channel".

    Raises `NotFoundError` for a pattern that matches none.
    """
    selection: set[str] = set()
    for pattern in patterns:
        matching = set(filter(_matcher(pattern), names))
        if not matching:
            raise not_found_error(subject, pattern, names, failures)
        selection |= matching
    return sorted(selection)


def not_found_error(
    subject: str, pattern: str, names: Collection[str], failures: Iterable[DaemonFailure] = ()
) -> NotFoundError:
    """Return the error for a name that does not exist or a pattern that matches nothing."""
    suffix = unreachable_suffix(failures)
    if is_pattern(pattern):
        hint = _glob_hint(pattern, names)
        return NotFoundError(f"no {subject} matches {pattern}{suffix}", hint=hint)
    hint = _did_you_mean(pattern, names)
    return NotFoundError(f"{subject} {pattern} does not exist{suffix}", hint=hint)


def unreachable_suffix(failures: Iterable[DaemonFailure]) -> str:
    """Return a suffix that names the daemons without an answer, "" if all have answered."""
    errors = "; ".join(str(failure.error) for failure in failures)
    return f" on the daemons that answer; left out: {errors}" if errors else ""


def _glob_hint(pattern: str, names: Collection[str]) -> str:
    """Suggest slashes for a glob that would match as a regular expression."""
    try:
        is_expression = any(map(parse_regexp(pattern).fullmatch, names))
    except ValueError:
        return ""
    hint = f"This is a glob; write '/{pattern}/' for a regular expression."
    return hint if is_expression else ""


def describe_registered_only(subject: str, failures: Collection[DaemonFailure] = ()) -> str:
    """Return the message about a topic or channel that only nsqlookupd has."""
    nobody = "no nsqd that answers" if failures else "no nsqd"
    return f"{subject} is registered with nsqlookupd, but {nobody} has it"


# nsqd pings its nsqlookupd every 15 s, and registers again if that fails. The other 5 s are for a
# slow machine.
UNLISTED_S = 20.0
ASK_EVERY_S = 1.0


class UnlistedTopics:
    """Find the topics that have no connection and are on no nsqd. Used on one thread.

    ``topics`` has those that no nsqd had at the last call of `among`.
    """

    def __init__(
        self, connection: ConnectionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.topics: Set[str] = frozenset()
        self._connection = connection
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._ask_at_s = 0.0

    def among(self, unconnected: Collection[str]) -> Set[str]:
        """Return the unconnected topics that no nsqd has had for `UNLISTED_S`.

        Call it repeatedly, with all topics that have no connection at that time.
        """
        self._since_s = {t: since for t, since in self._since_s.items() if t in unconnected}
        connection = self._connection
        if connection.nsqd_tcp_addresses or not connection.lookupd_http_addresses:
            return self.topics
        now = self._clock()
        if unconnected and now >= self._ask_at_s:
            listed = self._listed()
            for topic in unconnected:
                if listed is None or topic in listed:
                    self._since_s.pop(topic, None)
                else:
                    self._since_s.setdefault(topic, now)
            now = self._clock()
            self._ask_at_s = now + ASK_EVERY_S
        self.topics = {t for t, since in self._since_s.items() if now - since >= UNLISTED_S}
        return self.topics

    def refuse(self, topics: Iterable[str]) -> None:
        """Raise `NotFoundError` if no nsqd has one of these topics."""
        if names := ", ".join(sorted(self.topics & set(topics))):
            raise NotFoundError(
                f"no nsqd has topic {names}, which only nsqlookupd knows",
                hint="Run again when the nsqd that had it is back, or delete it: nsq topic delete.",
            )

    def _listed(self) -> set[str] | None:
        """Return the topics that any nsqlookupd names an nsqd for; None if none answers."""
        try:
            with open_cluster(self._connection) as cluster:
                answers, _ = cluster.fetch_nodes()
        except (NsqError, OSError):
            return None
        return announced_topics(answers) if answers else None


log = logging.getLogger("nsqtools")


# Conditions are checked five times a second: a lost connection leads to a question within 0.2 s,
# and a check costs a few comparisons.
CHECK_S = 0.2
ASK_AGAIN_S = 1.0
# For topics that are deleted, or while an nsqd that may have one is silent: both last for long.
ASK_SELDOM_S = 5.0


class ConsumedTopics:
    """Decide which topics to consume: the ``given`` ones and those that ``pattern`` matches, except
    deleted ones until they exist again.

    Args:
        pattern: A regular expression that names contain, as in nsq_to_file. Names are listed every
            ``refresh_s``.
        check: Raises `ConfigurationError` for a topic that must not be consumed.
        leave_out: Topics that the pattern does not match.
        forgets_deleted: Do not wait for a given topic that was deleted.

    After `start` a thread asks the daemons until ``stopping`` is set, so one that hangs delays no
    message. Methods are for one other thread, except `suspect`. ``nsqd`` has the addresses of each
    matching topic as nsqlookupd named them last; it is replaced and never changed. ``unlisted``
    covers the topics without a connection, in runs that end after silence.

    Raises `ConfigurationError` for an invalid pattern, and for a pattern with a connection that can
    only name topics and not consume them.
    """

    def __init__(
        self,
        given: Collection[str],
        connection: ConnectionSettings,
        pattern: str | None = None,
        refresh_s: float = 60.0,
        *,
        check: Callable[[str], object] = lambda topic: None,
        leave_out: Iterable[str] = (),
        forgets_deleted: bool = False,
    ) -> None:
        try:
            self.pattern = None if pattern is None else parse_regexp(pattern)
        except ValueError as exc:
            raise ConfigurationError(
                f"{pattern!r} is not a regular expression: {exc}",
                hint="For example '^orders[.]': topics whose name begins so.",
            ) from None
        if pattern is not None:
            check_can_consume(connection.nsqd_tcp_addresses, connection.lookupd_http_addresses)
        self.given = given
        self.connection = connection
        self.check = check
        self.stopping = threading.Event()
        self.nsqd: Mapping[str, set[Address]] = {}
        self.unlisted = UnlistedTopics(connection)
        self._refresh_s = refresh_s
        self._forgets_deleted = forgets_deleted
        self._current = {*given}
        self._awaited = {*given}
        self._excluded = {*given, *leave_out}  # from the matches of the pattern
        self._suspects: set[str] = set()
        self._is_connected: Callable[[str], bool] = lambda topic: False
        self._silent, self._change_log = ChangeLog(), ChangeLog()
        self._failure: Exception | None = None

    def start(self, is_connected: Callable[[str], bool], *, ends_idle: bool) -> None:
        """Find topics now, and from now on. Raises the first failure if no daemon answers.

        ``is_connected`` returns whether a topic has a connection, on any thread. ``ends_idle``: the
        run ends after silence.
        """
        self._is_connected = is_connected
        self._find()
        watch = partial(self._watch, ends_idle)
        threading.Thread(target=watch, name="nsq-topics", daemon=True).start()

    def current(self) -> set[str]:
        """Return the topics to consume now. Raises the error that ended the thread."""
        if self._failure is not None:
            raise self._failure
        return self._current.copy()

    @property
    def has_candidates(self) -> bool:
        """Whether there is a topic to consume, or one may appear."""
        return bool(self._current or self._awaited or self.pattern)

    def disconnected(self) -> set[str]:
        """Return the topics to consume that have no connection."""
        return {topic for topic in self._current.copy() if not self._is_connected(topic)}

    def suspect(self, topic: str) -> None:
        """Note that a topic has lost a connection, and may be deleted. For any thread."""
        self._suspects.add(topic)

    def postpone(self, topic: str) -> None:
        """Drop a topic that cannot be consumed now, until it is found again."""
        self._current.discard(topic)

    # -- the thread that asks -------------------------------------------------------------------

    def _watch(self, ends_idle: bool) -> None:
        ask_at = retry_at = 0.0
        refresh_at = time.monotonic() + self._refresh_s
        try:
            while not self.stopping.wait(CHECK_S):
                if (now := time.monotonic()) >= refresh_at:
                    refresh_at = now + self._refresh_s
                    self._refresh()
                # Another thread may add while this one pops, so the set is not copied and cleared.
                suspects = {self._suspects.pop() for _ in range(len(self._suspects))}
                disconnected = self.disconnected() if suspects or ends_idle else set()
                if ends_idle:
                    self.unlisted.among(disconnected)
                lost, absent = suspects & disconnected, self._awaited - self._current
                self._suspects |= lost  # until they are connected, or deleted
                if (lost and now >= ask_at) or (absent and now >= retry_at):
                    have_all_answered = self._ask_nsqd(lost, absent)
                    now = time.monotonic()
                    ask_at = now + (ASK_AGAIN_S if have_all_answered else ASK_SELDOM_S)
                    retry_at = now + min(self._refresh_s, ASK_SELDOM_S)
        except Exception as exc:
            self._failure = exc

    def _refresh(self) -> None:
        for topic in self._current.copy():
            self.check(topic)
        try:
            self._find()
        except (NsqError, OSError) as exc:
            self._report_failure("pattern", f"no topics were found: {exc}; trying again")
        else:
            self._change_log.resolve("pattern")

    def _report_failure(self, key: str, text: str) -> None:
        """Log why no daemon answers, unless the run is stopping."""
        if not self.stopping.is_set():
            self._change_log.report(key, text)

    def _find(self) -> None:
        """Ask all daemons for topics that the pattern matches. Raises if none answers."""
        if self.pattern is None:
            return
        with open_cluster(self.connection) as cluster:
            names, failures = fetch_topics(cluster)
            answers, _ = cluster.fetch_nodes()
        for address, error in failures:
            self._silent.report(address, f"cannot list the topics of {address}: {error}")
        self._silent.retain([failure.address for failure in failures], "{} answers again")
        nsqd: dict[str, set[Address]] = collections.defaultdict(set)
        for entry in chain.from_iterable(answers.values()):
            for topic in filter(self.pattern.search, entry.topics - entry.tombstoned):
                nsqd[topic].add(entry.node.tcp)
        matching = {*filter(self.pattern.search, names)}
        for topic in sorted(matching - self._current - self._excluded):
            try:
                self.check(topic)
                self._current.add(topic)
            except ConfigurationError as exc:
                log.error("%s", exc)
                self._excluded.add(topic)
        self.nsqd = nsqd

    def _ask_nsqd(self, lost: set[str], absent: set[str]) -> bool:
        """Ask which topics exist; return whether all nsqd have answered.

        The topics of nsqlookupd do not count: a restarted one has neither topics nor nsqd until
        every nsqd has registered again.
        """
        try:
            with open_cluster(self.connection) as cluster:
                answers, failures = cluster.ask_nsqds(topic_names, required=False)
        except (NsqError, OSError) as exc:
            self._report_failure("nsqd", f"cannot ask which topics there are: {exc}; trying again")
            return False
        self._change_log.resolve("nsqd")
        existing = merge_names(answers)
        for topic in absent & existing:
            self.check(topic)
            self._current.add(topic)
        if failures or not answers:
            return False
        for topic in sorted(lost - existing):
            self._current.discard(topic)
            self._suspects.discard(topic)
            if self._forgets_deleted:
                self._awaited.discard(topic)
                log.warning("topic %s was deleted; it is no longer consumed", topic)
            else:
                log.warning("topic %s was deleted; waiting until it exists again", topic)
        return True
