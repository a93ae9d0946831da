"""Values of options: converted by plain functions, with errors that name the option."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
from plugins.cli import GivenCommand
from typer import Argument, Option

from nsqtools.cli.parsing import app
from nsqtools.errors import ConfigurationError


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


def test_text_becomes_the_declared_type(given_command: GivenCommand) -> None:
    line = "a b --count 9 --rate 2 --mode round-robin --flag --no-maybe --number 1 --number 2"

    given_command(given)
    app.run(["given", *line.split(), "--half", "5", "-vv"])

    wanted = {"files": [Path("a"), Path("b")], "count": 9, "rate": 2.0, "mode": Mode.round_robin}
    wanted |= {"flag": True, "maybe": False, "numbers": [1, 2], "half": 2.5, "verbose": 2}
    assert GOT.pop() == wanted


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
