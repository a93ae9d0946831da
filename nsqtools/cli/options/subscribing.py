"""What a command does before it subscribes: look the topic up, for a SUB would create it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from nsqtools.cli.options.opt import opt
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings

SAFETY = "Safety"

Create = Annotated[
    bool,
    opt("--create", "Continue although the topic does not exist; subscribing creates it.", SAFETY),
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
    """Ask for the topics before subscribing. Raises `NotFoundError` and `ConfigurationError`.

    Where nobody answers at all, that alone is said: raises the error of the connection.
    """
    from nsqtools.client.connection import require_one
    from nsqtools.cluster.directory import open_cluster
    from nsqtools.cluster.topics import check_subscription, inspect_topic
    from nsqtools.protocol.names import check_channel, check_topic

    check_channel(channel)
    topics = [check_topic(topic) for topic in topics]
    with open_cluster(connection) as cluster:
        for topic in topics:
            report = inspect_topic(cluster, topic)
            if not report.asked:
                nsqds = connection.nsqd_tcp_addresses
                require_one(nsqds, connection.client_options().dial_timeout_s)
                if report.failed and not nsqds:
                    raise report.failed[0]
            if warning := check_subscription(report, channel, create=create, force=force):
                runtime.tell(f"nsq: {warning}")
