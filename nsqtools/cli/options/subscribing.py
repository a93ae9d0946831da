"""What a command does before it subscribes: look the topic up, for a SUB would create it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from typer import Option

from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings

SAFETY = "Safety"

Create = Annotated[
    bool,
    Option(
        "--create",
        help="Continue although the topic does not exist; subscribing creates it.",
        rich_help_panel=SAFETY,
    ),
]


def look_before(
    topics: Iterable[str],
    channel: str,
    connection: ConnectionSettings,
    runtime: Runtime,
    *,
    create: bool,
    force: bool,
) -> None:
    """Ask for the topics before subscribing. Raises `NotFoundError` and `ConfigurationError`."""
    from nsqtools.cluster.directory import open_cluster
    from nsqtools.cluster.topics import check_subscription, inspect_topic

    with open_cluster(connection) as cluster:
        for topic in topics:
            report = inspect_topic(cluster, topic)
            if warning := check_subscription(report, channel, create=create, force=force):
                runtime.tell(f"nsq: {warning}")
