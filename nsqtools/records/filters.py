"""Which messages to keep: ``--grep``, ``--where`` and ``--sample``, and several of them as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import MessageLike
from nsqtools.records.queries import compile_where
from nsqtools.records.units import argument_bytes

Filter = Callable[[MessageLike], bool]


def grep(pattern: str, *, ignore_case: bool = False, invert: bool = False) -> Filter:
    """Keep the messages whose body contains ``pattern``, or with ``invert`` those that do not.

    The pattern works on bytes: ``\\xff`` finds a byte, and case is ignored for ASCII only. Raises
    `ConfigurationError` for a pattern that is not a regular expression.
    """
    try:
        search = re.compile(argument_bytes(pattern), re.IGNORECASE if ignore_case else 0).search
    except re.error as error:
        raise ConfigurationError(
            f"{pattern!r} is not a regular expression: {error}",
            hint="A character that means itself has a backslash before it: \\( \\[ \\. \\*",
        ) from None
    return lambda message: (search(message.body) is None) is invert


def where(program: str) -> Filter:
    """Keep the messages whose body is JSON for which ``program``, in jq's language, is true.

    Raises `ConfigurationError` for a wrong program.
    """
    is_wanted = compile_where(program)
    return lambda message: is_wanted(message.body)


def sample(share: float, random: Callable[[], float]) -> Filter:
    """Keep each message with the probability ``share``; ``random`` gives numbers in [0, 1)."""
    return lambda _message: random() < share


def parse_share(text: str) -> float:
    """Read a share: ``10%`` or ``0.1``. Raises ``ValueError``."""
    number = text.strip()
    try:
        share = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share; write 10% or 0.1")
    return share


def every(filters: Sequence[Filter]) -> Filter | None:
    """The filter that keeps what all ``filters`` keep, asked in order; None when there are none."""
    if len(filters) <= 1:
        return filters[0] if filters else None
    return lambda message: all(keep(message) for keep in filters)
