"""The entry point of ``nsq``.

``nsq``, ``nsq --help``, ``nsq --version`` and ``nsq completion`` are answered here, before typer is
imported. All other command lines go to `app`. This module alone turns the end of a command (a
result, an error, a signal, a closed pipe or a bug) into an exit status.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

# Names of NSQ's Go utilities. Invoked by one of them, nsq accepts its flags (`commands.compat`).
UTILITIES = (
    "nsq_stat",
    "nsq_tail",
    "nsq_to_file",
    "nsq_to_http",
    "nsq_to_nsq",
    "to_nsq",
    "nsqadmin",
)

SCRIPTS = {"bash": "nsq.bash", "zsh": "_nsq", "fish": "nsq.fish"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nsq`` with ``arguments`` (by default those of the process); return the exit status."""
    if arguments is None and os.getpid() == 1:
        from nsqtools.cli.running.inheritance import continue_below_init

        continue_below_init()
    program = os.path.basename(sys.argv[0]) if arguments is None else "nsq"
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    try:
        try:
            status = _run(arguments, program)
        except RuntimeError as error:
            # A signal arrived while a wait on a condition had released its lock. Then the lock
            # raises RuntimeError on the way out.
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
        # Buffered output must come before the error.
        _flush(sys.stdout)
        from nsqtools.cli.registry import FAILURE_STATUS
        from nsqtools.cli.running.runtime import asks_for_json, before_dashes, report_error

        return report_error(
            error,
            sys.stderr,
            debug="--debug" in before_dashes(arguments) or bool(os.environ.get("NSQ_DEBUG")),
            json=asks_for_json(arguments),
            status=FAILURE_STATUS.get(arguments[0]) if arguments else None,
        )
    finally:
        _flush(sys.stdout)
        _flush(sys.stderr)


def quick_answer(arguments: Sequence[str]) -> str | None:
    """Return the answer to ``arguments`` that needs no command, None if a command has to run."""
    first = arguments[0] if arguments else "--help"
    if first in ("--version", "version"):
        from nsqtools import __version__

        return f"nsq {__version__}\n"
    if list(arguments) == ["help", "options"]:
        lines = packaged_text("man", "nsq-options.7.md").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("<!--"))
    if first in ("--help", "-h", "help"):
        from nsqtools.cli.parsing.help import render_for_stdout, root_page

        return render_for_stdout(root_page())
    if first == "--help-llm":
        from nsqtools.cli.parsing.app import llm_page

        return llm_page()
    if first == "completion" and len(arguments) == 2 and arguments[1] in SCRIPTS:
        return packaged_text("completions", SCRIPTS[arguments[1]])
    return None


def packaged_text(folder: str, name: str) -> str:
    """Read a file that is in this package in a wheel, and in ``folder`` in a checkout."""
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
        _reduce_garbage_collection()
        return go_main(program, arguments)
    # nsq help topic list is nsq topic list --help.
    if arguments[:1] == ["help"] and len(arguments) > 1 and list(arguments[1:]) != ["options"]:
        arguments = [*arguments[1:], "--help"]
    answer = quick_answer(arguments)
    if answer is not None:
        sys.stdout.write(answer)
        return 0

    # Completion scripts use it, so it is not in the registry of commands.
    if arguments[0] == "__complete_line":
        from nsqtools.cli.commands.complete_line import complete_line

        return complete_line(arguments[1:])

    from nsqtools.cli.registry import COMMANDS, Command
    from nsqtools.cli.running.inheritance import clean_inherited_signals

    clean_inherited_signals()
    command = COMMANDS.get(arguments[0])
    if command is None:
        _run_plugin(arguments)
    if isinstance(command, Command) and command.raw:
        return command.load()(list(arguments[1:])) or 0
    # The Go utilities accept --version too.
    if command is not None and list(arguments[1:]) == ["--version"]:
        return _run(arguments[1:])

    from nsqtools.cli.parsing.app import run

    _reduce_garbage_collection()
    return run(arguments)


def _run_plugin(arguments: Sequence[str]) -> None:
    """Become the program ``nsq-NAME`` of PATH, if there is one for a command that nsq lacks."""
    from shutil import which

    name = arguments[0]
    # An option names no program, and a path would name one outside of PATH.
    if not name.startswith("-") and "/" not in name and (program := which(f"nsq-{name}")):
        os.execv(program, [program, *arguments[1:]])


def _reduce_garbage_collection() -> None:
    """Collect garbage less often than by default.

    Messages form no cycles and are allocated by the hundred thousand a second. With the default
    thresholds tail spends a tenth of its time in the collector.
    """
    import gc

    gc.set_threshold(100_000, 50, 100)


def _open_streams() -> None:
    """Open /dev/null for each standard stream that was closed at the start (``<&-``).

    Otherwise the first socket would get its descriptor, and printed text would go to nsqd. stdout
    is opened for reading only, so that writing fails instead of losing data.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def _flush(stream: TextIO) -> None:
    """Flush ``stream``, and discard its buffer if that fails, such as on a closed terminal.

    Otherwise the flush of Python at exit would fail again and change the exit status.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
