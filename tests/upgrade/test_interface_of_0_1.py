"""Programs and scripts for version 0.1 run on: no name, parameter, command or option is gone."""

from __future__ import annotations

import json
import sys

from plugins.cli import RunNsq
from upgrade.interface import KEPT, commands, public_names

INTERFACE = json.loads(KEPT.read_text("utf-8"))

GONE = {
    "Consumer takes no deliveries": "part of the delivery queue, which is gone",
    "Consumer.give_up is gone": "the option giving_up and the callback on_giving_up",
    "Producer takes no nsqd_tcp_address": "nsqd_tcp_addresses, one or several",
    "Publication takes no command": "only a Producer makes publications",
    "Publication.command is gone": "an encoded command, of use to the Producer alone",
}
"""What version 0.2.0 removed, and what to use. CHANGELOG lists what programs may have used."""


def test_every_public_name_takes_what_it_took() -> None:
    now = public_names(sys.executable)
    changed = []
    for name, members in INTERFACE["python"].items():
        for member, parameters in members.items():
            what = f"{name}.{member}".removesuffix(".")
            have = now.get(name, {}).get(member)
            complaints = ["is gone"] if have is None else missing(parameters, have)
            changed += [f"{what} {complaint}" for complaint in complaints]
    assert sorted(changed) == sorted(GONE)


def missing(then: list[list[str]], now: list[list[str]]) -> list[str]:
    """What callers of then can no longer pass."""
    gone = [name for name, _ in then if name not in dict(now)]
    positions = [name for name, kind in then if kind != "KEYWORD_ONLY"]
    moved = [name for name, kind in now if kind != "KEYWORD_ONLY"][: len(positions)] != positions
    lost = [f"takes no {name}" for name in gone]
    return [*lost, *([f"took {positions} by position"] if moved and not gone else [])]


def test_every_command_has_the_options_it_had(run_nsq: RunNsq) -> None:
    now = commands(lambda arguments: run_nsq(arguments).out.decode())
    gone = {
        command: sorted(set(options) - set(now.get(command, [])))
        for command, options in INTERFACE["commands"].items()
    }

    assert len(now) >= len(gone) > 40
    assert {command: options for command, options in gone.items() if options} == {}
