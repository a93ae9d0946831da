"""``nsq completion``: the completion scripts, which the package brings along.

Printing one costs no more than ``nsq --version``: shells run it when they start. The scripts ask
``nsq __complete_line`` at each TAB.
"""

from __future__ import annotations

import os
import sys

from nsqtools.cli.parsing.help import HelpPage, rendered_for_stdout

FILES = {"bash": "nsq.bash", "zsh": "_nsq", "fish": "nsq.fish"}

DESCRIPTION = """\
Print the completion script for bash, zsh or fish.

A normal installation puts the scripts where shells look for them: in share/ below the directory
that nsq was installed into. This command is for all other cases. Names of topics and channels
are requested from the cluster that the command line names, for at most a second."""

SECTIONS = {
    "Arguments": [("bash|zsh|fish", "Which shell. [required]")],
    "Options": [("-h, --help", "Show this message and exit.")],
}

EXAMPLES = (
    'eval "$(nsq completion bash)"    # in ~/.bashrc',
    'eval "$(nsq completion zsh)"     # in ~/.zshrc, after compinit',
    "nsq completion fish > ~/.config/fish/completions/nsq.fish",
)


def completion(arguments: list[str]) -> int:
    """Print the completion script for bash, zsh or fish."""
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(rendered_for_stdout(page()))
        return 0
    if len(arguments) != 1 or arguments[0] not in FILES:
        from nsqtools.errors import ConfigurationError

        raise ConfigurationError(
            "give one shell: bash, zsh or fish", hint="See nsq completion --help."
        )
    sys.stdout.write(read_script(FILES[arguments[0]]))
    return 0


def page() -> HelpPage:
    """What ``nsq completion --help`` shows."""
    return HelpPage("nsq completion bash|zsh|fish", DESCRIPTION, SECTIONS, EXAMPLES)


def read_script(name: str) -> str:
    """Read a script: the package's own, or in a checkout that of the top directory."""
    package = os.path.dirname(os.path.dirname(__file__))
    for directory in (package, os.path.dirname(os.path.dirname(package))):
        try:
            with open(os.path.join(directory, "completions", name), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            continue
    from nsqtools.errors import NsqError

    raise NsqError(f"the script {name} is missing from {package}", hint="Install nsqtools again.")
