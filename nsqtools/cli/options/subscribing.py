"""What a command does before it subscribes: look the topic up, for a SUB would create it."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings

SAFETY = "Safety"

Create = Annotated[
    bool,
    Option(
        "--create",
        help="Go on when the topic does not exist; subscribing creates it.",
        rich_help_panel=SAFETY,
    ),
]


def look_before(
    topic: str,
    channel: str,
    connection: ConnectionSettings,
    runtime: Runtime,
    *,
    create: bool,
    force: bool,
) -> None:
    """Ask for the topic before subscribing. Raises `NotFoundError` and `ConfigurationError`."""
    from nsqtools.cluster.topics import check_subscription, inspect_topic

    report = inspect_topic(
        topic,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        nsqd_http_addresses=connection.nsqd_http_addresses,
        address_map=connection.address_map,
    )
    if warning := check_subscription(report, channel, create=create, force=force):
        runtime.tell(f"nsq: {warning}")
