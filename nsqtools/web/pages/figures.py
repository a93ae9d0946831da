"""Numbers as the pages show them. Pure.

Counts are always whole (1,234,567): a number that is cut or rounded misleads. What is not known is
a dash, never 0. Sparklines and charts without JavaScript are points of SVG lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

UNKNOWN = "—"

Points = Sequence[tuple[float, float | None]]


def count(value: int | None) -> str:
    """Return a whole number with its thousands separated."""
    return UNKNOWN if value is None else f"{value:,}"


def rate(per_s: float | None) -> str:
    """Return messages a second, with a decimal where there are few."""
    if per_s is None:
        return UNKNOWN
    if per_s == 0:
        return "0"
    if per_s < 0.05:
        return "<0.1"
    return f"{per_s:.1f}" if per_s < 10 else f"{per_s:,.0f}"


def seconds(value_s: float | None) -> str:
    """Return a latency or an age, in the unit that fits: ``1.2 ms``, ``3.0 s``, ``2 h 5 min``."""
    if value_s is None:
        return UNKNOWN
    if value_s == 0:
        return "0 s"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"
    minutes, hours, days = (int(value_s // unit) for unit in (60, 3600, 86400))
    if minutes < 60:
        return f"{minutes} min {int(value_s % 60)} s"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def age(value_s: float) -> str:
    """Return how long something lasts already; clocks differ, so never less than nothing."""
    return seconds(max(0.0, float(int(value_s))))


def percent(value: float) -> str:
    """Return a share that is given in percent: ``99.9 %``."""
    return f"{value:g} %"


def size(value: int | None) -> str:
    """Return bytes: ``512 B``, ``1.5 KiB``."""
    if value is None:
        return UNKNOWN
    scaled, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024 or unit == "TiB":
            break
        scaled /= 1024
    return f"{value} B" if unit == "B" else f"{scaled:.1f} {unit}"


def clock(time_s: float) -> str:
    """Return a time of the day, UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S UTC")


def moment(time_s: float) -> str:
    """Return a date with its time, UTC; a dash for one that no calendar has."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def line_paths(points: Points, width: float, height: float, *, top: float | None = None) -> str:
    """Return the ``d`` of an SVG path through the points, with gaps where a value is None.

    ``top`` is the value at the upper edge: the highest one by default. Empty for fewer than two
    values: there is no line to draw.
    """
    known = [(at_s, value) for at_s, value in points if value is not None]
    if len(known) < 2:
        return ""
    start_s, end_s = points[0][0], points[-1][0]
    highest = top if top is not None else max(value for _, value in known)
    across = width / ((end_s - start_s) or 1.0)
    up = (height - 2) / (highest or 1.0)
    values = [None, *(value for _, value in points), None]
    path, is_pen_down = [], False
    for index, (at_s, value) in enumerate(points):
        if value is None:
            is_pen_down = False
            continue
        if values[index] == value == values[index + 2]:
            continue  # within a level line, which then stays the same while time goes on
        x, y = (at_s - start_s) * across, height - 1 - value * up
        path.append(f"{'L' if is_pen_down else 'M'}{x:.1f} {y:.1f}")
        is_pen_down = True
    return "".join(path)
