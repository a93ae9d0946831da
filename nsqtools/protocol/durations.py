"""Durations as NSQ's programs and this one write them: ``250ms``, ``30s``, ``1h30m``, ``1.5h``.

The grammar is Go's (time.ParseDuration): a sign, then numbers each with a unit, and a unit is
needed except after 0. Inside the program a duration is a float of seconds, or an int of nanoseconds
where its name ends in ``_ns``.
"""

from __future__ import annotations

import re

NS = 1_000_000_000
"""Nanoseconds in a second."""

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_UNITS_NS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": NS, "m": 60 * NS}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[-+]?({_PART})+", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)


def parse_duration(text: str) -> float:
    """Return the duration in seconds. Raises ``ValueError`` naming what is wrong."""
    if text.strip("+-") == "0" and len(text) <= 2:
        return 0.0
    if not _DURATION.fullmatch(text):
        lacks_unit = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text, re.ASCII)
        reason = "has no unit" if lacks_unit else "is not a duration"
        raise ValueError(f"{text!r} {reason}; write 250ms, 30s, 5m or 1h30m")
    total = sum(float(number) * _UNIT_S[unit] for number, unit in _PARTS.findall(text))
    return -total if text.startswith("-") else total


def format_duration(seconds: float) -> str:
    """Return the shortest common way to write a duration: ``250ms``, ``1m30s``, ``1h``, ``0s``."""
    text = go_duration(round(seconds * NS)).replace("µ", "u")
    if text.endswith("m0s"):
        text = text[:-2]
    return text.removesuffix("0m") if text.endswith("h0m") else text


def go_duration(duration_ns: int) -> str:
    """Write nanoseconds as Go does, on the pages of nsqd: ``1h0m0s``, ``632.134542ms``, ``0s``."""
    sign, left = ("-", -duration_ns) if duration_ns < 0 else ("", duration_ns)
    if left < NS:
        for unit in ("ms", "µs", "ns"):
            if left >= _UNITS_NS[unit]:
                return f"{sign}{_decimal(left, _UNITS_NS[unit])}{unit}"
        return "0s"
    minutes, rest = divmod(left, _UNITS_NS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, _UNITS_NS['s'])}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def _decimal(value: int, unit: int) -> str:
    whole, part = divmod(value, unit)
    digits = str(part).zfill(len(str(unit)) - 1).rstrip("0") if part else ""
    return f"{whole}.{digits}" if digits else str(whole)
