"""Names for the completion of shells, found in the cluster that the command line names.

`complete_line` asks for them while a user waits for the tab key: it ends after a second whatever
hangs, and when anything fails there is just nothing to complete. They go into a command line, so
names that no nsqd would take (a daemon may answer anything) are left out.
"""

from __future__ import annotations

import os
from enum import Enum
from threading import Timer
from typing import Annotated

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import NsqError

TIMEOUT_S = 0.8  # for a daemon; what another one answered in time is still shown
LIMIT_S = 1.0  # for everything: name resolution knows no time-out


class NameKind(Enum):
    """What is to be completed."""

    topics = "topics"
    channels = "channels"
    nodes = "nodes"
    profiles = "profiles"


def names_of(
    kind: Annotated[NameKind, Argument()],
    topic: Annotated[str | None, opt("--topic -t TOPIC", "Whose channels.")] = None,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> list[str]:
    """The names, channels of all topics where none is given; none when no daemon answers."""
    if kind is NameKind.profiles:
        from nsqtools.settings import config_path, profile_names

        return profile_names(config_path(runtime.environ))
    from nsqtools.cluster.topics import channel_names, topic_names
    from nsqtools.protocol.names import is_valid_name

    limit = Timer(LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    try:
        with cluster.open(TIMEOUT_S) as opened:
            if kind is NameKind.nodes:
                nsqds, _ = opened.nsqds()
                return [nsqd.address for nsqd in nsqds if is_address(nsqd.address)]
            is_topics = kind is NameKind.topics
            names = topic_names(opened) if is_topics else channel_names(opened, topic or "")
    except NsqError:
        return []
    finally:
        limit.cancel()
    return list(filter(is_valid_name, names))


def is_address(text: str) -> bool:
    """Tell whether it is ``host:port`` or a URL, with nothing in it that means more to a shell."""
    return bool(text) and all(
        (each.isascii() and each.isalnum()) or each in ".-:/_" for each in text
    )
