"""``nsq __complete``: names for the completion of shells, found in the cluster and kept in a file.

`complete_line` asks for them while a user waits for the tab key: it ends after a second whatever
hangs, and when anything fails there is just nothing to complete. They go into a command line, so
names that no nsqd would take (a daemon may answer anything) are left out.

What was found is kept under the command line and the variables that lead to the cluster. Within
`FRESH_S` it is the answer; within `STALE_S` it is the answer too, and a process of its own asks the
cluster again for the next time: neither a slow cluster nor a busy machine delays a TAB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from threading import Timer
from typing import Annotated
from zlib import crc32

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection, ClusterSettings
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_lines
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import NsqError

FRESH_S = 5.0
STALE_S = 3600.0
REFRESHING = "NSQ_REFRESH_NAMES"
NOT_KEPT = (REFRESHING, "NSQ_DEBUG", "NSQ_AUTH_SECRET")


def answer(arguments: Sequence[str], environ: Mapping[str, str], now_s: float) -> str | None:
    """The names that were found before, or None where the cluster is to be asked."""
    if environ.get(REFRESHING):
        return None
    path = _path(arguments, environ)
    try:
        age_s = now_s - os.stat(path).st_mtime
        with open(path, encoding="utf-8") as file:
            key, _, names = file.read().partition("\n")
    except (OSError, ValueError):
        return None
    if key != _key(arguments, environ) or not 0 <= age_s < STALE_S:
        return None
    if age_s >= FRESH_S:
        refresh(arguments, environ)
    return names


def keep(arguments: Sequence[str], environ: Mapping[str, str], names: str) -> None:
    """Keep names for the next time; where that is not possible, nothing is kept."""
    path = _path(arguments, environ)
    new = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(new, "w", encoding="utf-8") as file:
            file.write(f"{_key(arguments, environ)}\n{names}")
        os.replace(new, path)
    except OSError:
        pass


def refresh(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ask the cluster again, in a process that outlives this one."""
    if environ.get(REFRESHING):
        return
    null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    command = [sys.executable, "-P", "-m", "nsqtools", *arguments]  # -P: nothing of the cwd
    try:
        os.posix_spawn(
            sys.executable, command, {**environ, REFRESHING: "1"}, file_actions=null, setpgroup=0
        )
    except (OSError, NotImplementedError):
        pass


def _path(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return os.path.join(home, "nsqtools", f"names-{crc32(_key(arguments, environ).encode()):08x}")


def _key(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Everything that the answer depends on but the secret: a checksum of it, which is all that
    there is of the other variables, would tell a guess from the secret."""
    variables = [
        f"{name}={crc32(value.encode('utf-8', 'surrogateescape'))}"
        for name, value in sorted(environ.items())
        if name.startswith("NSQ_") and name not in NOT_KEPT
    ]
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    files = []
    for name in ("config.toml", "profile"):
        try:
            files.append(os.stat(os.path.join(config, "nsqtools", name)).st_mtime_ns)
        except OSError:
            files.append(0)
    return repr((list(arguments), variables, files))


TIMEOUT = "800ms"  # for a daemon; what another one answered in time is still shown
LIMIT_S = 1.0  # for everything: name resolution knows no time-out

REFRESH_TIMEOUT = "5s"  # no user waits for these
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

    What was found is kept for a while.

    Examples:
        nsq __complete topics
        nsq __complete channels -t clicks
    """
    write_lines(runtime, names_of(kind, topic, cluster=cluster, runtime=runtime))


def names_of(
    kind: KindOfName, topic: OfTopic = None, *, cluster: ClusterConnection, runtime: Session
) -> list[str]:
    """The names, none when no daemon answers in a second; they are kept for the next time."""
    is_refreshing = bool(runtime.environ.get(REFRESHING))
    limit = Timer(REFRESH_LIMIT_S if is_refreshing else LIMIT_S, give_up, (runtime,))
    limit.daemon = True
    limit.start()
    try:
        names = find_names(kind, topic or "", cluster, runtime)
    except NsqError:  # maybe for want of time
        refresh(runtime.arguments, runtime.environ)
        return []
    if kind is not NameKind.profiles:
        text = "".join(f"{name}\n" for name in names)
        keep(runtime.arguments, runtime.environ, text)
    return names


def give_up(runtime: Runtime) -> None:
    """End at once; a process that may take its time finds the names for the next TAB."""
    refresh(runtime.arguments, runtime.environ)
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

    is_refreshing = bool(runtime.environ.get(REFRESHING))
    with cluster.open(REFRESH_TIMEOUT if is_refreshing else TIMEOUT) as opened:
        if kind is NameKind.nodes:
            nsqds, _ = opened.nsqds()
            return [nsqd.address for nsqd in nsqds if is_address(nsqd.address)]
        names = topic_names(opened) if kind is NameKind.topics else channel_names(opened, topic)
    return list(filter(is_valid_name, names))
