"""``nsq channel``: what channels there are, and changes to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqtools.cli.options.params import Yes
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import Cell, write_json
from nsqtools.cli.running.administering import (
    Changing,
    ChannelGlobs,
    ClusterListing,
    ListedTopics,
    NewChannels,
    OneChannel,
    OneTopic,
    TopicGlob,
    cells_of,
    select_topics,
)

if TYPE_CHECKING:
    from nsqtools.cluster.queue_rows import QueueRow

CHANNELS = ("topic", "channel", "nodes", "depth", "in_flight", "deferred", "clients", "paused")
_NODES = "node depth disk in_flight deferred requeued timed_out messages clients paused"
CHANNEL_NODES = tuple(_NODES.split())


def list_(topic: ListedTopics = None, *, listing: ClusterListing) -> int:
    """List channels, with the number of nsqd that have them and their depth.

    Examples:
        nsq channel list
        nsq channel list clicks --json
    """
    from nsqtools.cluster.inventory import take_inventory, with_channels
    from nsqtools.cluster.queue_rows import channel_row

    with listing.open(CHANNELS) as opened:
        inventory = take_inventory(opened)
        names = select_topics(inventory, topic)
        inventory = with_channels(opened, inventory, names)
    queues: dict[tuple[str, str], list[QueueRow]] = {
        (name, channel): [] for name in names for channel in inventory.channels(name)
    }
    for name in names:
        for address, stats in inventory.where(name):
            for channel in stats.channels:
                queues[name, channel.channel_name].append(channel_row(address, name, channel))
    summed = ("depth", "in_flight", "deferred", "clients")
    rows: list[Sequence[Cell]] = [
        (
            *pair,
            len(queues),
            *(sum(getattr(row, count) for row in queues) for count in summed),
            any(row.paused for row in queues),
        )
        for pair, queues in sorted(queues.items())
    ]
    listing.write(CHANNELS, rows, ("deferred", "nodes", "in_flight"))
    return report_unreachable(inventory.failures, listing.runtime)


def info(topic: OneTopic, channel: OneChannel, *, listing: ClusterListing) -> int:
    """Show one channel and its consumers, on every nsqd that has it.

    Examples:
        nsq channel info clicks archive
        nsq channel info clicks archive --json | jq '.nodes[].consumers'
    """
    from nsqtools.cluster.inventory import channel_of, take_inventory, with_channels
    from nsqtools.cluster.queue_rows import channel_row
    from nsqtools.cluster.stats_documents import channel_document
    from nsqtools.cluster.topics import describe_registered_only, not_found_error

    with listing.open(CHANNEL_NODES) as opened:
        inventory = with_channels(opened, take_inventory(opened), [topic])
    if topic not in inventory.topics:
        raise not_found_error("topic", topic, inventory.topics, inventory.failures)
    channels = inventory.channels(topic)
    if channel not in channels:
        raise not_found_error("channel", channel, channels, inventory.failures)
    where = inventory.where(topic)
    stats_by_node = [
        (at, channel_stats)
        for at, topic_stats in where
        if (channel_stats := channel_of(topic_stats, channel)) is not None
    ]
    if not stats_by_node:
        note = describe_registered_only(f"channel {topic}/{channel}", inventory.failures)
        listing.runtime.info(f"nsq: {note}")
    if listing.form.is_document:
        nodes = [channel_document(at, topic, each) for at, each in stats_by_node]
        document = {"topic": topic, "channel": channel, "nodes": nodes}
        write_json(listing.runtime, document)
    else:
        queues = (channel_row(at, topic, each) for at, each in stats_by_node)
        rows = [cells_of(row, CHANNEL_NODES) for row in queues]
        optional = ("disk", "timed_out", "requeued", "messages", "deferred")
        listing.write(CHANNEL_NODES, rows, optional)
    return report_unreachable(inventory.failures, listing.runtime)


def create(topic: TopicGlob, channel: NewChannels, *, change: Changing) -> int:
    """Create channels of a topic, on every nsqd that has it and with nsqlookupd.

    Fails on an nsqd that is not well: with a full disk it would drop messages on their way to the
    channel.

    Examples:
        nsq channel create clicks archive
        nsq channel create 'web*' archive metrics
    """
    return change.execute("create", [topic], channel)


def delete(topic: TopicGlob, channel: ChannelGlobs, yes: Yes = False, *, change: Changing) -> int:
    """Delete channels, with their messages, everywhere.

    A consumer that is connected creates its channel again when it reconnects: such consumers are
    shown first. Asks for confirmation; in a script, give --yes.

    Examples:
        nsq channel delete clicks archive
        nsq channel delete clicks 'test*' --dry-run
    """
    return change.execute("delete", [topic], channel, yes=yes)


def empty(topic: TopicGlob, channel: ChannelGlobs, yes: Yes = False, *, change: Changing) -> int:
    """Discard the messages in channels, in flight and deferred too.

    Examples:
        nsq channel empty clicks archive
        nsq channel empty clicks '*' --yes
    """
    return change.execute("empty", [topic], channel, yes=yes)


def pause(topic: TopicGlob, channel: ChannelGlobs, *, change: Changing) -> int:
    """Pause channels: messages stay in them and are not delivered.

    Examples:
        nsq channel pause clicks archive
    """
    return change.execute("pause", [topic], channel)


def unpause(topic: TopicGlob, channel: ChannelGlobs, *, change: Changing) -> int:
    """Resume paused channels.

    Examples:
        nsq channel unpause clicks archive
    """
    return change.execute("unpause", [topic], channel)
