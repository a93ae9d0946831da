"""Types of the arguments of the library: an error names the parameter. Pure.

A program without a type checker would otherwise get an AttributeError from the depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nsqtools.errors import ConfigurationError

NONE = type(None)
NUMBER = (int, float)
_DESCRIPTIONS: dict[Any, str] = {
    str: "str",
    NONE: "None",
    int: "int",
    float: "float",
    Callable: "a function",
    Mapping: "a dict",
}


def check_argument(name: str, value: object, *types: Any) -> None:
    """Raise `ConfigurationError` if a value has none of the types. Shows no value: it is secret."""
    if not isinstance(value, types):
        descriptions = [_DESCRIPTIONS.get(kind) or kind.__name__ for kind in types]
        raise ConfigurationError(
            f"{name} must be {' or '.join(descriptions)}, not {type(value).__name__}"
        )


def check_functions(**functions: object) -> None:
    """Raise `ConfigurationError` for a callback that cannot be called."""
    for name, function in functions.items():
        check_argument(name, function, Callable, NONE)


def check_times(**seconds: float) -> None:
    """Raise `ConfigurationError` for a time that is negative or no number."""
    for name, value in seconds.items():
        check_argument(name, value, *NUMBER)
        if not value >= 0:  # negated, so that NaN is refused
            raise ConfigurationError(f"{name} must be >= 0, not {value!r}")


def check_texts(name: str, texts: object) -> list[str]:
    """Return one text, or several, as a list. Raises `ConfigurationError` for anything else."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise ConfigurationError(f"{name} must be str or a list of str, not {type(texts).__name__}")
    texts = list(texts)
    for text in texts:
        check_argument(f"each of {name}", text, str)
    return texts
