"""The entry of ``nsq``: answer at once what needs no command, run the rest, map every end.

``nsq``, ``nsq --help``, ``nsq --version`` and ``nsq completion`` are answered here, before typer
is imported. Everything else goes to `app`. However a command ends - a result, one of our errors, a
usage error, a signal, a closed pipe, a bug - becomes an exit status here and nowhere else.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

UTILITIES = ("nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq")
"""Names of NSQ's Go utilities: called by one of them, we take its flags (`commands.compat`)."""

SCRIPTS = {"bash": "nsq.bash", "zsh": "_nsq", "fish": "nsq.fish"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nsq`` with ``arguments`` (default: those of the process); returns the exit status."""
    if arguments is None and os.getpid() == 1:
        from nsqtools.cli.running.inheritance import continue_below_init

        continue_below_init()
    program = os.path.basename(sys.argv[0]) if arguments is None else "nsq"
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    try:
        try:
            status = _run(arguments, program)
        except RuntimeError as error:  # of a lock: the signal came as a wait had let it go
            if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
                raise error.__context__ from None
            raise
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        _settle(sys.stdout)  # what was printed comes before the error
        from nsqtools.cli.registry import OWN_FAILURE
        from nsqtools.cli.running.runtime import asks_for_json, before_dashes, report_error

        return report_error(
            error,
            sys.stderr,
            debug="--debug" in before_dashes(arguments) or bool(os.environ.get("NSQ_DEBUG")),
            json=asks_for_json(arguments[1:]),
            status=OWN_FAILURE.get(arguments[0]) if arguments else None,
        )
    finally:
        _settle(sys.stdout)
        _settle(sys.stderr)


def quick_answer(arguments: Sequence[str]) -> str | None:
    """The text that answers ``arguments`` without any command, or None when one has to run."""
    first = arguments[0] if arguments else "--help"
    if first in ("--version", "version"):
        from nsqtools import __version__

        return f"nsq {__version__}\n"
    if list(arguments) == ["help", "options"]:
        lines = packaged_text("man", "nsq-options.7.md").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("<!--"))
    if first in ("--help", "-h", "help"):
        from nsqtools.cli.parsing.help import rendered_for_stdout, root_page

        return rendered_for_stdout(root_page())
    if first == "completion" and len(arguments) == 2 and arguments[1] in SCRIPTS:
        return packaged_text("completions", SCRIPTS[arguments[1]])
    return None


def packaged_text(folder: str, name: str) -> str:
    """Read a file that the wheel puts in this package, and that a checkout has in ``folder``."""
    package = os.path.dirname(__file__)
    for directory in (package, os.path.dirname(os.path.dirname(package))):
        try:
            with open(os.path.join(directory, folder, name), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            continue
    from nsqtools.errors import NsqError

    raise NsqError(f"{name} is missing from {package}", hint="Install nsqtools again.")


def _run(arguments: Sequence[str], program: str = "nsq") -> int:
    if program in UTILITIES:
        from nsqtools.cli.commands.compat import go_main
        from nsqtools.cli.running.inheritance import clean_inherited_signals

        clean_inherited_signals()
        _collect_less()
        return go_main(program, arguments)
    # nsq help topic list
    if arguments[:1] == ["help"] and len(arguments) > 1 and list(arguments[1:]) != ["options"]:
        arguments = [*arguments[1:], "--help"]
    answer = quick_answer(arguments)
    if answer is not None:
        sys.stdout.write(answer)
        return 0

    if arguments[0] == "__complete_line":  # for programs: no list of commands has it
        from nsqtools.cli.commands.complete_line import complete_line

        return complete_line(arguments[1:])

    from nsqtools.cli.registry import COMMANDS, Command
    from nsqtools.cli.running.inheritance import clean_inherited_signals

    clean_inherited_signals()
    command = COMMANDS.get(arguments[0])
    if isinstance(command, Command) and command.raw:
        return command.load()(list(arguments[1:])) or 0
    if command is not None and list(arguments[1:]) == ["--version"]:  # as the Go utilities have it
        return _run(arguments[1:])

    from nsqtools.cli.parsing.app import run

    _collect_less()
    return run(arguments)


def _collect_less() -> None:
    """Messages come and go by the hundred thousand a second and form no cycles: with the default
    tail spends a tenth of its time collecting."""
    import gc

    gc.set_threshold(100_000, 50, 100)


def _open_streams() -> None:
    """Put /dev/null where a stream was closed before we started (``<&-``).

    Else the first socket would take its number, and what is printed would go to nsqd. stdout gets
    one that does not take anything, so that data is not lost there: writing fails.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def _settle(stream: TextIO) -> None:
    """Write what ``stream`` still holds; what it does not take (a terminal is gone) goes nowhere.

    Else Python would fail once more when it flushes the stream at exit, with a status of its own.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
