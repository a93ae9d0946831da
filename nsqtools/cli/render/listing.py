"""Listings of topics and channels: all of them in a line each, or one of them node by node.

``depth`` is what nsqd calls so, in every command: the messages that wait in one queue. ``waiting``
is the depth of a topic and of all its channels together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.options.params import GLOBS
from nsqtools.cli.render.output import Cell, Form, write_json, write_listing
from nsqtools.cli.running.ends import ExitStatus
from nsqtools.cli.running.runtime import Runtime

if TYPE_CHECKING:
    from nsqtools.cluster.directory import DaemonFailure

ListedTopics = Annotated[list[str] | None, Argument(metavar="TOPIC", help=GLOBS)]

TOPICS = ("topic", "nodes", "channels", "depth", "waiting", "messages", "paused")
CHANNELS = ("topic", "channel", "nodes", "depth", "in_flight", "deferred", "clients", "paused")
TOPIC_NODES = ("node", "channel", "depth", "disk", "in_flight", "messages", "clients", "paused")
CHANNEL_NODES = (
    "node",
    "depth",
    "disk",
    "in_flight",
    "deferred",
    "requeued",
    "timed_out",
    "messages",
    "clients",
    "paused",
)


def list_topics(
    settings: ClusterSettings, runtime: Runtime, patterns: Sequence[str], form: Form
) -> int:
    """A line for each topic."""
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.topics import select

    form.check(TOPICS)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    names = select("topic", patterns, inventory.topics) if patterns else sorted(inventory.topics)
    rows: list[Sequence[Cell]] = []
    for name in names:
        found = [topic for _, topic in inventory.where(name)]
        channels = {channel.channel_name for topic in found for channel in topic.channels}
        depth = sum(topic.depth for topic in found)
        waiting = depth + sum(channel.depth for topic in found for channel in topic.channels)
        messages = sum(topic.message_count for topic in found)
        paused = any(topic.paused for topic in found)
        rows.append((name, len(found), len(channels), depth, waiting, messages, paused))
    write_listing(runtime, TOPICS, rows, form, optional=("messages", "channels"))
    return tell_left_out(inventory.failures, runtime)


def list_channels(
    settings: ClusterSettings, runtime: Runtime, patterns: Sequence[str], form: Form
) -> int:
    """A line for each channel of some topics."""
    from nsqtools.cluster.inventory import registered_channels, take_inventory
    from nsqtools.cluster.topics import select

    form.check(CHANNELS)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
        known = inventory.topics
        names = select("topic", patterns, known) if patterns else sorted(known)
        registered = registered_channels(cluster, inventory, names)
    found = {
        (name, channel.channel_name, address): channel
        for name in names
        for address, topic in inventory.where(name)
        for channel in topic.channels
    }
    pairs = {(topic, channel) for topic, channel, _ in found}.union(*registered.values())
    rows: list[Sequence[Cell]] = []
    for topic, channel in sorted(pairs):
        stats = [each for key, each in found.items() if key[:2] == (topic, channel)]
        rows.append(
            (
                topic,
                channel,
                len(stats),
                sum(each.depth for each in stats),
                sum(each.in_flight_count for each in stats),
                sum(each.deferred_count for each in stats),
                sum(each.client_count for each in stats),
                any(each.paused for each in stats),
            )
        )
    write_listing(runtime, CHANNELS, rows, form, optional=("deferred", "nodes", "in_flight"))
    return tell_left_out(inventory.failures, runtime)


def show_topic(settings: ClusterSettings, runtime: Runtime, name: str, form: Form) -> int:
    """One topic: a line for it and for each of its channels, on each nsqd."""
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.stats_documents import topic_document
    from nsqtools.cluster.topics import missing, on_no_nsqd

    form.check(TOPIC_NODES)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    if name not in inventory.topics:
        raise missing("topic", name, inventory.topics)
    found = list(inventory.where(name))
    if not found:
        runtime.tell(f"nsq: {on_no_nsqd(name)}")
    if form.is_document:
        nodes = [topic_document(address, topic) for address, topic in found]
        known = inventory.lookupds_that_know(name)
        write_json(runtime, {"topic": name, "nodes": nodes, "lookupds": known}, indent=2)
        return tell_left_out(inventory.failures, runtime)
    rows: list[Sequence[Cell]] = []
    for address, topic in found:
        own = (topic.depth, topic.backend_depth, None, topic.message_count, None, topic.paused)
        rows.append((address, None, *own))
        for channel in topic.channels:
            rows.append(
                (
                    address,
                    channel.channel_name,
                    channel.depth,
                    channel.backend_depth,
                    channel.in_flight_count,
                    channel.message_count,
                    channel.client_count,
                    channel.paused,
                )
            )
    write_listing(runtime, TOPIC_NODES, rows, form, optional=("disk", "messages"))
    return tell_left_out(inventory.failures, runtime)


def show_channel(
    settings: ClusterSettings, runtime: Runtime, topic: str, name: str, form: Form
) -> int:
    """One channel: a line for each nsqd."""
    from nsqtools.cluster.inventory import channel_of, take_inventory
    from nsqtools.cluster.stats_documents import channel_document
    from nsqtools.cluster.topics import missing

    form.check(CHANNEL_NODES)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    if topic not in inventory.topics:
        raise missing("topic", topic, inventory.topics)
    where = list(inventory.where(topic))
    found = [(at, each) for at, stats in where if (each := channel_of(stats, name)) is not None]
    if not found:
        there = {each.channel_name for _, stats in where for each in stats.channels}
        raise missing("channel", name, there)
    if form.is_document:
        document: dict[str, Any] = {"topic": topic, "channel": name}
        document["nodes"] = [channel_document(at, topic, each) for at, each in found]
        write_json(runtime, document, indent=2)
    else:
        rows: list[Sequence[Cell]] = [
            (
                address,
                each.depth,
                each.backend_depth,
                each.in_flight_count,
                each.deferred_count,
                each.requeue_count,
                each.timeout_count,
                each.message_count,
                each.client_count,
                each.paused,
            )
            for address, each in found
        ]
        optional = ("disk", "timed_out", "requeued", "messages", "deferred")
        write_listing(runtime, CHANNEL_NODES, rows, form, optional=optional)
    return tell_left_out(inventory.failures, runtime)


def tell_left_out(failures: Iterable[DaemonFailure], runtime: Runtime) -> ExitStatus:
    """Name the daemons that did not answer; return the exit status."""
    status = ExitStatus.DONE
    for failure in failures:
        if runtime.is_json:
            runtime.report(failure.error)
        else:
            runtime.insist(f"nsq: left out: {failure.error}")
        status = ExitStatus.PARTLY_DONE
    return status
