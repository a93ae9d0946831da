"""Look a topic up before subscribing to it.

A SUB creates topic and channel, so a misspelt topic would leave debris on nsqd and wait for ever.
And nsqd hands the backlog of a topic without channels to its first channel: if that is an ephemeral
one, what it does not consume is destroyed with it when its client leaves.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.stats import TopicStats, read_stats


@dataclass(slots=True)
class TopicReport:
    """What was found out about a topic.

    ``backlog`` counts the messages queued in the topic itself where it has no channel. ``asked``
    and ``failed`` say who answered and what went wrong; ``known_topics`` are names to suggest.
    """

    topic: str
    exists: bool = False
    channels: set[str] = field(default_factory=set)
    backlog: int = 0
    asked: list[str] = field(default_factory=list)
    failed: list[NsqError] = field(default_factory=list)
    known_topics: set[str] = field(default_factory=set)


def inspect_topic(cluster: Cluster, topic: str) -> TopicReport:
    """Ask every nsqlookupd, and every nsqd that is given or that they name for the topic.

    Failures are noted in the report, none is raised.
    """
    report = TopicReport(topic)
    lookups, failures = cluster.ask(cluster.lookupds, lambda lookupd: lookupd.lookup(topic))
    announced = (node for lookup in lookups.values() for node in lookup.nodes)
    nsqds, impostors = cluster.nsqds_among(announced)
    clients = {nsqd.address: nsqd.client for nsqd in nsqds}
    answers, failed = cluster.ask(clients, lambda nsqd: _topics(nsqd, topic))
    report.asked += [*lookups, *answers]
    report.failed += [failure.error for failure in (*failures, *impostors, *failed)]
    report.exists = any(lookup.is_known for lookup in lookups.values()) or any(answers.values())
    for lookup in lookups.values():
        report.channels |= lookup.channels
    for stats in (each for topics in answers.values() for each in topics):
        report.channels.update(channel.channel_name for channel in stats.channels)
        if not stats.channels:
            report.backlog += stats.depth
    if not report.exists:
        report.known_topics = _known_topics(cluster, clients)
    return report


def topics_on_nsqds(cluster: Cluster) -> tuple[set[str], bool]:
    """Return the topics that any nsqd has, and whether these are all: some nsqd and each answered.

    What nsqlookupd says of topics does not count: one that was restarted knows none, and no nsqd,
    for as long as nsqd takes to register again.
    """
    nsqds, failures = cluster.nsqds()
    answers, failed = cluster.ask({nsqd.address: nsqd.client for nsqd in nsqds}, _topics)
    names = {each.topic_name for topics in answers.values() for each in topics}
    return names, bool(answers) and not failures and not failed


def _topics(nsqd: NsqdHTTPClient, topic: str = "") -> tuple[TopicStats, ...]:
    return read_stats(nsqd.stats(topic)).topics or ()


def _known_topics(cluster: Cluster, clients: dict[str, NsqdHTTPClient]) -> set[str]:
    listed, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    answers, _ = cluster.ask(clients, _topics)
    names = {name for names in listed.values() for name in names}
    return names | {each.topic_name for topics in answers.values() for each in topics}


def check_subscription(
    report: TopicReport, channel: str, *, create: bool = False, force: bool = False
) -> str:
    """Decide whether to subscribe. Return "" or one line of warning.

    Raises `NotFoundError` for a topic that nobody asked has, unless ``create``; and
    `ConfigurationError` when an ephemeral channel would destroy the topic's backlog, unless
    ``force``.
    """
    topic = report.topic
    if not report.exists:
        if not report.asked:
            why = f" ({report.failed[0]})" if report.failed else ""
            return f"cannot check whether topic {topic} exists{why}; subscribing creates it"
        if create:
            return ""
        raise NotFoundError(f"topic {topic} does not exist", hint=_suggestion(report))
    if is_ephemeral(channel) and not report.channels and report.backlog and not force:
        raise ConfigurationError(
            f"topic {topic} has no channel and {report.backlog} messages waiting: what an "
            f"ephemeral channel does not read before you leave would be destroyed",
            hint="Name a channel that stays (--channel NAME), or go on with --force.",
        )
    if is_ephemeral(channel) and not report.channels and report.failed and not force:
        return (
            f"cannot check whether messages wait in topic {topic} ({report.failed[0]}); "
            "what this run does not read of them is lost"
        )
    return ""


def _suggestion(report: TopicReport) -> str:
    near = difflib.get_close_matches(report.topic, sorted(report.known_topics), n=3)
    go_on = "Use --create to subscribe all the same."
    return f"Did you mean {' or '.join(near)}? {go_on}" if near else go_on
