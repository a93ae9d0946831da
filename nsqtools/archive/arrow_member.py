"""Members of messages in Arrow columns: the logs of ``nsq to-file --store parquet|delta``.

A log is written once, read once and removed, so it is encoded at the least cost: about a third of
that of JSON, in both directions. A member is a head and an Arrow IPC stream:

    8 bytes   `MAGIC`
    8 bytes   the size of the stream, little-endian
    4 bytes   the CRC-32 of the size and the stream, little-endian
    4 bytes   zero
    stream    the schema `SCHEMA`, record batches, and the end of the stream

The magic begins as gzip does, and continues with a method that gzip does not have. So a program
that does not know the format, such as zcat or nsqtools 0.3.0, reports damage and returns no text.

All readers see a member as a compressed piece of text, which has one line for each message
(`MemberDecoder`). Landing reads the columns (`read_member_batches`). Both verify the checksum
first. pyarrow is imported at the first use.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from nsqtools.records.envelope import Envelope, MessageLike, decode, encode_many

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow

    Checksum = Callable[..., int]

MAGIC = b"\x1f\x8bARROW1"
_HEAD = struct.Struct("<8sQI4x")
_SIZE = struct.Struct("<Q")
MAX_BATCH_BYTES = 1 << 28
"""Bytes of bodies in a record batch, whose offsets have 32 bits."""
TEXT_ROWS = 1000
"""Messages whose text is made at a time."""


class ArrowMemberError(ValueError):
    """The bytes of a member have changed, or are not the columns of messages."""


@cache
def arrow_schema() -> pyarrow.Schema:
    """Return the columns. The identity of a message is (topic, nsqd, id)."""
    import pyarrow

    return pyarrow.schema(
        [
            pyarrow.field("topic", pyarrow.string(), nullable=False),
            pyarrow.field("nsqd", pyarrow.string(), nullable=False),
            pyarrow.field("id", pyarrow.binary(16), nullable=False),
            pyarrow.field("ts_ns", pyarrow.int64(), nullable=False),
            pyarrow.field("attempts", pyarrow.uint16(), nullable=False),
            pyarrow.field("body", pyarrow.binary(), nullable=False),
        ]
    )


# -- writing ------------------------------------------------------------------------------------


def encode_batch(topic: str, nsqd: str, messages: Sequence[MessageLike]) -> bytes:
    """Return messages as record batches, for `ArrowMember.compress`."""
    import pyarrow

    bodies = [message.body for message in messages]
    half = len(bodies) // 2
    if half and sum(map(len, bodies)) > MAX_BATCH_BYTES:
        parts = messages[:half], messages[half:]
        return b"".join(encode_batch(topic, nsqd, part) for part in parts)
    columns = [
        pyarrow.repeat(topic, len(bodies)),
        pyarrow.repeat(nsqd, len(bodies)),
        pyarrow.array([message.id for message in messages], pyarrow.binary(16)),
        pyarrow.array([message.timestamp_ns for message in messages], pyarrow.int64()),
        pyarrow.array([message.attempts for message in messages], pyarrow.uint16()),
        pyarrow.array(bodies, pyarrow.binary()),
    ]
    batch = pyarrow.RecordBatch.from_arrays(columns, schema=arrow_schema())
    return batch.serialize().to_pybytes()  # type: ignore[no-any-return]


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowMember:
    """A compressor of record batches, which makes one member of them."""

    def __init__(self, checksum: Checksum) -> None:
        self._checksum = checksum
        self._parts = [arrow_schema().serialize().to_pybytes()]

    def compress(self, data: bytes, /) -> bytes:
        """Add record batches of `encode_batch`."""
        self._parts.append(data)
        return b""

    def flush(self) -> bytes:
        """Return the member."""
        stream = b"".join([*self._parts, _END_OF_STREAM])
        checksum = self._checksum(stream, self._checksum(_SIZE.pack(len(stream))))
        return _HEAD.pack(MAGIC, len(stream), checksum) + stream


class ArrowTextMember(ArrowMember):
    """A compressor of text: of complete lines that are messages."""

    def __init__(self, checksum: Checksum) -> None:
        super().__init__(checksum)
        self._text: list[bytes] = []

    def compress(self, data: bytes, /) -> bytes:
        """Add text, which may end within a line."""
        self._text.append(data)
        return b""

    def flush(self) -> bytes:
        """Return the member. Raises ``ValueError`` if a line is not a message."""
        messages = map(decode, filter(None, b"".join(self._text).split(b"\n")))
        for (topic, nsqd), rows in itertools.groupby(messages, lambda row: (row.topic, row.nsqd)):
            super().compress(encode_batch(topic, nsqd, list(rows)))
        return super().flush()


# -- reading ------------------------------------------------------------------------------------


def read_member_batches(data: bytes, checksum: Checksum) -> list[pyarrow.RecordBatch]:
    """Return the columns of a complete member. Raises `ArrowMemberError`."""
    stream = memoryview(data)[_HEAD.size :]
    if len(data) < _HEAD.size or _stream_size(data) != len(stream):
        raise ArrowMemberError("it does not end where it should")
    return list(_read_stream(data, stream, checksum))


def _stream_size(head: bytes | bytearray) -> int:
    magic, size, _ = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise ArrowMemberError("it does not begin like a member")
    return int(size)


def _read_stream(
    head: bytes | bytearray, stream: bytes | memoryview, checksum: Checksum
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    _, size, expected = _HEAD.unpack_from(head)
    if checksum(stream, checksum(_SIZE.pack(size))) != expected or any(head[20 : _HEAD.size]):
        raise ArrowMemberError("its checksum differs")
    try:
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(stream)) as batches:
            if batches.schema != arrow_schema():
                raise ArrowMemberError("its columns are not those of messages")
            for batch in batches:
                batch.validate(full=True)
                if any(column.null_count for column in batch.columns):
                    raise ArrowMemberError("a message lacks a value")
                yield batch
    except (pyarrow.ArrowException, OSError) as exc:
        raise ArrowMemberError(f"its stream cannot be read: {exc}") from None


class MemberDecoder:
    """Returns a member as text, one line for each message: see `members.Unpacker`.

    It has the attributes of Python's decompressors. No text is returned before the checksum has
    been verified.
    """

    def __init__(self, checksum: Checksum) -> None:
        self.eof = False
        self.needs_input = True
        self.unused_data = b""
        self._checksum = checksum
        self._data = bytearray()
        self._texts: Iterator[bytes] | None = None
        self._text = b""

    def decompress(self, data: bytes, limit: int) -> bytes:
        """Return at most ``limit`` bytes of text. Raises `ArrowMemberError`."""
        if self._texts is None:
            self._data += data
            if not self._has_whole_member():
                return b""
        assert self._texts is not None
        if not self._text:
            self._text = next(self._texts, b"")
        piece, self._text = self._text[:limit], self._text[limit:]
        if not self._text:
            self._text = next(self._texts, b"")
        self.eof = not self._text
        return piece

    def _has_whole_member(self) -> bool:
        size = len(self._data)
        if not self._data.startswith(MAGIC[:size]):
            raise ArrowMemberError("it does not begin like a member")
        if size < _HEAD.size or size < (end := _HEAD.size + _stream_size(self._data)):
            return False
        self.unused_data = bytes(self._data[end:])
        head, stream = self._data[: _HEAD.size], bytes(self._data[_HEAD.size : end])
        self._data.clear()
        self.needs_input = False
        batches = _read_stream(head, stream, self._checksum)
        self._texts = (text for batch in batches for text in _texts_of(batch))
        return True


def _texts_of(batch: pyarrow.RecordBatch) -> Iterator[bytes]:
    for offset in range(0, batch.num_rows, TEXT_ROWS):
        columns: Any = [column.to_pylist() for column in batch.slice(offset, TEXT_ROWS).columns]
        rows = map(Envelope._make, zip(*columns, strict=True))
        for (topic, nsqd), messages in itertools.groupby(rows, lambda row: (row.topic, row.nsqd)):
            yield encode_many(topic, nsqd, messages)
