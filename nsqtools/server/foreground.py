"""Run a daemon in the foreground until SIGTERM or SIGINT, as ``nsqd`` and ``nsqlookupd`` do.

Exit status: 0 after a signal (everything is on disk then), 1 when it could not start, 2 for a
command line that Go's flag package would refuse.

Trap: start-up is a feature. The arguments are read before anything that serves is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.server.daemon_log import DaemonLog, version_line
from nsqtools.server.go_flags import (
    FlagError,
    HelpAsked,
    flags_of,
    parse_flags,
    read_config,
    usage,
)

if TYPE_CHECKING:
    from nsqtools.server.nsqd_daemon import NsqdDaemon
    from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon
    from nsqtools.server.options import NsqdOptions, NsqlookupdOptions


O = TypeVar("O", bound="NsqdOptions | NsqlookupdOptions")  # noqa: E741 - the options of a daemon


def run_daemon(
    program: str,
    options_class: type[O],
    load: Callable[[O], Callable[[O, DaemonLog], NsqdDaemon | NsqlookupdDaemon | None]],
    arguments: Sequence[str],
    *,
    deprecated: Mapping[str, str],
) -> int:
    """Read the command line, run the daemon, return the exit status.

    ``load`` imports the class of the daemon, or a function that does all there is to do, and is
    called only when there is something to run.
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
    log = DaemonLog(sys.stderr, f"[{program}] ")

    def make() -> NsqdDaemon | NsqlookupdDaemon | None:
        daemon = load(options)(options, log)  # its first line is the version
        for name in line.without_effect:
            log.warn(f"the flag -{name} is deprecated and has no effect")
        return daemon

    try:
        config = read_config(line.config, options_class) if line.config else {}
        options = options_class(**{**config, **line.options})
        log = DaemonLog(sys.stderr, options.log_prefix, options.log_level)
        _run(make)
    except ConfigurationError as exc:
        log.fatal(f"failed to instantiate {program} - {exc}")
        return 1
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        log.fatal(f"failed to start {program} - {where}{exc.strerror}")
        return 1
    return 0


def _run(make_daemon: Callable[[], NsqdDaemon | NsqlookupdDaemon | None]) -> None:
    import asyncio

    from nsqtools.files.opening import allow_many
    from nsqtools.server.loop_meter import MeteredLoop

    allow_many()
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        runner.run(_serve(make_daemon))


async def _serve(make_daemon: Callable[[], NsqdDaemon | NsqlookupdDaemon | None]) -> None:
    import asyncio
    import signal

    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    daemon = make_daemon()
    if daemon is not None:
        await daemon.start()
        daemon.owns_process()
        await asked_to_stop.wait()
        await daemon.stop()
