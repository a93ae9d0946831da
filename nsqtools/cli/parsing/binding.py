"""Bind plain functions to typer: options in sets, conversion without pydantic, private names.

Options that come in sets: a command asks for a value, and a provider builds it from options.

    def consumer_connection(nsqd: NsqdAddresses = None, ...) -> ConnectionSettings: ...

    ConsumerConnection = Annotated[ConnectionSettings, From(consumer_connection)]

    def tail(topic: Topics, *, connection: ConsumerConnection) -> None: ...

`flatten(tail)` has the parameters ``topic, nsqd, ...``, which is what typer parses, and calls
``tail`` with the connection that the provider made. Providers may ask for other providers' values.
An `OptionSet` is its own provider: a command asks for ``limits: StopLimits``.
One name is one option: of several that declare it, the first says what it is.

Conversion: typer 0.29 converts every value through pydantic adapters, even the ``--help`` flag: 80
ms on each call. A parameter builds its adapter when ``_runtime_param`` is empty, so
`NativeCoercion` puts a converter of our own there before typer reads the command line. Where that
name is missing (other versions) nothing happens and typer converts as it always did, only slower.

This is the only module that uses private names of typer (``_click``, ``_runtime_param``,
``type_descriptor``); pyproject.toml bounds the version, and the tests of conversion and start-up
fail where one is gone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import copy
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer import BadParameter as BadParameter  # for others, too
from typer import Option
from typer._click.exceptions import BadOptionUsage as BadOptionUsage
from typer._click.exceptions import MissingParameter as MissingParameter
from typer._click.exceptions import NoSuchOption as NoSuchOption
from typer._click.exceptions import UsageError as UsageError
from typer.models import OptionInfo

from nsqtools.records.units import parse_size, parse_span

Result = TypeVar("Result")
Called = TypeVar("Called", bound=Callable[..., Any])
Converter = Callable[[Any], Any]

PARSERS: dict[str, Converter] = {"DURATION": parse_span, "SIZE": parse_size}
"""What reads a value, by the word for it."""


def opt(form: str, help: str, panel: str | None = None, default: Any = None, **more: Any) -> Any:
    """The option ``--count -n N``: its names, then the word for its value; a switch has none.

    In ``Annotated``, or as the default of a parameter: there the long name may be left out, if it
    is the parameter's (as is the rest of an ``envvar`` that ends with _), and ``default`` is the
    value of an option that is not given.
    """
    names = [word for word in form.split() if word.startswith("-")]
    metavar = form.removeprefix(" ".join(names)).strip() or None
    more = {"parser": PARSERS.get(metavar or ""), **more}
    option: Any = Option(..., *names, metavar=metavar, help=help, rich_help_panel=panel, **more)
    option.usual = default
    return option


def heading(panel: str) -> Callable[[Called], Called]:
    """Return the decorator that puts the options of a function that name no heading under one."""

    def under(function: Called) -> Called:
        vars(function)["panel"] = panel
        return function

    return under


class OptionSet:
    """A set of options: an attribute for each, declared as parameters of a command are.

    ``panel`` is the heading of those that name none, as `heading` has it for a function.
    """

    panel = ""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)
        self.check()

    def check(self) -> None:
        """Raise `ConfigurationError` for options that contradict each other."""


class From:
    """Marks, inside ``Annotated``, a parameter whose value ``provider`` builds from options."""

    def __init__(self, provider: Callable[..., Any]):
        self.provider = provider


def some(
    options: type, *names: str, prefix: str = "", panel: str | None = None
) -> Callable[..., dict[str, Any]]:
    """Return the provider of some options of a set (of all without ``names``), as a mapping.

    With a ``prefix`` they are options of their own: under other names, without a short form or an
    environment variable.
    """

    def values(**given: Any) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in given.items()}

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
    """Return ``function`` taking plain options, as keywords, in place of provided values."""
    hints = _parameter_hints(function)
    own: list[str] = []
    flat: dict[str, inspect.Parameter] = {}
    providers: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    for name, parameter in _parameters(function, hints).items():
        provider = _provider(hints[name])
        if provider is None:
            own.append(name)
            flat[name] = _declared(parameter, hints[name], getattr(function, "panel", ""))
        else:
            provide = flatten(provider)
            parameters = inspect.signature(provide).parameters
            providers[name] = provide, tuple(parameters)
            flat.update({each: parameters[each] for each in parameters if each not in flat})

    def call(**values: Any) -> Result:
        arguments = {name: values[name] for name in own}
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
    """The parameter as typer reads it; an `opt` that is its default moves into ``Annotated``."""
    default = parameter.default
    if isinstance(default, OptionInfo):
        usual = vars(default)["usual"]
        default.rich_help_panel = default.rich_help_panel or panel or None
        if not any(name.startswith("--") for name in default.param_decls or ()):
            name = "--" + parameter.name.rstrip("_").replace("_", "-")
            default.param_decls = (name, *(default.param_decls or ()))
        if isinstance(default.envvar, str) and default.envvar.endswith("_"):
            default.envvar += parameter.name.upper()
        is_switch = usual is None and hint is bool
        hint, default = Annotated[hint, default], False if is_switch else usual
    kind = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=hint, default=default, kind=kind)


def _parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters. What is inside of ``Annotated`` may stay a name that
    only a type checker knows: it is not looked up, so that --help imports nothing for it."""
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
            if isinstance(mark, From):
                return mark.provider
    return None


# -- conversion ---------------------------------------------------------------------------------


class NativeCoercion:
    """Mix-in for commands and groups: prepare the parameters before typer reads them."""

    params: list[Any]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.help = "Show the usual options (-h) or all of them (--help), and exit."
            prepare(option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for parameter in self.params:
            prepare(parameter)
        _refuse_single_dashes(self.params, args, ctx)
        return super().parse_args(ctx, args)  # type: ignore[misc]


def _coerce(convert: Converter, value: Any, param: Any, ctx: Any) -> Any:
    """What typer calls to convert a value, in place of its pydantic adapter."""
    if value is None:
        return () if param.multiple or param.nargs == -1 else None
    try:
        return convert(value)
    except ValueError as error:
        raise BadParameter(str(error), ctx=ctx, param=param) from error


def _refuse_single_dashes(params: list[Any], args: list[str], ctx: Any) -> None:
    """Raise `NoSuchOption` for a long option with one dash, as Go's utilities take it.

    ``-topic clicks`` would otherwise be ``-t opic`` and an argument ``clicks``.
    """
    options = {
        name: parameter
        for parameter in params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    takes_value = False
    for arg in args:
        if takes_value:
            takes_value = False
        elif arg == "--":
            return
        elif arg.startswith("-"):
            name, equals, _ = arg.partition("=")
            if f"-{name}" in options and len(name) > 2:
                raise NoSuchOption(name, possibilities=[f"-{name}"], ctx=ctx)
            option = options.get(name)
            takes_value = option is not None and not (option.is_flag or option.count or equals)


def annotation_of(parameter: Any) -> Any:
    """The type that ``parameter`` was declared with; None where typer does not tell."""
    return getattr(getattr(parameter, "type_descriptor", None), "annotation", None)


def converter(annotation: Any, *, least: float | None, most: float | None) -> Converter | None:
    """The function that turns text into ``annotation``; None when typer has to do it."""
    if get_origin(annotation) is list:
        each = converter(get_args(annotation)[0], least=least, most=most)
        return each and (lambda values: [each(value) for value in values])
    if annotation in (int, float):
        return _number(annotation, least, most)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _member(annotation)
    return _PLAIN.get(annotation)


def prepare(parameter: Any) -> None:
    """Give a parameter its converter, unless typer has made one."""
    if getattr(parameter, "_runtime_param", parameter) is not None:
        return
    descriptor = parameter.type_descriptor
    info = descriptor.parameter_info
    convert = info.parser or converter(descriptor.annotation, least=info.min, most=info.max)
    if convert is not None:
        parameter._runtime_param = SimpleNamespace(coerce=partial(_coerce, convert))


def _boolean(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError(f"{value!r} is not a boolean (true or false)")


_PLAIN: dict[Any, Converter] = {str: str, bool: _boolean, Path: Path}


def _number(kind: type[int] | type[float], least: float | None, most: float | None) -> Converter:
    def convert(value: Any) -> int | float:
        try:
            number = kind(value)
            if kind is float and not math.isfinite(number):
                raise ValueError
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
            raise ValueError(f"{value!r} is not one of {known}") from None

    return convert
