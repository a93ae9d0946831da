"""Select and transform messages with regular expressions, random samples and jq programs.

Pure. ``--grep``, ``--where`` and ``--sample`` select messages, ``--pick`` transforms a body.
``--where '.status >= 500'`` and ``--pick .user.id`` are jq programs, which are compiled before the
first message. jq itself converts results to text (``tojson``), because values that pass through the
Python binding become doubles, and large numbers would lose digits. jq is imported only when a
program is compiled.

A filter returns True or False, or raises ``ValueError`` when it cannot be evaluated, because the
body is not JSON or the program fails. An error is never a False: a consumer that finishes the
rejected messages would lose one that no filter has evaluated. It has the same consequence as a
failed ``--pick``: a forwarder refuses the message (dead letter, or requeue), a publisher rejects
it, and a command that only prints reports it. As in jq, invalid UTF-8 and halves of surrogate pairs
become U+FFFD, so one damaged field does not hide the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import MessageLike
from nsqtools.records.units import argument_bytes, parse_regexp

# The program is on separate lines, because it may end in a comment.
_IS_ANY_TRUE = "any((\n", "\n); .)"
_TO_TEXT = 'if type == "string" then . else tojson end'
_TEXTS = "(\n", f"\n) | {_TO_TEXT}"
_TEXTS_BUT_NULL = "(\n", f"\n) | select(. != null) | {_TO_TEXT}"

_BLANK = "\ufeff \t\r\n"  # jq reads no value from these characters, and raises no error.
# Escaped backslashes are matched as well, because the characters after \\ are no escape.
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def _read_body(body: bytes) -> tuple[str, bool]:
    """Return the body as text for jq, and whether the text is exact (without replacements).

    Raises ``ValueError`` for a blank body.
    """
    text = body.decode("utf-8", "replace")
    is_exact = "\ufffd" not in text or text.encode() == body
    if "\\ud" in text or "\\uD" in text:
        repaired = _ESCAPES.sub(lambda escape: "\\ufffd" if escape["half"] else escape[0], text)
        is_exact, text = is_exact and repaired == text, repaired
    if not text.strip(_BLANK):
        raise ValueError("it is blank, and not JSON")
    return text, is_exact


def compile_pick(program: str, *, omits_null: bool = False) -> Pick:
    """Return a function that applies ``program`` to a body; it returns None without a result.

    Strings are returned raw, other values as compact JSON, and several results on separate lines
    (as ``jq -rc`` prints them). With ``omits_null`` null is no result. The function raises
    ``ValueError`` if the body is not JSON, if the program fails, or if a result has replaced
    characters. Raises `ConfigurationError` for an invalid program.
    """
    run = _compile(program, _TEXTS_BUT_NULL if omits_null else _TEXTS)

    def pick(body: bytes) -> bytes | None:
        text, is_exact = _read_body(body)
        results = run(text).all()
        picked = "\n".join(results)
        if not is_exact and "\ufffd" in picked:
            raise ValueError("it has bytes that are not UTF-8, or half of a surrogate pair")
        return picked.encode() if results else None

    return pick


def _compile(program: str, wrapper: tuple[str, str]) -> Callable[[str], Any]:
    try:
        import jq
    except ImportError:
        raise ConfigurationError(
            "JSON cannot be queried without the package jq: pip install 'nsqtools[jq]'"
        ) from None
    try:
        jq.compile(program)  # Without the wrapper, the error has the position in the user's text.
        compiled = jq.compile(program.join(wrapper))
    except ValueError as error:
        reason = str(error).splitlines()[0].removeprefix("jq: error: ")
        raise ConfigurationError(
            f"{program!r} is not a program of jq: {reason}",
            hint="For example .status >= 500, .user.id or {id, name: .user.name}.",
        ) from None
    run: Callable[[str], Any] = compiled.input_text
    return run


Filter = Callable[[MessageLike], bool]
"""Returns whether to keep a message. Raises ``ValueError`` if it cannot be evaluated."""
Pick = Callable[[bytes], bytes | None]


def grep(pattern: str, *, ignore_case: bool = False, invert: bool = False) -> Filter:
    """Keep messages whose body matches ``pattern``, or with ``invert`` all other messages.

    The pattern matches bytes: ``\\xff`` is a byte, and case is ignored for ASCII only. Raises
    `ConfigurationError` for an invalid regular expression.
    """
    try:
        flags = re.IGNORECASE if ignore_case else 0
        search = parse_regexp(argument_bytes(pattern), flags).search
    except ValueError as error:
        raise ConfigurationError(
            f"{pattern!r} is not a regular expression: {error}",
            hint="A character that means itself has a backslash before it: \\( \\[ \\. \\*",
        ) from None
    return lambda message: (search(message.body) is None) is invert


def where(program: str) -> Filter:
    """Keep messages for which the jq ``program`` has a result other than false and null.

    The filter raises ``ValueError`` if the body is not JSON or the program fails. Raises
    `ConfigurationError` for an invalid program.
    """
    run = _compile(program, _IS_ANY_TRUE)
    return lambda message: any(run(_read_body(message.body)[0]).all())


def sample(share: float, random: Callable[[], float]) -> Filter:
    """Keep each message with the probability ``share``; ``random`` returns numbers in [0, 1)."""
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
    """Return the filter that keeps a message if all ``filters`` do; None for no filters.

    They are evaluated in order. False from one of them prevails over an error of another.
    """
    if len(filters) <= 1:
        return filters[0] if filters else None

    def is_kept(message: MessageLike) -> bool:
        failure: ValueError | None = None
        for keep in filters:
            try:
                if not keep(message):
                    return False
            except ValueError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    return is_kept


M = TypeVar("M", bound=MessageLike)
OnUnjudged = Callable[[M, ValueError], object]
"""Called with a message that a filter or ``--pick`` cannot evaluate, and the error."""


def reporting(keep: Filter, on_unjudged: OnUnjudged[M]) -> Callable[[M], bool]:
    """Return a filter that rejects and reports the messages that ``keep`` cannot evaluate."""

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
    """Combine a filter and a pick with the options of nsq_to_nsq.

    ``required`` is a field that each object must have, ``value`` its required text or number, and
    ``whitelist`` the fields to keep. Raises `ConfigurationError`.
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
    # Python's json also reads NaN and Infinity, which are not JSON.
    return f"{is_text} or {field} == {value.strip()}" if is_number else is_text
