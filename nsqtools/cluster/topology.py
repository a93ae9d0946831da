"""The topics and channels that a cluster ought to have: exported, compared and created.

nsqd makes topics and channels when they are first used, and a message that comes before its channel
is there is lost to that channel. A topology names them beforehand, in TOML:

    nsqds = ["nsqd-1:4151", "nsqd-2:4151"]   # by HTTP address; may be left out

    [topics."clicks"]
    channels = ["archive", "billing"]
    everywhere = true        # on every nsqd; with false where the topic is, and with nsqlookupd
    paused = false
    paused_channels = ["billing"]

Each topic is registered with every nsqlookupd, where an nsqd that gets a topic later finds its
channels. Ephemeral topics and channels come and go with their consumers, and are not part of it.

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


class WantedTopic(NamedTuple):
    """A topic, as in the file. ``everywhere``: on every nsqd, not only where it is."""

    channels: frozenset[str] = frozenset()
    everywhere: bool = True
    paused: bool = False
    paused_channels: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Topology:
    """What ought to be there. ``nsqds`` are HTTP addresses; without any they are not compared."""

    topics: Mapping[str, WantedTopic] = field(default_factory=dict)
    nsqds: frozenset[str] = frozenset()


# -- the file -------------------------------------------------------------------------------------


def parse(text: str, name: str) -> Topology:
    """Read a topology; ``name`` is that of its file. Raises `ConfigurationError`."""
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
    wanted = {topic: _topic(name, topic, each) for topic, each in topics.items()}
    return Topology(wanted, frozenset(map(nsqd_address, nsqds)))


def _topic(name: str, topic: str, fields: Any) -> WantedTopic:
    where = f"{name}: topic {check_topic(topic)}"
    known = {"channels", "everywhere", "paused", "paused_channels"}
    if not isinstance(fields, dict) or not fields.keys() <= known:
        raise ConfigurationError(f"{where} may have {', '.join(sorted(known))}")
    flags = {flag: fields.get(flag, flag == "everywhere") for flag in ("everywhere", "paused")}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}: {flag} must be true or false")
    lists = {key: _names(fields.get(key, []), f"{where}: {key}") for key in known - flags.keys()}
    for channel in lists["channels"] | lists["paused_channels"]:
        check_channel(channel)
    paused = lists["paused_channels"]
    return WantedTopic(lists["channels"] | paused, paused_channels=paused, **flags)


def _names(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigurationError(f"{where} must be a list of strings")
    return frozenset(value)


def encode(topology: Topology) -> str:
    """Return the text of a file. A string of JSON is one of TOML."""
    lines = [f"nsqds = {json.dumps(sorted(topology.nsqds))}"]
    for name, topic in sorted(topology.topics.items()):
        lines += ["", f"[topics.{json.dumps(name)}]"]
        lines.append(f"channels = {json.dumps(sorted(topic.channels))}")
        lines += ["everywhere = false"] if not topic.everywhere else []
        lines += ["paused = true"] if topic.paused else []
        if topic.paused_channels:
            lines.append(f"paused_channels = {json.dumps(sorted(topic.paused_channels))}")
    return "\n".join(lines) + "\n"


# -- what is there --------------------------------------------------------------------------------


def topology_of(inventory: Inventory, topics: Iterable[str]) -> Topology:
    """Describe some topics of a cluster as they are. What one nsqd has paused counts as paused."""
    wanted = {}
    for topic in filterfalse(is_ephemeral, topics):
        there = [stats for _, stats in inventory.where(topic)]
        paused = {each.channel_name for stats in there for each in stats.channels if each.paused}
        wanted[topic] = WantedTopic(
            frozenset(filterfalse(is_ephemeral, inventory.channels(topic))),
            len(there) == len(inventory.nodes) > 0,
            any(stats.paused for stats in there),
            frozenset(filterfalse(is_ephemeral, paused)),
        )
    return Topology(wanted, frozenset(inventory.nodes))


def plan_topology(cluster: Cluster, wanted: Topology) -> AdminPlan:
    """Plan what the cluster lacks. Raises the first failure when no daemon answers."""
    inventory = take_inventory(cluster)
    inventory = with_channels(cluster, inventory, inventory.topics.intersection(wanted.topics))
    steps = sort_steps(
        step for name, topic in wanted.topics.items() for step in _lacking(inventory, name, topic)
    )
    return AdminPlan(steps, inventory.failures, tuple(_notes(inventory, wanted)))


def _lacking(inventory: Inventory, name: str, topic: WantedTopic) -> Iterator[Step]:
    queues = {"": topic.paused, **{each: each in topic.paused_channels for each in topic.channels}}
    for channel in queues:
        lacking = inventory.registered.keys() - inventory.lookupds_with(name, channel)
        yield from lookupd_steps(lacking, Action.CREATE, name, channel)
    there = dict(inventory.where(name))
    for address in inventory.nodes if topic.everywhere else there:
        paused: dict[str, bool] = {}  # those that are there
        if stats := there.get(address):
            paused = {
                "": stats.paused,
                **{each.channel_name: each.paused for each in stats.channels},
            }
        for channel, should_be in queues.items():
            if channel not in paused:
                yield Step("nsqd", address, Action.CREATE, name, channel)
            if should_be != paused.get(channel, False):
                action = Action.PAUSE if should_be else Action.UNPAUSE
                yield Step("nsqd", address, action, name, channel)


def _notes(inventory: Inventory, wanted: Topology) -> Iterator[str]:
    for address in sorted(wanted.nsqds - inventory.nodes.keys()):
        yield f"nsqd {address} of the topology is not there"
    if not inventory.registered:
        for name, topic in wanted.topics.items():
            if not topic.everywhere and not any(inventory.where(name)):
                yield f"topic {name} is on no nsqd, and there is no nsqlookupd to register it with"


# -- what is there and ought not to be ------------------------------------------------------------


def idle_steps(cluster: Cluster, before: Inventory, wanted: Topology) -> list[Step]:
    """Plan to delete what is not part of a topology and was idle since ``before`` was taken.

    Idle is what had neither a client nor a new message on any nsqd. Raises the error of a daemon
    that did not answer then or now, and one for an nsqd that left: what it has cannot be judged.
    """
    now = take_inventory(cluster)
    now = with_channels(cluster, now, now.topics)
    for failure in (*before.failures, *now.failures):
        raise failure.error
    for address in before.nodes.keys() - now.nodes.keys():
        raise ConnectionFailed(f"nsqd {address} is not there any more", hint="Run it again.")
    steps: list[Step] = []
    for name in filterfalse(is_ephemeral, sorted(now.topics)):
        was, is_wanted = dict(before.where(name)), name in wanted.topics
        surplus = now.channels(name) - wanted.topics[name].channels if is_wanted else {""}
        for channel in filterfalse(is_ephemeral, sorted(surplus)):
            if all(_is_idle(was.get(at), each, channel) for at, each in now.where(name)):
                steps += change_steps(now, Action.DELETE, name, channel)
    return steps


def _is_idle(was: TopicStats | None, stats: TopicStats, channel: str) -> bool:
    """Whether a topic of one nsqd, or one channel of it, had no client and no message."""
    if was is None or was.message_count != stats.message_count:
        return False
    return not any(
        each.client_count
        for topic in (was, stats)
        for each in topic.channels
        if channel in ("", each.channel_name)
    )
