"""The commands that are daemons: their help page, made from flags in Go's syntax.

Such a command is raw (see `registry`): typer does not read its arguments, the server does. Its
module has ``flags()`` and ``page()``, from which the help, the manual and completions are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqtools.cli.parsing.help import HelpPage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqtools.server.settings.go_flags import Flag

SYNTAX = (
    "The flags are those of the real one, with one dash or two. A bool takes its value after an "
    "equals sign: -verbose=false. SIGINT and SIGTERM end it, with everything on disk."
)


def daemon_page(program: str, summary: str, flags: Mapping[str, Flag]) -> HelpPage:
    """The page of ``nsq PROGRAM --help``; ``-help`` prints Go's own."""
    from nsqtools.server.settings.go_flags import entries

    # a help that names the host name tells the default itself, and that differs between machines
    rows = [
        (head, flag.help if "hostname" in flag.help else text)
        for flag, (head, text) in zip(flags.values(), entries(flags), strict=True)
    ]
    return HelpPage(
        f"nsq {program} [-flag VALUE | -flag=VALUE]...",
        f"{summary}\n\n{SYNTAX}",
        {"Flags": rows},
        [f"nsq {program} -tcp-address=127.0.0.1:0 -http-address=127.0.0.1:0"],
    )
