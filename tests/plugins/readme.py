"""README.md and the guides as programs: their code blocks, and a place to run them.

    blocks = parse(name, text)      the fenced blocks, each with the heading above it
    place.run(command)              one command line, in bash, as a reader would type it

A *place* has its own daemons and directory, which `Place.fit` puts into the text.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pexpect
import pytest
from plugins.in_process import Result
from plugins.waiting import patience_s

UNTIL_INTERRUPTED = "# until Ctrl-C"
UNTIL_SIGNAL = "# until SIGTERM"  # the marker in a Python program
# A command that is not ready for an interrupt ends with a traceback. It is ready soon after its
# first output; a command without output has to start within this time.
LET_RUN_S = patience_s(0.4)
SILENT, LET_START_S = "nsq tail", patience_s(1.5)
DEADLINE_S = patience_s(90.0)
FOR_A_SHELL = re.compile(r"[|<>&;$#*~]")


class Block(NamedTuple):
    document: str
    heading: str
    language: str
    text: str
    line: int


class Command(NamedTuple):
    """One command line, and its expected output (None: any)."""

    text: str
    output: str | None = None

    @property
    def runs_until_interrupted(self) -> bool:
        return UNTIL_INTERRUPTED in self.text


def parse(document: str, text: str) -> list[Block]:
    blocks, heading = [], ""
    for match in re.finditer(r"^#+ (.*)$|^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        if match[1] is None:
            line = text.count("\n", 0, match.start()) + 1
            blocks.append(Block(document, heading, match[2], match[3], line))
        else:
            heading = match[1]
    fences = re.findall("^```", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks), f"{document}: a block does not end"
    return blocks


def commands_of(block: Block) -> list[Command]:
    """The command lines of a ``sh`` block, a ``console`` block (with output) or a crontab."""
    if block.language == "console":
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        return [Command(*part.split("\n", 1)) for part in parts]
    text = block.text.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if block.language == "cron":
        lines = [line.split(None, 5)[5] for line in lines]
    return [Command(line, None) for line in lines]


@dataclass
class Place:
    """The place where commands run. ``stands_for`` maps words of the text to their real values.

    ``in_process`` has functions for commands that a test runs itself, by their first words; a
    function gets the other words. Command lines that need a shell run in one.
    """

    directory: Path
    stands_for: dict[str, str]
    environ: dict[str, str] = field(default_factory=dict)
    in_process: dict[str, Callable[[list[str]], Result]] = field(default_factory=dict)

    def fit(self, text: str) -> str:
        """Insert the real addresses and directories."""
        for words, real in self.stands_for.items():
            text = text.replace(words, real)
        return text

    def run(self, command: Command) -> tuple[int, str]:
        """Run one command line to its end, or interrupt it if the text does.

        Return its status, and its output on stdout and stderr.
        """
        if command.runs_until_interrupted:
            return self._run_and_interrupt(command)
        for words, run in self.in_process.items():
            if command.text.startswith(f"{words} ") and not FOR_A_SHELL.search(command.text):
                status, out, err = run(shlex.split(self.fit(command.text.removeprefix(words))))
                return status, out.decode() + err
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.fit(command.text)],
            cwd=self.directory,
            env=self.environ,
            input=b"",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
        )
        return done.returncode, done.stdout.decode()

    def _run_and_interrupt(self, command: Command) -> tuple[int, str]:
        """Run a command on a terminal, where users interrupt it."""
        where = {"cwd": str(self.directory), "env": self.environ, "timeout": DEADLINE_S}
        line = ["-c", f"exec {self.fit(command.text)}"]
        child = pexpect.spawn("bash", line, encoding="utf-8", dimensions=(40, 120), **where)
        try:
            is_silent = command.text.startswith(SILENT)
            if not is_silent:
                child.expect(r"\S")
            with pytest.raises(pexpect.TIMEOUT):  # a user would watch it for a while
                child.expect(pexpect.EOF, timeout=LET_START_S if is_silent else LET_RUN_S)
            child.sendintr()
            child.expect(pexpect.EOF)
            output = child.before or ""
        finally:
            child.close(force=True)
        assert child.exitstatus is not None, output
        return child.exitstatus, output


def user_environment(home: Path) -> dict[str, str]:
    """The environment of a user with this ``nsq`` on the PATH and no configuration."""
    scripts = str(Path(sys.executable).parent)
    kept = {name: os.environ[name] for name in ("LANG", "JAVA_HOME") if name in os.environ}
    return kept | {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "xterm",
        "PYTHONSAFEPATH": "1",
    }
