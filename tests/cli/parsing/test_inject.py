"""Values made from sets of options: flattening a command's signature and calling it back."""

from __future__ import annotations

import inspect
from typing import Annotated, NamedTuple

import pytest

from nsqtools.cli.parsing.binding import From, flatten


class Size(NamedTuple):
    width: int = 1
    height: int = 2


def area(unit: str, *, size: Annotated[Size, From(Size)]) -> str:
    return f"{size.width * size.height} {unit}"


Area = Annotated[str, From(area)]


def command(topic: str, *, area: Area, quiet: bool = False) -> tuple[str, str, bool]:
    """Do it."""
    return topic, area, quiet


def test_provided_values_become_the_options_of_their_providers() -> None:
    parameters = inspect.signature(flatten(command)).parameters

    assert list(parameters) == ["topic", "unit", "width", "height", "quiet"]
    assert parameters["height"].default == 2
    assert parameters["topic"].annotation is str


def test_the_call_gives_each_provider_its_own_options() -> None:
    call = flatten(command)

    result = call(topic="t", quiet=True, unit="m2", width=3, height=4)

    assert result == ("t", "12 m2", True)


def test_name_and_help_stay() -> None:
    call = flatten(command)

    assert (call.__name__, call.__doc__) == ("command", "Do it.")


def test_a_name_that_two_providers_share_is_one_option() -> None:
    def both(*, first: Annotated[Size, From(Size)], second: Annotated[Size, From(Size)]) -> bool:
        return first == second

    call = flatten(both)

    assert list(inspect.signature(call).parameters) == ["width", "height"]
    assert call(width=5, height=6)


def refuse(value: int) -> int:
    raise ValueError(value)


Refused = Annotated[int, From(refuse)]


def test_an_error_of_a_provider_comes_through() -> None:
    def use(*, value: Refused) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="7"):
        flatten(use)(value=7)
