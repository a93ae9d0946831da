"""Convert option values with plain functions, so that parsing a command line needs no pydantic.

typer 0.29 converts every value through pydantic adapters, even the ``--help`` flag: 80 ms on each
call. A parameter builds its adapter when ``_runtime_param`` is empty, so this mix-in puts a
converter of our own there before typer reads the command line. The name is private to typer: where
it is missing (other versions) nothing happens and typer converts as it always did, only slower,
which `test_startup` notices.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from typer import BadParameter

Converter = Callable[[Any], Any]


class NativeCoercion:
    """Mix-in for commands and groups: prepare the parameters before typer reads them."""

    params: list[Any]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            _prepare(option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for parameter in self.params:
            _prepare(parameter)
        return super().parse_args(ctx, args)  # type: ignore[misc]


def converter(annotation: Any, *, least: float | None, most: float | None) -> Converter | None:
    """The function that turns text into ``annotation``; None when typer has to do it."""
    if get_origin(annotation) is list:
        each = converter(get_args(annotation)[0], least=least, most=most)
        return each and (lambda values: [each(value) for value in values])
    if annotation is str:
        return str
    if annotation is bool:
        return _boolean
    if annotation in (int, float):
        return _number(annotation, least, most)
    if annotation is Path:
        return Path
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _member(annotation)
    return None


def _prepare(parameter: Any) -> None:
    if getattr(parameter, "_runtime_param", parameter) is not None:
        return
    descriptor = parameter.type_descriptor
    info = descriptor.parameter_info
    convert = info.parser or converter(descriptor.annotation, least=info.min, most=info.max)
    if convert is not None:
        parameter._runtime_param = NativeParam(convert)


class NativeParam:
    """What typer asks to convert a value, in place of its pydantic adapter."""

    def __init__(self, convert: Converter):
        self._convert = convert

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        try:
            return self._convert(value)
        except ValueError as error:
            raise BadParameter(str(error), ctx=ctx, param=param) from error


def _boolean(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError(f"{value!r} is not a boolean (true or false)")


def _number(kind: type[int] | type[float], least: float | None, most: float | None) -> Converter:
    def convert(value: Any) -> int | float:
        try:
            number = kind(value)
        except ValueError:
            noun = "an integer" if kind is int else "a number"
            raise ValueError(f"{value!r} is not {noun}") from None
        if least is not None and number < least:
            raise ValueError(f"{number} is less than {least}")
        if most is not None and number > most:
            raise ValueError(f"{number} is more than {most}")
        return number

    return convert


def _member(enum: type[Enum]) -> Converter:
    def convert(value: Any) -> Enum:
        try:
            return enum(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in enum)
            raise ValueError(f"{value!r} is none of {known}") from None

    return convert
