"""Names for TAB, kept in a file: a cluster that is slow, or a machine that is busy, delays nobody.

What ``nsq __complete`` printed is kept under the command line and the variables that lead to the
cluster. Within `FRESH_S` it is the answer; within `STALE_S` it is the answer too, and a process of
its own asks the cluster again for the next time. Nothing heavy is imported here, because typer
alone would cost more than the rest.
"""

from __future__ import annotations

import os
import sys
from zlib import crc32

TYPE_CHECKING = False  # importing typing would triple the time
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
