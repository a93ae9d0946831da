"""Run a daemon in the foreground until SIGTERM or SIGINT, as ``nsqd`` and ``nsqlookupd`` do.

SIGHUP, the end of the terminal, stops it in the same way, where it kills those programs.

The exit status is 0 after a signal when all messages are on disk, 1 when the daemon could not start
or not write all messages, and 2 for a command line that Go's flag package refuses.

Trap: start-up time is a feature. The arguments are parsed before the server is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nsqtools.errors import NsqError
from nsqtools.server.daemon_log import DaemonLog, version_line
from nsqtools.server.go_flags import (
    FlagError,
    flags_of,
    parse_flags,
    read_config,
    report_flag_error,
)
from nsqtools.server.options import NsqdOptions


def run_daemon(
    program: str, options_class: type, arguments: Sequence[str], deprecated: Mapping[str, str]
) -> int:
    """Run the daemon with the options of a command line; return the exit status.

    ``deprecated`` are the names and help texts of flags without effect.
    """
    flags = flags_of(options_class, deprecated)
    try:
        line = parse_flags(flags, arguments)
    except FlagError as exc:
        return report_flag_error(exc, program, flags)
    if line.asks_version:
        sys.stdout.write(version_line(program) + "\n")
        return 0
    log = DaemonLog(sys.stderr, f"[{program}] ")
    try:
        config = read_config(line.config, options_class) if line.config else {}
        options = options_class(**{**config, **line.options})
        log = DaemonLog(sys.stderr, options.log_prefix, options.log_level)
        if isinstance(options, NsqdOptions) and options.recover_only:
            from nsqtools.server.recovery import move_messages

            move_messages(options, log)  # a signal kills it, which loses nothing
            return 0
        return 0 if _run(options, log, line.without_effect) else 1
    except NsqError as exc:
        log.fatal(f"failed to instantiate {program} - {exc}")
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        log.fatal(f"failed to start {program} - {where}{exc.strerror}")
    return 1


def _run(options: Any, log: DaemonLog, without_effect: Sequence[str]) -> bool:
    import asyncio
    import signal

    from nsqtools.files.opening import raise_open_file_limit
    from nsqtools.http.loop_meter import MeteredLoop
    from nsqtools.server.nsqd_daemon import NsqdDaemon
    from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon

    async def serve() -> bool:
        stop_requested = asyncio.Event()
        loop = asyncio.get_running_loop()
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup
            signals.remove(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, stop_requested.set)
        kind = NsqdDaemon if isinstance(options, NsqdOptions) else NsqlookupdDaemon
        daemon = kind(options, log)  # logs the version first
        for name in without_effect:
            log.warn(f"the flag -{name} is deprecated and has no effect")
        await daemon.start()
        daemon.owns_process()
        await stop_requested.wait()
        return await daemon.stop()

    raise_open_file_limit()
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        return runner.run(serve())
