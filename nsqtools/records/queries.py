"""Ask the JSON in a body, in jq's language. Pure.

``--where '.status >= 500'`` and ``--pick .user.id`` are programs of jq, compiled at the start;
a wrong one is refused there. Results are turned into text inside of jq (``tojson``): a number that
the program does not change keeps all its digits, while the values that the binding makes of them go
through double precision. jq is imported only when a program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsqtools.errors import ConfigurationError

# The program stands on lines of its own, for it may end in a comment.
_IS_ANY_TRUE = "any((\n", "\n); .)"
_TEXTS = "(\n", '\n) | if type == "string" then . else tojson end'


def compile_where(program: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether any result of ``program`` is neither false nor null.

    A body that is not JSON, or that the program fails for, is not wanted. Raises
    `ConfigurationError` for a wrong program.
    """
    ask = _compile(program, _IS_ANY_TRUE)

    def is_wanted(body: bytes) -> bool:
        try:
            return any(ask(body.decode()).all())
        except ValueError:
            return False

    return is_wanted


def compile_pick(program: str) -> Callable[[bytes], bytes | None]:
    """Return a function from a body to what ``program`` makes of it; None when it makes nothing.

    Strings are given as they are, everything else as compact JSON, several results on lines of
    their own (as ``jq -rc`` prints them). The function raises ``ValueError`` for a body that is not
    JSON, or that the program fails for. Raises `ConfigurationError` for a wrong program.
    """
    ask = _compile(program, _TEXTS)

    def pick(body: bytes) -> bytes | None:
        results = ask(body.decode()).all()
        return "\n".join(results).encode() if results else None

    return pick


def _compile(program: str, around: tuple[str, str]) -> Callable[[str], Any]:
    try:
        import jq
    except ImportError:
        raise ConfigurationError(
            "JSON cannot be queried without the package jq: pip install 'nsqtools[jq]'"
        ) from None
    try:
        jq.compile(
            program
        )  # for the message: alone, so that it says where in the text the error is
        compiled = jq.compile(program.join(around))
    except ValueError as error:
        reason = str(error).splitlines()[0].removeprefix("jq: error: ")
        raise ConfigurationError(
            f"{program!r} is not a program of jq: {reason}",
            hint="For example .status >= 500, .user.id or {id, name: .user.name}.",
        ) from None
    ask: Callable[[str], Any] = compiled.input_text
    return ask
