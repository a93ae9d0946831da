"""``nsq __complete``: names for the completion of shells.

Completion scripts call it while somebody waits for the tab key: it is gone after a second whatever
hangs, and when anything fails there is just nothing to complete. What it prints goes into a command
line, so names that no nsqd would take (a daemon may answer anything) are left out.
"""

from __future__ import annotations

import os
from enum import Enum
from threading import Timer
from typing import Annotated

from typer import Argument, Option

from nsqtools.cli.options.cluster_connection import ClusterConnection, ClusterSettings
from nsqtools.cli.render.output import ByteWriter
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import NsqError

TIMEOUT = "800ms"  # for a daemon; what another one answered in time is still shown
LIMIT_S = 1.0  # for everything: name resolution knows no time-out


class NameKind(Enum):
    """What is to be completed."""

    topics = "topics"
    channels = "channels"
    profiles = "profiles"


KindOfName = Annotated[NameKind, Argument(help="Which names.")]
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
    """Print the names of topics, channels or profiles, for the completion of shells.

    One name a line, and nothing at all when no daemon answers in a second.

    Examples:
        nsq __complete topics
        nsq __complete channels -t clicks
    """
    limit = Timer(LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    try:
        names = find_names(kind, topic or "", cluster, runtime)
    except NsqError:
        return
    ByteWriter(runtime.stdout.fileno()).write("".join(f"{name}\n" for name in names).encode())


def find_names(kind: NameKind, topic: str, cluster: ClusterSettings, runtime: Runtime) -> list[str]:
    """The names, those of channels of ``topic`` or of all topics. Raises `NsqError`."""
    if kind is NameKind.profiles:
        from nsqtools.settings import config_path, profile_names

        return profile_names(config_path(runtime.environ))
    from nsqtools.cluster.name_patterns import channel_names, topic_names
    from nsqtools.protocol.names import is_valid_name

    with cluster.open(TIMEOUT) as opened:
        names = topic_names(opened) if kind is NameKind.topics else channel_names(opened, topic)
    return list(filter(is_valid_name, names))
