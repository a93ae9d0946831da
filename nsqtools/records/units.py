"""Sizes, points in time and spans as people write them on a command line.

Durations proper (``30s``, ``1h30m``) are the protocol's, in `nsqtools.protocol.durations`; here
they only must not be negative. Every function raises ``ValueError`` with a message that shows the
accepted forms.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from nsqtools.protocol.durations import parse_duration

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.ASCII | re.IGNORECASE)

NS = 1_000_000_000


class Moment(NamedTuple):
    """A point in time as it was written, and as nanoseconds since 1970."""

    text: str
    ns: int


def parse_span(text: str) -> float:
    """Return a duration that is not negative, in seconds."""
    seconds = parse_duration(text.strip())
    if seconds < 0:
        raise ValueError(f"{text!r} is negative")
    return seconds


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
    midnight), ``now``, and a distance from now (``-2h``, ``+30s``).
    """
    text = text.strip()
    if text == "now":
        return now_ns
    if text[:1] in ("-", "+"):
        return now_ns + round(parse_duration(text) * NS)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-21T08:00:00Z, 2026-11-21 or -2h"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * NS + since.microseconds * 1000
