"""End-to-end processing latency: quantiles of the time from publish to FIN, over a rolling window.

As nsqd does, a channel keeps two sketches of half a window each: when half a window is over, the
older one is dropped and a new one takes the samples. An answer merges both.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ddsketch import DDSketch

from nsqtools.protocol.stats import LatencyStats

_RELATIVE_ACCURACY = 0.01
_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 3600.0)


class LatencyCounts:
    """The latency of a few messages of all channels, for /metrics: one in each read of FINs."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, published_ns: int) -> None:
        """Enter a message that is finished now."""
        took_s = max(0.0, (time.time_ns() - published_ns) / 1_000_000_000)
        self._counts[bisect_left(_BOUNDS_S, took_s)] += 1
        self._total_s += took_s

    def shown(self) -> tuple[Sequence[float], Sequence[int], float]:
        """Return the upper bounds in seconds, the counts, and the sum."""
        return _BOUNDS_S, self._counts, self._total_s


class LatencyWindow:
    """The samples of one channel."""

    def __init__(self, percentiles: Sequence[float], window_s: float) -> None:
        self.percentiles = tuple(sorted(percentiles, reverse=True))
        self._half_ns = int(window_s * 1_000_000_000 / 2)
        self._current, self._previous = _sketch(), _sketch()
        self._turns_at_ns = time.time_ns() + self._half_ns

    def add(self, published_ns: Iterable[int]) -> None:
        """Enter messages that are finished now, by the time they were published."""
        now_ns = time.time_ns()
        self._turn(now_ns)
        for timestamp_ns in published_ns:
            self._current.add(max(0, now_ns - timestamp_ns))

    def _turn(self, now_ns: int) -> None:
        overdue_ns = now_ns - self._turns_at_ns
        if overdue_ns < 0:
            return
        self._previous = self._current if overdue_ns < self._half_ns else _sketch()
        self._current = _sketch()
        self._turns_at_ns = now_ns + self._half_ns

    def merge_into(self, sketch: DDSketch) -> None:
        """Add the samples of the last window."""
        self._turn(time.time_ns())
        sketch.merge(self._previous)
        sketch.merge(self._current)


def _sketch() -> DDSketch:
    return DDSketch(_RELATIVE_ACCURACY)


def latency_stats(latencies: Sequence[LatencyWindow]) -> LatencyStats:
    """Summarise a channel, or all channels of a topic."""
    if not latencies:
        return LatencyStats()
    merged = _sketch()
    for latency in latencies:
        latency.merge_into(merged)
    percentiles = [
        (quantile, float(merged.get_quantile_value(quantile) or 0.0))
        for quantile in latencies[0].percentiles
    ]
    return LatencyStats(count=int(merged.count), percentiles=tuple(percentiles))
