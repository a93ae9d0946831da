"""Names of topics and channels chosen by patterns as in a shell: ``clicks``, ``web.*``. Pure.

No name of NSQ contains ``*``, ``?`` or ``[``, so a text with one of them is always a pattern.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from nsqtools.errors import NotFoundError


def is_pattern(text: str) -> bool:
    """Tell whether the text can stand for several names."""
    return any(mark in text for mark in "*?[")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Tell whether one of the patterns stands for the name; no patterns stand for every name."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def select(what: str, patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the names that the patterns stand for, in order.

    Raises `NotFoundError`, with names that are near, for a pattern that stands for none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise missing(what, pattern, names)
        chosen |= found
    return sorted(chosen)


def missing(what: str, pattern: str, names: Collection[str]) -> NotFoundError:
    """The error for a name or pattern that nothing has."""
    if is_pattern(pattern):
        return NotFoundError(f"no {what} matches {pattern}")
    near = difflib.get_close_matches(pattern, sorted(names), n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else ""
    return NotFoundError(f"{what} {pattern} does not exist", hint=hint)
