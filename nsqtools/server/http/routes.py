"""Which handler a path and a method belong to, by the rules of Go's httprouter. Pure.

A path that differs from a route by its case, a slash at the end, or superfluous slashes and dots is
redirected to the route; a known path with another method is refused with the methods it has.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H")


@dataclass(frozen=True, slots=True)
class Found(Generic[H]):
    """The handler, and what stood in the place of the route's ``:name``."""

    handler: H
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Ask at this path instead."""

    path: str


@dataclass(frozen=True, slots=True)
class OtherMethods:
    """The path is known for these methods, in the form of the Allow header; none: unknown."""

    allow: str


class Routes(Generic[H]):
    """Handlers by ``(method, path)``; the last segment of a path may be ``:name``."""

    def __init__(self, handlers: Mapping[tuple[str, str], H]) -> None:
        self._methods = sorted({method for method, _ in handlers})
        self._exact: dict[tuple[str, str], H] = {}
        self._with_parameter: dict[tuple[str, str], H] = {}
        for (method, path), handler in handlers.items():
            head, _, last = path.rpartition("/")
            if last.startswith(":"):
                self._with_parameter[method, head] = handler
            else:
                self._exact[method, path] = handler

    def find(self, method: str, path: str) -> Found[H] | Redirect | OtherMethods:
        """Decide what to do with a request."""
        if found := self._match(method, path):
            return found
        if path != "/":
            canonical = self._canonical(method, path)
            if canonical is not None:
                return Redirect(canonical)
        allowed = [m for m in self._methods if m != method and self._match(m, path)]
        return OtherMethods(", ".join(sorted({*allowed, "OPTIONS"})) if allowed else "")

    def _match(self, method: str, path: str) -> Found[H] | None:
        if (handler := self._exact.get((method, path))) is not None:
            return Found(handler)
        head, _, last = path.rpartition("/")
        handler = self._with_parameter.get((method, head))
        return Found(handler, last) if handler is not None and last else None

    def _canonical(self, method: str, path: str) -> str | None:
        clean = posixpath.normpath("/" + path.lstrip("/"))
        candidates = (path.removesuffix("/"), path + "/", clean, clean + "/")
        for candidate in candidates:
            if candidate and self._match(method, candidate):
                return candidate
        for known_method, route in self._exact:
            if known_method == method and route.lower() in (clean.lower(), clean.lower() + "/"):
                return route
        return None
