"""Find the argument of a command that is program text, where a body would be executed.

``sh -c 'echo {}'`` with a body of ``$(reboot)`` reboots: the text in place of ``{}`` is not quoted,
and no quoting is right for every language. The safe form passes the body to the script as an
argument: ``sh -c 'echo "$1"' sh {}``. The same holds behind env, sudo and similar programs, for
options that take a program (``perl -e``), and where a body itself could be such an option or the
program to run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PLACE = "{}"


class _Interpreter(NamedTuple):
    """How an interpreter takes a program.

    ``code`` are the letters of options that take program text, ``values`` the letters of options
    with another value. Options end after a letter of ``last``. Without such an option the program
    may be the ``first`` word; of a ``shell`` it is the first word after all options. Options that
    are ``mixed`` may follow other words.
    """

    code: str
    values: str = ""
    last: str = ""
    first: bool = False
    shell: bool = False
    mixed: bool = False


def _named(names: str, interpreter: _Interpreter) -> dict[str, _Interpreter]:
    return dict.fromkeys(names.split(), interpreter)


_INTERPRETERS = {
    **_named("sh bash rbash dash ash zsh ksh mksh yash csh tcsh", _Interpreter("c", shell=True)),
    **_named("python pypy", _Interpreter("c", "WXm", "cm")),
    **_named("perl", _Interpreter("eEMm", "I")),
    **_named("ruby", _Interpreter("e", "IrCEF")),
    **_named("node nodejs bun", _Interpreter("ep", "rC")),
    **_named("php", _Interpreter("rBRE", "cdfz")),
    **_named("lua luajit julia", _Interpreter("eE", "lLpJ")),
    **_named("awk gawk mawk nawk", _Interpreter("ef", "Fvl", first=True)),
    **_named("sed gsed", _Interpreter("ef", "l", first=True)),
    **_named("deno pwsh powershell", _Interpreter("cC", first=True)),
    **_named("fish guile su runuser script", _Interpreter("cC", "gGsoO", mixed=True)),
    **_named(
        "Rscript R elixir groovy osascript mysql mariadb mongo mongosh",
        _Interpreter("e", "huPD", mixed=True),
    ),
    **_named("psql duckdb", _Interpreter("c", "dfvhpULoPFRT", mixed=True)),
    **_named("clickhouse-client", _Interpreter("q", "huCdt", mixed=True)),
    **_named("tclsh expect gdb vim vi ex", _Interpreter("cx", "f", first=True)),
    **_named("sqlite", _Interpreter("", first=True, mixed=True)),
}
_LONG_CODE = re.compile(r"--?(eval|print|command|execute|expression|source|run|query)", re.I)
_LONG_VALUE = re.compile(r"--(rcfile|init-file|require|import|loader|file|user|group|host|shell)")

# Programs that run another one, after their own options.
_WRAPPER_NAMES = """
    env sudo doas nice ionice timeout nohup setsid stdbuf time chrt taskset chroot unshare
    nsenter setpriv gosu su-exec tini dumb-init flock xargs find busybox strace systemd-run
    docker podman kubectl command exec unbuffer uv poetry pipx npx entr runcon firejail
    faketime systemd-cat sshpass prlimit torsocks proxychains
"""
_WRAPPERS = frozenset(_WRAPPER_NAMES.split())
_SCRIPT_OF = {"env": ("-S", "-vS", "--split-string"), "flock": ("-c", "--command")}
# A shell reads their words again.
_JOINING = ("ssh", "rsh", "parallel", "watch", "eval", "tmux", "screen")


def find_program_text(words: Sequence[str]) -> str | None:
    """Return the word of a command in which ``{}`` would be executed, or None."""
    while words:
        name, target = _name_of(words[0]), _name_of(os.path.realpath(shutil.which(words[0]) or ""))
        if target in _INTERPRETERS and name not in _INTERPRETERS:
            name = target  # a link to a shell, whatever it is called
        words = words[1:]
        if name in _JOINING:
            return next((word for word in words if PLACE in word), None)
        if name in _INTERPRETERS and (word := _find_in_options(_INTERPRETERS[name], words)):
            return word
        if name not in _WRAPPERS:
            return None
        may_have_begun = False
        for at, word in enumerate(words):
            if word.startswith(PLACE) and not may_have_begun:  # as an option or a program
                return word
            if word.startswith(_SCRIPT_OF.get(name, ())):
                return next((text for text in words[at : at + 2] if PLACE in text), None)
            if _name_of(word) not in (*_INTERPRETERS, *_JOINING):
                if not shutil.which(word):
                    continue
                if at and words[at - 1].startswith("-"):  # a program, or the user of sudo -u git
                    may_have_begun = True
                    continue
            words = words[at:]
            break
        else:
            return None
    return None


def _name_of(word: str) -> str:
    """Return the name without folder and version: python of /usr/bin/python3.13."""
    return re.sub(r"[-.\d]+t?$", "", os.path.basename(word)) or word


def _find_in_options(interpreter: _Interpreter, words: Iterable[str]) -> str | None:
    remaining, has_code = deque(words), False
    while remaining:
        word = remaining.popleft()
        if word.startswith(PLACE):
            return word  # it may be an option: perl takes -esystem(...)
        if word == "--" or len(word) < 2 or word[0] not in "-+":
            word = remaining.popleft() if word == "--" and remaining else word
            is_program = has_code if interpreter.shell else interpreter.first and not has_code
            if is_program and PLACE in word:
                return word
            if interpreter.mixed:
                continue
            return None
        if PLACE in word:
            return word
        if interpreter.shell and not word.startswith("--"):
            has_code |= "c" in word
            remaining = deque(list(remaining)[int(word[-1] in "oO") :])
            continue
        letter, value = _read_option(interpreter, word)
        if letter and not value:
            value = remaining.popleft() if remaining else ""
        if letter in interpreter.code:
            has_code |= bool(letter)
            if PLACE in value:
                return value
        if letter and letter in interpreter.last:
            return None
    return None


def _read_option(interpreter: _Interpreter, word: str) -> tuple[str, str]:
    """Return the letter of an option that takes a value, "" if it takes none, and the value if it
    is in the same word."""
    if _LONG_CODE.fullmatch(word):
        return interpreter.code[:1], ""
    if word.startswith("--"):
        return ("?" if _LONG_VALUE.fullmatch(word) else ""), ""
    for at, letter in enumerate(word[1:], 2):
        if letter in interpreter.code:
            return letter, word[at:].strip(interpreter.code)  # node -pe
        if letter in interpreter.values:
            return letter, word[at:]
    return "", ""
