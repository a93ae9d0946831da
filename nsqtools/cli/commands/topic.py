"""``nsq topic``: what topics there are, and changes to them."""

from __future__ import annotations

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import SAFETY, Yes
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import ListingForm
from nsqtools.cli.running.administering import (
    Changing,
    ListedTopics,
    NewTopics,
    OneTopic,
    TopicGlobs,
    list_topics,
    show_topic,
)
from nsqtools.cli.running.runtime import Session


def list_(
    topic: ListedTopics = None, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """List topics, with the number of nsqd that have them and their depth.

    Topics that are only registered with nsqlookupd are listed with 0 nsqd.

    Examples:
        nsq topic list
        nsq topic list 'web*' --lookupd-http-address lookup:4161
        nsq topic list --json | jq -r '.[].topic'
    """
    return list_topics(cluster, runtime, topic or (), form)


def info(
    topic: OneTopic, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show one topic and its channels, on every nsqd that has it.

    Examples:
        nsq topic info clicks
        nsq topic info clicks --json | jq '.nodes[].depth'
    """
    return show_topic(cluster, runtime, topic, form)


def create(topic: NewTopics, *, change: Changing) -> int:
    """Create topics: on the nsqd given, and registered with every nsqlookupd given.

    A topic that is only registered can be found before its first message is published.

    Examples:
        nsq topic create clicks views
        nsq topic create clicks --lookupd-http-address lookup:4161
    """
    return change.of_topics("create", topic)


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
    return change.of_topics("delete", topic, yes=yes)


def empty(
    topic: TopicGlobs,
    channels: bool = opt("--channels", "Empty the channels too.", SAFETY),
    yes: Yes = False,
    *,
    change: Changing,
) -> int:
    """Discard the messages in topics; with --channels, in their channels too.

    nsqd moves messages to channels at once and empties only the topic's own queue: without
    --channels, the messages in channels stay.

    Examples:
        nsq topic empty clicks --channels
        nsq topic empty clicks --dry-run
    """
    return change.of_topics("empty", topic, yes=yes, with_channels=channels)


def pause(topic: TopicGlobs, *, change: Changing) -> int:
    """Pause topics: messages stay in them and do not reach the channels.

    Examples:
        nsq topic pause clicks
    """
    return change.of_topics("pause", topic)


def unpause(topic: TopicGlobs, *, change: Changing) -> int:
    """Resume paused topics.

    Examples:
        nsq topic unpause clicks
    """
    return change.of_topics("unpause", topic)
