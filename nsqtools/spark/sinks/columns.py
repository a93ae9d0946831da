"""Columns of an Arrow record batch as lists, made by Arrow and not by Python row for row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqtools.records.envelope import Envelope
from nsqtools.spark.dead_letters import NO_ID

if TYPE_CHECKING:
    import pyarrow


class Chunk(NamedTuple):
    """Some rows. ``topics`` is None where all go to the topic of the options, ``defers_ms`` where
    none is deferred; ``message`` makes the envelope of a row that is to be put aside, by its place
    here and its topic."""

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
