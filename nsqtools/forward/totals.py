"""What a forwarder counts, by the topic that messages came from, and the counts as metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from nsqtools.records.prometheus import Metric


@dataclass(slots=True)
class ForwardTotals:
    """Messages by what became of them. ``repeated`` were sent again although the destination may
    have had them: as many may be there twice. ``failures`` counts tries that failed."""

    received: int = 0
    filtered: int = 0
    delivered: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    requeued: int = 0
    repeated: int = 0
    failures: int = 0
    bytes: int = 0


HELP = {
    "received": "Messages received.",
    "filtered": "Messages that a filter left out, finished.",
    "delivered": "Messages that the destination confirmed, finished.",
    "dead_lettered": "Messages written to the dead letters, finished.",
    "dropped": "Messages that the destination refused and that were dropped as asked, finished.",
    "requeued": "Messages requeued, to be delivered later.",
    "repeated": "Messages sent again although the destination may have had them.",
    "failures": "Tries to deliver that failed.",
    "bytes": "Bytes of the bodies delivered.",
}


class Counters:
    """The counts of each topic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, ForwardTotals] = {}

    def add(self, topic: str, **counts: int) -> None:
        """Add to some counts of a topic."""
        with self._lock:
            totals = self._topics.setdefault(topic, ForwardTotals())
            for name, count in counts.items():
                setattr(totals, name, getattr(totals, name) + count)

    @property
    def totals(self) -> ForwardTotals:
        """All topics together."""
        with self._lock:
            each = [asdict(totals) for totals in self._topics.values()]
        names = [field.name for field in fields(ForwardTotals)]
        return ForwardTotals(**{name: sum(counts[name] for counts in each) for name in names})

    def metrics(self, held: int, is_failing: bool) -> Iterator[Metric]:
        """The metrics, for /metrics and for a file."""
        with self._lock:
            topics = {topic: asdict(totals) for topic, totals in self._topics.items()}
        for name, help in HELP.items():
            what = name if name in ("failures", "bytes") else f"{name}_messages"
            samples = [({"topic": topic}, counts[name]) for topic, counts in topics.items()]
            yield Metric(f"nsq_forward_{what}_total", "counter", help, samples)
        yield Metric(
            "nsq_forward_held_messages",
            "gauge",
            "Messages on their way or waiting to be sent.",
            [({}, held)],
        )
        yield Metric(
            "nsq_forward_failing", "gauge", "1 while no destination works.", [({}, int(is_failing))]
        )
