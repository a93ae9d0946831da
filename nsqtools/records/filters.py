"""Which messages to keep, and what to make of them: regular expressions, shares, jq's language.
Pure.

``--grep``, ``--where`` and ``--sample`` select, ``--pick`` transforms a body. ``--where '.status >=
500'`` and ``--pick .user.id`` are programs of jq, compiled at the start; a wrong one is refused
there. Results are turned into text inside of jq (``tojson``): a number that the program does not
change keeps all its digits, while the values that the binding makes of them go through double
precision. jq is imported only when a program is compiled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import argument_bytes

# The program is on lines of its own, because it may end in a comment.
_IS_ANY_TRUE = "any((\n", "\n); .)"
_TEXTS = "(\n", '\n) | if type == "string" then . else tojson end'


def compile_pick(program: str) -> Pick:
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
        jq.compile(program)  # alone, so that the message says where in the text the error is
        compiled = jq.compile(program.join(around))
    except ValueError as error:
        reason = str(error).splitlines()[0].removeprefix("jq: error: ")
        raise ConfigurationError(
            f"{program!r} is not a program of jq: {reason}",
            hint="For example .status >= 500, .user.id or {id, name: .user.name}.",
        ) from None
    ask: Callable[[str], Any] = compiled.input_text
    return ask


Filter = Callable[[MessageLike], bool]
Pick = Callable[[bytes], bytes | None]


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
    """Keep the messages for which a result of ``program``, in jq's language, is neither false nor
    null. A body that is not JSON, or that the program fails for, is not wanted.

    Raises `ConfigurationError` for a wrong program.
    """
    ask = _compile(program, _IS_ANY_TRUE)

    def is_wanted(message: MessageLike) -> bool:
        try:
            return any(ask(message.body.decode()).all())
        except ValueError:
            return False

    return is_wanted


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


def json_filters(
    keep: Filter | None,
    pick: Pick | None,
    *,
    required: str | None,
    value: str | None,
    whitelist: Sequence[str],
) -> tuple[Filter | None, Pick | None]:
    """Return what selects and what transforms: nsq_to_nsq's options and others together.

    ``required`` is a field that an object must have, ``value`` the text or number that it must be;
    ``whitelist`` are the fields that are kept. Raises `ConfigurationError`.
    """
    if value is not None and required is None:
        raise ConfigurationError("--require-json-value needs --require-json-field")
    if required is not None:
        field = json.dumps(required)
        program = f'type == "object" and has({field})'
        if value is not None:
            program += f" and ({_is_value(f'.[{field}]', value)})"
        keep = every([where(program), *([keep] if keep is not None else [])])
    if whitelist:
        if pick is not None:
            raise ConfigurationError("give either --pick or --whitelist-json-field")
        names = json.dumps(list(whitelist))
        chosen = f"with_entries(select(.key as $key | {names} | index([$key])))"
        pick = compile_pick(f'if type == "object" then {chosen} else error("not an object") end')
    return keep, pick


def _is_value(field: str, value: str) -> str:
    is_text = f"{field} == {json.dumps(value)}"
    try:
        number = json.loads(value)
        is_number = not isinstance(number, bool) and math.isfinite(number)
    except (ValueError, TypeError, OverflowError):
        is_number = False
    # Python reads NaN and Infinity, which are no JSON
    return f"{is_text} or {field} == {value.strip()}" if is_number else is_text
