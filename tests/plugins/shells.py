"""Completion in real shells, each on a terminal of its own.

    shell = shells("bash")                # or zsh, fish; skips where the shell is not there
    shell.candidates("nsq topic cr")      # {"create"}

The shells start without anybody's settings, load what the checkout has in completions/, and find
``nsq`` on their PATH. Candidates are what the shell itself offers for the last word, or where an
option has its value after = for that value. That ``nsq`` asks daemons for as long as a test waits,
not for one second, which is over on a busy machine before anything is imported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pexpect
import pytest
from plugins.cli import NSQ, end_terminal
from plugins.waiting import patience_s

COMPLETIONS = Path(__file__).parents[2] / "completions"
DEADLINE_S = patience_s(20.0)
PATIENT_NSQ = f"""
from nsqtools.cli.commands import complete
complete.LIMIT_S = complete.TIMEOUT_S = {DEADLINE_S}
from nsqtools.cli.main import main
raise SystemExit(main())
"""
END = "<end>"

Shells = Callable[..., "Shell"]


class Shell:
    """A shell on a terminal. ``took_s`` is how long the last completion took, key to answer."""

    command = ""
    setup = ""
    """Lines to type first. They bind Escape * to showing the candidates between <<< and <end>."""

    def __init__(self, env: Mapping[str, str], directory: Path):
        self.took_s = 0.0
        self._nsq = Path(env["PATH"].partition(":")[0]) / "nsq"
        program, *arguments = self.command.split()
        self._child: pexpect.spawn[str] = pexpect.spawn(
            program,
            arguments,
            env=dict(env),
            cwd=str(directory),
            encoding="utf-8",
            timeout=DEADLINE_S,
            dimensions=(50, 400),
            echo=False,
        )
        self._child.delaybeforesend = None
        for line in self.setup.strip().splitlines():
            self._child.sendline(line)
        self._child.sendline("echo re''ady")
        self._child.expect("ready")

    def candidates(self, line: str) -> set[str]:
        """What the shell offers for the last word of ``line``."""
        began_s = time.monotonic()
        self._child.send(f"{line}\x1b*")
        self._child.expect(f"<<<(.*?){END}")
        self.took_s = time.monotonic() - began_s
        found: str = self._child.match.group(1)
        self._child.send("\x15")
        return self.read(found, line)

    def read(self, found: str, line: str) -> set[str]:
        """The candidates, from what was shown."""
        return set(found.split())

    def lose_patience(self) -> None:
        """From now on ``nsq`` has one second to answer, as for users."""
        write_script(self._nsq, NSQ)

    def press_tab(self, line: str, completed: str) -> None:
        """Type ``line`` and press the tab key; the shell must make ``completed`` of it."""
        self._child.send(line)
        self._child.send("\t")
        self._child.sendline("")
        self._child.expect_exact(completed)

    def close(self) -> None:
        end_terminal(self._child)


class Bash(Shell):
    """readline's insert-completions puts the candidates into the command line."""

    command = "bash --norc --noprofile -i"
    setup = rf"""
source {COMPLETIONS}/nsq.bash
bind '"\ez": insert-completions'
bind -x '"\ey": printf "<<<%s{END}" "$READLINE_LINE"'
bind '"\e*": "\ez\ey"'
"""

    def read(self, found: str, line: str) -> set[str]:
        before, _, last = line.rpartition(" ")
        words = set(found.removeprefix(before).split())
        if words == {last}:
            return set()  # nothing came
        return {_value(word, last) for word in words}


class Zsh(Shell):
    """What the completion system is given to choose from, with ``compadd`` listened to."""

    command = "zsh -f -i"
    setup = rf"""
fpath=({COMPLETIONS} $fpath)
autoload -Uz compinit && compinit -u -D
compadd() {{
  if [[ ${{@[1,(i)(-|--)]}} != *-[OAD]\ * ]]; then
    typeset -a hits
    builtin compadd -A hits "$@"
    found+=($IPREFIX$^hits)
  fi
  builtin compadd "$@"
}}
show() {{ found=(); zle list-choices; print -n "<<<$found{END}" }}
zle -N show
bindkey '\e*' show
"""

    def read(self, found: str, line: str) -> set[str]:
        return {_value(word, line.rpartition(" ")[2]) for word in found.split()}


class Fish(Shell):
    """fish tells its candidates by itself."""

    command = "fish --no-config --private -i"
    setup = rf"""
source {COMPLETIONS}/nsq.fish
function show
set -l found (complete -C (commandline -c) | string split -f 1 \t)
printf '<<<%s{END}' "$found"
end
bind \e\* show
"""

    def read(self, found: str, line: str) -> set[str]:
        last = line.rpartition(" ")[2]
        # where nothing begins with what was typed, fish offers what is somewhat like it
        return {_value(word, last) for word in found.split() if word.startswith(last)}


def write_script(path: Path, command: Sequence[str]) -> None:
    """A program that runs ``command`` with its own arguments after it."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def _value(word: str, last: str) -> str:
    """The value behind = where one was typed; some shells show the option in front of it."""
    return word.removeprefix(last[: last.rfind("=") + 1])


SHELLS = {"bash": Bash, "zsh": Zsh, "fish": Fish}


@pytest.fixture
def shells(nsq_env: Mapping[str, str], tmp_path: Path) -> Iterator[Shells]:
    """Start a shell by its name, in an empty directory; skips where it is not installed."""
    started: list[Shell] = []
    programs, directory = tmp_path / "bin", tmp_path / "here"
    programs.mkdir()
    directory.mkdir()
    write_script(programs / "nsq", [NSQ[0], "-c", PATIENT_NSQ])
    path = f"{programs}:{os.environ.get('PATH', os.defpath)}"

    def start(name: str, env: Mapping[str, str] | None = None) -> Shell:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        shell = SHELLS[name]({**nsq_env, "PATH": path, **(env or {})}, directory)
        started.append(shell)
        return shell

    yield start
    for shell in started:
        shell.close()
