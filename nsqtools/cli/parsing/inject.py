"""Options that come in sets: a command asks for a value, a provider builds it from options.

    def consumer_connection(nsqd: NsqdAddresses = None, ...) -> ConnectionSettings: ...

    ConsumerConnection = Annotated[ConnectionSettings, From(consumer_connection)]

    def tail(topic: Topics, *, connection: ConsumerConnection) -> None: ...

`flatten(tail)` has the parameters ``topic, nsqd, ...``, which is what typer parses, and calls
``tail`` with the connection that the provider made. Providers may ask for other providers' values.
One name is one option: two providers that declare the same name share it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Result = TypeVar("Result")


class From:
    """Marks, inside ``Annotated``, a parameter whose value ``provider`` builds from options."""

    def __init__(self, provider: Callable[..., Any]):
        self.provider = provider


def flatten(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return ``function`` taking plain options, as keywords, in place of provided values."""
    hints = get_type_hints(function, include_extras=True)
    own: dict[str, inspect.Parameter] = {}
    provided: dict[str, inspect.Parameter] = {}
    providers: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        provider = _provider(hints[name])
        if provider is None:
            own[name] = parameter.replace(
                annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY
            )
        else:
            flat = flatten(provider)
            parameters = inspect.signature(flat).parameters
            providers[name] = flat, tuple(parameters)
            provided.update(parameters)

    def call(**values: Any) -> Result:
        arguments = {name: values[name] for name in own}
        for name, (provider, options) in providers.items():
            arguments[name] = provider(**{option: values[option] for option in options})
        return function(**arguments)

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__annotations__ = {}
    vars(call)["__signature__"] = inspect.Signature([*own.values(), *provided.values()])
    return call


def _provider(annotation: Any) -> Callable[..., Any] | None:
    if get_origin(annotation) is Annotated:
        for mark in get_args(annotation)[1:]:
            if isinstance(mark, From):
                return mark.provider
    return None
