"""``nsq __complete``: names for the completion of shells.

`complete_line` asks for them while somebody waits for the tab key: it is gone after a second
whatever hangs, and when anything fails there is just nothing to complete. They go into a command
line, so names that no nsqd would take (a daemon may answer anything) are left out.
"""

from __future__ import annotations

import os
from enum import Enum
from threading import Timer
from typing import Annotated

from typer import Argument

from nsqtools.cli import name_cache
from nsqtools.cli.options.connection import ClusterConnection, ClusterSettings
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_lines
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import NsqError

TIMEOUT = "800ms"  # for a daemon; what another one answered in time is still shown
LIMIT_S = 1.0  # for everything: name resolution knows no time-out

REFRESH_TIMEOUT = "5s"  # nobody waits for these
REFRESH_LIMIT_S = 15.0


class NameKind(Enum):
    """What is to be completed."""

    topics = "topics"
    channels = "channels"
    nodes = "nodes"
    profiles = "profiles"


KindOfName = Annotated[NameKind, Argument(help="Which names.")]
OfTopic = Annotated[str | None, opt("--topic -t TOPIC", "Whose channels; all without it.")]


def complete(
    kind: KindOfName, topic: OfTopic = None, *, cluster: ClusterConnection, runtime: Session
) -> None:
    """Print the names of topics, channels, nodes or profiles, one a line.

    What was found is kept for a while, see `nsqtools.cli.name_cache`, which calls this to renew it.

    Examples:
        nsq __complete topics
        nsq __complete channels -t clicks
    """
    write_lines(runtime, names_of(kind, topic, cluster=cluster, runtime=runtime))


def names_of(
    kind: KindOfName, topic: OfTopic = None, *, cluster: ClusterConnection, runtime: Session
) -> list[str]:
    """The names, none when no daemon answers in a second; they are kept for the next time."""
    is_refreshing = bool(runtime.environ.get(name_cache.REFRESHING))
    limit = Timer(REFRESH_LIMIT_S if is_refreshing else LIMIT_S, give_up, (runtime,))
    limit.daemon = True
    limit.start()
    try:
        names = find_names(kind, topic or "", cluster, runtime)
    except NsqError:  # maybe for want of time
        name_cache.refresh(runtime.arguments, runtime.environ)
        return []
    if kind is not NameKind.profiles:
        text = "".join(f"{name}\n" for name in names)
        name_cache.keep(runtime.arguments, runtime.environ, text)
    return names


def give_up(runtime: Runtime) -> None:
    """End at once; a process that may take its time finds the names for the next TAB."""
    name_cache.refresh(runtime.arguments, runtime.environ)
    os._exit(0)


def is_address(text: str) -> bool:
    """Tell whether it is ``host:port`` or a URL, with nothing in it that means more to a shell."""
    return bool(text) and all(
        (each.isascii() and each.isalnum()) or each in ".-:/_" for each in text
    )


def find_names(kind: NameKind, topic: str, cluster: ClusterSettings, runtime: Runtime) -> list[str]:
    """The names, those of channels of ``topic`` or of all topics. Raises `NsqError`."""
    if kind is NameKind.profiles:
        from nsqtools.settings import config_path, profile_names

        return profile_names(config_path(runtime.environ))
    from nsqtools.cluster.topics import channel_names, topic_names
    from nsqtools.protocol.names import is_valid_name

    is_refreshing = bool(runtime.environ.get(name_cache.REFRESHING))
    with cluster.open(REFRESH_TIMEOUT if is_refreshing else TIMEOUT) as opened:
        if kind is NameKind.nodes:
            nsqds, _ = opened.nsqds()
            return [nsqd.address for nsqd in nsqds if is_address(nsqd.address)]
        names = topic_names(opened) if kind is NameKind.topics else channel_names(opened, topic)
    return list(filter(is_valid_name, names))
