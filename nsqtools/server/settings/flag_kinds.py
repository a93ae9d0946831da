"""How the values of Go's flags are read from text and shown in /config.

A kind reads one flag value (`parse`, raising ``ValueError`` with Go's reason), has Go's word for
the type in the usage, and turns the value into what /config answers. Repeatable kinds collect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsqtools.protocol.durations import go_duration, parse_duration
from nsqtools.server.daemon_log import LEVELS

_TRUE = {"1", "t", "T", "TRUE", "true", "True"}
_FALSE = {"0", "f", "F", "FALSE", "false", "False"}
TLS_VERSIONS = {"tls1.0": 0x0301, "tls1.1": 0x0302, "tls1.2": 0x0303, "tls1.3": 0x0304}


@dataclass(frozen=True, slots=True)
class FlagKind:
    """One type of flag. ``go_name`` stands in the usage; ``show`` gives the default there."""

    go_name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    wire: Callable[[Any], Any] = lambda value: value  # for /config
    is_bool: bool = False
    repeatable: bool = False


def seconds_to_ns(seconds: float) -> int:
    """Return the duration as Go counts it."""
    return round(seconds * 1_000_000_000)


def parse_int(text: str) -> int:
    """Read an integer literal of Go: 0x, 0o, 0b and a bare leading 0 for octal, and underscores."""
    digits = text.lstrip("+-")
    is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    try:
        value = int(text, 8 if is_octal else 0)
    except ValueError:
        raise ValueError("parse error") from None
    if text != text.strip() or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("parse error")
    return value


def parse_bool(text: str) -> bool:
    """Read a Go bool."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("parse error")


def parse_seconds(text: str) -> float:
    """Read a Go duration as seconds."""
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError("parse error") from None


def parse_log_level(text: str) -> str:
    """Read a log level in any case."""
    if text.lower() not in LEVELS:
        raise ValueError(f"invalid log level '{text}' (debug, info, warn, error, fatal)")
    return text.lower()


def parse_tls_required(text: str) -> int:
    """Read true, false or tcp-https as 2, 0 or 1."""
    if text.lower() == "tcp-https":
        return 1
    try:
        return 2 if parse_bool(text.lower()) else 0
    except ValueError:
        raise ValueError(f'strconv.ParseBool: parsing "{text}": invalid syntax') from None


def parse_tls_version(text: str) -> int:
    """Read tls1.0 to tls1.3 as the number of the version."""
    if text == "":
        return 0x0301
    if text.lower() not in TLS_VERSIONS:
        raise ValueError(f'unknown tlsVersionOption "{text}"')
    return TLS_VERSIONS[text.lower()]


def _tls_version_word(version: int) -> str:
    return next(word for word, number in TLS_VERSIONS.items() if number == version)


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Read percentiles separated by commas."""
    values = tuple(float(word) for word in text.split(","))
    if not all(map(math.isfinite, values)):
        raise ValueError("parse error")
    return values


STRING = FlagKind("string", lambda text: text, lambda value: f'"{value}"')
INT = FlagKind("int", parse_int)
BOOL = FlagKind("", parse_bool, lambda value: str(value).lower(), is_bool=True)
DURATION = FlagKind(
    "duration", parse_seconds, lambda value: go_duration(seconds_to_ns(value)), seconds_to_ns
)
STRINGS = FlagKind("value", lambda text: (text,), repeatable=True, wire=lambda value: list(value))
PERCENTILES = FlagKind("value", parse_percentiles, repeatable=True, wire=lambda value: list(value))
LOG_LEVEL = FlagKind(
    "value", parse_log_level, str.upper, wire=lambda value: LEVELS.index(value) + 1
)
TLS_REQUIRED = FlagKind("", parse_tls_required, lambda value: "", is_bool=True)
TLS_MIN_VERSION = FlagKind("value", parse_tls_version, _tls_version_word)


def parse_float(text: str) -> float:
    """Read a float."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("parse error") from None


FLOAT = FlagKind("float", parse_float, "{:g}".format)
