"""Programs and scripts for earlier versions still run, except for declared removals.

The interface is public names, parameters, commands and options. That of a version is written by

    PYTHONPATH=tests python -m upgrade.test_interface_of_earlier ../nsqtools-0.2/.venv/bin/nsq

to ``left_by_0_2/interface.json``. `SIGNATURES` runs in its Python.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from plugins.cli import RunNsq
from upgrade.scenes import SCENES, kept_of

from nsqtools.cli import registry
from nsqtools.cli.parsing.help import CONNECTION_OPTIONS, SEE_CONNECTION_OPTIONS
from nsqtools.server import go_flags

SIGNATURES = """
import enum, inspect, json
from importlib import import_module

def parameters(thing):
    if isinstance(thing, enum.EnumMeta):
        return []  # only Python calls it, with parameters that differ by version
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
    """Each command with its options, parsed from its help."""
    text = help_of([*path, "--help"])
    listed, commands_of = text.partition("Examples:")[0], {}
    if re.search(r"^Usage: .* COMMAND", text, re.MULTILINE):
        deprecated = () if path else registry.DEPRECATED
        for name in (*_COMMAND.findall(listed), *deprecated):
            commands_of |= commands(help_of, (*path, name))
        return commands_of
    entries = (line.strip() for line in listed.splitlines() if re.match(r"  -", line))
    options = {option for entry in entries for option in _OPTION.findall(entry.partition("  ")[0])}
    if SEE_CONNECTION_OPTIONS in text:  # These are accepted, and described in one page.
        names = [name.replace("_", "-") for name in CONNECTION_OPTIONS]
        options |= {f"--{prefix}{name}" for name in names for prefix in ("", "no-")}
    return {" ".join(path): sorted(options)}


def public_names(python: str) -> dict[str, Any]:
    result = subprocess.run([python, "-c", SIGNATURES], capture_output=True, check=True, cwd="/")
    names: dict[str, Any] = json.loads(result.stdout)
    return names


NSQD_OF_DOCTOR = (
    "address-map allow-announced auth-requires-tls auth-secret-file lookupd-authorization "
    "no-auth-requires-tls no-lookupd-authorization no-profile profile timeout tls-ca-file tls-cert "
    "tls-insecure tls-key tls-min-version tls-pin-sha256"
)

PARTS_OF_PUBLICATION = "bodies defer_s on_settled size submitted_at timeout_s topic"
INTERNALS_OF_PUBLICATION = "encode is_alone is_written on_settled settle timeout_s"

GONE = {
    # Python
    "Consumer takes no backlog": "batches() of one consumer of several topics",
    "Consumer takes no looked_up": "lookupd_http_addresses",
    "aio.Consumer.topic is gone": "topics",
    "aio.Message takes no message": "nsqtools.Message is that of asyncio too",
    "ClientOptions takes no connect_threads": "eight threads serve any number of nsqd",
    "ClientOptions.connect_threads is gone": "eight threads serve any number of nsqd",
    "ClientOptions takes no rdy_resend": "RDY is always sent again when a quarter is left",
    "ClientOptions.rdy_resend is gone": "RDY is always sent again when a quarter is left",
    "ClientOptions.reported_client_id is gone": "client_id, else the short name of the machine",
    "ClientOptions.reported_hostname is gone": "hostname, else the name of the machine",
    "Consumer takes no deliveries": "part of the delivery queue, which is gone",
    "Consumer.give_up is gone": "the option giving_up and the callback on_giving_up",
    "Producer takes no nsqd_tcp_address": "nsqd_tcp_addresses, one or several",
    "Publication takes no command": "only a Producer makes publications",
    "Publication.command is gone": "an encoded command, of use to the Producer alone",
    **{
        f"Publication takes no {name}": "only a Producer makes publications"
        for name in PARTS_OF_PUBLICATION.split()
    },
    **{
        f"Publication.{name} is gone": "of use to the Producer alone"
        for name in INTERNALS_OF_PUBLICATION.split()
    },
    # commands: "nsq NAME is gone" and "nsq NAME takes no --option"
    **{
        f"nsq spark doctor takes no --{option}": "of use to the addresses alone"
        for option in NSQD_OF_DOCTOR.split()
    },
    **{f"nsq nsqd takes no -{flag}": instead for flag, instead in go_flags.REMOVED_FLAGS.items()},
    **{
        removed.replace(" --", " takes no --")
        if " --" in removed
        else f"{removed} is gone": instead
        for removed, instead in registry.REMOVED.items()
        if not removed.startswith("nsq to-exec")  # No earlier version had it.
    },
}
"""Removed parts, each with its replacement. CHANGELOG lists those that programs may have used."""

Interface = dict[str, Any]


def test_removals_are_declared_with_a_replacement(run_nsq: RunNsq) -> None:
    now = {
        "python": public_names(sys.executable),
        "commands": commands(lambda arguments: run_nsq(arguments).out.decode()),
    }
    missed: set[str] = set()
    for version in SCENES:
        then = json.loads((kept_of(version) / "interface.json").read_text("utf-8"))
        assert len(then["python"]) >= 14
        assert len(then["commands"]) > 40
        missed |= {*python_complaints(then, now), *command_complaints(then, now)}
    assert (missed - set(GONE), set(GONE) - missed) == (set(), set())


def python_complaints(then: Interface, now: Interface) -> Iterator[str]:
    for name, members in then["python"].items():
        if name not in now["python"]:
            yield f"{name} is gone"
            continue
        for member, parameters in members.items():
            full_name = f"{name}.{member}".removesuffix(".")
            have = now["python"][name].get(member)
            for complaint in ["is gone"] if have is None else missing(parameters, have):
                yield f"{full_name} {complaint}"


def missing(then: list[list[str]], now: list[list[str]]) -> list[str]:
    """The parameters that earlier callers can no longer pass."""
    gone = [name for name, _ in then if name not in dict(now)]
    positions = [name for name, kind in then if kind != "KEYWORD_ONLY"]
    moved = [name for name, kind in now if kind != "KEYWORD_ONLY"][: len(positions)] != positions
    lost = [f"takes no {name}" for name in gone]
    return [*lost, *([f"took {positions} by position"] if moved and not gone else [])]


def command_complaints(then: Interface, now: Interface) -> Iterator[str]:
    for command, options in then["commands"].items():
        if command not in now["commands"]:
            yield f"nsq {gone_part(command, now['commands'])} is gone"
            continue
        for option in set(options) - set(now["commands"][command]):
            yield f"nsq {command} takes no {option}"


def gone_part(command: str, now: Collection[str]) -> str:
    """The command, or its group if that was removed as a whole."""
    group = command.partition(" ")[0]
    return command if any(name.split()[0] == group for name in now) else group


def main(nsq: str) -> None:
    def help_of(arguments: list[str]) -> str:
        return subprocess.run([nsq, *arguments], capture_output=True, text=True, check=True).stdout

    python = str(Path(nsq).with_name("python"))
    interface = {"python": public_names(python), "commands": commands(help_of)}
    output = subprocess.run([nsq, "--version"], capture_output=True, text=True, check=True).stdout
    version = output.split()[1].rpartition(".")[0]  # 0.2 of "nsq 0.2.0"
    kept = kept_of(version) / "interface.json"
    kept.write_text(json.dumps(interface, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
