"""nsqadmin's JSON for topics, channels, consumers and nsqd, with its keys in its order.

Objects are those of one nsqd, or with ``"node": "*"`` sums over several. A latency that is summed
has the mean weighed by count, and the largest and smallest of the nsqd. `gather` asks the nsqd of a
cluster, under the names that they announce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.errors import NsqError
from nsqtools.http.http_api import KnownNode, NsqdHTTPClient
from nsqtools.protocol.stats import (
    ChannelStats,
    ClientStats,
    LatencyStats,
    NsqdStats,
    TopicStats,
    read_stats,
)

Document = dict[str, Any]


class Nsqd(NamedTuple):
    """One nsqd and what it says. ``name`` is its broadcast address and HTTP port; ``known`` what
    each nsqlookupd, by address, says of it; ``info`` what itself does where none knows it."""

    name: str
    hostname: str
    stats: NsqdStats
    known: dict[str, KnownNode]
    info: Document


def topic_of(nsqd: Nsqd, topic: TopicStats, now_s: float) -> Document:
    """A topic on one nsqd."""
    return {
        "node": nsqd.name,
        "hostname": nsqd.hostname,
        "topic_name": topic.topic_name,
        "depth": topic.depth,
        "memory_depth": topic.depth - topic.backend_depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "nodes": None,
        "channels": [channel_of(nsqd, topic.topic_name, each, now_s) for each in topic.channels],
        "paused": topic.paused,
        "e2e_processing_latency": latency_of(topic.e2e_processing_latency),
    }


def channel_of(nsqd: Nsqd, topic: str, channel: ChannelStats, now_s: float) -> Document:
    """A channel on one nsqd."""
    clients = channel.clients
    return {
        "node": nsqd.name,
        "hostname": nsqd.hostname,
        "topic_name": topic,
        "channel_name": channel.channel_name,
        "depth": channel.depth,
        "memory_depth": channel.depth - channel.backend_depth,
        "backend_depth": channel.backend_depth,
        **{name: getattr(channel, name) for name in CHANNEL_COUNTS},
        "nodes": None,
        "clients": None
        if clients is None
        else [client_of(nsqd.name, client, now_s) for client in clients],
        "paused": channel.paused,
        "e2e_processing_latency": latency_of(channel.e2e_processing_latency),
    }


def client_of(node: str, client: ClientStats, now_s: float) -> Document:
    """A consumer; ``connected`` is in nanoseconds."""
    return {
        "node": node,
        **{name: getattr(client, name) for name in CLIENT_FACTS},
        "connected": (int(now_s) - client.connect_ts) * 1_000_000_000,
        **{name: getattr(client, name) for name in CLIENT_NUMBERS},
    }


CLIENT_FACTS = ["remote_address", "version", "client_id", "hostname", "user_agent", "connect_ts"]
CLIENT_NUMBERS = [
    "in_flight_count",
    "ready_count",
    "finish_count",
    "requeue_count",
    "message_count",
    "sample_rate",
    "deflate",
    "snappy",
    "authed",
    "auth_identity",
    "auth_identity_url",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
]


def latency_of(latency: LatencyStats) -> Document:
    """The latency of one nsqd, in nanoseconds."""
    percentiles = None
    if latency.percentiles is not None:
        percentiles = [
            {
                "average": value,
                "count": latency.count,
                "max": value,
                "min": value,
                "quantile": quantile,
                "value": value,
            }
            for quantile, value in (
                (quantile, _whole(value)) for quantile, value in latency.percentiles
            )
        ]
    return {
        "count": latency.count,
        "percentiles": percentiles,
        "topic": "",
        "channel": "",
        "host": "",
    }


def _whole(value: float) -> float:
    """Return a whole number as the integer that Go writes for it."""
    return int(value) if float(value).is_integer() else value


def latencies_together(parts: Iterable[Document], topic: str, channel: str) -> Document:
    """The latencies of several nsqd."""
    parts = list(parts)
    by_quantile: dict[float, list[Document]] = {}
    for part in parts:
        for percentile in part["percentiles"] or ():
            by_quantile.setdefault(percentile["quantile"], []).append(percentile)
    return {
        "count": sum(part["count"] for part in parts),
        "percentiles": [_together(each) for each in by_quantile.values()] or None,
        "topic": topic,
        "channel": channel,
        "host": "*",
    }


def _together(percentiles: Sequence[Document]) -> Document:
    count = sum(each["count"] for each in percentiles)
    # an nsqd that has measured nothing says 0, which is not the smallest
    measured = [each for each in percentiles if each["count"]] or percentiles
    total = sum(each["average"] * each["count"] for each in percentiles)
    return {
        "average": _whole(total / count) if count else 0,
        "count": count,
        "max": max(each["max"] for each in measured),
        "min": min(each["min"] for each in measured),
        "quantile": percentiles[0]["quantile"],
    }


def topics_together(name: str, topics: Sequence[Document]) -> Document:
    """A topic on several nsqd: its sums, each nsqd, and its channels with theirs."""
    channels: dict[str, list[Document]] = {}
    for topic in topics:
        for channel in topic["channels"]:
            channels.setdefault(channel["channel_name"], []).append(channel)
    return {
        "node": "*",
        "hostname": "",
        "topic_name": name,
        **_sums(topics, ("depth", "memory_depth", "backend_depth", "message_count")),
        "nodes": list(topics),
        "channels": [channels_together(each) for _, each in sorted(channels.items())],
        "paused": any(topic["paused"] for topic in topics),
        "e2e_processing_latency": latencies_together(
            (topic["e2e_processing_latency"] for topic in topics), name, ""
        ),
    }


def channels_together(channels: Sequence[Document]) -> Document:
    """A channel on several nsqd: its sums, each nsqd, and its consumers where they are known."""
    first = channels[0]
    return {
        "node": "*",
        "hostname": "",
        "topic_name": first["topic_name"],
        "channel_name": first["channel_name"],
        **_sums(channels, CHANNEL_SUMS),
        "nodes": list(channels),
        "clients": [client for each in channels for client in each["clients"] or ()] or None,
        "paused": any(channel["paused"] for channel in channels),
        "e2e_processing_latency": latencies_together(
            (channel["e2e_processing_latency"] for channel in channels),
            first["topic_name"],
            first["channel_name"],
        ),
    }


CHANNEL_COUNTS = [
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
    "client_count",
]
CHANNEL_SUMS = ("depth", "memory_depth", "backend_depth", *CHANNEL_COUNTS)


def _sums(parts: Sequence[Document], names: Iterable[str]) -> Document:
    return {name: sum(part[name] for part in parts) for name in names}


def node_of(nsqd: Nsqd, newest: str) -> Document:
    """An nsqd in the list of nodes; ``newest`` is the highest version in the cluster."""
    host, _, port = nsqd.name.rpartition(":")
    entries = list(nsqd.known.items())
    topics: dict[str, bool] = {}
    for _, entry in entries:
        for topic in entry.topics:
            topics[topic] = topics.get(topic, False) or topic in entry.tombstoned
    if not entries:
        topics = {topic.topic_name: False for topic in nsqd.stats.topics or ()}
    addresses = [f"{lookupd}/{entry.remote_address}" for lookupd, entry in entries]
    return {
        "remote_addresses": addresses or None,
        "remote_address": entries[0][1].remote_address if entries else "",
        "hostname": nsqd.hostname,
        "broadcast_address": host.strip("[]"),
        "tcp_port": entries[0][1].node.tcp.port if entries else nsqd.info.get("tcp_port", 0),
        "http_port": int(port),
        "version": nsqd.stats.version,
        "topics": [
            {"topic": topic, "tombstoned": is_hidden} for topic, is_hidden in sorted(topics.items())
        ],
        "out_of_date": nsqd.stats.version != newest,
    }


def newest_version(versions: Iterable[str]) -> str:
    """Return the highest of some versions, "" where there are none."""

    def order(version: str) -> list[tuple[int, str]]:
        parts = version.replace("-", ".").split(".")
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return max(versions, key=order, default="")


class UpstreamError(Exception):
    """No daemon answered; the text is nsqadmin's."""


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """The nsqd that answered, by host and name, and who did not."""

    nsqds: tuple[Nsqd, ...]
    failures: tuple[DaemonFailure, ...]

    @property
    def message(self) -> str:
        """What the answer has under ``message``."""
        return warning([failure.error for failure in self.failures])

    def having(self, topic: str) -> list[tuple[Nsqd, TopicStats]]:
        """The nsqd that have a topic, with it."""
        return [
            (nsqd, each)
            for nsqd in self.nsqds
            for each in nsqd.stats.topics or ()
            if each.topic_name == topic
        ]


def warning(errors: Sequence[NsqError]) -> str:
    """Return the text for errors of some daemons, "" without any."""
    return "WARNING: " + "\n".join(map(str, errors)) if errors else ""


def upstream_error(cluster: Cluster, failures: Sequence[DaemonFailure]) -> UpstreamError:
    """Return the error for the case that no daemon answered."""
    texts = ", ".join(str(failure.error) for failure in failures)
    lookupds = [failure for failure in failures if failure.address in cluster.lookupds]
    kind = "nsqlookupd" if lookupds and len(lookupds) == len(cluster.lookupds) else "nsqd"
    return UpstreamError(f"UPSTREAM_ERROR: failed to query any {kind}: {texts}")


def gather(
    cluster: Cluster, topic: str = "", channel: str = "", *, clients: bool = False
) -> NodeAnswers:
    """Ask every nsqd for its statistics. Raises `UpstreamError`."""
    known, failures = cluster.known_nodes()
    entries: dict[str, dict[str, Any]] = {}
    for lookupd, nodes in known.items():
        for entry in nodes:
            entries.setdefault(str(entry.node.http), {})[lookupd] = entry
    nsqds, impostors = cluster.nsqds_among(entry.node for each in known.values() for entry in each)
    names = {nsqd.address: nsqd.announced for nsqd in nsqds}

    def ask(client: NsqdHTTPClient) -> tuple[Any, dict[str, Any]]:
        stats = read_stats(client.stats(topic, channel, clients=clients))
        is_known = any(names[at] in entries for at in names if nsqd_clients[at] is client)
        return stats, {} if is_known else client.info()

    nsqd_clients = {nsqd.address: nsqd.client for nsqd in nsqds}
    answers, failed = cluster.ask(nsqd_clients, ask)
    failures = [*failures, *impostors, *failed]
    if failures and not answers:
        raise upstream_error(cluster, failures)
    found = []
    for address, (stats, info) in answers.items():
        registered = entries.get(names[address], {})
        first = next(iter(registered.values()), None)
        name = names[address] or f"{info.get('broadcast_address')}:{info.get('http_port')}"
        hostname = first.hostname if first else str(info.get("hostname", ""))
        found.append(Nsqd(name, hostname, stats, registered, info))
    found.sort(key=lambda nsqd: (nsqd.hostname, nsqd.name))
    return NodeAnswers(tuple(found), tuple(failures))
