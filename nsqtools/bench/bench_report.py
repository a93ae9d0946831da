"""What came of a measurement: rates, latencies, whether the counts agree, what was the limit.

Percentiles come from a DDSketch, exact to one percent whatever the number of values. For a picture
the values are also counted in classes with the bounds 1, 2, 5, 10 ... microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ddsketch import DDSketch

from nsqtools.bench.bench_plan import BenchMode, BenchPlan

RELATIVE_ACCURACY = 0.01
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

BOUNDS_MS = tuple(round(step * 10.0**power, 3) for power in range(-3, 6) for step in (1, 2, 5))

CLIENT_IS_BUSY = 0.9
"""Of a processor: a Python process does not take much more than one, whatever there are."""

BEHIND_SCHEDULE = 0.95


class Class(NamedTuple):
    """How many ``values`` are above ``low_ms`` and up to ``high_ms``; None means unbounded."""

    low_ms: float
    high_ms: float | None
    values: int


class Latencies:
    """Values in milliseconds. Plain data, which processes send to each other."""

    def __init__(self, parts: Iterable[Latencies] = ()) -> None:
        self._sketch = DDSketch(RELATIVE_ACCURACY)
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self.count = 0
        self.min_ms = float("inf")
        self.max_ms = 0.0
        for part in parts:
            self._sketch.merge(part._sketch)
            self._counts = [a + b for a, b in zip(self._counts, part._counts, strict=True)]
            self.count += part.count
            self.min_ms = min(self.min_ms, part.min_ms)
            self.max_ms = max(self.max_ms, part.max_ms)

    def add(self, value_ms: float, count: int = 1) -> None:
        """Enter a value, once or several times."""
        value_ms = max(0.0, value_ms)
        self._sketch.add(value_ms, count)
        self._counts[bisect_left(BOUNDS_MS, value_ms)] += count
        self.count += count
        self.min_ms = min(self.min_ms, value_ms)
        self.max_ms = max(self.max_ms, value_ms)

    def figures_ms(self) -> dict[str, float]:
        """The figures that are reported, by name; all are 0 without values."""
        if not self.count:
            return dict.fromkeys(("min", "mean", *PERCENTILES, "max"), 0.0)
        figures = {"min": self.min_ms, "mean": float(self._sketch.avg)}
        for name, quantile in PERCENTILES.items():
            value = float(self._sketch.get_quantile_value(quantile) or 0.0)
            figures[name] = min(max(value, self.min_ms), self.max_ms)
        return {**figures, "max": self.max_ms}

    def classes(self) -> list[Class]:
        """The classes from the first to the last that has values, empty ones between included."""
        edges: list[float | None] = [0.0, *BOUNDS_MS, None]
        classes = [
            Class(low or 0.0, high, count)
            for (low, high), count in zip(pairwise(edges), self._counts, strict=True)
        ]
        filled = [number for number, each in enumerate(classes) if each.values]
        return classes[filled[0] : filled[-1] + 1] if filled else []


@dataclass(slots=True)
class WorkerResult:
    """What a publisher or a consumer did: all it published or consumed, and of that what was
    measured.

    ``redelivered`` messages had been delivered before. ``began_at`` and ``ended_at`` are monotonic
    times of the first and the last batch that was measured. ``cpu_s`` is the processor time of
    ``cpu_messages``, and ``cpu_share`` that over its duration.
    """

    messages: int = 0
    checksum: int = 0
    redelivered: int = 0
    measured: int = 0
    measured_bytes: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    cpu_messages: int = 0
    cpu_share: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One measurement. ``published`` and ``consumed`` include the warm-up; the rest does not.

    ``client_cpu`` is the processor time of the busiest of our processes over the time that passed,
    and ``machine_cpu`` that of everything on this machine, 1.0 being all processors (None where it
    is not known). ``cpu_us_per_message`` is what a message cost all of our processes, in
    microseconds of processor time.
    """

    plan: BenchPlan
    topic: str
    seconds: float
    messages: int
    bytes: int
    latencies: Latencies | None
    published: int
    consumed: int | None
    redelivered: int
    is_intact: bool
    cpu_us_per_message: float
    client_cpu: float
    machine_cpu: float | None
    interrupted: bool

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def missing(self) -> int:
        """Messages that were published and not consumed."""
        return 0 if self.consumed is None else max(0, self.published - self.consumed)

    @property
    def repeated(self) -> int:
        """Messages that were consumed more than once."""
        return 0 if self.consumed is None else max(0, self.consumed - self.published)

    @property
    def latency_of(self) -> str:
        """What a latency is that of."""
        return "message" if self.plan.mode is BenchMode.E2E else "batch"

    @property
    def limits(self) -> list[str]:
        """What held the figures down, as far as it can be seen from here, in a line each."""
        lines = []
        if self.client_cpu >= CLIENT_IS_BUSY:
            lines.append(
                f"the client was the limit: its busiest process used {self.client_cpu:.0%} of a "
                "processor; add --connections"
            )
        if self.machine_cpu is not None and self.machine_cpu >= CLIENT_IS_BUSY:
            lines.append(
                f"this machine was the limit: its processors were {self.machine_cpu:.0%} busy; "
                "nsqd on another machine would show more"
            )
        asked = self.plan.rate
        if asked and self.messages_per_s < BEHIND_SCHEDULE * asked and not self.interrupted:
            lines.append(f"the rate of {asked:,.0f} messages/s was not reached")
        return lines

    def document(self) -> dict[str, Any]:
        """The report as JSON; times are seconds, but for latencies."""
        plan = self.plan
        latency: dict[str, Any] | None = None
        if self.latencies is not None:
            latency = {"of": self.latency_of, "count": self.latencies.count}
            latency |= {key: round(ms, 4) for key, ms in self.latencies.figures_ms().items()}
            latency["classes"] = [
                {"above": each.low_ms, "up_to": each.high_ms, "count": each.values}
                for each in self.latencies.classes()
            ]
        return {
            "mode": plan.mode.value,
            "nsqds": list(plan.nsqd_tcp_addresses),
            "topic": self.topic,
            "connections": plan.connections,
            "size": {"min": plan.size[0], "max": plan.size[1]},
            "batch": plan.batch,
            "window": plan.producer_options.max_outstanding,
            "max_in_flight": plan.consumer_options.max_in_flight,
            "rate": plan.rate or None,
            "warm_up_s": plan.warm_up_s,
            "transport": plan.transport,
            "seconds": round(self.seconds, 6),
            "messages": self.messages,
            "bytes": self.bytes,
            "messages_per_s": round(self.messages_per_s, 1),
            "bytes_per_s": round(self.bytes_per_s, 1),
            "latency_ms": latency,
            "published": self.published,
            "consumed": self.consumed,
            "redelivered": self.redelivered,
            "missing": self.missing,
            "repeated": self.repeated,
            "intact": self.is_intact,
            "cpu_us_per_message": round(self.cpu_us_per_message, 3),
            "client_cpu": round(self.client_cpu, 3),
            "machine_cpu": None if self.machine_cpu is None else round(self.machine_cpu, 3),
            "limits": self.limits,
            "interrupted": self.interrupted,
        }
