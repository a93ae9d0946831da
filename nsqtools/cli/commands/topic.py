"""``nsq topic``: what topics there are, and changes to them.

The services are imported when a command runs, for the help pages do not need them.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.params import Json
from nsqtools.cli.render.listing import ListedTopics, list_topics, show_topic
from nsqtools.cli.running.administering import (
    SAFETY,
    DryRun,
    NewTopics,
    OneTopic,
    TopicPatterns,
    Yes,
    change_topics,
)
from nsqtools.cli.running.runtime import Session

Channels = Annotated[
    bool, Option("--channels", help="Empty the channels too.", rich_help_panel=SAFETY)
]


def list_(
    topic: ListedTopics = None,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """List topics, with how many nsqd have them and what waits there.

    Those that are only registered with nsqlookupd are listed too: with 0 nsqd.

    Examples:
        nsq topic list
        nsq topic list 'web.*' --lookupd-http-address lookup:4161
        nsq topic list --json | jq -r '.[].topic'
    """
    return list_topics(cluster, runtime, topic or (), json=json)


def info(
    topic: OneTopic, json: Json = False, *, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show one topic and its channels, on every nsqd that has it.

    Examples:
        nsq topic info clicks
        nsq topic info clicks --json | jq '.nodes[].depth'
    """
    return show_topic(cluster, runtime, topic, json=json)


def create(
    topic: NewTopics,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Create topics: on the nsqd given, and registered with every nsqlookupd given.

    Registered alone, a topic can be found before the first message is published.

    Examples:
        nsq topic create clicks views
        nsq topic create clicks --lookupd-http-address lookup:4161
    """
    return change_topics("create", cluster, runtime, topic, dry_run=dry_run, json=json)


def delete(
    topic: TopicPatterns,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Delete topics, with their channels and messages, everywhere.

    First nsqlookupd forgets them, then every nsqd that has them deletes them. A consumer that is
    connected creates its topic again when it reconnects: such consumers are shown first. Asks
    before it does anything; in a script, give --yes.

    Examples:
        nsq topic delete clicks
        nsq topic delete 'test.*' --dry-run --lookupd-http-address lookup:4161
        nsq topic delete clicks --yes
    """
    return change_topics("delete", cluster, runtime, topic, yes=yes, dry_run=dry_run, json=json)


def empty(
    topic: TopicPatterns,
    channels: Channels = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Throw away what waits in topics; with --channels, in their channels too.

    nsqd empties the topic's own queue alone, and hands messages on to channels at once: without
    --channels what waits in them stays.

    Examples:
        nsq topic empty clicks --channels
        nsq topic empty clicks --dry-run
    """
    return change_topics(
        "empty",
        cluster,
        runtime,
        topic,
        yes=yes,
        dry_run=dry_run,
        json=json,
        with_channels=channels,
    )


def pause(
    topic: TopicPatterns,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Pause topics: messages stay in them and do not reach the channels.

    Examples:
        nsq topic pause clicks
    """
    return change_topics("pause", cluster, runtime, topic, dry_run=dry_run, json=json)


def unpause(
    topic: TopicPatterns,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Let paused topics go on.

    Examples:
        nsq topic unpause clicks
    """
    return change_topics("unpause", cluster, runtime, topic, dry_run=dry_run, json=json)
