"""``nsq nsqlookupd``: the embedded nsqlookupd with the command line of the real one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqtools.cli.parsing.help import HelpPage
    from nsqtools.server.go_flags import Flag
    from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon

DEPRECATED: dict[str, str] = {}


def nsqlookupd(arguments: list[str]) -> int:
    """Run an nsqlookupd in Python, with the flags and protocol of the real one."""
    from nsqtools.server.foreground import run_daemon
    from nsqtools.server.options import NsqlookupdOptions

    if arguments == ["--help"]:
        from nsqtools.cli.parsing.help import rendered_for_stdout

        sys.stdout.write(rendered_for_stdout(page()))
        return 0
    return run_daemon("nsqlookupd", NsqlookupdOptions, _load, arguments, deprecated=DEPRECATED)


def _load(_: object) -> type[NsqlookupdDaemon]:
    from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon

    return NsqlookupdDaemon


def flags() -> dict[str, Flag]:
    """The flags of its command line."""
    from nsqtools.server.go_flags import flags_of
    from nsqtools.server.options import NsqlookupdOptions

    return flags_of(NsqlookupdOptions, DEPRECATED)


def page() -> HelpPage:
    """What ``nsq nsqlookupd --help`` shows."""
    from nsqtools.cli.parsing.describe import daemon_page

    return daemon_page("nsqlookupd", nsqlookupd.__doc__ or "", flags())
