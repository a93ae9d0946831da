"""A row in the numbers that the history keeps. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nsqtools.cluster.history_frames import NAN
from nsqtools.cluster.queue_rows import RESTING, Key, QueueRow

QUANTITIES = (
    *("depth", "in_flight", "deferred", "clients"),
    *("ingress", "egress", "finish", "requeue", "timed_out"),
    "latency",
)
"""What is kept of a queue. The second line are rates, messages a second, and ``requeue`` has those
that timed out in it, as everywhere. ``latency`` is seconds, of the highest percentile of nsqd."""

Values = tuple[float, ...]

UNKNOWN: Values = (NAN,) * len(QUANTITIES)


def values_of(row: QueueRow) -> Values:
    """Return the values of a row, NaN for those that are not known."""
    rates = row.rates
    return (
        row.depth,
        row.in_flight,
        row.deferred,
        row.clients,
        *(
            (NAN,) * 5
            if rates is None
            else (rates.ingress, rates.egress, rates.finish, rates.requeue, rates.timed_out)
        ),
        max(row.latency)[1] if row.latency else NAN,
    )


def sums_of_nodes(rows: Iterable[QueueRow]) -> dict[Key, Values]:
    """Return the values of each nsqd as a whole, and of all together under node "".

    What came in is counted at the topics, everything else at the channels; the depth is that of
    both: no message is in both. Latency is the worst.
    """
    sums: dict[str, _Sum] = {}
    for row in rows:
        total = sums.get(row.node)
        if total is None:
            total = sums[row.node] = _Sum()
        total.add(row)
    found: dict[Key, Values] = {(node, "", ""): total.values() for node, total in sums.items()}
    if found:
        found["", "", ""] = _Sum.together(sums.values()).values()
    return found


class _Sum:
    """The rows of one nsqd, added up. Rates are not known until one of them is."""

    __slots__ = ("counts", "has_rates", "latency", "rates")

    def __init__(self) -> None:
        self.counts = [0, 0, 0, 0]
        self.rates = [0.0] * 5
        self.has_rates = False
        self.latency = NAN

    def add(self, row: QueueRow) -> None:
        counts, rates = self.counts, row.rates
        counts[0] += row.depth
        if rates is not None:
            self.has_rates = True
        if not row.channel:
            if rates is not None:
                self.rates[0] += rates.ingress
            return
        counts[1] += row.in_flight
        counts[2] += row.deferred
        counts[3] += row.clients
        if rates is not None and rates is not RESTING:
            sums = self.rates
            sums[1] += rates.egress
            sums[2] += rates.finish
            sums[3] += rates.requeue
            sums[4] += rates.timed_out
        if row.latency:
            self._note(max(row.latency)[1])

    def _note(self, latency_s: float) -> None:
        if not latency_s <= self.latency:  # NaN is not known yet
            self.latency = latency_s

    @classmethod
    def together(cls, parts: Iterable[_Sum]) -> _Sum:
        """Return the sum of all."""
        total = cls()
        for part in parts:
            total.counts = [
                one + other for one, other in zip(total.counts, part.counts, strict=True)
            ]
            total.rates = [one + other for one, other in zip(total.rates, part.rates, strict=True)]
            total.has_rates = total.has_rates or part.has_rates
            if part.latency == part.latency:
                total._note(part.latency)
        return total

    def values(self) -> Values:
        """Return them in the order of `QUANTITIES`."""
        rates = self.rates if self.has_rates else [NAN] * 5
        return (*self.counts, *rates, self.latency)
