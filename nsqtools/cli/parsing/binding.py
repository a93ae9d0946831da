"""Bind plain functions to typer: sets of options, and conversion of values without pydantic.

A command can take a value that a provider builds from several options:

    def consumer_connection(nsqd: NsqdAddresses = None, ...) -> ConnectionSettings: ...

    ConsumerConnection = Annotated[ConnectionSettings, Provided(consumer_connection)]

    def tail(topic: Topics, *, connection: ConsumerConnection) -> None: ...

`flatten(tail)` has the parameters ``topic, nsqd, ...``, which typer parses, and calls ``tail`` with
the connection that the provider built. Providers may take values of other providers. An `OptionSet`
is its own provider: a command takes ``limits: StopLimits``. If several declare an option of one
name, the first declaration is used.

typer 0.29 converts every value through pydantic adapters, even the ``--help`` flag, which costs 80
ms on each call. A parameter builds its adapter when ``_runtime_param`` is empty, so
`NativeCoercion` puts a converter there before typer reads the command line. In a version without
that name nothing happens, and typer converts the values itself, slower and in other words.

This is the only module that uses private names of typer (``_runtime_param``, ``type_descriptor``).
pyproject.toml has no upper bound, because a service that imports the client may need another typer:
commands work without these names, and the tests of conversion and start-up fail if one is gone.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from copy import copy
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer import BadParameter as BadParameter  # re-exported
from typer import Option
from typer.models import OptionInfo

from nsqtools.records.units import parse_size, parse_span

if TYPE_CHECKING:
    from typer._click.exceptions import BadOptionUsage as BadOptionUsage
    from typer._click.exceptions import MissingParameter as MissingParameter
    from typer._click.exceptions import NoSuchOption as NoSuchOption
    from typer._click.exceptions import UsageError as UsageError
else:  # the errors of click, of which typer exports one, wherever a version of typer has them
    _errors = sys.modules[BadParameter.__module__]
    BadOptionUsage, MissingParameter = _errors.BadOptionUsage, _errors.MissingParameter
    NoSuchOption, UsageError = _errors.NoSuchOption, _errors.UsageError

Result = TypeVar("Result")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Converter = Callable[[Any], Any]

PARSERS_BY_METAVAR: dict[str, Converter] = {"DURATION": parse_span, "SIZE": parse_size}


def opt(
    form: str, help: str, panel: str | None = None, default: Any = None, **settings: Any
) -> Any:
    """Declare the option ``--count -n N``: its names, then its metavar. A switch has no metavar.

    Use it in ``Annotated``, or as the default of a parameter. As a default, the long name may be
    omitted if it equals the parameter's name, an ``envvar`` that ends with _ is completed by that
    name, and ``default`` is the value of the absent option. ``settings`` are typer's.
    """
    names = [word for word in form.split() if word.startswith("-")]
    metavar = form.removeprefix(" ".join(names)).strip() or None
    settings = {"parser": PARSERS_BY_METAVAR.get(metavar or ""), **settings}
    option: Any = Option(..., *names, metavar=metavar, help=help, rich_help_panel=panel, **settings)
    option.default_value = default
    return option


def in_panel(panel: str) -> Callable[[Decorated], Decorated]:
    """Return a decorator that sets the help panel of the function's options without a panel."""

    def set_panel(function: Decorated) -> Decorated:
        vars(function)["panel"] = panel
        return function

    return set_panel


class OptionSet:
    """A set of options, declared as attributes in the way of a command's parameters.

    ``panel`` is the help panel of the options without one, as with `in_panel`.
    """

    panel = ""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)
        self.check()

    def check(self) -> None:
        """Raise `ConfigurationError` for options that contradict each other."""


class Provided:
    """Mark a parameter, inside ``Annotated``, whose value ``provider`` builds from options."""

    def __init__(self, provider: Callable[..., Any]):
        self.provider = provider


def subset(
    options: type, *names: str, prefix: str = "", panel: str | None = None
) -> Callable[..., dict[str, Any]]:
    """Return a provider of the named options of a set (all without ``names``), as a mapping.

    With a ``prefix`` they are separate options with prefixed names, without a short form or an
    environment variable.
    """

    def values(**options: Any) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in options.items()}

    parameters = []
    for parameter in inspect.signature(flatten(options)).parameters.values():
        if not names or parameter.name in names:
            parameters.append(_renamed(parameter, prefix, panel) if prefix else parameter)
    values.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(values)["__signature__"] = inspect.Signature(parameters)
    return values


def _renamed(parameter: inspect.Parameter, prefix: str, panel: str | None) -> inspect.Parameter:
    hint, option = get_args(parameter.annotation)
    option = copy(option)
    long = next(name for name in option.param_decls if name.startswith("--"))
    on, slash, _ = long.partition("/")
    name = prefix.replace("_", "-") + on.removeprefix("--")
    option.param_decls = (f"--{name}/--no-{name}" if slash else f"--{name}",)
    option.envvar, option.rich_help_panel = None, panel
    return parameter.replace(name=prefix + parameter.name, annotation=Annotated[hint, option])


def flatten(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that takes plain options as keywords, and provided values for none."""
    hints = _parameter_hints(function)
    plain: list[str] = []
    flat: dict[str, inspect.Parameter] = {}
    providers: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    for name, parameter in _parameters(function, hints).items():
        provider = _provider(hints[name])
        if provider is None:
            plain.append(name)
            flat[name] = _declared(parameter, hints[name], getattr(function, "panel", ""))
        else:
            provide = flatten(provider)
            parameters = inspect.signature(provide).parameters
            providers[name] = provide, tuple(parameters)
            flat = {**flat, **{key: parameters[key] for key in parameters if key not in flat}}

    def call(**values: Any) -> Result:
        arguments = {name: values[name] for name in plain}
        for name, (provide, options) in providers.items():
            arguments[name] = provide(**{option: values[option] for option in options})
        return function(**arguments)

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__annotations__ = {}
    vars(call)["__signature__"] = inspect.Signature(list(flat.values()))
    return call


def _parameters(
    function: Callable[..., Any], hints: dict[str, Any]
) -> Mapping[str, inspect.Parameter]:
    if not (isinstance(function, type) and issubclass(function, OptionSet)):
        return inspect.signature(function).parameters
    kind, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return {
        name: inspect.Parameter(name, kind, default=getattr(function, name, none)) for name in hints
    }


def _declared(parameter: inspect.Parameter, hint: Any, panel: str) -> inspect.Parameter:
    """Return the parameter as typer reads it. An `opt` as its default moves to ``Annotated``."""
    default = parameter.default
    if isinstance(default, OptionInfo):
        default_value = vars(default)["default_value"]
        default.rich_help_panel = default.rich_help_panel or panel or None
        if not any(name.startswith("--") for name in default.param_decls or ()):
            name = "--" + parameter.name.rstrip("_").replace("_", "-")
            default.param_decls = (name, *(default.param_decls or ()))
        if isinstance(default.envvar, str) and default.envvar.endswith("_"):
            default.envvar += parameter.name.upper()
        is_switch = default_value is None and hint is bool
        hint, default = Annotated[hint, default], False if is_switch else default_value
    kind = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=hint, default=default, kind=kind)


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the parameters.

    Names inside ``Annotated`` are not resolved: they may be imported only for type checkers, so
    that --help need not import their modules.
    """
    if isinstance(function, type):
        return get_type_hints(function, include_extras=True)
    return {
        name: eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
        for name, annotation in function.__annotations__.items()
        if name != "return"
    }


def _provider(annotation: Any) -> Callable[..., Any] | None:
    if isinstance(annotation, type) and issubclass(annotation, OptionSet):
        return annotation
    if get_origin(annotation) is Annotated:
        for mark in get_args(annotation)[1:]:
            if isinstance(mark, Provided):
                return mark.provider
    return None


# -- conversion ---------------------------------------------------------------------------------


class NativeCoercion:
    """Mix-in for commands and groups: set the converters before typer reads the parameters."""

    params: list[Any]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.help = "Show the common options (-h) or all of them (--help), and exit."
            set_converter(option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for parameter in self.params:
            set_converter(parameter)
        return super().parse_args(ctx, args)  # type: ignore[misc]


def _convert(convert: Converter, value: Any, param: Any, ctx: Any) -> Any:
    """Convert a value for typer, in place of its pydantic adapter."""
    if value is None:
        return () if param.multiple or param.nargs == -1 else None
    try:
        return convert(value)
    except ValueError as error:
        raise BadParameter(str(error), ctx=ctx, param=param) from error


def annotation_of(parameter: Any) -> Any:
    """Return the declared type of ``parameter``, None if typer does not provide it."""
    return getattr(getattr(parameter, "type_descriptor", None), "annotation", None)


def choices_of(parameter: Any) -> tuple[str, ...]:
    """Return the values of an enum parameter, nothing for another type."""
    kind = annotation_of(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(member.value) for member in kind)
    # typer before 0.29
    return tuple(map(str, getattr(getattr(parameter, "type", None), "choices", ())))


def converter_for(
    annotation: Any, *, minimum: float | None, maximum: float | None
) -> Converter | None:
    """Return the function that converts text to ``annotation``, None if typer has to convert."""
    if get_origin(annotation) is list:
        convert = converter_for(get_args(annotation)[0], minimum=minimum, maximum=maximum)
        return convert and (lambda values: [convert(value) for value in values])
    if annotation in (int, float):
        return _number(annotation, minimum, maximum)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum_member(annotation)
    return _PLAIN.get(annotation)


def set_converter(parameter: Any) -> None:
    """Set the converter of a parameter, unless typer has built its adapter."""
    if getattr(parameter, "_runtime_param", parameter) is not None:
        return
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None:
        return
    info = descriptor.parameter_info
    convert = info.parser or converter_for(
        descriptor.annotation, minimum=info.min, maximum=info.max
    )
    if convert is not None:
        parameter._runtime_param = SimpleNamespace(coerce=partial(_convert, convert))


def _boolean(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError(f"{value!r} is not a boolean (true or false)")


_PLAIN: dict[Any, Converter] = {str: str, bool: _boolean, Path: Path}


def _number(
    kind: type[int] | type[float], minimum: float | None, maximum: float | None
) -> Converter:
    def convert(value: Any) -> int | float:
        try:
            number = kind(value)
            if kind is float and not math.isfinite(number):
                raise ValueError
        except ValueError:
            noun = "an integer" if kind is int else "a number"
            raise ValueError(f"{value!r} is not {noun}") from None
        if minimum is not None and number < minimum:
            raise ValueError(f"{number} is less than {minimum}")
        if maximum is not None and number > maximum:
            raise ValueError(f"{number} is more than {maximum}")
        return number

    return convert


def _enum_member(enum: type[Enum]) -> Converter:
    def convert(value: Any) -> Enum:
        try:
            return enum(value)
        except ValueError:
            choices = ", ".join(str(member.value) for member in enum)
            raise ValueError(f"{value!r} is not one of {choices}") from None

    return convert
