"""Run a daemon in front until SIGTERM or SIGINT, as ``nsqd`` and ``nsqlookupd`` do.

Exit status: 0 after a signal (everything is on disk then), 1 when it could not start, 2 for a
command line that Go's flag package would refuse.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.server.log import Log
from nsqtools.server.settings.config_file import read_config
from nsqtools.server.settings.go_flags import (
    FlagError,
    HelpAsked,
    flags_of,
    parse_flags,
    usage,
)
from nsqtools.server.version import version_line


class Daemon(Protocol):
    """What runs in front."""

    def start(self) -> Coroutine[Any, Any, None]: ...
    def stop(self) -> Coroutine[Any, Any, None]: ...


class LogOptions(Protocol):
    """The options that every daemon has."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_prefix(self) -> str: ...


O = TypeVar("O", bound=LogOptions)  # noqa: E741 - the options of a daemon


def run_daemon(
    program: str,
    options_class: type[O],
    make_daemon: Callable[[O, Log], Daemon],
    arguments: Sequence[str],
    *,
    deprecated: Mapping[str, str],
) -> int:
    """Read the command line, run the daemon, return the exit status.

    ``deprecated`` are flags that are accepted and do nothing, with their help.
    """
    flags = flags_of(options_class, deprecated)
    try:
        line = parse_flags(flags, arguments)
    except HelpAsked:
        sys.stderr.write(usage(program, flags))
        return 0
    except FlagError as exc:
        sys.stderr.write(f"{exc}\n{usage(program, flags)}")
        return 2
    if line.asks_version:
        sys.stdout.write(version_line(program) + "\n")
        return 0
    log = Log(sys.stderr, f"[{program}] ")

    def make() -> Daemon:
        daemon = make_daemon(options, log)  # its first line tells the version
        for name in line.without_effect:
            log.warn(f"the flag -{name} is deprecated and has no effect")
        return daemon

    try:
        config = read_config(line.config, options_class) if line.config else {}
        options = options_class(**{**config, **line.options})
        log = Log(sys.stderr, options.log_prefix, options.log_level)
        asyncio.run(_serve(make))
    except ConfigurationError as exc:
        log.fatal(f"failed to instantiate {program} - {exc}")
        return 1
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        log.fatal(f"failed to start {program} - {where}{exc.strerror}")
        return 1
    return 0


async def _serve(make_daemon: Callable[[], Daemon]) -> None:
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    daemon = make_daemon()
    await daemon.start()
    await asked_to_stop.wait()
    await daemon.stop()
