"""``nsq topic``: what topics there are, and changes to them."""

from __future__ import annotations

from collections.abc import Sequence

from nsqtools.cli.options.params import SAFETY, Yes
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import Cell, write_json
from nsqtools.cli.running.administering import (
    Changing,
    ClusterListing,
    ListedTopics,
    NewTopics,
    OneTopic,
    TopicGlobs,
    cells_of,
    select_topics,
)

TOPICS = ("topic", "nodes", "channels", "depth", "waiting", "messages", "paused")
QUEUE_COLUMNS = ("node", "channel", "depth", "disk", "in_flight", "messages", "clients", "paused")
TOPIC_NODES = (*QUEUE_COLUMNS, "announced_by")


def list_(topic: ListedTopics = None, *, listing: ClusterListing) -> int:
    """List topics, with the number of nsqd that have them and their depth.

    Topics that are only registered with nsqlookupd are listed with 0 nsqd.

    Examples:
        nsq topic list
        nsq topic list 'web*' --lookupd-http-address lookup:4161
        nsq topic list --json | jq -r '.[].topic'
    """
    from nsqtools.cluster.inventory import take_inventory

    with listing.open(TOPICS) as opened:
        inventory = take_inventory(opened)
    rows: list[Sequence[Cell]] = []
    for name in select_topics(inventory, topic):
        nodes = [stats for _, stats in inventory.where(name)]
        channels = [channel for stats in nodes for channel in stats.channels]
        names = {channel.channel_name for channel in channels}
        depth = sum(stats.depth for stats in nodes)
        waiting = depth + sum(channel.depth for channel in channels)
        messages = sum(stats.message_count for stats in nodes)
        paused = any(stats.paused for stats in nodes)
        rows.append((name, len(nodes), len(names), depth, waiting, messages, paused))
    listing.write(TOPICS, rows, ("messages", "channels"))
    return report_unreachable(inventory.failures, listing.runtime)


def info(topic: OneTopic, *, listing: ClusterListing) -> int:
    """Show one topic and its channels, on every nsqd that has it.

    announced_by are the nsqlookupd that send the topic's consumers to this nsqd.

    Examples:
        nsq topic info clicks
        nsq topic info clicks --lookupd-http-address lookup:4161 --columns node,announced_by
        nsq topic info clicks --json | jq '.nodes[].depth'
    """
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.queue_rows import rows_of_topic
    from nsqtools.cluster.stats_documents import topic_document
    from nsqtools.cluster.topics import describe_registered_only, not_found_error

    with listing.open(TOPIC_NODES) as cluster:
        inventory = take_inventory(cluster)
    if topic not in inventory.topics:
        raise not_found_error("topic", topic, inventory.topics, inventory.failures)
    stats_by_node = dict(inventory.where(topic))
    lookupds = {address: inventory.announced_by(address, topic) for address in stats_by_node}
    if not stats_by_node:
        listing.runtime.info(
            f"nsq: {describe_registered_only(f'topic {topic}', inventory.failures)}"
        )
    if listing.form.is_document:
        nodes = [
            {**topic_document(address, stats), "announced_by": lookupds[address]}
            for address, stats in stats_by_node.items()
        ]
        registered = inventory.lookupds_with(topic)
        write_json(listing.runtime, {"topic": topic, "nodes": nodes, "lookupds": registered})
    else:
        rows = [
            [*cells_of(row, QUEUE_COLUMNS), ", ".join(lookupds[address]) or None]
            for address, stats in stats_by_node.items()
            for row in rows_of_topic(address, stats)
        ]
        listing.write(TOPIC_NODES, rows, ("disk", "messages", "announced_by"))
    return report_unreachable(inventory.failures, listing.runtime)


def create(topic: NewTopics, *, change: Changing) -> int:
    """Create topics: on the nsqd given, and registered with every nsqlookupd given.

    A topic that is only registered can be found before its first message is published.

    Examples:
        nsq topic create clicks views
        nsq topic create clicks --lookupd-http-address lookup:4161
    """
    return change.execute("create", topic)


def delete(topic: TopicGlobs, yes: Yes = False, *, change: Changing) -> int:
    """Delete topics, with their channels and messages, everywhere.

    nsqlookupd deletes them first, then every nsqd that has them. A consumer that is
    connected creates its topic again when it reconnects: such consumers are shown first. Asks
    for confirmation; in a script, give --yes.

    Examples:
        nsq topic delete clicks
        nsq topic delete 'test*' --dry-run --lookupd-http-address lookup:4161
        nsq topic delete clicks --yes
    """
    return change.execute("delete", topic, yes=yes)


def empty(
    topic: TopicGlobs,
    channels: bool = opt("--channels", "Empty the channels too.", SAFETY),
    yes: Yes = False,
    *,
    change: Changing,
) -> int:
    """Discard the messages in topics; with --channels, in their channels too.

    nsqd moves messages to channels immediately and empties only the topic's own queue, so without
    --channels the messages in channels stay.

    Examples:
        nsq topic empty clicks --channels
        nsq topic empty clicks --dry-run
    """
    return change.execute("empty", topic, yes=yes, with_channels=channels)


def pause(topic: TopicGlobs, *, change: Changing) -> int:
    """Pause topics: messages stay in them and do not reach the channels.

    Examples:
        nsq topic pause clicks
    """
    return change.execute("pause", topic)


def unpause(topic: TopicGlobs, *, change: Changing) -> int:
    """Resume paused topics.

    Examples:
        nsq topic unpause clicks
    """
    return change.execute("unpause", topic)
