"""Durations as NSQ's programs and this one write them: ``250ms``, ``30s``, ``1h30m``, ``1.5h``.

The grammar is Go's (time.ParseDuration): a sign, then numbers each with a unit, and a unit is
needed except after 0. Inside the program a duration is a float of seconds.
"""

from __future__ import annotations

import re

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
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
    """Return the shortest common way to write a duration: ``250ms``, ``1m30s``, ``0s``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if 0 < seconds < 1:
        for unit in ("ms", "us"):
            if seconds >= _UNIT_S[unit]:
                return f"{seconds / _UNIT_S[unit]:.6g}{unit}"
        return f"{seconds * 1e9:.6g}ns"
    minutes, rest = divmod(round(seconds, 6), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
    return text + (f"{rest:.9g}s" if rest or not text else "")
