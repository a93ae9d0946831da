"""``nsq channel``: what channels there are, and changes to them.

The services are imported when a command runs, for the help pages do not need them.
"""

from __future__ import annotations

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.params import Json
from nsqtools.cli.render.listing import ListedTopics, list_channels, show_channel
from nsqtools.cli.running.administering import (
    ChannelPatterns,
    DryRun,
    NewChannels,
    OneChannel,
    OneTopic,
    TopicPattern,
    Yes,
    change_channels,
)
from nsqtools.cli.running.runtime import Session


def list_(
    topic: ListedTopics = None,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """List channels, with how many nsqd have them and what waits there.

    Examples:
        nsq channel list
        nsq channel list clicks --json
    """
    return list_channels(cluster, runtime, topic or (), json=json)


def info(
    topic: OneTopic,
    channel: OneChannel,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Show one channel and its consumers, on every nsqd that has it.

    Examples:
        nsq channel info clicks archive
        nsq channel info clicks archive --json | jq '.nodes[].clients'
    """
    return show_channel(cluster, runtime, topic, channel, json=json)


def create(
    topic: TopicPattern,
    channel: NewChannels,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Create channels of a topic, on every nsqd that has it and with nsqlookupd.

    Examples:
        nsq channel create clicks archive
        nsq channel create 'web.*' archive metrics
    """
    return change_channels("create", cluster, runtime, topic, channel, dry_run=dry_run, json=json)


def delete(
    topic: TopicPattern,
    channel: ChannelPatterns,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Delete channels, with their messages, everywhere.

    A consumer that is connected creates its channel again when it reconnects: such consumers are
    shown first. Asks before it does anything; in a script, give --yes.

    Examples:
        nsq channel delete clicks archive
        nsq channel delete clicks 'test*' --dry-run
    """
    return change_channels(
        "delete", cluster, runtime, topic, channel, yes=yes, dry_run=dry_run, json=json
    )


def empty(
    topic: TopicPattern,
    channel: ChannelPatterns,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Throw away what is in channels, in flight and deferred too.

    Examples:
        nsq channel empty clicks archive
        nsq channel empty clicks '*' --yes
    """
    return change_channels(
        "empty", cluster, runtime, topic, channel, yes=yes, dry_run=dry_run, json=json
    )


def pause(
    topic: TopicPattern,
    channel: ChannelPatterns,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Pause channels: messages stay in them and are not delivered.

    Examples:
        nsq channel pause clicks archive
    """
    return change_channels("pause", cluster, runtime, topic, channel, dry_run=dry_run, json=json)


def unpause(
    topic: TopicPattern,
    channel: ChannelPatterns,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Let paused channels go on.

    Examples:
        nsq channel unpause clicks archive
    """
    return change_channels("unpause", cluster, runtime, topic, channel, dry_run=dry_run, json=json)
