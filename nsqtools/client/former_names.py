"""Names that were public in 0.3 although they are of use to nsqtools alone.

They work until 0.5, with a DeprecationWarning. Neither `dir` of an object nor a type checker shows
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class FormerName:
    """The attribute ``name`` of a class, which is ``_name`` now.

    A descriptor costs the other attributes nothing, unlike ``__getattr__``: messages are read
    hundreds of thousands of times a second.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:  # autospec and pydoc read every attribute of a class
            return getattr(owner, "_" + self._name, None)
        text = f"{owner.__name__}.{self._name} is private and will be removed in nsqtools 0.5"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(instance, "_" + self._name)


def former_names(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that keeps each name as an alias of the one with an underscore."""

    def decorate(kind: type[T]) -> type[T]:
        for name in names:
            setattr(kind, name, FormerName(name))
        kind.__dir__ = _public_dir  # type: ignore[method-assign]
        return kind

    return decorate


def _public_dir(self: object) -> list[str]:
    from inspect import getattr_static  # slow to import

    statics = {name: getattr_static(type(self), name, None) for name in object.__dir__(self)}
    return [name for name, static in statics.items() if not isinstance(static, FormerName)]
