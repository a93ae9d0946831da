"""The rows from the beginning of a partition that are done with, without a gap. Pure.

Spans of rows are sent one after the other and end in any order, since parts of them may be refused,
halved or sent to another nsqd. What a ledger can note is only the prefix.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nsqtools.spark.ledger import Entry


@dataclass(slots=True, eq=False)
class Span:
    """Rows up to the number ``stop``, with the checksum there; ``pending`` publishes are under way.

    The counts are what becomes of its rows.
    """

    stop: int
    checksum: int
    pending: int = 0
    rejected: int = 0
    unknown: int = 0
    dead_lettered: int = 0
    topics: dict[str, int] = field(default_factory=dict)


class Prefix:
    """Goes on from ``entry``, which it changes as spans become part of the prefix."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._spans: deque[Span] = deque()

    def begin(self, stop: int, checksum: int) -> Span:
        """The next rows are going to be sent, up to number ``stop``; set their ``pending``."""
        span = Span(stop, checksum)
        self._spans.append(span)
        return span

    def advance(self) -> None:
        """Take in the spans that are done with."""
        entry = self.entry
        while self._spans and not self._spans[0].pending:
            span = self._spans.popleft()
            entry.done, entry.checksum = span.stop, span.checksum
            entry.rejected += span.rejected
            entry.unknown += span.unknown
            entry.dead_lettered += span.dead_lettered
            for topic, count in span.topics.items():
                entry.topics[topic] = entry.topics.get(topic, 0) + count
