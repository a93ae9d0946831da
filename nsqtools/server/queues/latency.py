"""End-to-end processing latency: quantiles of the time from publish to FIN, over a rolling window.

As nsqd does, a channel keeps two sketches of half a window each: when half a window is over, the
older one is dropped and a new one takes the samples. An answer merges both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ddsketch import DDSketch

from nsqtools.protocol.stats import LatencyStats

_RELATIVE_ACCURACY = 0.01


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
