"""``nsq nsqlookupd``: the embedded nsqlookupd in front, with the command line of the real one."""

from __future__ import annotations


def nsqlookupd(arguments: list[str]) -> int:
    """Run an nsqlookupd in Python, with the flags and protocol of the real one."""
    from nsqtools.server.foreground import run_daemon
    from nsqtools.server.nsqlookupd import NsqlookupdDaemon
    from nsqtools.server.settings.nsqlookupd_options import NsqlookupdOptions

    return run_daemon(
        "nsqlookupd",
        NsqlookupdOptions,
        NsqlookupdDaemon,
        arguments,
        summary=nsqlookupd.__doc__ or "",
        deprecated={},
    )
