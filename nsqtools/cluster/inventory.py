"""Which topics and channels there are, and where: on nsqd, and registered with nsqlookupd.

The two differ: a topic that was only created with nsqlookupd is on no nsqd yet, and a topic stays
registered when its last nsqd is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient
from nsqtools.protocol.stats import ChannelStats, TopicStats, read_stats


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the daemons that answered have. ``nodes`` and ``registered`` go by address."""

    nodes: Mapping[str, tuple[TopicStats, ...]]
    given: frozenset[str]
    registered: Mapping[str, frozenset[str]]
    failures: tuple[DaemonFailure, ...]

    @property
    def topics(self) -> set[str]:
        """The names of all topics."""
        names = {name for topics in self.registered.values() for name in topics}
        return names | {topic.topic_name for topics in self.nodes.values() for topic in topics}

    def where(self, name: str) -> Iterator[tuple[str, TopicStats]]:
        """Every nsqd that has the topic, with its statistics."""
        for address, topics in self.nodes.items():
            for topic in topics:
                if topic.topic_name == name:
                    yield address, topic

    def lookupds_that_know(self, name: str) -> list[str]:
        """Every nsqlookupd with which the topic is registered."""
        return [address for address, topics in self.registered.items() if name in topics]


def take_inventory(cluster: Cluster) -> Inventory:
    """Ask everybody. Raises the first failure when nobody answers."""
    nsqds, failures = cluster.nsqds()
    answers, failed = cluster.ask(
        {nsqd.address: nsqd.client for nsqd in nsqds},
        lambda client: read_stats(client.stats(clients=True)).topics or (),
    )
    alive = {name: each for name, each in cluster.lookupds.items() if not _is_among(failures, name)}
    registered, forgetful = cluster.ask(alive, NsqlookupdHTTPClient.topics)
    failures += [*failed, *forgetful]
    if failures and not answers and not registered:
        raise failures[0].error
    return Inventory(
        answers,
        frozenset(nsqd.address for nsqd in nsqds if nsqd.is_given),
        {address: frozenset(topics) for address, topics in registered.items()},
        tuple(failures),
    )


def registered_channels(
    cluster: Cluster, inventory: Inventory, topics: Iterable[str]
) -> dict[str, set[tuple[str, str]]]:
    """The (topic, channel) pairs that each nsqlookupd knows, of some topics."""

    def ask(client: NsqlookupdHTTPClient) -> set[tuple[str, str]]:
        return {(topic, channel) for topic in topics for channel in client.channels(topic)}

    alive = {address: cluster.lookupds[address] for address in inventory.registered}
    answers, _ = cluster.ask(alive, ask)
    return answers


def channel_of(topic: TopicStats, name: str) -> ChannelStats | None:
    """Return the channel of that name."""
    return next((channel for channel in topic.channels if channel.channel_name == name), None)


def messages_of(channel: ChannelStats) -> int:
    """Count the messages of a channel: queued, in flight and deferred."""
    return channel.depth + channel.in_flight_count + channel.deferred_count


def _is_among(failures: Iterable[DaemonFailure], address: str) -> bool:
    return any(failure.address == address for failure in failures)
