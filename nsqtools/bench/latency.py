"""Latencies: their percentiles, and how they are spread over classes that read well.

Percentiles come from a DDSketch, exact to one percent whatever the number of values. For a picture
the values are also counted in classes with the bounds 1, 2, 5, 10 ... microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from ddsketch import DDSketch

RELATIVE_ACCURACY = 0.01
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

BOUNDS_MS = tuple(round(step * 10.0**power, 3) for power in range(-3, 6) for step in (1, 2, 5))


class Class(NamedTuple):
    """How many ``values`` are above ``low_ms`` and up to ``high_ms``; None means unbounded."""

    low_ms: float
    high_ms: float | None
    values: int


class Latencies:
    """Values in milliseconds. Plain data, which processes send to each other."""

    def __init__(self) -> None:
        self._sketch = DDSketch(RELATIVE_ACCURACY)
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self.count = 0
        self.min_ms = float("inf")
        self.max_ms = 0.0

    def add(self, value_ms: float, count: int = 1) -> None:
        """Enter a value, once or several times."""
        value_ms = max(0.0, value_ms)
        self._sketch.add(value_ms, count)
        self._counts[bisect_left(BOUNDS_MS, value_ms)] += count
        self.count += count
        if value_ms < self.min_ms:
            self.min_ms = value_ms
        if value_ms > self.max_ms:
            self.max_ms = value_ms

    def merge(self, other: Latencies) -> None:
        """Enter everything that ``other`` has."""
        self._sketch.merge(other._sketch)
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.min_ms = min(self.min_ms, other.min_ms)
        self.max_ms = max(self.max_ms, other.max_ms)

    @classmethod
    def merged(cls, parts: Iterable[Latencies]) -> Latencies:
        """All that ``parts`` have."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    @property
    def mean_ms(self) -> float:
        return float(self._sketch.avg) if self.count else 0.0

    def percentile_ms(self, quantile: float) -> float:
        """The value below which the share ``quantile`` of all values lies, within one percent."""
        value = float(self._sketch.get_quantile_value(quantile) or 0.0)
        return min(max(value, self.min_ms), self.max_ms) if self.count else 0.0

    def percentiles_ms(self) -> dict[str, float]:
        """The percentiles that are reported, by name."""
        return {name: self.percentile_ms(quantile) for name, quantile in PERCENTILES.items()}

    def classes(self) -> list[Class]:
        """The classes from the first to the last that has values, empty ones between included."""
        edges: list[float | None] = [0.0, *BOUNDS_MS, None]
        classes = [
            Class(low or 0.0, high, count)
            for (low, high), count in zip(pairwise(edges), self._counts, strict=True)
        ]
        filled = [number for number, each in enumerate(classes) if each.values]
        return classes[filled[0] : filled[-1] + 1] if filled else []
