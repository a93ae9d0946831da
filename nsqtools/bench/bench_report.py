"""What came of a measurement: rates, latencies, whether the counts agree, what was the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nsqtools.bench.bench_plan import BenchMode, BenchPlan
from nsqtools.bench.consuming import ConsumerResult
from nsqtools.bench.latency import Latencies
from nsqtools.bench.publishing import PublisherResult

CLIENT_IS_BUSY = 0.9
"""Of a processor: a Python process does not take much more than one, whatever there are."""

BEHIND_SCHEDULE = 0.95


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
        plan, options = self.plan, self.plan.producer_options
        return {
            "mode": plan.mode.value,
            "nsqds": list(plan.nsqd_tcp_addresses),
            "topic": self.topic,
            "connections": plan.connections,
            "size": {"min": plan.size[0], "max": plan.size[1]},
            "batch": plan.batch,
            "window": options.max_outstanding,
            "max_in_flight": plan.consumer_options.max_in_flight,
            "rate": plan.rate or None,
            "warm_up_s": plan.warm_up_s,
            "transport": transport(plan),
            "seconds": round(self.seconds, 6),
            "messages": self.messages,
            "bytes": self.bytes,
            "messages_per_s": round(self.messages_per_s, 1),
            "bytes_per_s": round(self.bytes_per_s, 1),
            "latency_ms": latency_document(plan.mode, self.latencies),
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


def transport(plan: BenchPlan) -> list[str]:
    """What is between us and nsqd besides TCP."""
    options = plan.producer_options
    return [
        name
        for name, is_on in (
            ("tls", options.tls_v1),
            ("snappy", options.snappy),
            ("deflate", options.deflate),
        )
        if is_on
    ]


def latency_document(mode: BenchMode, latencies: Latencies | None) -> dict[str, Any] | None:
    """Latencies as JSON has them; None where none were measured."""
    if latencies is None:
        return None
    return {
        "of": "message" if mode is BenchMode.E2E else "batch",
        "count": latencies.count,
        "min": round(latencies.min_ms, 4) if latencies.count else 0.0,
        "mean": round(latencies.mean_ms, 4),
        **{name: round(value, 4) for name, value in latencies.percentiles_ms().items()},
        "max": round(latencies.max_ms, 4),
        "classes": [
            {"above": each.low_ms, "up_to": each.high_ms, "count": each.values}
            for each in latencies.classes()
        ],
    }


def merged(results: Sequence[PublisherResult | ConsumerResult]) -> Latencies:
    """The latencies of all workers."""
    return Latencies.merged(result.latencies for result in results)


def cpu_us_per_message(results: Sequence[PublisherResult | ConsumerResult]) -> float:
    """Processor time of all workers of one kind, over the messages that they spent it on."""
    messages = sum(result.cpu_messages for result in results)
    return 1e6 * sum(result.cpu_s for result in results) / messages if messages else 0.0
