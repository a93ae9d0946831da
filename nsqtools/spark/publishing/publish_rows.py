"""Rows as lists, which of them can be published, and which are done. Pure.

Arrow makes the lists, not Python row by row. Spans of rows are sent one after the other and finish
in any order, because parts of them may be refused, halved or sent to another nsqd. A ledger can
only note the *prefix*: the rows from the beginning that are done, without a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqtools.protocol.names import is_valid_name
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.ledger import LedgerEntry
from nsqtools.spark.publishing.row_outcomes import NO_ID

if TYPE_CHECKING:
    import pyarrow

MAX_DEFER_MS = 3_600_000  # nsqd's default for --max-req-timeout

is_topic = lru_cache(maxsize=1024)(is_valid_name)


def refusal(body: bytes | None, topic: str | None, defer_ms: int | None, most_bytes: int) -> str:
    """Why a row cannot be published; ``""`` when it can. ``most_bytes`` is the limit of a body."""
    if topic is None:
        return "the topic is null"
    if not is_topic(topic):
        return f"{topic!r} is not a valid topic"
    if body is None:
        return "the body is null"
    if not body:
        return "the body is empty, which NSQ cannot carry"
    if len(body) > most_bytes:
        return f"{len(body)} bytes are above the limit of {most_bytes}"
    if defer_ms is not None and not 0 <= defer_ms <= MAX_DEFER_MS:
        return f"a delay of {defer_ms} ms is not within 0 and 1h"
    return ""


def fitting(bodies: Sequence[bytes | None], most_bytes: int) -> int:
    """How many bodies from the first go into one batch: one at least."""
    if sum(map(len, filter(None, bodies))) <= most_bytes:
        return len(bodies)
    size = 0
    for count, body in enumerate(bodies):
        size += len(body or b"")
        if count and size > most_bytes:
            return count
    return len(bodies)


class Chunk(NamedTuple):
    """Some rows. ``topics`` is None where all go to the topic of the options, ``defers_ms`` where
    none is deferred; ``message`` makes the envelope of a dead letter, from its place here and its
    topic."""

    bodies: list[bytes | None]
    topics: list[str | None] | None
    defers_ms: list[int | None] | None
    message: Callable[[int, str], Envelope]


def chunk_of(batch: pyarrow.RecordBatch, *, has_topic: bool) -> Chunk:
    """Return the rows of a batch, whose columns `check_columns` has found good.

    With ``has_topic`` the options name one, and a column of topics is not looked at.
    """
    names = batch.schema.names
    bodies = byte_strings(batch.column("body"))
    topics = None if has_topic else batch.column("topic").to_pylist()
    defers = batch.column("defer_ms").to_pylist() if "defer_ms" in names else None

    def message(index: int, topic: str) -> Envelope:
        def value(name: str) -> Any:
            return batch.column(name)[index].as_py() if name in names else None

        id = (value("id") or "").encode()
        return Envelope(
            topic,
            value("nsqd") or "",
            id if len(id) == len(NO_ID) else NO_ID,
            value("ts_ns") or 0,
            value("attempts") or 0,
            bodies[index] or b"",
        )

    return Chunk(bodies, topics, defers, message)


def byte_strings(array: pyarrow.Array) -> list[bytes | None]:
    """The values of a column of binaries or texts, as bytes."""
    import pyarrow

    if not pyarrow.types.is_binary(array.type):
        array = array.cast(pyarrow.large_binary())  # of texts nothing is copied
    values: list[bytes | None] = array.to_pylist()
    return values


@dataclass(slots=True, eq=False)
class RowSpan:
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
    """Continues from ``entry``, which it changes as spans become part of the prefix."""

    def __init__(self, entry: LedgerEntry) -> None:
        self.entry = entry
        self._spans: deque[RowSpan] = deque()

    def begin(self, stop: int, checksum: int) -> RowSpan:
        """The next rows are going to be sent, up to number ``stop``; set their ``pending``."""
        span = RowSpan(stop, checksum)
        self._spans.append(span)
        return span

    def advance(self) -> None:
        """Add the finished spans to the entry."""
        entry = self.entry
        while self._spans and not self._spans[0].pending:
            span = self._spans.popleft()
            entry.done, entry.checksum = span.stop, span.checksum
            entry.rejected += span.rejected
            entry.unknown += span.unknown
            entry.dead_lettered += span.dead_lettered
            for topic, count in span.topics.items():
                entry.topics[topic] = entry.topics.get(topic, 0) + count
