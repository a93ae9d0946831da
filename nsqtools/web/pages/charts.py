"""The history of a queue as charts: still pictures, and the numbers that uPlot draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nsqtools.cluster.history import QUANTITIES, History
from nsqtools.cluster.queue_rows import Key
from nsqtools.web.pages import figures
from nsqtools.web.pages.figures import Points, line_paths

RANGES = {"5m": 300.0, "15m": 900.0, "1h": 3600.0, "6h": 21600.0, "24h": 86400.0}
RANGE = "15m"

TREND_S = 120.0


@dataclass(frozen=True, slots=True)
class Line:
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
    lines: tuple[Line, ...]
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
        Line(quantity, label, line_paths(series[label], 400, 120, top=top or 1.0))
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
        return figures.seconds
    if unit == "/s":
        return lambda value: f"{figures.rate(value)}/s"
    return lambda value: figures.count(round(value))


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
