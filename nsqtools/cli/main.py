"""The entry of ``nsq``: answer at the door what needs no program, run the rest, map every end.

``nsq``, ``nsq --help`` and ``nsq --version`` are answered from the registry before typer is
imported. Everything else goes to `app`. However a command ends - a result, one of our errors, a
usage error, a signal, a closed pipe, a bug - becomes an exit status here and nowhere else.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would triple the front door's time
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nsq`` with ``arguments`` (default: those of the process); returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        answer = at_the_door(arguments)
        if answer is None:
            status = _run(arguments)
        else:
            sys.stdout.write(answer)
            status = 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    return status


def at_the_door(arguments: Sequence[str]) -> str | None:
    """The text that answers ``arguments`` without any command, or None when one has to run."""
    if list(arguments) == ["--version"]:
        from nsqtools import __version__

        return f"nsq {__version__}\n"
    if list(arguments) in ([], ["--help"]):
        from nsqtools.cli.help import render, root_page
        from nsqtools.cli.terminal import terminal_width, wants_colour

        return render(
            root_page(),
            colour=wants_colour(os.environ, is_tty=sys.stdout.isatty()),
            width=terminal_width(sys.stdout.fileno()),
        )
    return None


def _run(arguments: Sequence[str]) -> int:
    """Run a command; every failure is told on stderr and becomes an exit status."""
    from nsqtools.cli import failures

    try:
        return _dispatch(arguments)
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        debug = "--debug" in arguments or bool(os.environ.get("NSQ_DEBUG"))
        return failures.report(error, sys.stderr, debug=debug)


def _dispatch(arguments: Sequence[str]) -> int:
    from nsqtools.cli.registry import COMMANDS, Command

    command = COMMANDS.get(arguments[0])
    if isinstance(command, Command) and command.raw:
        return command.load()(list(arguments[1:])) or 0

    from nsqtools.cli.app import run

    return run(arguments)


def _silence_stdout() -> None:
    """Keep Python from complaining about the closed pipe again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
