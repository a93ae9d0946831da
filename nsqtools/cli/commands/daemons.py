"""``nsq nsqd`` and ``nsq nsqlookupd``, the embedded daemons with the flags of the real ones, and
``nsq demo``, which shows the tool on such daemons.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nsqtools.cli.running.runtime import Session, exit_on_signals

if TYPE_CHECKING:
    from nsqtools.cli.parsing.help import HelpPage
    from nsqtools.server.go_flags import Flag


class Daemon:
    """A command with Go's flags, from a class in `nsqtools.server.options`."""

    def __init__(self, name: str, help: str, options: str, deprecated: dict[str, str]) -> None:
        self.name = name
        self.__doc__ = help
        self._options = options
        self._deprecated = deprecated

    def __call__(self, arguments: list[str]) -> int:
        from nsqtools.server.foreground import run_daemon

        if arguments == ["--help"]:
            from nsqtools.cli.parsing.help import render_for_stdout

            sys.stdout.write(render_for_stdout(self.page()))
            return 0
        return run_daemon(self.name, self._options_class(), arguments, self._deprecated)

    def _options_class(self) -> type:
        from nsqtools.server import options

        options_class: type = getattr(options, self._options)
        return options_class

    def flags(self) -> dict[str, Flag]:
        """Return the flags of the command line."""
        from nsqtools.server.go_flags import flags_of

        return flags_of(self._options_class(), self._deprecated)

    def page(self) -> HelpPage:
        """Return the page of ``--help``."""
        from nsqtools.cli.parsing.help import daemon_page

        return daemon_page(self.name, self.__doc__ or "", self.flags())


nsqd = Daemon(
    "nsqd",
    "Run an nsqd in Python, with the flags, files and protocol of the real one.",
    "NsqdOptions",
    {"worker-id": "[deprecated] use --node-id"},
)
nsqlookupd = Daemon(
    "nsqlookupd",
    "Run an nsqlookupd in Python, with the flags and protocol of the real one.",
    "NsqlookupdOptions",
    {},
)


# -- the demonstration ----------------------------------------------------------------------------


def demo(*, runtime: Session) -> None:
    """Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.

    Needs no NSQ and removes everything afterwards. Each step shows the command line that does it,
    which you can type where nsqd and nsqlookupd have their usual ports, and checks its own numbers.

    Examples:
        nsq demo
    """
    from nsqtools.demo import StopRequest, Story, demo_stage

    stop_request = StopRequest()
    with (
        exit_on_signals(stop_request.on_signal),
        demo_stage(runtime.environ, stop_request) as stage,
    ):
        story = Story(stage, runtime.stdout)
        story.run()
        story.write("Everything was there. Next: nsq --help\n")
