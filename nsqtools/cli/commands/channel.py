"""``nsq channel``: what channels there are, and changes to them."""

from __future__ import annotations

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import Yes
from nsqtools.cli.render.output import ListingForm
from nsqtools.cli.running.administering import (
    Changing,
    ChannelGlobs,
    ListedTopics,
    NewChannels,
    OneChannel,
    OneTopic,
    TopicGlob,
    list_channels,
    show_channel,
)
from nsqtools.cli.running.runtime import Session


def list_(
    topic: ListedTopics = None, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """List channels, with the number of nsqd that have them and their depth.

    Examples:
        nsq channel list
        nsq channel list clicks --json
    """
    return list_channels(cluster, runtime, topic or (), form)


def info(
    topic: OneTopic,
    channel: OneChannel,
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Show one channel and its consumers, on every nsqd that has it.

    Examples:
        nsq channel info clicks archive
        nsq channel info clicks archive --json | jq '.nodes[].consumers'
    """
    return show_channel(cluster, runtime, topic, channel, form)


def create(topic: TopicGlob, channel: NewChannels, *, change: Changing) -> int:
    """Create channels of a topic, on every nsqd that has it and with nsqlookupd.

    Examples:
        nsq channel create clicks archive
        nsq channel create 'web*' archive metrics
    """
    return change.of_channels("create", topic, channel)


def delete(topic: TopicGlob, channel: ChannelGlobs, yes: Yes = False, *, change: Changing) -> int:
    """Delete channels, with their messages, everywhere.

    A consumer that is connected creates its channel again when it reconnects: such consumers are
    shown first. Asks for confirmation; in a script, give --yes.

    Examples:
        nsq channel delete clicks archive
        nsq channel delete clicks 'test*' --dry-run
    """
    return change.of_channels("delete", topic, channel, yes=yes)


def empty(topic: TopicGlob, channel: ChannelGlobs, yes: Yes = False, *, change: Changing) -> int:
    """Discard the messages in channels, in flight and deferred too.

    Examples:
        nsq channel empty clicks archive
        nsq channel empty clicks '*' --yes
    """
    return change.of_channels("empty", topic, channel, yes=yes)


def pause(topic: TopicGlob, channel: ChannelGlobs, *, change: Changing) -> int:
    """Pause channels: messages stay in them and are not delivered.

    Examples:
        nsq channel pause clicks archive
    """
    return change.of_channels("pause", topic, channel)


def unpause(topic: TopicGlob, channel: ChannelGlobs, *, change: Changing) -> int:
    """Resume paused channels.

    Examples:
        nsq channel unpause clicks archive
    """
    return change.of_channels("unpause", topic, channel)
