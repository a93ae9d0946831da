"""Values of options: converted by plain functions, with errors that name the option."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
from plugins.cli import GivenCommand
from typer import Argument, Option

from nsqtools.cli.parsing import app
from nsqtools.cli.parsing.binding import BadParameter, NoSuchOption, UsageError, annotation_of
from nsqtools.errors import ConfigurationError
from nsqtools.records.units import parse_span


class Mode(Enum):
    all = "all"
    round_robin = "round-robin"


def halve(text: str) -> float:
    return float(text) / 2


GOT: list[dict[str, Any]] = []


def given(
    files: Annotated[list[Path] | None, Argument()] = None,
    count: Annotated[int, Option(min=1, max=9)] = 5,
    rate: float = 0.5,
    mode: Mode = Mode.all,
    flag: bool = False,
    maybe: bool | None = None,
    numbers: Annotated[list[int] | None, Option("--number")] = None,
    half: Annotated[float | None, Option(parser=halve)] = None,
    verbose: Annotated[int, Option("-v", count=True)] = 0,
) -> None:
    GOT.append(dict(locals()))


def parse(given_command: GivenCommand, line: str) -> dict[str, Any]:
    given_command(given)
    app.run(["given", *line.split()])
    return GOT.pop()


def test_text_becomes_the_declared_type(given_command: GivenCommand) -> None:
    line = "a b --count 9 --rate 2 --mode round-robin --flag --no-maybe --number 1 --number 2"

    assert parse(given_command, f"{line} --half 5 -vv") == {
        "files": [Path("a"), Path("b")],
        "count": 9,
        "rate": 2.0,
        "mode": Mode.round_robin,
        "flag": True,
        "maybe": False,
        "numbers": [1, 2],
        "half": 2.5,
        "verbose": 2,
    }


def test_a_switch_can_be_set_by_the_environment(
    given_command: GivenCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[bool] = []

    def switch(on: Annotated[bool, Option(envvar="NSQ_TEST_ON")] = False) -> None:
        got.append(on)

    given_command(switch)
    for text in ("1", "YES", "off", "false"):
        monkeypatch.setenv("NSQ_TEST_ON", text)
        app.run(["given"])
    monkeypatch.setenv("NSQ_TEST_ON", "perhaps")
    with pytest.raises(ConfigurationError, match="'perhaps' is not a boolean"):
        app.run(["given"])

    assert got == [True, True, False, False]


def test_what_is_relied_on_of_typers_private_interface_is_there() -> None:
    command = app.command_tree().load("tail")
    parameters = {parameter.name: parameter for parameter in command.params}

    # a parameter builds its pydantic adapter where this is None
    assert all(parameter._runtime_param is None for parameter in parameters.values())
    # what an option was declared with
    assert annotation_of(parameters["count"]) is int
    assert annotation_of(parameters["topic"]) == list[str]
    assert parameters["count"].type_descriptor.parameter_info.min == 1
    assert parameters["exit_idle"].type_descriptor.parameter_info.parser is parse_span
    # the errors of a command line
    assert issubclass(NoSuchOption, UsageError)
    assert issubclass(BadParameter, UsageError)
