"""What a version promises to programs and scripts: public names, parameters, commands, options.

    PYTHONPATH=tests python -m upgrade.interface ../nsqtools-0.2/.venv/bin/nsq

writes what that version has to ``left_by_0_2/interface.json``. `SIGNATURES` runs in its Python.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upgrade.scenes import kept_of, version_of

SIGNATURES = """
import inspect, json
from importlib import import_module

def parameters(thing):
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    return [(p.name, p.kind.name) for p in signature.parameters.values()]

public = {}
for place in ("nsqtools", "nsqtools.aio", "nsqtools.testing"):
    try:
        module = import_module(place)
    except ModuleNotFoundError:
        continue
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing):
            members = []
            if inspect.isclass(thing):
                for each in thing.__mro__:  # attributes that instances alone have
                    members += [(name, None) for name in vars(each).get("__annotations__", ())]
                members += inspect.getmembers(thing)
            public[(place + "." + name).removeprefix("nsqtools.")] = {
                "": parameters(thing),
                **{m: parameters(v) if callable(v) else [] for m, v in members if m[0] != "_"},
            }
print(json.dumps(public))
"""

_COMMAND = re.compile(r"^  ([a-z][a-z-]+)  +\S", re.MULTILINE)
_OPTION = re.compile(r"(?:^|\s|, )(--?[a-z][a-z0-9-]*)")


def commands(
    help_of: Callable[[list[str]], str], path: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Each command with its options, read from the help that a user sees."""
    text = help_of([*path, "--help"])
    listed, found = text.partition("Examples:")[0], {}
    if re.search(r"^Usage: .* COMMAND", text, re.MULTILINE):
        for name in _COMMAND.findall(listed):
            found |= commands(help_of, (*path, name))
        return found
    options = {
        option
        for line in listed.splitlines()
        if re.match(r"  -", line)
        for option in _OPTION.findall(line.strip().partition("  ")[0])
    }
    return {" ".join(path): sorted(options)}


def public_names(python: str) -> dict[str, Any]:
    done = subprocess.run([python, "-c", SIGNATURES], capture_output=True, check=True, cwd="/")
    names: dict[str, Any] = json.loads(done.stdout)
    return names


def main(nsq: str) -> None:
    def help_of(arguments: list[str]) -> str:
        return subprocess.run([nsq, *arguments], capture_output=True, text=True, check=True).stdout

    python = str(Path(nsq).with_name("python"))
    interface = {"python": public_names(python), "commands": commands(help_of)}
    kept = kept_of(version_of(nsq)) / "interface.json"
    kept.write_text(json.dumps(interface, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
