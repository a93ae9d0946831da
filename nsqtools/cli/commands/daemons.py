"""``nsq nsqd`` and ``nsq nsqlookupd``: the embedded daemons, with the flags of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqtools.cli.parsing.help import HelpPage
    from nsqtools.server.go_flags import Flag


class Daemon:
    """A command that takes Go's flags. ``load`` imports its options, and the class to run."""

    def __init__(
        self,
        name: str,
        help: str,
        load: Callable[[], tuple[type, Callable[[Any], Any]]],
        deprecated: dict[str, str],
    ) -> None:
        self.name = name
        self.__doc__ = help
        self._load = load
        self._deprecated = deprecated

    def __call__(self, arguments: list[str]) -> int:
        from nsqtools.server.foreground import run_daemon

        if arguments == ["--help"]:
            from nsqtools.cli.parsing.help import rendered_for_stdout

            sys.stdout.write(rendered_for_stdout(self.page()))
            return 0
        options, daemon = self._load()
        return run_daemon(self.name, options, daemon, arguments, deprecated=self._deprecated)

    def flags(self) -> dict[str, Flag]:
        """The flags of its command line."""
        from nsqtools.server.go_flags import flags_of

        return flags_of(self._load()[0], self._deprecated)

    def page(self) -> HelpPage:
        """What ``--help`` shows."""
        from nsqtools.cli.parsing.help import daemon_page

        return daemon_page(self.name, self.__doc__ or "", self.flags())


def _nsqd() -> tuple[type, Callable[[Any], Any]]:
    from nsqtools.server.options import NsqdOptions

    def daemon(options: NsqdOptions) -> Callable[..., Any]:
        from nsqtools.server.nsqd_daemon import NsqdDaemon, recover

        return recover if options.recover_only else NsqdDaemon

    return NsqdOptions, daemon


def _nsqlookupd() -> tuple[type, Callable[[Any], Any]]:
    from nsqtools.server.options import NsqlookupdOptions

    def daemon(_: NsqlookupdOptions) -> type:
        from nsqtools.server.nsqlookupd_daemon import NsqlookupdDaemon

        return NsqlookupdDaemon

    return NsqlookupdOptions, daemon


nsqd = Daemon(
    "nsqd",
    "Run an nsqd in Python, with the flags, files and protocol of the real one.",
    _nsqd,
    {"worker-id": "[deprecated] use --node-id"},
)
nsqlookupd = Daemon(
    "nsqlookupd",
    "Run an nsqlookupd in Python, with the flags and protocol of the real one.",
    _nsqlookupd,
    {},
)
