"""The topics and channels that a cluster should have: export, compare and create them.

nsqd creates topics and channels at their first use, and a new channel does not receive messages
that were delivered to other channels before. A topology declares them in advance, in TOML:

    nsqds = ["nsqd-1:4151", "nsqd-2:4151"]   # by HTTP address; may be left out

    [topics."clicks"]
    channels = ["archive", "billing"]
    everywhere = true        # on every nsqd; false: only on nsqd with the topic, and nsqlookupd
    paused = false
    paused_channels = ["billing"]

Each topic is registered with every nsqlookupd, from which an nsqd that creates the topic later gets
its channels. Ephemeral topics and channels belong to their consumers, and are not part of it.

    plan = plan_topology(cluster, parse(text, "topology.toml"))
    apply(cluster, plan)                     # of `admin`; the steps create, pause and unpause

Nothing is deleted unless `idle_steps` of two inventories are added to the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, NamedTuple

from nsqtools.cluster.admin import Action, AdminPlan, Step, change_steps, lookupd_steps, sort_steps
from nsqtools.cluster.directory import Cluster, nsqd_address
from nsqtools.cluster.inventory import Inventory, take_inventory, with_channels
from nsqtools.errors import ConfigurationError, ConnectionFailed
from nsqtools.protocol.names import check_channel, check_topic, is_ephemeral
from nsqtools.protocol.stats import TopicStats


class ExpectedTopic(NamedTuple):
    """A topic of the file. ``everywhere``: on every nsqd, not only where it exists."""

    channels: frozenset[str] = frozenset()
    everywhere: bool = True
    paused: bool = False
    paused_channels: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Topology:
    """Expected topics and nsqd. ``nsqds`` are HTTP addresses; none are compared if it is empty."""

    topics: Mapping[str, ExpectedTopic] = field(default_factory=dict)
    nsqds: frozenset[str] = frozenset()


# -- the file -------------------------------------------------------------------------------------


def parse(text: str, name: str) -> Topology:
    """Read a topology from a file called ``name``. Raises `ConfigurationError`."""
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigurationError(f"{name}: {exc}") from exc
    nsqds = _names(document.pop("nsqds", []), f"{name}: nsqds")
    topics = document.pop("topics", {})
    if document or not isinstance(topics, dict):
        raise ConfigurationError(
            f"{name}: unknown {', '.join(document) or 'topics'}",
            hint="A topology has nsqds and [topics.NAME]; nsq topology export writes one.",
        )
    expected = {topic: _topic(name, topic, fields) for topic, fields in topics.items()}
    return Topology(expected, frozenset(map(nsqd_address, nsqds)))


def _topic(name: str, topic: str, fields: Any) -> ExpectedTopic:
    where = f"{name}: topic {check_topic(topic)}"
    keys = {"channels", "everywhere", "paused", "paused_channels"}
    if not isinstance(fields, dict) or not fields.keys() <= keys:
        raise ConfigurationError(f"{where} may have {', '.join(sorted(keys))}")
    flags = {flag: fields.get(flag, flag == "everywhere") for flag in ("everywhere", "paused")}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}: {flag} must be true or false")
    lists = {key: _names(fields.get(key, []), f"{where}: {key}") for key in keys - flags.keys()}
    for channel in lists["channels"] | lists["paused_channels"]:
        check_channel(channel)
    paused = lists["paused_channels"]
    return ExpectedTopic(lists["channels"] | paused, paused_channels=paused, **flags)


def _names(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{where} must be a list of strings")
    return frozenset(value)


def encode(topology: Topology) -> str:
    """Return the text of a file. Every JSON string is a TOML string."""
    lines = [f"nsqds = {json.dumps(sorted(topology.nsqds))}"]
    for name, topic in sorted(topology.topics.items()):
        lines += ["", f"[topics.{json.dumps(name)}]"]
        lines.append(f"channels = {json.dumps(sorted(topic.channels))}")
        lines += ["everywhere = false"] if not topic.everywhere else []
        lines += ["paused = true"] if topic.paused else []
        if topic.paused_channels:
            lines.append(f"paused_channels = {json.dumps(sorted(topic.paused_channels))}")
    return "\n".join(lines) + "\n"


# -- compare --------------------------------------------------------------------------------------


def topology_of(inventory: Inventory, topics: Iterable[str]) -> Topology:
    """Describe topics of a cluster. A queue that one nsqd has paused counts as paused."""
    existing = {}
    for topic in filterfalse(is_ephemeral, topics):
        nodes = [stats for _, stats in inventory.where(topic)]
        paused = {c.channel_name for stats in nodes for c in stats.channels if c.paused}
        existing[topic] = ExpectedTopic(
            frozenset(filterfalse(is_ephemeral, inventory.channels(topic))),
            len(nodes) == len(inventory.nodes) > 0,
            any(stats.paused for stats in nodes),
            frozenset(filterfalse(is_ephemeral, paused)),
        )
    return Topology(existing, frozenset(inventory.nodes))


def plan_topology(cluster: Cluster, topology: Topology) -> AdminPlan:
    """Plan the missing parts of a topology. Raises the first failure if no daemon answers."""
    inventory = take_inventory(cluster)
    inventory = with_channels(cluster, inventory, inventory.topics.intersection(topology.topics))
    steps = sort_steps(
        step
        for name, topic in topology.topics.items()
        for step in _missing_steps(inventory, name, topic)
    )
    return AdminPlan(steps, inventory.failures, tuple(_notes(inventory, topology)))


def _missing_steps(inventory: Inventory, name: str, topic: ExpectedTopic) -> Iterator[Step]:
    queues = {"": topic.paused, **{c: c in topic.paused_channels for c in topic.channels}}
    for channel in queues:
        lacking = inventory.registered.keys() - inventory.lookupds_with(name, channel)
        yield from lookupd_steps(lacking, Action.CREATE, name, channel)
    nodes = dict(inventory.where(name))
    for address in inventory.nodes if topic.everywhere else nodes:
        paused: dict[str, bool] = {}
        if stats := nodes.get(address):
            paused = {
                "": stats.paused,
                **{channel.channel_name: channel.paused for channel in stats.channels},
            }
        for channel, should_be in queues.items():
            if channel not in paused:
                yield Step("nsqd", address, Action.CREATE, name, channel)
            if should_be != paused.get(channel, False):
                action = Action.PAUSE if should_be else Action.UNPAUSE
                yield Step("nsqd", address, action, name, channel)


def _notes(inventory: Inventory, topology: Topology) -> Iterator[str]:
    for address in sorted(topology.nsqds - inventory.nodes.keys()):
        yield f"nsqd {address} of the topology does not exist"
    if not inventory.registered:
        for name, topic in topology.topics.items():
            if not topic.everywhere and not any(inventory.where(name)):
                yield f"topic {name} is on no nsqd, and there is no nsqlookupd to register it with"


# -- prune ----------------------------------------------------------------------------------------


def idle_steps(cluster: Cluster, before: Inventory, topology: Topology) -> list[Step]:
    """Plan to delete topics and channels outside a topology that were idle since ``before``.

    An idle queue had neither a client nor a new message on any nsqd. Raises an error for a daemon
    that did not answer then or now, and for an nsqd that left: its queues cannot be judged.
    """
    now = take_inventory(cluster)
    now = with_channels(cluster, now, now.topics)
    for failure in (*before.failures, *now.failures):
        raise failure.error
    for address in before.nodes.keys() - now.nodes.keys():
        raise ConnectionFailed(f"nsqd {address} has left", hint="Run it again.")
    steps: list[Step] = []
    for name in filterfalse(is_ephemeral, sorted(now.topics)):
        earlier, is_expected = dict(before.where(name)), name in topology.topics
        surplus = now.channels(name) - topology.topics[name].channels if is_expected else {""}
        for channel in filterfalse(is_ephemeral, sorted(surplus)):
            if all(_is_idle(earlier.get(at), stats, channel) for at, stats in now.where(name)):
                steps += change_steps(now, Action.DELETE, name, channel)
    return steps


def _is_idle(earlier: TopicStats | None, stats: TopicStats, name: str) -> bool:
    """Return whether a topic on one nsqd, or one of its channels, had no client and no message."""
    if earlier is None or earlier.message_count != stats.message_count:
        return False
    return not any(
        channel.client_count
        for topic in (earlier, stats)
        for channel in topic.channels
        if name in ("", channel.channel_name)
    )
