"""Numbers as text, trends as lines, and the data of the charts, which a script draws."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from nsqtools.cluster.history import History
from nsqtools.cluster.problems import rate_text
from nsqtools.cluster.queue_rows import Key

UNKNOWN = "—"

Points = Sequence[tuple[float, float | None]]


def count(value: int | None) -> str:
    """Return a whole number with its thousands separated."""
    return UNKNOWN if value is None else f"{value:,}"


def rate(per_s: float | None) -> str:
    """Return messages a second."""
    return UNKNOWN if per_s is None else rate_text(per_s)


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
    if value < 1024:
        return f"{value} B"
    power = min((value.bit_length() - 1) // 10, 4)
    return f"{value / 1024**power:.1f} {' KMGT'[power]}iB"


def line_path(points: Points, width: float, height: float, low: float, high: float) -> str:
    """Return the ``d`` of an SVG path through the points, with gaps where a value is None.

    ``low`` and ``high`` are the values at the edges. Empty for fewer than two values: there is no
    line to draw.
    """
    if sum(value is not None for _, value in points) < 2:
        return ""
    start_s, end_s = points[0][0], points[-1][0]
    across = width / ((end_s - start_s) or 1.0)
    up = (height - 2) / ((high - low) or 1.0)
    values = [None, *(value for _, value in points), None]
    path, is_pen_down = [], False
    for index, (at_s, value) in enumerate(points):
        if value is None:
            is_pen_down = False
            continue
        if values[index] == value == values[index + 2]:
            continue  # within a level line, which then stays the same while time goes on
        x, y = (at_s - start_s) * across, height - 1 - (value - low) * up
        path.append(f"{'L' if is_pen_down else 'M'}{x:.1f} {y:.1f}")
        is_pen_down = True
    return "".join(path)


class Spark(NamedTuple):
    """A trend: its line, from the least value to the greatest, and these two as text."""

    path: str
    said: str


def spark(points: Points) -> Spark:
    """Return a trend on its own scale, so that a small change of a large number shows."""
    values = [value for _, value in points if value is not None]
    if not values:
        return Spark("", "")
    low, high = min(values), max(values)
    range_text = brief(high) if low == high else f"{brief(low)} \N{EN DASH} {brief(high)}"
    return Spark(line_path(points, 80, 18, low, high), range_text if high else "")


def brief(value: float) -> str:
    """Return a number in few characters: ``12``, ``3.4k``, ``120M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # three digits of what is less would be 1e+03
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


RANGES = {"5m": 300.0, "15m": 900.0, "1h": 3600.0, "6h": 21600.0}
RANGE = "15m"

TREND_S = 120.0
MAX_LINES = 8


class ChartLine(NamedTuple):
    """A line of a chart. ``column`` is its name among the numbers; ``keys`` are summed up."""

    column: str
    label: str
    quantity: str
    keys: Sequence[Key]


class Figure(NamedTuple):
    """What a chart shows. ``unit`` is that of its values."""

    name: str
    title: str
    unit: str
    lines: Sequence[ChartLine]


class Charts(NamedTuple):
    """The charts of a page. ``source`` is where their numbers are, ``choices`` are what can be
    shown instead: a name, an address, and whether it is shown."""

    figures: Sequence[Figure]
    choices: Sequence[Sequence[tuple[str, str, bool]]]
    source: str


def figures_of(
    key: Key, channels: Sequence[str] = (), *, is_split: bool = False
) -> tuple[Figure, ...]:
    """Return what is charted of a channel, an nsqd, or a topic with its channels.

    Of a topic that is the sum over its channels, or a line for each of the first `MAX_LINES`.
    """
    _, topic, channel = key
    of_all = own = [key]
    if topic and not channel:
        own = [("", topic, name) for name in channels]
        of_all = [key, *own]

    def figure(name: str, title: str, unit: str, *lines: tuple[str, str, Sequence[Key]]) -> Figure:
        shown = [ChartLine(quantity, label, quantity, keys) for quantity, label, keys in lines]
        if is_split:
            quantity = "finish" if name == "rates" else lines[0][0]
            shown = [ChartLine(f"{quantity} {k[2]}", k[2], quantity, [k]) for k in own[:MAX_LINES]]
        return Figure(name, title, unit, shown)

    rates = [("ingress", "in" if channel else "published", [key])]
    rates += [("finish", "finished", own), ("requeue", "requeued", own)]
    return (
        figure("depth", "Depth", "", ("depth", "waiting", of_all), ("in_flight", "in flight", own)),
        figure("rates", "Finished a second" if is_split else "Messages a second", "/s", *rates),
        figure("latency", "Latency", "s", ("latency", "from publish to finish", own))
        if topic
        else figure("clients", "Consumers", "", ("clients", "connected", own)),
    )


def range_of(asked: str) -> str:
    """Return the range of time that an address asks for."""
    return asked if asked in RANGES else RANGE


def columns_of(history: History, figures: Sequence[Figure], since_s: float) -> dict[str, Points]:
    """Return the points of every line, by its column."""
    return {
        line.column: history.series(line.keys, line.quantity, since_s=since_s)
        for figure in figures
        for line in figure.lines
    }


def numbers_of(history: History, figures: Sequence[Figure], shown: str) -> dict[str, Any]:
    """Return the points of every line over a range, as columns beside the times ``t``."""
    found = columns_of(history, figures, time.time() - RANGES[shown])
    columns = {name: dict(points) for name, points in found.items()}
    times = sorted({at_s for column in columns.values() for at_s in column})
    return {
        "range_s": RANGES[shown],
        "t": times,
        **{name: [column.get(at_s) for at_s in times] for name, column in columns.items()},
    }


def point_of(history: History, figures: Sequence[Figure], since_s: float) -> dict[str, Any] | None:
    """Return the newest values, for the charts of an open page."""
    point: dict[str, Any] = {}
    for name, points in columns_of(history, figures, since_s).items():
        if points:
            point["t"], point[name] = points[-1]
    return point or None
