"""Which messages to keep, and what to make of them: regular expressions, shares, jq's language.
Pure.

``--grep``, ``--where`` and ``--sample`` select, ``--pick`` transforms a body. ``--where '.status >=
500'`` and ``--pick .user.id`` are programs of jq, compiled at the start; a wrong one is refused
there. Results are turned into text inside of jq (``tojson``): a number that the program does not
change keeps all its digits, while the values that the binding makes of them go through double
precision. jq is imported only when a program is compiled.

A filter has three answers: yes, no, and ``ValueError`` where it cannot tell, because the body is
not JSON or the program fails for it. "Cannot tell" is never a no: who finishes what a filter leaves
out would lose a message that nobody has judged. It has the same consequence as a ``--pick`` that
fails: a forwarder refuses the message (dead letter, or back to its queue), a publisher rejects it,
and what only prints reports it. As in jq, bytes that are not UTF-8 and halves of surrogate pairs
are U+FFFD for a program, so one damaged field does not hide the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import argument_bytes

# The program is on lines of its own, because it may end in a comment.
_IS_ANY_TRUE = "any((\n", "\n); .)"
_TEXTS = "(\n", '\n) | if type == "string" then . else tojson end'

_BLANK = "\ufeff \t\r\n"  # where jq finds no value, and no error either
_ESCAPES = re.compile(  # those of backslashes, too: what follows \\ is text
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def _read_body(body: bytes) -> tuple[str, bool]:
    """Return the body as text that jq can parse, and whether nothing had to be replaced for that.

    Raises ``ValueError`` for a body without any value.
    """
    text = body.decode("utf-8", "replace")
    is_exact = "\ufffd" not in text or text.encode() == body
    if "\\ud" in text or "\\uD" in text:
        whole = _ESCAPES.sub(lambda escape: "\\ufffd" if escape["half"] else escape[0], text)
        is_exact, text = is_exact and whole == text, whole
    if not text.strip(_BLANK):
        raise ValueError("it is blank, and not JSON")
    return text, is_exact


def compile_pick(program: str) -> Pick:
    """Return a function from a body to what ``program`` makes of it; None when it makes nothing.

    Strings are given as they are, everything else as compact JSON, several results on lines of
    their own (as ``jq -rc`` prints them). The function raises ``ValueError`` for a body that is not
    JSON, that the program fails for, or of which a part that it returns would not be the same: what
    is not UTF-8. Raises `ConfigurationError` for a wrong program.
    """
    ask = _compile(program, _TEXTS)

    def pick(body: bytes) -> bytes | None:
        text, is_exact = _read_body(body)
        results = ask(text).all()
        picked = "\n".join(results)
        if not is_exact and "\ufffd" in picked:
            raise ValueError("it has bytes that are not UTF-8, or half of a surrogate pair")
        return picked.encode() if results else None

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
"""Whether to keep a message. Raises ``ValueError`` where it cannot tell."""
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
    null. It cannot tell for a body that is not JSON, or that the program fails for.

    Raises `ConfigurationError` for a wrong program.
    """
    ask = _compile(program, _IS_ANY_TRUE)
    return lambda message: any(ask(_read_body(message.body)[0]).all())


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
    """The filter that keeps what all ``filters`` keep, asked in order; None when there are none.

    One that says no decides, also where another cannot tell.
    """
    if len(filters) <= 1:
        return filters[0] if filters else None

    def is_kept(message: MessageLike) -> bool:
        doubt: ValueError | None = None
        for keep in filters:
            try:
                if not keep(message):
                    return False
            except ValueError as error:
                doubt = doubt or error
        if doubt is not None:
            raise doubt
        return True

    return is_kept


M = TypeVar("M", bound=MessageLike)
OnUnjudged = Callable[[M, ValueError], object]
"""Gets a message for which a filter or ``--pick`` cannot tell, and why."""


def reporting(keep: Filter, on_unjudged: OnUnjudged[M]) -> Callable[[M], bool]:
    """Return the filter that leaves out, and reports, the messages for which it cannot tell."""

    def is_kept(message: M) -> bool:
        try:
            return keep(message)
        except ValueError as error:
            on_unjudged(message, error)
            return False

    return is_kept


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
