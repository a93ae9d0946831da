"""``nsq nsqd``: the embedded nsqd in the foreground, with the command line of the real one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqtools.cli.parsing.help import HelpPage
    from nsqtools.server.go_flags import Flag
    from nsqtools.server.nsqd_daemon import NsqdDaemon, NsqdRecovery
    from nsqtools.server.options import NsqdOptions

DEPRECATED = {"worker-id": "[deprecated] use --node-id"}


def nsqd(arguments: list[str]) -> int:
    """Run an nsqd in Python, with the flags, files and protocol of the real one."""
    from nsqtools.server.foreground import run_daemon
    from nsqtools.server.options import NsqdOptions

    if arguments == ["--help"]:
        from nsqtools.cli.parsing.help import rendered_for_stdout

        sys.stdout.write(rendered_for_stdout(page()))
        return 0
    return run_daemon("nsqd", NsqdOptions, _load, arguments, deprecated=DEPRECATED)


def _load(options: NsqdOptions) -> type[NsqdDaemon | NsqdRecovery]:
    from nsqtools.server.nsqd_daemon import NsqdDaemon, NsqdRecovery

    return NsqdRecovery if options.recover_only else NsqdDaemon


def flags() -> dict[str, Flag]:
    """The flags of its command line."""
    from nsqtools.server.go_flags import flags_of
    from nsqtools.server.options import NsqdOptions

    return flags_of(NsqdOptions, DEPRECATED)


def page() -> HelpPage:
    """What ``nsq nsqd --help`` shows."""
    from nsqtools.cli.parsing.describe import daemon_page

    return daemon_page("nsqd", nsqd.__doc__ or "", flags())
