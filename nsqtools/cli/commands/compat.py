"""``nsq compat``: the Go utilities' names and flags, on this program."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from nsqtools.cli.parsing.help import HelpPage, rendered_for_stdout
from nsqtools.errors import ConfigurationError, OutputError

DESCRIPTION = """\
Use the names and flags of NSQ's Go utilities with this program.

Called as nsq_tail, nsq_to_file, to_nsq, nsq_stat, nsq_to_nsq or nsq_to_http, the program takes the
flags of that utility, with their meanings: --install makes the links. Nothing that is not such a
link is replaced. explain shows the native command line for a given one, and what differs."""

ARGUMENTS = (
    ("explain", "Show the native command line."),
    ("UTILITY", "nsq_tail, nsq_to_file, to_nsq, nsq_stat, nsq_to_nsq or nsq_to_http."),
    ("FLAG", "Flags of the utility."),
)

OPTIONS = (
    ("--install DIR", "Link the names of the utilities to this program, in DIR."),
    ("-h, --help", "Show this message and exit."),
)

EXAMPLES = (
    "nsq compat --install /usr/local/bin",
    "nsq compat explain nsq_to_file -topic clicks -lookupd-http-address lookup:4161 -gzip=true",
)


def compat(arguments: list[str]) -> int:
    """Use the names and flags of NSQ's Go utilities with this program."""
    match arguments:
        case ["--help" | "-h"]:
            sys.stdout.write(rendered_for_stdout(page()))
        case ["explain", utility, *flags]:
            sys.stdout.write("".join(f"{line}\n" for line in explain(utility, flags)))
        case ["--install", directory]:
            for link in install(Path(directory)):
                sys.stdout.write(f"{link}\n")
        case _:
            raise ConfigurationError(
                "give --install DIR, or explain UTILITY FLAG ...", hint="See nsq compat --help."
            )
    return 0


def page() -> HelpPage:
    """What ``nsq compat --help`` shows."""
    usage = "nsq compat --install DIR | explain UTILITY [FLAG]..."
    return HelpPage(usage, DESCRIPTION, {"Arguments": ARGUMENTS, "Options": OPTIONS}, EXAMPLES)


def install(directory: Path) -> list[Path]:
    """Make a link for each Go utility in a directory; return those that are new.

    A file that is there already is not replaced, unless it is such a link. Raises `OutputError` and
    `ConfigurationError`.
    """
    from nsqtools.cli.compat.go_utilities import UTILITIES

    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory")
    program = Path(sys.argv[0]).resolve()
    made = []
    for name in UTILITIES:
        link = directory / name
        try:
            if link.is_symlink() and link.resolve() == program:
                continue
            if link.is_symlink() and link.resolve().name == "nsq":
                link.unlink()
            link.symlink_to(program)
        except FileExistsError:
            raise OutputError(
                f"{link} is there already, and is not ours", hint="Remove it, or take another DIR."
            ) from None
        except OSError as exc:
            raise OutputError(f"cannot link {link} ({exc.strerror})") from exc
        made.append(link)
    return made


def explain(program: str, arguments: list[str]) -> list[str]:
    """Return the native line for a Go command line, and what differs. Raises
    `ConfigurationError`."""
    from nsqtools.cli.compat.go_main import read_flags
    from nsqtools.cli.compat.go_utilities import UTILITIES
    from nsqtools.cli.compat.translation import GoFatal, translate
    from nsqtools.server.go_flags import FlagError, HelpAsked, usage

    name = os.path.basename(program)
    if name not in UTILITIES:
        raise ConfigurationError(
            f"{program!r} is not a utility of NSQ", hint=f"One of {', '.join(UTILITIES)}."
        )
    try:
        translation = translate(name, read_flags(name, arguments))
    except HelpAsked:
        return usage(name, UTILITIES[name]).splitlines()
    except (FlagError, GoFatal) as exc:
        raise ConfigurationError(f"{name}: {exc}") from None
    return [f"nsq {shlex.join(translation.argv)}", *(f"# {note}" for note in translation.notes)]
