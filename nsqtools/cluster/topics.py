"""Topics by name: list them, select by pattern, and look one up before subscribing to it.

A pattern is a glob as in a shell (``clicks``, ``web*``), or a regular expression between slashes
that is searched for (``/^(web|app)_/``). It is one language in every command. No name of NSQ has
``*``, ``?``, ``[`` or ``/``, so a text with one of them is always a pattern. Names are asked for as
cheaply as possible: nsqlookupd keeps them ready; an nsqd is asked only where it was given.

A SUB creates topic and channel, so a misspelt topic would leave debris on nsqd and wait for ever.
And nsqd hands the backlog of a topic without channels to its first channel: if that is an ephemeral
one, what it does not consume is destroyed with it when its client leaves.

A command that consumes until a channel is empty waits while a topic has no connection: it may still
be made, or nsqd is being restarted. nsqlookupd keeps the name of a topic when the last nsqd that
had it is gone, and then the wait would be for ever and without a word. So nsqlookupd decides, and
only when it has named no nsqd for `UNLISTED_S` on end: an nsqd that was restarted, or whose
nsqlookupd was, is registered again before that. An nsqd that is given by address is tried for ever,
which the client reports; then nothing here is decided.

`ConsumedTopics` decides for the commands that archive and forward which topics to consume: those
given, and those whose names match a pattern, now and later. Every nsqlookupd and nsqd is asked, at
once and again and again, and the answers are united: one that is down hides nothing that another
knows.

The lists of nsqd show which have a topic, too. Its consumer can begin with those, ask seldom
itself, and soon when a list shows that a further one has the topic.

Trap: a topic that is taken for deleted and is not would be consumed no more. And the consumer of a
deleted topic would create it again when it reconnects. So only nsqd decides, all of them, and only
after the topic has lost its connections; an nsqlookupd that was restarted has nothing to say.
"""

from __future__ import annotations

import collections
import difflib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import chain

from nsqtools.client.connection_settings import ConnectionSettings, check_can_consume
from nsqtools.cluster.directory import Cluster, DaemonFailure, open_cluster
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.http.http_api import KnownNode, NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.names import Address, is_ephemeral
from nsqtools.protocol.stats import ChannelStats, TopicStats
from nsqtools.protocol.text import counted


@dataclass(slots=True)
class TopicReport:
    """What was found out about a topic.

    ``stats`` are those of each nsqd that has it; ``channels`` are on one, or nsqlookupd knows them.
    ``unwell`` has the health and the statistics of those nsqd that cannot store messages.
    ``asked`` and ``failed`` say who answered and what went wrong; ``looked_at`` are the
    TCP addresses of nsqd that answered, if known, and ``known_topics`` names to suggest.
    """

    topic: str
    exists: bool = False
    stats: list[TopicStats] = field(default_factory=list)
    unwell: list[tuple[str, TopicStats]] = field(default_factory=list)
    channels: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    failed: list[NsqError] = field(default_factory=list)
    looked_at: set[Address] = field(default_factory=set)
    known_topics: set[str] = field(default_factory=set)

    @property
    def backlog(self) -> int:
        """Messages queued in the topic itself, where it has no channel."""
        return sum(each.depth for each in self.stats if not each.channels)

    def of_channel(self, name: str) -> list[ChannelStats]:
        """The channel on each nsqd that has it."""
        channels = chain.from_iterable(each.channels for each in self.stats)
        return [channel for channel in channels if channel.channel_name == name]

    def is_paused(self, channel: str) -> bool:
        """Tell whether an nsqd has paused the topic or the channel."""
        stats: list[TopicStats | ChannelStats] = [*self.stats, *self.of_channel(channel)]
        return any(each.paused for each in stats)


def inspect_topic(cluster: Cluster, topic: str, newcomer: Address | None = None) -> TopicReport:
    """Ask every nsqlookupd, and every nsqd that is given or that they name for the topic; of the
    latter with ``newcomer`` the one at this address alone.

    Failures are noted in the report, none is raised.
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
    answers = {address: each.topics or () for address, each in reports.items()}
    report.asked += [*lookups, *answers]
    names = {name for address in answers for name in cluster.names_of(address)}
    report.looked_at |= {cluster.reachable(each.tcp) for each in nodes if str(each.http) in names}
    report.looked_at |= {tcp for address, tcp in cluster.proven.items() if address in answers}
    report.failed += [failure.error for failure in (*failures, *impostors, *failed)]
    report.exists = any(lookup.is_known for lookup in lookups.values()) or any(answers.values())
    for lookup in lookups.values():
        report.channels |= lookup.channels
    report.stats = list(chain.from_iterable(answers.values()))
    for address, each in reports.items():
        if not each.is_well:
            text = f"{address} is not well ({each.health})"
            report.unwell += [(text, stats) for stats in each.topics or ()]
    for stats in report.stats:
        report.channels |= {channel.channel_name for channel in stats.channels}
    if not report.exists:
        listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
        named, _ = cluster.ask(nsqds, topic_names)
        report.known_topics = merge_names(listed) | merge_names(named)
    return report


def _topics(nsqd: NsqdHTTPClient, topic: str = "") -> tuple[TopicStats, ...]:
    return nsqd.stats(topic).topics or ()


def topic_names(nsqd: NsqdHTTPClient) -> list[str]:
    return [each.topic_name for each in _topics(nsqd)]


def merge_names(answers: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the names that any daemon has answered."""
    return {name for names in answers.values() for name in names}


def announced_topics(known: Mapping[str, Iterable[KnownNode]]) -> set[str]:
    """Return the topics that any nsqlookupd names an nsqd for, which may be silent."""
    return {topic for nodes in known.values() for node in nodes for topic in node.topics}


def describe_queue(report: TopicReport, channel: str) -> str:
    """Say in a few words what a consumer of the channel waits for."""
    topic, queue = report.topic, f"{report.topic}/{channel}"
    if not report.asked:
        return str(report.failed[0]) if report.failed else f"no daemon knows topic {topic}"
    if not report.stats:
        return f"topic {topic} is on no nsqd yet"
    if is_new_channel(report, channel):
        return f"channel {queue} is new: it gets what is published from now on"
    if report.is_paused(channel):
        is_topic = any(each.paused for each in report.stats)
        return f"topic {topic} is paused" if is_topic else f"channel {queue} is paused"
    there = report.of_channel(channel)
    waiting = sum(each.depth for each in there)
    text = f"channel {queue} " + (f"has {counted(waiting, 'message')}" if waiting else "is empty")
    if in_flight := sum(each.in_flight_count for each in there):
        text += f", {in_flight} in flight"
    if deferred := sum(each.deferred_count for each in there):
        text += f", {deferred} deferred"
    return text


def is_new_channel(report: TopicReport, channel: str) -> bool:
    """Tell whether a subscription creates the channel, and other channels have what was before."""
    return bool(report.channels) and channel not in report.channels


def check_subscription(
    report: TopicReport, channel: str, *, create: bool = False, force: bool = False
) -> str:
    """Decide whether to subscribe. Return "" or one line of warning.

    Raises `NotFoundError` for a topic that no daemon asked has, unless ``create``; and
    `ConfigurationError` when an ephemeral channel would destroy the topic's backlog, unless
    ``force``. Raises `NsqError` when an nsqd with a full disk would drop it on its way to the
    channel.
    """
    topic = report.topic
    if not report.exists:
        if not report.asked:
            why = f" ({report.failed[0]})" if report.failed else ""
            return f"cannot check whether topic {topic} exists{why}; subscribing creates it"
        if create:
            return ""
        meant = _meant(topic, report.known_topics)
        raise NotFoundError(
            f"topic {topic} does not exist",
            hint=f"{meant} Use --create to subscribe all the same.".lstrip(),
        )
    for text, stats in report.unwell:
        if stats.depth and not stats.channels:
            waiting = counted(stats.depth, "message")
            raise NsqError(
                f"{text}, and would drop {waiting} of topic {topic} on their way to {channel}",
                hint="Make room on its disk first.",
            )
    if is_ephemeral(channel) and report.backlog and not force:
        where = " on an nsqd" if report.channels else ""  # others have some, or know of them
        count = counted(report.backlog, "message")
        raise ConfigurationError(
            f"topic {topic} has no channel and {count} waiting{where}: what an "
            f"ephemeral channel does not read before you leave would be destroyed",
            hint="Name a channel that stays (--channel NAME), or go on with --force.",
        )
    if is_ephemeral(channel) and not report.channels and report.failed and not force:
        return (
            f"cannot check whether messages wait in topic {topic} ({report.failed[0]}); "
            "what this run does not read of them is lost"
        )
    for text, stats in report.unwell:
        if channel not in {each.channel_name for each in stats.channels}:
            return f"{text}: channel {topic}/{channel} misses what it cannot write"
    return ""


def _meant(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=3)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def fetch_topics(cluster: Cluster) -> tuple[set[str], list[DaemonFailure]]:
    """Return the topics of every nsqlookupd and of every nsqd given by address, and who failed.

    Raises the first failure when no daemon answers.
    """
    answers, failures = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    nsqds, impostors = cluster.nsqds_among()
    stats, failed = cluster.ask(nsqds, topic_names)
    failures += [*impostors, *failed]
    if failures and not answers and not stats:
        raise failures[0].error
    return merge_names(answers) | merge_names(stats), failures


def fetch_channels(cluster: Cluster, topic: str) -> list[str]:
    """Return the channels of a topic, or of all with ``""``. Raises as above."""

    def channels(nsqd: NsqdHTTPClient) -> list[str]:
        return [channel.channel_name for each in _topics(nsqd, topic) for channel in each.channels]

    answers: dict[str, list[str]] = {}
    if topic:
        answers, _ = cluster.ask(cluster.lookupds, lambda client: client.channels(topic))
    if not answers:
        answers, _ = cluster.ask_nsqds(channels)
    return sorted(merge_names(answers))


def is_pattern(text: str) -> bool:
    """Tell whether the text can match several names."""
    return any(mark in text for mark in "*?[/")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Tell whether one of the patterns matches the name; without patterns every name matches.

    Raises `ConfigurationError` for a regular expression that is none.
    """
    return not patterns or any(_matcher(pattern)(name) for pattern in patterns)


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[str], bool]:
    if not (len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")):
        return lambda name: fnmatchcase(name, pattern)
    try:
        expression = re.compile(pattern[1:-1])
    except re.error as error:
        raise ConfigurationError(f"invalid regular expression {pattern} ({error})") from error
    return lambda name: expression.search(name) is not None


def select_names(
    what: str,
    patterns: Iterable[str],
    names: Collection[str],
    failures: Iterable[DaemonFailure] = (),
) -> list[str]:
    """Return the names that the patterns match, in order.

    Raises `NotFoundError` as `missing` makes it, for a pattern that matches none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = set(filter(_matcher(pattern), names))
        if not found:
            raise not_found_error(what, pattern, names, failures)
        chosen |= found
    return sorted(chosen)


def not_found_error(
    what: str, pattern: str, names: Collection[str], failures: Iterable[DaemonFailure] = ()
) -> NotFoundError:
    """Return the error for a name that does not exist or a pattern that matches nothing."""
    where = unreachable_suffix(failures)
    if is_pattern(pattern):
        hint = _glob_hint(pattern, names)
        return NotFoundError(f"no {what} matches {pattern}{where}", hint=hint)
    return NotFoundError(f"{what} {pattern} does not exist{where}", hint=_meant(pattern, names))


def unreachable_suffix(failures: Iterable[DaemonFailure]) -> str:
    """Say who may have what was not found, "" when every daemon answered."""
    left_out = "; ".join(str(failure.error) for failure in failures)
    return f" on the daemons that answer; left out: {left_out}" if left_out else ""


def _glob_hint(pattern: str, names: Collection[str]) -> str:
    """What to write for a pattern that is a regular expression without its slashes."""
    try:
        meant = any(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return ""
    return f"This is a glob; write '/{pattern}/' for a regular expression." if meant else ""


def describe_registered_only(subject: str, failures: Collection[DaemonFailure] = ()) -> str:
    """Return the message about a topic or channel that only nsqlookupd knows."""
    which = "no nsqd that answers" if failures else "no nsqd"
    return f"{subject} is registered with nsqlookupd, but {which} has it"


UNLISTED_S = 20.0  # nsqd registers at a restarted nsqlookupd within 15
ASK_EVERY_S = 1.0


class UnlistedTopics:
    """Asks while a topic has no connection. Used on one thread.

    ``found`` are those that no nsqd has, as of the last call of `among`.
    """

    def __init__(
        self, connection: ConnectionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.found: Set[str] = frozenset()
        self._connection = connection
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._ask_at_s = 0.0

    def among(self, unconnected: Collection[str]) -> Set[str]:
        """Return those of all topics without a connection that no nsqd has.

        To be called again and again, with what has no connection then.
        """
        self._since_s = {t: since for t, since in self._since_s.items() if t in unconnected}
        connection = self._connection
        if connection.nsqd_tcp_addresses or not connection.lookupd_http_addresses:
            return self.found
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
        self.found = {t for t, since in self._since_s.items() if now - since >= UNLISTED_S}
        return self.found

    def refuse(self, topics: Iterable[str]) -> None:
        """Raise `NotFoundError` when any of these topics is among those found."""
        if names := ", ".join(sorted(self.found & set(topics))):
            raise NotFoundError(
                f"no nsqd has topic {names}, which only nsqlookupd knows",
                hint="Run again when the nsqd that had it is back, or delete it: nsq topic delete.",
            )

    def _listed(self) -> set[str] | None:
        """Return the topics that some nsqd is named for; None when no daemon answers."""
        try:
            with open_cluster(self._connection) as cluster:
                answers, _ = cluster.fetch_nodes()
        except (NsqError, OSError):
            return None
        return announced_topics(answers) if answers else None


log = logging.getLogger("nsqtools")


class ChangeLog:
    """Log a problem when it begins, changes or ends, and not each time that it is met again.

    What is tried again every few seconds would otherwise fill the log with one line. A key names
    the subject of a problem: a topic, an address.
    """

    def __init__(self) -> None:
        self._reported: dict[str, str] = {}

    def report(self, key: str, text: str) -> None:
        """Log the problem of a key, unless it is the one that was reported last."""
        if self._reported.get(key) != text:
            self._reported[key] = text
            log.warning("%s", text)

    def resolve(self, key: str, text: str = "") -> None:
        """Forget the problem of a key; log ``text`` if there was one."""
        if self._reported.pop(key, None) is not None and text:
            log.warning("%s", text)

    def retain(self, keys: Iterable[str], text: str) -> None:
        """Resolve the problems of all other keys; ``{}`` in ``text`` becomes the key."""
        for key in set(self._reported).difference(keys):
            self.resolve(key, text.format(key))


LOOK_S = 0.2  # between looks whether it is time to ask something
ASK_AGAIN_S = 1.0
ASK_SELDOM_S = 5.0  # for topics that are deleted, or while an nsqd that may have one is silent


class ConsumedTopics:
    """Which topics to consume now: those ``given``, and those that ``pattern`` finds, but for those
    that are deleted, until they are there again.

    The pattern is a regular expression that names contain (as nsq_to_file), asked for every
    ``refresh_s``; ``check`` raises `ConfigurationError` for a topic that must not be consumed, and
    those to ``leave_out`` are not found. With ``forgets_deleted`` those given are not waited for.

    From `start` on daemons are asked on a thread of its own, until ``stopping`` is set: one that
    hangs delays no message. Methods are for one other thread, `suspect` for any. ``nsqd`` have a
    topic found, as nsqlookupd named them last: a new mapping each time. ``unlisted`` are asked for
    where silence ends the run.

    Raises `ConfigurationError` for a pattern that is not one, and for a pattern with a connection
    that only names topics: nobody could consume them.
    """

    def __init__(
        self,
        given: Collection[str],
        connection: ConnectionSettings,
        pattern: str | None = None,
        refresh_s: float = 60.0,
        *,
        check: Callable[[str], None] = lambda topic: None,
        leave_out: Iterable[str] = (),
        forgets_deleted: bool = False,
    ) -> None:
        try:
            self.pattern = None if pattern is None else re.compile(pattern)
        except re.error as exc:
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
        self._wanted = {*given}
        self._awaited = {*given}
        self._passed_over = {*given, *leave_out}  # where the pattern finds them
        self._suspects: set[str] = set()
        self._is_connected: Callable[[str], bool] = lambda topic: False
        self._silent, self._change_log = ChangeLog(), ChangeLog()
        self._failure: Exception | None = None

    def start(self, is_connected: Callable[[str], bool], *, ends_idle: bool) -> None:
        """Find topics, now and from now on. Raises the first failure when no daemon answers.

        ``is_connected`` tells whether a topic has a connection, on any thread; ``ends_idle`` that
        silence ends the run.
        """
        self._is_connected = is_connected
        self._find()
        watch = partial(self._watch, ends_idle)
        threading.Thread(target=watch, name="nsq-topics", daemon=True).start()

    def wanted(self) -> set[str]:
        """Return the topics to consume now. Raises what ended the asking."""
        if self._failure is not None:
            raise self._failure
        return self._wanted.copy()

    @property
    def has_candidates(self) -> bool:
        """Whether there is a topic to consume, or may be one."""
        return bool(self._wanted or self._awaited or self.pattern)

    def disconnected(self) -> set[str]:
        """Return the topics to consume that have no connection."""
        return {topic for topic in self._wanted.copy() if not self._is_connected(topic)}

    def suspect(self, topic: str) -> None:
        """A topic has lost a connection: it may be deleted. For any thread."""
        self._suspects.add(topic)

    def postpone(self, topic: str) -> None:
        """A topic cannot be consumed now: it is wanted when it is found again."""
        self._wanted.discard(topic)

    # -- the thread that asks -------------------------------------------------------------------

    def _watch(self, ends_idle: bool) -> None:
        ask_at = retry_at = 0.0
        refresh_at = time.monotonic() + self._refresh_s
        try:
            while not self.stopping.wait(LOOK_S):
                if (now := time.monotonic()) >= refresh_at:
                    refresh_at = now + self._refresh_s
                    self._refresh()
                suspects = {self._suspects.pop() for _ in range(len(self._suspects))}
                disconnected = self.disconnected() if suspects or ends_idle else set()
                if ends_idle:
                    self.unlisted.among(disconnected)
                lost, absent = suspects & disconnected, self._awaited - self._wanted
                self._suspects |= lost  # until they are connected, or deleted
                if (lost and now >= ask_at) or (absent and now >= retry_at):
                    are_all = self._ask_nsqd(lost, absent)
                    now = time.monotonic()
                    ask_at = now + (ASK_AGAIN_S if are_all else ASK_SELDOM_S)
                    retry_at = now + min(self._refresh_s, ASK_SELDOM_S)
        except Exception as exc:
            self._failure = exc

    def _refresh(self) -> None:
        for topic in self._wanted.copy():
            self.check(topic)
        try:
            self._find()
        except (NsqError, OSError) as exc:
            self._failed("pattern", f"no topics were found: {exc}; trying again")
        else:
            self._change_log.resolve("pattern")

    def _failed(self, key: str, what: str) -> None:
        """Log why nobody answers, unless nobody waits for an answer any more."""
        if not self.stopping.is_set():
            self._change_log.report(key, what)

    def _find(self) -> None:
        """Ask all daemons for topics of the pattern. Raises when none answers."""
        if self.pattern is None:
            return
        with open_cluster(self.connection) as cluster:
            names, failures = fetch_topics(cluster)
            answers, _ = cluster.fetch_nodes()
        for address, error in failures:
            self._silent.report(address, f"cannot list the topics of {address}: {error}")
        self._silent.retain([failure.address for failure in failures], "{} answers again")
        nsqd: dict[str, set[Address]] = collections.defaultdict(set)
        for known in chain.from_iterable(answers.values()):
            for topic in filter(self.pattern.search, known.topics - known.tombstoned):
                nsqd[topic].add(known.node.tcp)
        found = {*filter(self.pattern.search, names)}
        for topic in sorted(found - self._wanted - self._passed_over):
            try:
                self.check(topic)
                self._wanted.add(topic)
            except ConfigurationError as exc:
                log.error("%s", exc)
                self._passed_over.add(topic)
        self.nsqd = nsqd

    def _ask_nsqd(self, lost: set[str], absent: set[str]) -> bool:
        """Ask which topics there are; return whether all nsqd have answered.

        What nsqlookupd says of topics does not count: one that was restarted knows none, and no
        nsqd, for as long as nsqd takes to register again.
        """
        try:
            with open_cluster(self.connection) as cluster:
                answers, failures = cluster.ask_nsqds(topic_names, required=False)
        except (NsqError, OSError) as exc:
            self._failed("nsqd", f"cannot ask which topics there are: {exc}; trying again")
            return False
        self._change_log.resolve("nsqd")
        there = merge_names(answers)
        for topic in absent & there:
            self.check(topic)
            self._wanted.add(topic)
        if failures or not answers:
            return False
        for topic in sorted(lost - there):
            self._wanted.discard(topic)
            self._suspects.discard(topic)
            if self._forgets_deleted:
                self._awaited.discard(topic)
                log.warning("topic %s was deleted; it is not consumed any more", topic)
            else:
                log.warning("topic %s was deleted; waiting until it is there again", topic)
        return True
