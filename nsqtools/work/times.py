"""A histogram of handling times by topic and outcome."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator

from nsqtools.records.prometheus import Metric, Sample

# Seconds. The steps of Prometheus clients up to 10 s, then as long as messages may be in flight:
# 15 minutes is nsqd's default of -max-msg-timeout.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)


class HandlingTimes:
    """Counts handled messages by time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def record(self, topic: str, outcome: str, seconds: float) -> None:
        """Count a message."""
        index, key = bisect_left(BOUNDS, seconds), (topic, outcome)
        with self._lock:
            if key not in self._counts:
                self._counts[key], self._sums[key] = [0] * (len(BOUNDS) + 1), 0.0
            self._counts[key][index] += 1
            self._sums[key] += seconds

    def total(self, outcome: str) -> int:
        """Return the number of messages with this outcome."""
        with self._lock:
            return sum(sum(counts) for (_, o), counts in self._counts.items() if o == outcome)

    def metric(self) -> Metric:
        """Return the histogram."""
        help = "How long the handler took; outcome error: it raised an exception."
        return Metric("nsq_work_handling_seconds", "histogram", help, list(self._samples()))

    def _samples(self) -> Iterator[Sample]:
        with self._lock:
            counts = {key: (counts.copy(), self._sums[key]) for key, counts in self._counts.items()}
        for (topic, outcome), (by_bound, seconds) in counts.items():
            labels, count = {"topic": topic, "outcome": outcome}, 0
            for bound, number in zip((*BOUNDS, math.inf), by_bound, strict=True):
                count += number
                yield {**labels, "le": f"{bound:g}".replace("inf", "+Inf")}, count, "_bucket"
            yield labels, seconds, "_sum"
            yield labels, count, "_count"
