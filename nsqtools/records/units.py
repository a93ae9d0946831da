"""Parse values of a command line: sizes, times, durations, regular expressions, escapes.

The grammar of durations (``30s``, ``1h30m``) is in `nsqtools.protocol.text`; command lines also
accept days (``7d``), and `parse_span` refuses negative durations. Delimiters and templates contain
escapes. Every function raises ``ValueError`` with a message that shows the accepted forms.
"""

from __future__ import annotations

import re
import warnings
from datetime import UTC, datetime
from typing import AnyStr, NamedTuple

from nsqtools.protocol.text import NS, parse_duration

_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[\x80-\xff]+|.|\Z)", re.DOTALL)
_SIMPLE = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"0": b"\0", b"\\": b"\\"}


def unescape(text: str) -> bytes:
    r"""Return the bytes of ``text`` with the escapes ``\n \t \r \0 \\`` and ``\xNN`` interpreted.

    Raises ``ValueError`` for any other escape.
    """
    return _ESCAPE.sub(_value, argument_bytes(text))


def argument_bytes(text: str) -> bytes:
    """Return the typed bytes of an argument: Python decodes invalid UTF-8 to surrogates."""
    return text.encode("utf-8", "surrogateescape")


def _value(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if code in _SIMPLE:
        return _SIMPLE[code]
    if code[:1] == b"x" and len(code) == 3:
        return bytes.fromhex(code[1:].decode())
    sequence = escape[0].decode("utf-8", "replace")
    raise ValueError(f"unknown escape {sequence}; known are \\n \\t \\r \\0 \\xNN \\\\")


_DAYS = re.compile(r"([-+]?)(\d+\.?\d*|\.\d+)d(?=[\d.]|\Z)", re.ASCII)
# Python reads only the first six digits of a fraction.
_NANOSECONDS = re.compile(r"[.,]\d{6}(\d{1,3})", re.ASCII)
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.ASCII | re.IGNORECASE)


class Moment(NamedTuple):
    """A point in time, as the user's text and as nanoseconds since 1970."""

    text: str
    ns: int


def parse_days(text: str) -> float:
    """Return a duration in seconds. It may begin with days of 24 hours, which Go does not have."""
    days = _DAYS.match(text)
    if days is None:
        return parse_duration(text)
    sign, count = days.groups()
    try:
        seconds = parse_duration(f"{float(count) * 24:f}h{text[days.end() :]}")
    except ValueError as error:
        raise ValueError(f"{text!r} is not a duration; write 30s, 1h30m or 7d") from error
    return -seconds if sign == "-" else seconds


def parse_span(text: str) -> float:
    """Return a duration that is not negative, in seconds."""
    seconds = parse_days(text.strip())
    if seconds < 0:
        raise ValueError(f"{text!r} is negative")
    return seconds


def parse_regexp(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Compile a regular expression.

    Python takes ``[[:digit:]]``, which grep and Go have, for another set, and only warns of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            return re.compile(pattern, flags)
        except FutureWarning as warning:
            remedy = "in a set write \\d for [:digit:] and \\[ for a bracket"
            raise ValueError(f"{str(warning).lower()}; {remedy}") from None
        except re.error as error:
            raise ValueError(str(error)) from None


def parse_size(text: str) -> int:
    """Return a size in bytes: ``4096``, ``64KiB`` (1024s), ``100MB`` (1000s)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 4096, 64KiB or 100MB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    return round(float(number) * float(1024 if binary else 1000) ** power)


def parse_time(text: str, *, now_ns: int) -> int:
    """Return a point in time as nanoseconds since 1970.

    Accepts RFC 3339 (``2026-11-21T08:00:00Z``; a missing offset means UTC, a missing time
    midnight), ``now``, and a distance from now (``-2h``, ``-1d``, ``+30s``).
    """
    text = text.strip()
    if text == "now":
        return now_ns
    if text[:1] in ("-", "+"):
        return now_ns + round(parse_days(text) * NS)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-21T08:00:00Z, 2026-11-21, -2h or +1d"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    digits = _NANOSECONDS.search(text)
    ns = since.microseconds * 1000 + (int(digits[1].ljust(3, "0")) if digits else 0)
    return (since.days * 86_400 + since.seconds) * NS + ns
