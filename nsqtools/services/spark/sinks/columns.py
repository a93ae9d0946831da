"""Columns of an Arrow record batch as lists, made without a Python call for each row.

`to_pylist` makes a scalar object for each value; slicing one bytes object by the offsets that Arrow
keeps beside it is several times as fast, and topics, of which there are few, are decoded once each.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqtools.records.envelope import Envelope
from nsqtools.services.spark.dead_letters import NO_ID

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
    topics = None if has_topic else texts(batch.column("topic"))
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

    if not len(array):
        return []
    is_large = array.type in (pyarrow.large_binary(), pyarrow.large_string())
    is_small = array.type in (pyarrow.binary(), pyarrow.string())
    if not (is_large or is_small):  # dictionaries and views: rare enough
        array = array.cast(pyarrow.binary())
    validity, offsets_buffer, data_buffer = array.buffers()
    offsets = memoryview(offsets_buffer).cast("q" if is_large else "i")
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    begin = offsets[0]
    # what a batch shares with others is not copied: only its own range
    data = bytes(memoryview(data_buffer)[begin : offsets[-1]]) if data_buffer else b""
    places = offsets.tolist()
    if begin:
        places = [place - begin for place in places]
    values: list[bytes | None] = [data[start:stop] for start, stop in pairwise(places)]
    if validity is not None and array.null_count:
        for index, is_there in enumerate(array.is_valid().to_pylist()):
            if not is_there:
                values[index] = None
    return values


def texts(array: pyarrow.Array) -> list[str | None]:
    """The values of a column of texts with few different ones."""
    encoded = array.dictionary_encode()
    names: list[str | None] = encoded.dictionary.to_pylist()
    if len(names) == 1 and not array.null_count:
        return names * len(array)
    return [None if place is None else names[place] for place in encoded.indices.to_pylist()]
