"""Changes to a cluster. Those to topics and channels are a plan that is shown first.

    plan = plan_topics(cluster, Action.DELETE, ["clicks"])
    for step in plan.steps: ...      each change, its daemon, and the messages that are lost
    outcomes = apply(cluster, plan)  the same steps, each with its error

A dry run is a plan that is not applied. Steps are in the order of nsqadmin: nsqlookupd before nsqd,
so that no client is sent to a topic that is being deleted. A failed step does not stop the others.

Where a change goes:

    create    every nsqlookupd, and the nsqd that were given; a channel to the nsqd with its topic
    delete    every nsqlookupd and nsqd that has it
    the rest  every nsqd that has it

The plan warns of two traps of nsqd: emptying a topic leaves the messages in its channels, and a
deleted topic is created again as soon as a consumer reconnects or a producer publishes.

Options of a running nsqd need no plan: all can be read, and two can be changed.
"""

from __future__ import annotations

import enum
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nsqtools.cluster.directory import Answers, Cluster, DaemonFailure
from nsqtools.cluster.inventory import (
    Inventory,
    channel_of,
    messages_of,
    take_inventory,
    with_channels,
)
from nsqtools.cluster.topics import merge_names, select_names, unreachable_suffix
from nsqtools.errors import ConfigurationError, HTTPError, NotFoundError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.names import LOOKUPD_TCP_PORT, check_channel, check_topic, parse_address
from nsqtools.protocol.stats import ChannelStats, ClientStats, TopicStats
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")


class Action(enum.Enum):
    """A change of a topic or a channel."""

    CREATE = "create"
    DELETE = "delete"
    EMPTY = "empty"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    TOMBSTONE = "tombstone"

    @property
    def is_destructive(self) -> bool:
        """Whether it cannot be undone."""
        return self in (Action.DELETE, Action.EMPTY, Action.TOMBSTONE)


def subject_of(topic: str, channel: str) -> str:
    """Return a topic or a channel in words: ``topic clicks``, ``channel clicks/archive``."""
    return f"channel {topic}/{channel}" if channel else f"topic {topic}"


DaemonKind = Literal["nsqlookupd", "nsqd"]


class Step(NamedTuple):
    """One change at one daemon. ``channel`` is "" for the topic itself.

    ``messages`` is the number of messages that are lost. ``clients`` are connected consumers, which
    would create a deleted queue again. ``node`` is the nsqd that a tombstone hides.
    """

    daemon: DaemonKind
    address: str
    action: Action
    topic: str
    channel: str = ""
    node: str = ""
    messages: int = 0
    clients: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The change in words: ``pause topic clicks``."""
        return f"{self.action.value} {subject_of(self.topic, self.channel)}"

    @property
    def needs_room(self) -> bool:
        """Whether nsqd moves messages to a channel, and drops them if its disk is full."""
        is_unpaused_topic = self.action is Action.UNPAUSE and not self.channel
        return self.daemon == "nsqd" and (self.action is Action.CREATE or is_unpaused_topic)


class AdminPlan(NamedTuple):
    """A list of changes. ``failures`` are daemons that could not be asked for it; ``notes`` are
    warnings to show first."""

    steps: tuple[Step, ...]
    failures: tuple[DaemonFailure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_destructive(self) -> bool:
        """Whether a user should confirm it."""
        return any(step.action.is_destructive for step in self.steps)


class StepResult(NamedTuple):
    """A step that was carried out, and its error if it failed."""

    step: Step
    error: NsqError | None = None


def apply(cluster: Cluster, plan: AdminPlan) -> list[StepResult]:
    """Carry out every step of a plan, in order; failures of others do not stop it.

    A step that would lose messages on an nsqd that is not well fails.
    """
    unwell = dict(unwell_nsqds(cluster, plan.steps))
    return [
        StepResult(step, (step.needs_room and unwell.get(step.address)) or _try(cluster, step))
        for step in plan.steps
    ]


def unwell_nsqds(cluster: Cluster, steps: Iterable[Step]) -> list[DaemonFailure]:
    """Return the nsqd without room on their disks, among those whose steps need it."""
    nsqds = {step.address: cluster.nsqd(step.address) for step in steps if step.needs_room}
    return cluster.ask(nsqds, require_well)[1]


def require_well(nsqd: NsqdHTTPClient) -> None:
    """Raise `NsqError` for an nsqd with a full disk, which drops messages that it moves."""
    try:
        nsqd.ping()
    except HTTPError as exc:
        reason = "and would drop messages: make room on its disk first"
        raise NsqError(f"{nsqd.url} is not well ({exc.code or exc}), {reason}") from exc


def _try(cluster: Cluster, step: Step) -> NsqError | None:
    try:
        if step.action is Action.TOMBSTONE:
            cluster.lookupds[step.address].tombstone(step.topic, step.node)
        else:
            is_nsqd = step.daemon == "nsqd"
            daemon = cluster.nsqd(step.address) if is_nsqd else cluster.lookupds[step.address]
            daemon.administer(step.action.value, step.topic, step.channel)
    except NsqError as exc:
        return exc
    return None


def plan_topics(
    cluster: Cluster, action: Action, patterns: Sequence[str], *, with_channels: bool = False
) -> AdminPlan:
    """Plan a change of topics, and ``with_channels`` of all their channels.

    Raises `NotFoundError`, `ConfigurationError`, and the first failure when no daemon answers.
    """
    inventory = take_inventory(cluster)
    if action is Action.CREATE:
        names = [*dict.fromkeys(map(check_topic, patterns))]
        return AdminPlan(sort_steps(_create(inventory, names)), inventory.failures)
    names = select_names("topic", patterns, inventory.topics, inventory.failures)
    channels = inventory.channels if with_channels else lambda _: ()
    queues = [(name, channel) for name in names for channel in ("", *channels(name))]
    plan = _plan(inventory, action, queues, f"topic {', '.join(names)}")
    if action is Action.EMPTY and not with_channels:
        return plan._replace(notes=tuple(_retained_messages(inventory, names)))
    return plan


def plan_channels(
    cluster: Cluster, action: Action, topic_patterns: Sequence[str], channels: Sequence[str]
) -> AdminPlan:
    """Plan a change of the channels that match, in the topics that match.

    Raises like `plan_topics`.
    """
    inventory = take_inventory(cluster)
    topics = select_names("topic", topic_patterns, inventory.topics, inventory.failures)
    if action is Action.CREATE:
        names = [*dict.fromkeys(map(check_channel, channels))]
        return AdminPlan(sort_steps(_create(inventory, topics, names)), inventory.failures)
    inventory = with_channels(cluster, inventory, topics)
    existing = {topic: inventory.channels(topic) for topic in topics}
    selected = select_names("channel", channels, merge_names(existing), inventory.failures)
    queues = [(topic, name) for topic in topics for name in existing[topic].intersection(selected)]
    return _plan(inventory, action, queues, f"channel {', '.join(selected)}")


def _plan(
    inventory: Inventory, action: Action, queues: Iterable[tuple[str, str]], subject: str
) -> AdminPlan:
    steps = [step for queue in queues for step in change_steps(inventory, action, *queue)]
    if not steps:
        raise NotFoundError(f"no nsqd has the {subject}{unreachable_suffix(inventory.failures)}")
    return AdminPlan(sort_steps(steps), inventory.failures)


def plan_tombstone(cluster: Cluster, topic: str, node: str) -> AdminPlan:
    """Plan to remove a topic from one nsqd: hide it with every nsqlookupd, then delete it there.

    ``node`` is the nsqd as ``nsq nodes`` shows it. Raises `NotFoundError`, `ConfigurationError`
    without nsqlookupd, and the failure of an nsqd that does not answer.
    """
    if not cluster.lookupds:
        raise ConfigurationError(
            "only nsqlookupd hides a topic of one nsqd from consumers",
            hint="Give one with --lookupd-http-address.",
        )
    inventory = take_inventory(cluster)
    failed = dict(inventory.failures)
    names = {at: aliases for at in (*inventory.nodes, *failed) if (aliases := cluster.names_of(at))}
    address = cluster.aliases.get(node, node)
    nsqd, announced = next(
        (pair for pair in names.items() if address == pair[0] or node in pair[1]), (node, [])
    )
    if nsqd in failed:
        raise failed[nsqd]
    if not announced:
        raise NotFoundError(
            f"no nsqlookupd knows the nsqd {node}{unreachable_suffix(inventory.failures)}",
            hint=f"Known HTTP addresses: {', '.join(names) or 'none'}.",
        )
    steps = [
        Step("nsqlookupd", address, Action.TOMBSTONE, topic, node=name)
        for address in inventory.lookupds_with(topic)
        for name in announced
    ]
    stats = dict(inventory.where(topic)).get(nsqd)
    if stats is None:
        raise NotFoundError(f"the nsqd {nsqd} does not have the topic {topic}")
    steps.append(_nsqd_step(nsqd, Action.DELETE, stats))
    return AdminPlan(sort_steps(steps), inventory.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicChange:
    """A change to a topic, or to one channel of it.

    ``node`` is the nsqd of a tombstone, or the only nsqd to empty, pause or unpause on.
    ``with_channels`` includes all channels of the topic. Raises `ConfigurationError` for an invalid
    name.
    """

    action: Action
    topic: str
    channel: str = ""
    node: str = ""
    with_channels: bool = False

    def __post_init__(self) -> None:
        check_topic(self.topic)
        if self.channel:
            check_channel(self.channel)
        if self.action is Action.TOMBSTONE and not self.node:
            raise ConfigurationError("a tombstone needs a node")
        if self.node and self.action in (Action.CREATE, Action.DELETE):
            raise ConfigurationError(f"{self.action.value} is for all nsqd, not for one")

    @property
    def subject(self) -> str:
        """The queue in words: ``topic clicks``, ``channel clicks/archive``."""
        return subject_of(self.topic, self.channel)

    @property
    def word(self) -> str:
        """The name that confirms a destructive change, "" for another one."""
        return (self.channel or self.topic) if self.action.is_destructive else ""

    def plan(self, cluster: Cluster) -> AdminPlan:
        """Return a plan. Raises `NotFoundError`, and the first failure if no daemon answers."""
        if self.action is Action.TOMBSTONE:
            return plan_tombstone(cluster, self.topic, self.node)
        if self.channel:
            plan = plan_channels(cluster, self.action, [self.topic], [self.channel])
        else:
            plan = plan_topics(cluster, self.action, [self.topic], with_channels=self.with_channels)
        if not self.node:
            return plan
        steps = tuple(step for step in plan.steps if step.address == self.node)
        if not steps:
            raise NotFoundError(f"{self.node} does not have it, or does not answer")
        return AdminPlan(steps)  # the notes are about all nsqd


def _create(
    inventory: Inventory, topics: Iterable[str], channels: Sequence[str] = ("",)
) -> Iterator[Step]:
    for topic in topics:
        addresses = [address for address, _ in inventory.where(topic)]
        for channel in channels:
            yield from lookupd_steps(inventory.registered, Action.CREATE, topic, channel)
            # Without nsqlookupd a new topic is created on the given nsqd; a channel belongs to the
            # nsqd that have its topic.
            for address in addresses if channel else inventory.given.intersection(inventory.nodes):
                yield Step("nsqd", address, Action.CREATE, topic, channel)


def lookupd_steps(addresses: Iterable[str], action: Action, topic: str, channel: str) -> list[Step]:
    """Return the step for each nsqlookupd."""
    return [Step("nsqlookupd", at, action, topic, channel) for at in addresses]


def change_steps(inventory: Inventory, action: Action, topic: str, channel: str) -> Iterator[Step]:
    """Yield the steps that change a topic, or one of its channels, on all daemons that have it."""
    if action is Action.DELETE:
        yield from lookupd_steps(inventory.lookupds_with(topic, channel), action, topic, channel)
    for address, stats in inventory.where(topic):
        channel_stats = channel_of(stats, channel) if channel else None
        if channel_stats or not channel:
            yield _nsqd_step(address, action, stats, channel_stats)


def _nsqd_step(
    address: str, action: Action, topic: TopicStats, channel: ChannelStats | None = None
) -> Step:
    """Return the step for an nsqd, with the messages that it loses."""
    is_deleted = action is Action.DELETE
    lost = (channel,) if channel else topic.channels if is_deleted else ()
    messages = sum(map(messages_of, lost)) + (0 if channel else topic.depth)
    return Step(
        "nsqd",
        address,
        action,
        topic.topic_name,
        channel.channel_name if channel else "",
        messages=messages if action.is_destructive else 0,
        clients=tuple(
            _describe_client(client)
            for channel_stats in lost
            for client in channel_stats.clients or ()
            if is_deleted
        ),
    )


def _describe_client(client: ClientStats) -> str:
    """Describe a client for people: its host, its program and its address."""
    return f"{client.hostname} ({client.user_agent or 'unknown program'}, {client.remote_address})"


def _retained_messages(inventory: Inventory, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        channels = (channel for _, topic in inventory.where(name) for channel in topic.channels)
        if count := sum(map(messages_of, channels)):
            yield f"the channels of {name} keep their {counted(count, 'message')}"


def sort_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Sort steps: nsqlookupd first, and a topic before its channels."""

    def order(step: Step) -> tuple[bool, str, str, str]:
        return step.daemon == "nsqd", step.topic, step.channel, step.address

    return tuple(sorted(steps, key=order))


ADDRESSES = "nsqlookupd_tcp_addresses"
CHANGEABLE = ("log_level", ADDRESSES)


def get_option(cluster: Cluster, name: str) -> Answers[Any]:
    """Read an option of every nsqd. Raises `ConfigurationError` for an unknown option."""
    option = _option(name)
    return _ask(
        cluster,
        lambda nsqd: nsqd.config(option),
        f"has no option {option}",
        "Names are those of nsqd's configuration file, such as max_rdy_count.",
    )


def set_option(cluster: Cluster, name: str, value: str) -> Answers[Any]:
    """Change an option of every nsqd; the answers are the new values.

    Addresses are separated by commas. Raises `ConfigurationError` for an invalid address, and for a
    value that nsqd refuses.
    """
    option = _option(name)
    if option not in CHANGEABLE:
        raise ConfigurationError(
            f"{option} cannot be changed while nsqd runs",
            hint=f"These can: {', '.join(CHANGEABLE)}.",
        )
    if option == ADDRESSES:
        # nsqd takes any text, and then tries in vain to connect to it.
        texts = filter(None, map(str.strip, value.split(",")))
        value = json.dumps([str(parse_address(text, LOOKUPD_TCP_PORT)) for text in texts])
    return _ask(
        cluster,
        lambda nsqd: nsqd.set_config(option, value),
        f"does not take {value!r} for {option}",
        "log_level is debug, info, warn, error or fatal.",
    )


def warn_if_still_registered(cluster: Cluster, topics: Sequence[str], channel: str) -> None:
    """Warn that nsqlookupd still has a channel, or with ``""`` the topics, deleted on all nsqd."""
    if not topics:
        return
    registered, _ = cluster.ask_nsqds(lambda nsqd: nsqd.config(ADDRESSES), required=False)
    for topic in topics if any(registered.values()) else ():
        if not channel:
            log.warning("nsqlookupd still lists topic %s: nsq topic delete %s", topic, topic)
            continue
        log.warning(
            "an nsqd that gets the topic later makes channel %s again, which nsqlookupd goes on"
            " naming: nsq channel delete %s %s",
            channel,
            topic,
            channel,
        )


def _ask(
    cluster: Cluster, question: Callable[[NsqdHTTPClient], Any], refusal: str, hint: str
) -> Answers[Any]:
    def ask(nsqd: NsqdHTTPClient) -> Any:
        try:
            return question(nsqd)
        except HTTPError as exc:
            if exc.code in ("INVALID_OPTION", "INVALID_VALUE"):
                raise ConfigurationError(f"{nsqd.url} {refusal}", hint=hint) from exc
            raise

    return cluster.ask_nsqds(ask)


def _option(name: str) -> str:
    option = name.replace("-", "_")
    if not re.fullmatch("[a-z0-9_]+", option):
        raise ConfigurationError(f"{name!r} is not the name of an option")
    return option
