"""What is wrong with a cluster, in lines that say what to look at. Pure.

From one sample: daemons that do not answer or are not well, messages that nobody takes, messages
that time out, and what is paused. The worst stand first, the deepest queues within each kind.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample


class Severity(enum.IntEnum):
    """How bad it is; the worst first."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Problem:
    """A line. ``topic`` and ``channel`` are those it is about, ``node`` a daemon."""

    severity: Severity
    kind: str
    text: str
    topic: str = ""
    channel: str = ""
    node: str = ""
    weight: int = 0


def problems_of(sample: Sample, totals: Sequence[QueueRow]) -> list[Problem]:
    """Return what is wrong, the worst first. ``totals`` are those of the sample."""
    found = [*_of_daemons(sample), *_of_queues(totals)]
    found.sort(key=lambda problem: (problem.severity, -problem.weight, problem.topic))
    return found


def _of_daemons(sample: Sample) -> Iterator[Problem]:
    for failure in sample.failures:
        yield Problem(
            Severity.CRITICAL, "no answer", str(failure.error), node=failure.address, weight=1 << 62
        )
    for report in sample.reports:
        if report.stats.health not in ("OK", ""):
            yield Problem(
                Severity.CRITICAL,
                "not well",
                f"nsqd says: {report.stats.health}",
                node=report.address,
                weight=1 << 61,
            )


def _of_queues(totals: Iterable[QueueRow]) -> Iterator[Problem]:
    rows = list(totals)
    with_channels = {row.topic for row in rows if row.channel}
    for row in rows:
        ingress = row.rates.ingress if row.rates else 0.0
        if row.channel and row.depth and not row.clients and not row.paused:
            grows = ingress > 0
            yield Problem(
                Severity.CRITICAL if grows else Severity.WARNING,
                "no consumers",
                f"{row.depth:,} messages wait"
                + (f" and {_rate(ingress)} come every second" if grows else ""),
                row.topic,
                row.channel,
                weight=row.depth,
            )
        elif not row.channel and row.depth and row.topic not in with_channels:
            yield Problem(
                Severity.WARNING,
                "no channels",
                f"{row.depth:,} messages wait for the first channel",
                row.topic,
                weight=row.depth,
            )
        if row.rates and row.rates.timed_out > 0:
            yield Problem(
                Severity.WARNING,
                "timeouts",
                f"{_rate(row.rates.timed_out)} messages time out every second, "
                f"{row.timed_out:,} so far",
                row.topic,
                row.channel,
                weight=row.timed_out,
            )
        if row.paused:
            yield Problem(
                Severity.NOTE,
                "paused",
                f"{row.depth:,} messages wait",
                row.topic,
                row.channel,
                weight=row.depth,
            )


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 10 else f"{per_s:,.0f}"
