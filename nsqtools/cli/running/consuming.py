"""What commands that consume have in common: what, how long, and how it is watched.

A command declares ``consuming: Consuming``, or `StopLimits` alone.
`look_before` asks for the topic, for a SUB would create it. `idle_report` tells what a
run waits for that has got nothing yet, and `WaitingNotice` on a terminal on which nsqd.
`stop_when_empty` watches a queue for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSet, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.options.params import (
    LIMITS,
    MONITORING,
    SAFETY,
    Count,
    ExitIdle,
    For,
    Json,
    OptionalTopics,
)
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import Runtime, StopSignals, background_thread, stop_on_signals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.cli.running.service import Health, Metrics, Service
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.topics import ConsumedTopics, TopicReport
    from nsqtools.protocol.names import Address
    from nsqtools.tail.tail import RunLimits, Tail

EMPTY_AFTER_S = 2.0  # a connected channel that is silent for this long is empty
LOOK_EVERY_S = 0.5
IDLE_REPORT_S = (5.0, 60.0, 600.0, 3600.0)  # once each: a log of an idle service stays short
MOST_NAMED = 10

FAST_DISCOVERY_S = 60.0
"""A topic that grows onto another nsqd is found within seconds, as long as the command has just
begun to look: consumers ask nsqlookupd at most every 5 seconds."""

Create = Annotated[
    bool, opt("--create", "Subscribe even if the topic does not exist, which creates it.", SAFETY)
]


class StopLimits(OptionSet):
    """When to stop; without any limit, never."""

    count: Count = None
    until_empty: bool = opt("", "Stop when the channel is empty.", LIMITS)
    exit_idle: ExitIdle = None
    for_: For = None

    def run_limits(self) -> RunLimits:
        """The same, as those who consume take it."""
        from nsqtools.tail.tail import RunLimits

        idle_s = self.exit_idle
        if self.until_empty:
            idle_s = EMPTY_AFTER_S if idle_s is None else min(idle_s, EMPTY_AFTER_S)
        return RunLimits(self.count, idle_s, self.for_)


class Consuming(OptionSet):
    """What to consume, until when, and how it is watched. Raises `ConfigurationError`."""

    topic: OptionalTopics = None
    topic_pattern: str | None = opt("REGEX", "Also every topic, now and later, whose name matches.")
    topic_refresh: float = opt(
        "DURATION", "How often to look for topics of the pattern.", default="1m"
    )
    metrics_file: Path | None = opt(
        "FILE", "Write counts to this file, as Prometheus text.", MONITORING
    )
    listen_http: str | None = opt(
        "[HOST:]PORT",
        "Serve /metrics for Prometheus and /health, on loopback by default.",
        MONITORING,
    )
    limits: StopLimits
    create: Create = False
    json: Json = False

    def check(self) -> None:
        if not self.topics and self.topic_pattern is None:
            raise ConfigurationError("no topic given", hint="Give --topic or --topic-pattern.")

    @property
    def topics(self) -> tuple[str, ...]:
        """Each topic that was named, once."""
        return tuple(dict.fromkeys(self.topic or ()))

    def consumed(
        self,
        connection: ConnectionSettings,
        *,
        check: Callable[[str], None] = lambda topic: None,
        leave_out: Iterable[str] = (),
        forgets_deleted: bool = False,
    ) -> ConsumedTopics:
        """Return the topics to consume now and later; the parameters are those of the class."""
        from nsqtools.cluster.topics import ConsumedTopics

        return ConsumedTopics(
            self.topics,
            connection,
            self.topic_pattern,
            self.topic_refresh,
            check=check,
            leave_out=leave_out,
            forgets_deleted=forgets_deleted,
        )

    @contextmanager
    def watched(
        self,
        runtime: Runtime,
        stop: Callable[[], object],
        *,
        metrics: Metrics,
        health: Health,
        queue: tuple[ConnectionSettings, str],
        done: Callable[[], int],
    ) -> Iterator[RunStatus]:
        """Inside, signals call ``stop``, and the run is watched as the options say.

        ``queue`` is where the channel is, and its name; ``done`` counts the messages that came.
        """
        from nsqtools.cli.running.service import service

        metrics_file, environ = self.metrics_file, runtime.environ

        def end() -> None:
            supervised.stopping()
            stop()

        with (
            Progress(runtime) as progress,
            service(
                self.listen_http, environ, metrics=metrics, health=health, metrics_file=metrics_file
            ) as supervised,
            stop_on_signals(end) as signals,
            idle_report(
                runtime, *queue, self.topics, done, health=health, make_room=progress.clear
            ),
        ):
            yield RunStatus(progress, supervised, signals)


class RunStatus(NamedTuple):
    """A run that says how far it is: on a terminal, to systemd, and over HTTP."""

    progress: Progress
    service: Service
    signals: StopSignals

    def tick(self, text: Callable[[], str]) -> None:
        """A turn was taken, and this is how far it is."""
        self.service.ready()
        self.service.alive()
        self.progress.show(text)


def look_before(
    topics: Iterable[str],
    channel: str,
    connection: ConnectionSettings,
    runtime: Runtime,
    *,
    create: bool,
    force: bool,
    may_share: bool = True,
    looked: MutableSet[tuple[str, Address]] | None = None,
) -> bool:
    """Ask for the topics before subscribing. Raises `NotFoundError` and `ConfigurationError`.

    ``looked`` gets each topic with the nsqd that answered. Where no daemon answers at all,
    that alone is reported: raises the error of the connection. Unless it ``may_share`` a channel
    with other consumers, these are reported, and on a terminal the user is asked; returns whether
    to go on.
    """
    from nsqtools.client.connection import require_one
    from nsqtools.cluster.topics import (
        check_subscription,
        describe_queue,
        inspect_topic,
        is_new_channel,
    )
    from nsqtools.protocol.names import check_channel, check_topic, is_ephemeral, parse_address

    check_channel(channel)
    topics = [check_topic(topic) for topic in topics]
    report: TopicReport | None = None
    with ClusterSettings(connection).open() as cluster:
        for topic in topics:
            if report is None or report.asked:  # who did not answer for one takes time for each
                report = inspect_topic(cluster, topic)
                if not report.asked:
                    nsqds = connection.nsqd_tcp_addresses
                    require_one(nsqds, connection.client_options().dial_timeout_s)
                    if report.failed and not nsqds:
                        raise report.failed[0]
            report.topic = topic
            if warning := check_subscription(report, channel, create=create, force=force):
                runtime.info(f"nsq: {warning}")
            elif report.is_paused(channel) or (
                is_new_channel(report, channel) and not is_ephemeral(channel)
            ):
                runtime.info(f"nsq: {describe_queue(report, channel)}")
            if not may_share and not confirm_shared_channel(report, channel, runtime):
                return False
            if looked is not None:
                given = () if report.failed else map(parse_address, connection.nsqd_tcp_addresses)
                looked |= {(topic, nsqd) for nsqd in (*given, *report.looked_at)}
    return True


def backlog_guard(
    connection: ConnectionSettings,
    channel: str,
    looked: MutableSet[tuple[str, Address]],
    *,
    force: bool,
) -> Callable[[str, Address], Callable[[], None] | None] | None:
    """Return what keeps an ephemeral channel from the backlog of an nsqd that joins later, or was
    not among those that `look_before` has ``looked`` at.

    It looks when nsqd has taken the connection, and so answers over HTTP, too: one that started
    between a look that nobody answered and the connection was missed."""
    from nsqtools.cluster.topics import check_subscription, inspect_topic
    from nsqtools.protocol.names import is_ephemeral

    def begin(topic: str, nsqd: Address) -> Callable[[], None] | None:
        if (topic, nsqd) in looked:  # a moment ago; the next try may be much later
            looked.remove((topic, nsqd))
            return None
        return partial(look, topic, nsqd)

    def look(topic: str, nsqd: Address) -> None:
        with ClusterSettings(connection).open() as cluster:
            report = inspect_topic(cluster, topic, nsqd)
        try:
            check_subscription(report, channel, create=True)
        except ConfigurationError as exc:
            raise ConfigurationError(f"not consuming from {nsqd}: {exc}", hint=exc.hint) from None

    return begin if is_ephemeral(channel) and not force else None


def confirm_shared_channel(report: TopicReport, channel: str, runtime: Runtime) -> bool:
    """Report other consumers of a channel, and on a terminal ask whether to go on."""
    from nsqtools.protocol.text import counted

    consumers = sum(each.client_count for each in report.of_channel(channel))
    if not consumers:
        return True
    others = counted(consumers, "consumer")
    line = (
        f"nsq: {report.topic}/{channel} has {others}, which do without what is taken here; "
        "for a copy of everything use another channel (nsq tail without --channel makes one)"
    )
    is_asked = runtime.stdin.isatty() and runtime.stderr_is_tty
    return runtime.confirm([line], "Take messages from them?", yes=not is_asked)


@contextmanager
def idle_report(
    runtime: Runtime,
    connection: ConnectionSettings,
    channel: str,
    topics: Sequence[str],
    done: Callable[[], int],
    *,
    health: Health = lambda: (True, ""),
    make_room: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Inside, say on stderr at the times of `IDLE_REPORT_S` for what it waits, until the first
    message is ``done``."""
    from nsqtools.protocol.text import format_duration

    def why() -> str:
        from nsqtools.cluster.topics import describe_queue, inspect_topic

        is_well, text = health()
        if not is_well or not topics:
            return text
        with ClusterSettings(connection).open() as cluster:
            named = topics[:MOST_NAMED]
            return "; ".join(
                describe_queue(inspect_topic(cluster, each), channel) for each in named
            )

    def watch(ended: threading.Event) -> None:
        waited_s = 0.0
        for after_s in IDLE_REPORT_S:
            if ended.wait(after_s - waited_s) or done():
                return
            waited_s = after_s
            try:
                reason = why()
            except NsqError:  # the program ends, and nobody can be asked any more
                return
            if ended.is_set() or done():
                return
            make_room()
            runtime.info(f"nsq: no message for {format_duration(after_s)}: {reason}")

    with background_thread("waiting", watch, 0.0):  # what it asks may take its time
        yield


class WaitingNotice:
    """Says on stderr where the messages come from, each time that changes; called now and then."""

    def __init__(self, runtime: Runtime, channel: str) -> None:
        self._runtime = runtime
        self._channel = channel
        self._began_s = runtime.monotonic()
        self._said: dict[str, set[str]] = {}

    def __call__(self, tail: Tail) -> None:
        """Say what has changed, and see that it is found soon."""
        if self._runtime.monotonic() - self._began_s < FAST_DISCOVERY_S:
            tail.look_up_soon()
        for topic, addresses in tail.connections.items():
            now, before = set(addresses), self._said.get(topic)
            if now == before:
                continue
            self._said[topic] = now
            if not now:
                lost = ": the connection is lost; trying again"
                said = lost if before else ": no nsqd has the topic yet; waiting for one"
            elif not before:
                said = f" on {_list(now)}: waiting (Ctrl-C ends it)"
            elif now - before:
                said = f": now on {_list(now - before)} too"
            else:
                said = f": no longer on {_list(before - now)}"
            self._runtime.info(f"nsq: {topic}/{self._channel}{said}")

    def sum_up(self, count: int) -> None:
        """Say at the end how many messages came."""
        from nsqtools.protocol.text import counted

        elapsed_s = self._runtime.monotonic() - self._began_s
        self._runtime.info(f"nsq: {counted(count, 'message')} in {elapsed_s:.1f} s")


def _list(addresses: Iterable[str]) -> str:
    return ", ".join(sorted(addresses))


@contextmanager
def stop_when_empty(
    connection: ConnectionSettings,
    channel: str,
    connections: Callable[[], Mapping[str, Collection[str]]],
    on_empty: Callable[[], None],
) -> Iterator[None]:
    """Inside, ask nsqd for the depth of a channel, and call ``on_empty`` when it is 0 everywhere.

    A channel that gets new messages all the time is never silent, but it is empty at some moment.
    Where an nsqd cannot be asked, or an nsqlookupd that was restarted does not know it yet, nothing
    is called: the limit of silence is left to end the run. ``connections`` are those of each topic.
    """
    from nsqtools.cluster.directory import open_cluster

    def watch(ended: threading.Event) -> None:
        with open_cluster(connection) as cluster:
            while not ended.wait(LOOK_EVERY_S):
                try:
                    now = connections()
                    if all(now.values()) and is_empty(cluster, channel, now):
                        on_empty()
                        return
                except NsqError:
                    continue

    with background_thread("until-empty", watch):
        yield


def is_empty(cluster: Cluster, channel: str, connections: Mapping[str, Collection[str]]) -> bool:
    """Tell whether nothing waits, at any of the nsqd that each topic is consumed from."""
    from nsqtools.http.http_api import NsqdHTTPClient

    for topic, connected in connections.items():
        answers, failures = cluster.ask_nsqds(partial(NsqdHTTPClient.stats, topic=topic))
        there = [each for stats in answers.values() for each in stats.topics or ()]
        if failures or len(there) < len(connected):
            return False
        for found in there:
            waiting = [each.depth for each in found.channels if each.channel_name == channel]
            if any(waiting) or (found.depth and not found.paused):
                return False
    return True
