"""Every example of every help page, and so of every manual page of a command, can be typed.

They are parsed with all their options and not run: those of README and of the guides run in
`test_readme`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from plugins.cli import all_commands
from typer import Exit

from nsqtools.cli.parsing.app import LazyGroup, command_tree
from nsqtools.cli.running.runtime import Runtime

COMMANDS = all_commands()
BETWEEN = {"|", "&&", ";", "&"}


def examples_of(name: str) -> list[str]:
    text = (COMMANDS[name].load().__doc__ or "").partition("Examples:\n")[2]
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]


def calls_in(line: str) -> Iterator[list[str]]:
    """What follows each ``nsq`` in a command line of a shell."""
    part: list[str] = []
    for word in [*shlex.split(line, comments=True), "|"]:
        if word in BETWEEN or word.startswith(">"):
            while part and re.match(r"[A-Z_]+=", part[0]):
                part.pop(0)
            if part[:1] == ["nsq"]:
                yield part[1:]
            part = []
        else:
            part.append(word)


def parse(words: list[str], runtime: Runtime) -> None:
    """Raises what a wrong command line would."""
    command = command_tree()
    context = command.make_context("nsq", words, obj=runtime)
    while isinstance(command, LazyGroup):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_the_examples_of_every_help_page_can_be_typed(tmp_path: Path) -> None:
    settings = tmp_path / ".config" / "nsqtools" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[profiles.staging]\n")
    with (tmp_path / "out").open("w") as out:
        runtime = Runtime(out, out, {"HOME": str(tmp_path)})
        for name, command in COMMANDS.items():
            calls = [call for line in examples_of(name) for call in calls_in(line)]
            assert calls or command.raw, name
            for call in calls:
                with suppress(Exit):  # of what prints a list, such as -X list
                    parse(call, runtime)
