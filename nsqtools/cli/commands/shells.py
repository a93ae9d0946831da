"""``nsq completion`` and ``nsq compat``: scripts and names for the shell.

The package contains the completion scripts, which call ``nsq __complete_line`` at each TAB. `main`
answers ``nsq completion bash`` itself: shells run it when they start, and it costs no more than
``nsq --version``. `compat` runs the program under the names of the Go utilities.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from nsqtools.cli.main import SCRIPTS, UTILITIES, packaged_text
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.runtime import write_whole
from nsqtools.errors import ConfigurationError, OutputError


def completion(
    shell: Annotated[str, Argument(metavar="bash|zsh|fish", help="Which shell.")],
) -> None:
    """Print the completion script for bash, zsh or fish.

    A normal installation puts the scripts where shells look for them: in share/ below the directory
    that nsq was installed into. This command is for all other cases. Names of topics and channels
    are requested from the cluster that the command line names, for at most a second.

    Examples:
        eval "$(nsq completion bash)"    # in ~/.bashrc
        eval "$(nsq completion zsh)"     # in ~/.zshrc, after compinit
        nsq completion fish > ~/.config/fish/completions/nsq.fish
    """
    if shell not in SCRIPTS:
        raise ConfigurationError(
            "give one shell: bash, zsh or fish", hint="See nsq completion --help."
        )
    sys.stdout.write(packaged_text("completions", SCRIPTS[shell]))


def compat(
    words: Annotated[
        list[str] | None,
        Argument(metavar="explain UTILITY FLAG", help="Show the native command line."),
    ] = None,
    install: Path | None = opt("DIR", "Link the names of the utilities to this program, in DIR."),
) -> None:
    """Use the names and flags of NSQ's Go utilities with this program.

    Called as nsq_tail, nsq_to_file, to_nsq, nsq_stat, nsq_to_nsq, nsq_to_http or nsqadmin, the
    program accepts the flags of that utility. --install creates links with these names, and
    replaces only such links. explain shows the native command line for one of a utility.
    nsq-migration(7) lists the differences.

    Examples:
        nsq compat --install /usr/local/bin
        nsq compat explain nsq_to_file -topic clicks -lookupd-http-address lookup:4161 -gzip=true
    """
    match words or [], install:
        case ["explain", utility, *flags], None:
            lines = explain(utility, flags)
        case [], Path() as directory:
            lines = list(map(str, make_links(directory)))
        case _:
            raise ConfigurationError(
                "give --install DIR, or explain UTILITY FLAG ...", hint="See nsq compat --help."
            )
    # A line may have names of files, which need not be text.
    write_whole(sys.stdout.fileno(), os.fsencode("".join(f"{line}\n" for line in lines)))


# The flags behind the words belong to the utility.
vars(compat)["context_settings"] = {"allow_interspersed_args": False}


def make_links(directory: Path) -> list[Path]:
    """Create a link for each Go utility in a directory; return the new ones.

    An existing file is not replaced, unless it is such a link. Raises `OutputError` and
    `ConfigurationError`.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory")
    program = Path(sys.argv[0]).resolve()
    # A link cannot run python -m.
    if program.suffix == ".py":
        raise ConfigurationError(f"{program} is not the program nsq", hint="Run nsq itself.")
    new_links = []
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
                f"{link} exists and is not such a link", hint="Remove it, or use another DIR."
            ) from None
        except OSError as exc:
            raise OutputError(f"cannot link {link} ({exc.strerror})") from exc
        new_links.append(link)
    return new_links


def explain(program: str, arguments: list[str]) -> list[str]:
    """Return the native command line for a Go command line. Raises `ConfigurationError`."""
    from nsqtools.cli.commands.compat import read_flags
    from nsqtools.cli.commands.go_utilities import TRANSLATORS, GoFatal
    from nsqtools.cli.commands.go_utilities import UTILITIES as FLAGS
    from nsqtools.server.go_flags import FlagError, HelpRequested, usage

    name = os.path.basename(program)
    if name not in UTILITIES:
        raise ConfigurationError(
            f"{program!r} is not a utility of NSQ", hint=f"One of {', '.join(UTILITIES)}."
        )
    try:
        argv = TRANSLATORS[name](read_flags(name, arguments))
    except HelpRequested:
        return usage(name, FLAGS[name]).splitlines()
    except (FlagError, GoFatal) as exc:
        raise ConfigurationError(f"{name}: {exc}") from None
    return [f"nsq {shlex.join(argv)}", "# what differs: nsq-migration(7)"]
