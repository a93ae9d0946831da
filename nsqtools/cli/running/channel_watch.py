"""One object that asks nsqd about a channel, for the whole run of a command that consumes it.

A subscription creates topics and channels, and an ephemeral channel takes a backlog and loses it.
So the topics are checked before the first subscription (`ChannelWatch.check_topics`), and an nsqd
that joins later is checked when it joins (`backlog_guard`). While no message arrives the log gives
the reason (`idle_report`), and `stop_when_empty` ends a run with ``--until-empty``. The decisions
are pure functions of `nsqtools.cluster.topics`; this module decides when to ask.

Each fact is asked for once: an nsqd that `check_topics` has inspected is not inspected again when
the consumer connects to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.running.runtime import Runtime, background_thread
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.topics import TopicReport
    from nsqtools.http.service import Health
    from nsqtools.protocol.names import Address

POLL_S = 0.5  # of the depth, under --until-empty: a run ends this long after its channel is empty
IDLE_REPORT_S = (5.0, 60.0, 600.0, 3600.0)  # once each, so that the log of an idle service is short
# Topics in one line.
MAX_REPORTED = 10


def _is_well() -> tuple[bool, str]:
    return True, ""


class ChannelWatch:
    """Asks about one channel of one or several topics.

    ``force`` lets an ephemeral channel take a backlog. ``topics`` may be empty for a pattern.
    """

    def __init__(
        self,
        topics: Collection[str],
        channel: str,
        connection: ConnectionSettings,
        runtime: Runtime,
        *,
        force: bool,
    ) -> None:
        self._topics = topics
        self._channel = channel
        self._connection = connection
        self._runtime = runtime
        self._force = force
        self._inspected: set[tuple[str, Address]] = set()

    def check_topics(
        self,
        *,
        create: bool,
        may_share: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> bool:
        """Check every topic before subscribing, and report new, paused and empty queues.

        ``notify`` gets the lines about queues, which are printed by default.
        Unless it ``may_share`` the channel with other consumers, these are reported, and on a
        terminal the user is asked; returns whether to continue. Raises `NotFoundError` for a topic
        that does not exist unless ``create``, `ConfigurationError` for a backlog that would be
        lost, and the error of the connection if no daemon can be reached.
        """
        from nsqtools.client.connection import require_one
        from nsqtools.cluster.topics import (
            check_subscription,
            describe_queue,
            inspect_topic,
            is_new_channel,
        )
        from nsqtools.protocol.names import check_channel, check_topic, is_ephemeral, parse_address

        channel, nsqds = check_channel(self._channel), self._connection.nsqd_tcp_addresses
        topics = [check_topic(topic) for topic in self._topics]
        notify = notify or self._runtime.info
        report: TopicReport | None = None
        with ClusterSettings(self._connection).open() as cluster:
            for topic in topics:
                # daemons that did not answer for one topic would cost their timeout for each
                if report is None or report.answered:
                    report = inspect_topic(cluster, topic)
                    if not report.answered:
                        require_one(nsqds, self._connection.client_options().dial_timeout_s)
                        if report.failed and not nsqds:
                            raise report.failed[0]
                report.topic = topic
                if warning := check_subscription(report, channel, create=create, force=self._force):
                    notify(f"nsq: {warning}")
                elif report.is_paused(channel) or (
                    is_new_channel(report, channel) and not is_ephemeral(channel)
                ):
                    notify(f"nsq: {describe_queue(report, channel)}")
                if not may_share and not confirm_shared_channel(report, channel, self._runtime):
                    return False
                answered = () if report.failed else map(parse_address, nsqds)
                self._inspected |= {(topic, nsqd) for nsqd in (*answered, *report.looked_at)}
        return True

    @property
    def backlog_guard(self) -> Callable[[str, Address], Callable[[], None] | None] | None:
        """What keeps an ephemeral channel from the backlog of an nsqd that joins later.

        It is called when nsqd has accepted the connection, and so answers over HTTP as well: an
        nsqd that started between a check that nobody answered and the connection is not missed.
        None if nothing has to be kept.
        """
        from nsqtools.protocol.names import is_ephemeral

        return self._begin_check if is_ephemeral(self._channel) and not self._force else None

    def _begin_check(self, topic: str, nsqd: Address) -> Callable[[], None] | None:
        if (topic, nsqd) in self._inspected:  # a moment ago; the next connection may be much later
            self._inspected.remove((topic, nsqd))
            return None
        return partial(self._check_nsqd, topic, nsqd)

    def _check_nsqd(self, topic: str, nsqd: Address) -> None:
        from nsqtools.cluster.topics import check_subscription, inspect_topic

        with ClusterSettings(self._connection).open() as cluster:
            report = inspect_topic(cluster, topic, nsqd)
        try:
            check_subscription(report, self._channel, create=True)
        except ConfigurationError as exc:
            raise ConfigurationError(f"not consuming from {nsqd}: {exc}", hint=exc.hint) from None

    @contextmanager
    def idle_report(
        self,
        count_done: Callable[[], int],
        *,
        health: Health = _is_well,
        make_room: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Inside, report at the times of `IDLE_REPORT_S` why no message has arrived.

        Ends with the first message that is done. ``health`` gives the reason if it is not well,
        ``make_room`` is called before a line.
        """
        from nsqtools.protocol.text import format_duration

        def watch(ended: threading.Event) -> None:
            waited_s = 0.0
            for after_s in IDLE_REPORT_S:
                if ended.wait(after_s - waited_s) or count_done():
                    return
                waited_s = after_s
                try:
                    reason = self._idle_reason(health)
                except NsqError:  # the program ends, and asks nothing any more
                    return
                if ended.is_set() or count_done():
                    return
                make_room()
                self._runtime.info(f"nsq: no message for {format_duration(after_s)}: {reason}")

        with background_thread("waiting", watch, 0.0):  # a question may take its time
            yield

    def _idle_reason(self, health: Health) -> str:
        from nsqtools.cluster.topics import describe_queue, inspect_topic

        is_well, text = health()
        if not is_well or not self._topics:
            return text
        with ClusterSettings(self._connection).open() as cluster:
            return "; ".join(
                describe_queue(inspect_topic(cluster, topic), self._channel)
                for topic in [*self._topics][:MAX_REPORTED]
            )

    @contextmanager
    def stop_when_empty(
        self,
        connections: Callable[[], Mapping[str, Collection[str]]],
        on_empty: Callable[[], None],
    ) -> Iterator[None]:
        """Inside, poll the depth of the channel, and call ``on_empty`` when it is 0 everywhere.

        A channel that keeps receiving messages is never silent, but it is empty at some moment. If
        an nsqd does not answer, or a restarted nsqlookupd does not list it yet, nothing is called:
        the limit of silence then ends the run. ``connections`` are those of each topic.
        """
        from nsqtools.cluster.directory import open_cluster

        def watch(ended: threading.Event) -> None:
            with open_cluster(self._connection) as cluster:
                while not ended.wait(POLL_S):
                    try:
                        connected = connections()
                        if all(connected.values()) and is_empty(cluster, self._channel, connected):
                            on_empty()
                            return
                    except NsqError:
                        continue

        with background_thread("until-empty", watch):
            yield


def confirm_shared_channel(report: TopicReport, channel: str, runtime: Runtime) -> bool:
    """Report other consumers of a channel, and on a terminal ask whether to continue."""
    from nsqtools.protocol.text import counted

    consumers = sum(stats.client_count for stats in report.of_channel(channel))
    if not consumers:
        return True
    others = counted(consumers, "consumer")
    line = (
        f"nsq: {report.topic}/{channel} has {others}, which do without what is taken here; "
        "for a copy of everything use another channel (nsq tail without --channel makes one)"
    )
    is_asked = runtime.stdin.isatty() and runtime.stderr_is_tty
    return runtime.confirm([line], "Take messages from them?", yes=not is_asked)


def is_empty(cluster: Cluster, channel: str, connections: Mapping[str, Collection[str]]) -> bool:
    """Tell whether no message waits, on any nsqd that each topic is consumed from."""
    from nsqtools.http.http_api import NsqdHTTPClient

    for topic, connected in connections.items():
        answers, failures = cluster.ask_nsqds(partial(NsqdHTTPClient.stats, topic=topic))
        topics = [stats for answer in answers.values() for stats in answer.topics or ()]
        if failures or len(topics) < len(connected):
            return False
        for stats in topics:
            depths = [c.depth for c in stats.channels if c.channel_name == channel]
            if any(depths) or (stats.depth and not stats.paused):
                return False
    return True
