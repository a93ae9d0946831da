"""``nsq __complete``: names for the completion of shells.

Completion scripts call it while somebody waits for the tab key: it gives up after a second, and
when anything fails there is just nothing to complete.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from typer import Argument, Option

from nsqtools.cli.cluster_connection import ClusterConnection
from nsqtools.cli.output import ByteWriter
from nsqtools.cli.runtime import Session
from nsqtools.errors import NsqError

TIMEOUT_S = 1.0


class Kind(Enum):
    """What is to be completed."""

    topics = "topics"
    channels = "channels"


KindOfName = Annotated[Kind, Argument(metavar="topics|channels", help="Which names.")]
OfTopic = Annotated[
    str | None, Option("--topic", "-t", metavar="TOPIC", help="Whose channels; all without it.")
]


def complete(
    kind: KindOfName,
    topic: OfTopic = None,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> None:
    """Print the names of topics or channels, for the completion of shells.

    One name a line, and nothing at all when no daemon answers in a second.

    Examples:
        nsq __complete topics
        nsq __complete channels -t clicks
    """
    from nsqtools.services.names import channel_names, topic_names

    try:
        with cluster.open(min(TIMEOUT_S, cluster.timeout_s)) as opened:
            if kind is Kind.topics:
                names = topic_names(opened)
            else:
                names = channel_names(opened, topic or "")
    except NsqError:
        return
    ByteWriter(runtime.stdout.fileno()).write("".join(f"{name}\n" for name in names).encode())
