"""``nsq nsqd``: the embedded nsqd in front, with the command line of the real one."""

from __future__ import annotations


def nsqd(arguments: list[str]) -> int:
    """Run an nsqd in Python, with the flags, files and protocol of the real one."""
    from nsqtools.server.daemon import NsqdDaemon
    from nsqtools.server.foreground import run_daemon
    from nsqtools.server.settings.nsqd_options import NsqdOptions

    return run_daemon(
        "nsqd",
        NsqdOptions,
        NsqdDaemon,
        arguments,
        summary=nsqd.__doc__ or "",
        deprecated={"worker-id": "[deprecated] use --node-id"},
    )
