"""Format numbers, draw trends as SVG paths, and provide the data of charts to the script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from nsqtools.cluster.history import History
from nsqtools.cluster.queue_rows import QueueKey
from nsqtools.cluster.texts import duration_text, rate_text

UNKNOWN = "—"

Points = Sequence[tuple[float, float | None]]


def count(value: int | None) -> str:
    """Return a whole number with its thousands separated."""
    return UNKNOWN if value is None else f"{value:,}"


def rate(per_s: float | None) -> str:
    """Return messages a second."""
    return UNKNOWN if per_s is None else rate_text(per_s)


def seconds(value_s: float | None) -> str:
    """Return a latency, in the unit that fits: ``1.2 ms``, ``3.0 s``, ``2h5m``."""
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
    return duration_text(value_s)


def age(value_s: float) -> str:
    """Return a duration until now: ``12s``, ``4m``. Clocks differ, so it may be below 0."""
    return duration_text(value_s) if value_s >= 60 else f"{max(0, int(value_s))}s"


def percent(value: float) -> str:
    """Return a percentage: ``99.9 %``."""
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

    ``low`` and ``high`` are the values at the edges. The path is empty for fewer than two values.
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
        # Points within a level line are omitted, so that the path of a constant value stays equal
        # and need not be sent again.
        if values[index] == value == values[index + 2]:
            continue
        x, y = (at_s - start_s) * across, height - 1 - (value - low) * up
        path.append(f"{'L' if is_pen_down else 'M'}{x:.1f} {y:.1f}")
        is_pen_down = True
    return "".join(path)


class Spark(NamedTuple):
    """A trend: its path, and its smallest and largest value as text."""

    path: str
    range_text: str


def spark(points: Points) -> Spark:
    """Return a trend scaled to its values, so that a small change of a large number is visible."""
    values = [value for _, value in points if value is not None]
    if not values:
        return Spark("", "")
    low, high = min(values), max(values)
    range_text = brief(high) if low == high else f"{brief(low)} \N{EN DASH} {brief(high)}"
    return Spark(line_path(points, 80, 18, low, high), range_text if high else "")


def brief(value: float) -> str:
    """Return a number in few characters: ``12``, ``3.4k``, ``120M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # A value just below the unit would be rounded to 1e+03.
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


RANGES = {"5m": 300.0, "15m": 900.0, "1h": 3600.0, "6h": 21600.0}
RANGE = "15m"

TREND_S = 120.0
MAX_LINES = 8


class ChartLine(NamedTuple):
    """A line of a chart: a quantity, summed over ``keys``. ``column`` is its name in the data."""

    column: str
    label: str
    quantity: str
    keys: Sequence[QueueKey]


class Figure(NamedTuple):
    """A chart with its lines. ``unit`` is that of the values."""

    name: str
    title: str
    unit: str
    lines: Sequence[ChartLine]


class Charts(NamedTuple):
    """The charts of a page. ``source`` is the address of their data.

    ``choices`` are alternatives: a name, an address, and whether the alternative is shown.
    """

    figures: Sequence[Figure]
    choices: Sequence[Sequence[tuple[str, str, bool]]]
    source: str


def figures_of(
    key: QueueKey,
    channels: Sequence[str] = (),
    *,
    is_split: bool = False,
    has_latency: bool = False,
) -> tuple[Figure, ...]:
    """Return the charts of a channel, an nsqd, or a topic with its channels.

    The charts of a topic show sums over its channels, or one line for each of the first
    `MAX_LINES` channels. nsqd measures latency only on request; without it consumers are shown.
    """
    _, topic, channel = key
    all_queues = consumed = [key]
    if topic and not channel:
        consumed = [("", topic, name) for name in channels]
        all_queues = [key, *consumed]

    def figure(
        name: str, title: str, unit: str, *lines: tuple[str, str, Sequence[QueueKey]]
    ) -> Figure:
        if not is_split:
            chart_lines = [
                ChartLine(quantity, label, quantity, keys) for quantity, label, keys in lines
            ]
            return Figure(name, title, unit, chart_lines)
        quantity = "finish" if name == "rates" else lines[0][0]
        chart_lines = [
            ChartLine(f"{quantity} {key[2]}", key[2], quantity, [key])
            for key in consumed[:MAX_LINES]
        ]
        return Figure(name, title, unit, chart_lines)

    depths = [("depth", "waiting", all_queues), ("in_flight", "in flight", consumed)]
    rates = [("ingress", "in" if channel else "published", [key])]
    rates += [("finish", "finished", consumed), ("requeue", "requeued", consumed)]
    return (
        figure("depth", "Depth", "", *depths),
        figure("rates", "Finished a second" if is_split else "Messages a second", "/s", *rates),
        figure("latency", "Latency", "s", ("latency", "from publish to finish", consumed))
        if has_latency
        else figure("clients", "Consumers", "", ("clients", "connected", consumed)),
    )


def range_of(text: str) -> str:
    """Return the name of a range of time, the default for an unknown name."""
    return text if text in RANGES else RANGE


def points_by_column(
    history: History, figures: Sequence[Figure], since_s: float
) -> dict[str, Points]:
    """Return the points of every line, by its column."""
    return {
        line.column: history.series(line.keys, line.quantity, since_s=since_s)
        for figure in figures
        for line in figure.lines
    }


def numbers_of(history: History, figures: Sequence[Figure], range_name: str) -> dict[str, Any]:
    """Return the points of every line over a range, as columns with the times ``t``."""
    lines = points_by_column(history, figures, time.time() - RANGES[range_name])
    columns = {name: dict(points) for name, points in lines.items()}
    times = sorted({at_s for column in columns.values() for at_s in column})
    return {
        "range_s": RANGES[range_name],
        "t": times,
        **{name: [column.get(at_s) for at_s in times] for name, column in columns.items()},
    }


def point_of(history: History, figures: Sequence[Figure], since_s: float) -> dict[str, Any] | None:
    """Return the newest values, for the charts of an open page."""
    point: dict[str, Any] = {}
    for name, points in points_by_column(history, figures, since_s).items():
        if points:
            point["t"], point[name] = points[-1]
    return point or None
