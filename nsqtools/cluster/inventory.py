"""The daemons, topics and channels of a cluster, on nsqd and registered with nsqlookupd.

The two differ: a topic that was only created with nsqlookupd is on no nsqd yet, and a topic stays
registered when its last nsqd is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from nsqtools.cluster.directory import Answers, Cluster, DaemonFailure, Nsqds
from nsqtools.cluster.topics import merge_names, not_found_error
from nsqtools.errors import ConfigurationError, HTTPError
from nsqtools.http.http_api import HTTPAPI, KnownNode, NsqdHTTPClient, NsqlookupdHTTPClient
from nsqtools.protocol.names import Address
from nsqtools.protocol.stats import ChannelStats, TopicStats

# Topics whose channels are asked for within the timeout of one question: ten requests on one
# connection take a few milliseconds each.
AT_ONCE = 10


Registered = Mapping[str, frozenset[str]]
"""The topics of an nsqlookupd, and their channels if these were asked for."""


class Inventory(NamedTuple):
    """Topics and channels of all daemons that answered, by their addresses.

    ``nodes`` has the topics on each nsqd, ``registered`` the topics at each nsqlookupd, and
    ``announced`` the entries of each nsqd in the lists /nodes, by nsqlookupd.
    """

    nodes: Mapping[str, Mapping[str, TopicStats]]
    given: frozenset[str]
    registered: Mapping[str, Registered]
    failures: tuple[DaemonFailure, ...]
    announced: Mapping[str, Mapping[str, KnownNode]]

    @property
    def topics(self) -> set[str]:
        """The names of all topics."""
        return merge_names(self.registered) | merge_names(self.nodes)

    def where(self, name: str) -> Iterator[tuple[str, TopicStats]]:
        """Yield every nsqd that has the topic, with its statistics."""
        for address, topics in self.nodes.items():
            if name in topics:
                yield address, topics[name]

    def channels(self, topic: str) -> set[str]:
        """Return the names of a topic's channels, on any nsqd or registered."""
        names = {c.channel_name for _, stats in self.where(topic) for c in stats.channels}
        return names.union(*(topics.get(topic, ()) for topics in self.registered.values()))

    def lookupds_with(self, topic: str, channel: str = "") -> list[str]:
        """Return every nsqlookupd with which the topic, or the channel, is registered."""
        return [
            address
            for address, topics in self.registered.items()
            if (channel in topics.get(topic, ()) if channel else topic in topics)
        ]

    def announced_by(self, address: str, topic: str) -> list[str]:
        """Return the nsqlookupd that send consumers of the topic to an nsqd."""
        return [
            lookupd
            for lookupd, entry in self.announced.get(address, {}).items()
            if topic in entry.topics - entry.tombstoned
        ]


def take_inventory(cluster: Cluster) -> Inventory:
    """Ask all daemons. Raises the first failure when none answers."""
    entries_by_lookupd, nsqds, failures = cluster.discover_nsqds()
    answers, silent = cluster.ask(
        {**_remembered(cluster), **nsqds},
        lambda nsqd: {stats.topic_name: stats for stats in nsqd.stats(clients=True).topics or ()},
    )
    alive = {address: cluster.lookupds[address] for address in entries_by_lookupd}
    registered, forgetful = cluster.ask(alive, NsqlookupdHTTPClient.topics)
    failures += [*silent, *forgetful]
    if failures and not answers and not registered:
        raise failures[0].error
    entries = cluster.entries(entries_by_lookupd)
    return Inventory(
        answers,
        frozenset(cluster.given_addresses),
        {address: dict.fromkeys(topics, frozenset()) for address, topics in registered.items()},
        tuple(failures),
        {at: entries.get(name, {}) for at in answers if (name := cluster.names.get(at, ""))},
    )


def with_channels(cluster: Cluster, inventory: Inventory, topics: Iterable[str]) -> Inventory:
    """Add the channels of these topics at each nsqlookupd; one that fails is left out."""
    answers, failures = registered_channels(cluster, inventory.registered, topics)
    registered = {at: {**inventory.registered[at], **channels} for at, channels in answers.items()}
    return inventory._replace(registered=registered, failures=(*inventory.failures, *failures))


def registered_channels(
    cluster: Cluster, lookupds: Iterable[str], topics: Iterable[str]
) -> Answers[Registered]:
    """Ask each nsqlookupd for the channels of these topics; topics without a channel are left out.

    nsqlookupd answers for one topic at a time, so thousands of topics need several timeouts.
    """
    channels: dict[str, Registered] = {address: {} for address in lookupds}
    failures: list[DaemonFailure] = []
    names = list(topics)
    for start in range(0, len(names), AT_ONCE):
        alive = {address: cluster.lookupds[address] for address in channels}
        answers, failed = cluster.ask(alive, partial(_channels, names[start : start + AT_ONCE]))
        channels = {at: {**channels[at], **answer} for at, answer in answers.items()}
        failures += failed
    return channels, failures


def _channels(topics: Iterable[str], client: NsqlookupdHTTPClient) -> Registered:
    answers = ((topic, frozenset(client.channels(topic))) for topic in topics)
    return {topic: channels for topic, channels in answers if channels}


def channel_of(topic: TopicStats, name: str) -> ChannelStats | None:
    """Return the channel of that name."""
    return next((channel for channel in topic.channels if channel.channel_name == name), None)


def messages_of(channel: ChannelStats) -> int:
    """Count the messages of a channel: queued, in flight and deferred."""
    return channel.depth + channel.in_flight_count + channel.deferred_count


class NodeStatus(NamedTuple):
    """One nsqd. ``error`` is "" if it answers; ``lookupds`` are the nsqlookupd that announce it.

    ``topics`` counts its topics at these nsqlookupd, or without any nsqlookupd those on the nsqd.
    ``tombstoned`` are the topics for which an nsqlookupd hides it. ``ahead_s`` is the difference of
    its clock to this machine's, None if it sends no Date. ``aliases`` are its other addresses.
    ``info`` is its answer to /info, empty where there is none.
    """

    address: str
    tcp_address: str
    hostname: str
    version: str
    topics: int | None
    tombstoned: tuple[str, ...]
    lookupds: tuple[str, ...]
    error: str
    ahead_s: float | None = None
    aliases: tuple[str, ...] = ()
    info: Mapping[str, Any] = MappingProxyType({})


class PingResult(NamedTuple):
    """The time in which a daemon answered /ping, or the error."""

    daemon: str
    address: str
    latency_ms: float | None
    error: str | None


class NodeOfTopic(NamedTuple):
    """An nsqd that has a topic: its TCP and HTTP address, and the nsqlookupd that announce it."""

    nsqd: str
    node: str
    lookupds: list[str]


class TopicNodes(NamedTuple):
    """The nsqd that have a topic, and its channels."""

    channels: list[str]
    nodes: list[NodeOfTopic]
    failures: list[DaemonFailure]


def list_nodes(cluster: Cluster) -> tuple[list[NodeStatus], list[DaemonFailure]]:
    """Return every nsqd, also those that do not answer, and the nsqlookupd that do not.

    Raises the first failure if no daemon answers, unless samples remember an nsqd.
    """
    entries_by_lookupd, nsqds, failures = cluster.discover_nsqds()
    nsqds = {**_remembered(cluster), **nsqds}
    if failures and not nsqds:
        raise failures[0].error

    def ask(client: NsqdHTTPClient) -> dict[str, Any]:
        info = client.info() | {"error": ""}
        try:
            info["ahead_s"] = client.ping()
        except HTTPError as exc:  # It answers, and its disk is full.
            info["error"] = str(exc)
        if not cluster.lookupds:
            info["topics"] = len(client.stats().topics or ())
        return info

    answers, failed = cluster.ask(nsqds, ask)
    if not (entries_by_lookupd or answers or cluster.remembered):
        raise failed[0].error
    errors = {failure.address: str(failure.error) for failure in failed}
    registered = cluster.entries(entries_by_lookupd)
    nodes = []
    for address in sorted(nsqds):
        entries = registered.get(cluster.names.get(address, ""), {})
        info = answers.get(address, {})
        tcp = str(Address(info["broadcast_address"], info["tcp_port"])) if info else ""
        hostname, version = (str(info.get(name, "")) for name in ("hostname", "version"))
        topics: int | None = info.get("topics")
        for entry in list(entries.values())[:1]:
            tcp, hostname, version = str(entry.node.tcp), entry.hostname, version or entry.version
            topics = len({topic for e in entries.values() for topic in e.topics})
        hidden = {topic for e in entries.values() for topic in e.tombstoned}
        error = errors.get(address) or info.get("error", "")
        status = (tcp, hostname, version, topics, tuple(sorted(hidden)), tuple(entries), error)
        aliases = tuple(sorted(at for at, kept in cluster.aliases.items() if kept == address))
        nodes.append(NodeStatus(address, *status, info.get("ahead_s"), aliases, info))
    return nodes, failures


def _remembered(cluster: Cluster) -> Nsqds:
    return {at: nsqd for at, nsqd in cluster.remembered.items() if at not in cluster.aliases}


def ping(cluster: Cluster) -> list[PingResult]:
    """Ask every nsqlookupd, and every nsqd that is given or announced, for /ping."""
    lookupds = _ping_all(cluster, "nsqlookupd", cluster.lookupds)
    nsqds, failures = cluster.nsqds()
    pongs = _ping_all(cluster, "nsqd", nsqds)
    lost = [
        PingResult("nsqd", failure.address, None, str(failure.error))
        for failure in failures
        if failure.address not in cluster.lookupds
    ]
    return [*lookupds, *pongs, *lost]


def _ping_all(cluster: Cluster, daemon: str, clients: Mapping[str, HTTPAPI]) -> list[PingResult]:
    def measure(client: HTTPAPI) -> float:
        began_s = time.monotonic()
        client.ping()
        return (time.monotonic() - began_s) * 1000

    answers, failures = cluster.ask(clients, measure)
    errors = {failure.address: str(failure.error) for failure in failures}
    return [
        PingResult(daemon, address, answers.get(address), errors.get(address))
        for address in clients
    ]


def lookup_topic(cluster: Cluster, topic: str) -> TopicNodes:
    """Ask every nsqlookupd for the nsqd of a topic. Raises `NotFoundError` if none has it."""
    if not cluster.lookupds:
        raise ConfigurationError(
            "only nsqlookupd knows which nsqd have a topic",
            hint="Give one with --lookupd-http-address.",
        )
    answers, failures = cluster.ask(cluster.lookupds, lambda client: client.lookup(topic))
    if not answers:
        raise failures[0].error
    if not any(answer.is_known for answer in answers.values()):
        listed, _ = cluster.ask(cluster.lookupds, lambda client: client.topics())
        raise not_found_error("topic", topic, merge_names(listed), failures)
    nodes: dict[tuple[str, str], list[str]] = {}
    for lookupd, answer in answers.items():
        for node in answer.nodes:
            nodes.setdefault((str(node.tcp), str(node.http or "")), []).append(lookupd)
    channels = {channel for answer in answers.values() for channel in answer.channels}
    topic_nodes = [NodeOfTopic(*addresses, names) for addresses, names in sorted(nodes.items())]
    return TopicNodes(sorted(channels), topic_nodes, failures)
