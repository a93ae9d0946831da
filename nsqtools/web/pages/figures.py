"""Numbers as text, and the history of a queue as charts: still pictures, and what uPlot draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nsqtools.cluster.history import QUANTITIES, History
from nsqtools.cluster.queue_rows import Key

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


RANGES = {"5m": 300.0, "15m": 900.0, "1h": 3600.0, "6h": 21600.0}
RANGE = "15m"

TREND_S = 120.0


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart."""

    quantity: str
    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. ``unit`` is that of its values; ``summary`` says in words what it shows."""

    name: str
    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    is_empty: bool
    why_empty: str
    summary: str


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a page. ``source`` is where their numbers are, ``ranges`` name and address."""

    figures: tuple[Chart, ...]
    ranges: tuple[tuple[str, str], ...]
    shown: str
    source: str


RATES = (("ingress", "in"), ("finish", "finished"), ("requeue", "requeued"))
OF_CHANNELS = {
    "depth": ("Depth", "", (("depth", "waiting"), ("in_flight", "in flight"))),
    "rates": ("Messages a second", "/s", RATES),
    "latency": ("Latency", "s", (("latency", "from publish to finish"),)),
}
OF_TOPICS = {
    "depth": ("Depth", "", (("depth", "waiting in the topic"),)),
    "rates": ("Messages a second", "/s", (("ingress", "in"),)),
}
OF_NODES = {
    "depth": ("Depth", "", (("depth", "waiting"), ("in_flight", "in flight"))),
    "rates": ("Messages a second", "/s", RATES),
    "clients": ("Consumers", "", (("clients", "connected"),)),
}
NOT_KEPT = ": nsqd measures it with --e2e-processing-latency-percentile"


def trend(history: History, key: Key, quantity: str) -> Points:
    """Return the last two minutes of a queue, for a sparkline."""
    return history.series(key, quantity, since_s=time.time() - TREND_S)


def range_of(parameters: Mapping[str, str]) -> str:
    """Return the range of time that an address asks for."""
    asked = parameters.get("range", RANGE)
    return asked if asked in RANGES else RANGE


def charts_of(
    history: History,
    key: Key,
    described: Mapping[str, Any],
    shown: str,
    *,
    source: str,
    address: Callable[[str], str],
) -> Charts:
    """Return the charts of a queue over a range of time."""
    since_s = time.time() - RANGES[shown]
    made = []
    for name, (title, unit, lines) in described.items():
        series = {
            label: history.series(key, quantity, since_s=since_s) for quantity, label in lines
        }
        made.append(_chart(name, title, unit, lines, series))
    ranges = tuple((name, address(name)) for name in RANGES)
    return Charts(tuple(made), ranges, shown, source)


def _chart(
    name: str,
    title: str,
    unit: str,
    lines: tuple[tuple[str, str], ...],
    series: Mapping[str, Points],
) -> Chart:
    known = {
        label: [value for _, value in points if value is not None]
        for label, points in series.items()
    }
    top = max((max(values) for values in known.values() if values), default=0.0)
    drawn = tuple(
        ChartLine(quantity, label, line_paths(series[label], 400, 120, top=top or 1.0))
        for quantity, label in lines
    )
    show = _shower(unit)
    summary = ", ".join(
        f"{label} {show(values[-1])} (at most {show(max(values))})"
        for label, values in known.items()
        if values
    )
    is_empty = not any(line.path for line in drawn)
    why = NOT_KEPT if name == "latency" and not any(known.values()) else ""
    return Chart(name, title, unit, drawn, is_empty, why, summary)


def _shower(unit: str) -> Callable[[float], str]:
    if unit == "s":
        return seconds
    if unit == "/s":
        return lambda value: f"{rate(value)}/s"
    return lambda value: count(round(value))


def numbers_of(history: History, key: Key, shown: str) -> dict[str, Any]:
    """Return every quantity of a queue over a range, as columns beside the times ``t``."""
    since_s = time.time() - RANGES[shown]
    columns = {name: dict(history.series(key, name, since_s=since_s)) for name in QUANTITIES}
    times = sorted({at_s for column in columns.values() for at_s in column})
    return {
        "range_s": RANGES[shown],
        "t": times,
        **{name: [column.get(at_s) for at_s in times] for name, column in columns.items()},
    }


def point_of(history: History, key: Key, since_s: float) -> dict[str, Any] | None:
    """Return the newest values of a queue, for the charts of an open page."""
    point: dict[str, Any] = {}
    for name in QUANTITIES:
        points = history.series(key, name, since_s=since_s)
        if points:
            point["t"], point[name] = points[-1]
    return point or None
