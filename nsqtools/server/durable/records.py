"""What stands in the durable log: blocks with a checksum, and records in them. Pure.

A block is what was written at once: its length, the CRC-32 of its payload, the payload. A log ends
where a block is cut off or damaged. A record is its kind (one byte), the length of its data, and
its data. Queues have numbers, which are never used again; a queue that was emptied gets a new one.

The records may be read in any order but for two things: `QueueBegins` voids what stood before it
for its queue, and `Dropped` what stands anywhere. So what a checkpoint keeps may be written while
the queue goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

_BLOCK = struct.Struct(">II")
_RECORD = struct.Struct(">BI")
_QUEUE = struct.Struct(">IqQQQQ")
_KEPT = struct.Struct(">IBq")
_TARGETS = struct.Struct(">qH")
_DELIVERED = struct.Struct(">IQQ")
_DEFERRED = struct.Struct(">IqH16s")
_NUMBER = struct.Struct(">I")
_ATTEMPT = struct.Struct(">H16s")  # attempts and id, as they stand in a message frame

_ID_SIZE = 16


class Stage(IntEnum):
    """Where a message is, in the order in which these follow each other in one attempt."""

    WAITING = 0
    IN_FLIGHT = 1
    DEFERRED = 2


class QueueBegins(NamedTuple):
    """A queue is new, or stands here with these positions on disk and what is `Kept`."""

    number: int
    depth: int
    read_file: int
    read_position: int
    write_file: int
    write_position: int
    name: str


class Published(NamedTuple):
    """New messages for queues; ``due_ns`` is 0 or when they may be delivered."""

    due_ns: int
    numbers: tuple[int, ...]
    frames: bytes


class Kept(NamedTuple):
    """Messages that were in a queue's memory when a checkpoint was made.

    The attempts in the frames are those made when they are in flight, and else count the next one.
    """

    number: int
    stage: Stage
    due_ns: int
    frames: bytes


class Delivered(NamedTuple):
    """Messages were delivered; the disk has been read up to here. ``attempts`` are packed."""

    number: int
    read_file: int
    read_position: int
    attempts: bytes

    def each(self) -> Iterator[tuple[int, bytes]]:
        """Yield the attempts and the id of each message."""
        yield from _ATTEMPT.iter_unpack(self.attempts)


class Deferred(NamedTuple):
    """A message was given back, to be delivered at ``due_ns`` or later."""

    number: int
    due_ns: int
    attempts: int
    message_id: bytes


class Finished(NamedTuple):
    """Messages are done; ``ids`` are joined."""

    number: int
    ids: bytes

    def each(self) -> Iterator[bytes]:
        """Yield the ids."""
        for at in range(0, len(self.ids), _ID_SIZE):
            yield self.ids[at : at + _ID_SIZE]


class Dropped(NamedTuple):
    """A queue was emptied or deleted."""

    number: int


Record = QueueBegins | Published | Kept | Delivered | Deferred | Finished | Dropped

_KINDS: tuple[type[Record], ...] = (
    QueueBegins,
    Published,
    Kept,
    Delivered,
    Deferred,
    Finished,
    Dropped,
)


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record."""
    data = _encode(record)
    return _RECORD.pack(_KINDS.index(type(record)), len(data)) + data


def _encode(record: Record) -> bytes:
    match record:
        case QueueBegins(name=name):
            return _QUEUE.pack(*record[:6]) + name.encode()
        case Published(due_ns, numbers, frames):
            head = _TARGETS.pack(due_ns, len(numbers))
            return b"%b%b%b" % (head, struct.pack(f">{len(numbers)}I", *numbers), frames)
        case Kept(number, stage, due_ns, frames):
            return _KEPT.pack(number, stage, due_ns) + frames
        case Delivered(number, read_file, read_position, attempts):
            return _DELIVERED.pack(number, read_file, read_position) + attempts
        case Deferred():
            return _DEFERRED.pack(*record)
        case Finished(number, ids):
            return _NUMBER.pack(number) + ids
        case Dropped(number):
            return _NUMBER.pack(number)


def _decode(kind: int, data: bytes) -> Record:
    match _KINDS[kind]:
        case cls if cls is QueueBegins:
            return QueueBegins._make((*_QUEUE.unpack_from(data), data[_QUEUE.size :].decode()))
        case cls if cls is Published:
            due_ns, count = _TARGETS.unpack_from(data)
            numbers = struct.unpack_from(f">{count}I", data, _TARGETS.size)
            return Published(due_ns, numbers, data[_TARGETS.size + 4 * count :])
        case cls if cls is Kept:
            number, stage, due_ns = _KEPT.unpack_from(data)
            return Kept(number, Stage(stage), due_ns, data[_KEPT.size :])
        case cls if cls is Delivered:
            return Delivered._make((*_DELIVERED.unpack_from(data), data[_DELIVERED.size :]))
        case cls if cls is Deferred:
            return Deferred(*_DEFERRED.unpack(data))
        case cls if cls is Finished:
            return Finished._make((*_NUMBER.unpack_from(data), data[_NUMBER.size :]))
        case _:
            return Dropped(*_NUMBER.unpack(data))


def encode_block(records: Sequence[bytes]) -> bytes:
    """Return the bytes to write for encoded records."""
    payload = b"".join(records)
    return _BLOCK.pack(len(payload), crc32(payload)) + payload


def decode_blocks(content: bytes | memoryview) -> tuple[list[Record], int]:
    """Return the records of whole blocks, and how many bytes those take."""
    records: list[Record] = []
    position = 0
    view = memoryview(content)
    while position + _BLOCK.size <= len(view):
        length, checksum = _BLOCK.unpack_from(view, position)
        after = position + _BLOCK.size + length
        payload = view[position + _BLOCK.size : after]
        if not length or after > len(view) or crc32(payload) != checksum:
            break
        records += _records(payload)
        position = after
    return records, position


def _records(payload: memoryview) -> Iterator[Record]:
    position = 0
    while position < len(payload):
        kind, length = _RECORD.unpack_from(payload, position)
        position += _RECORD.size
        yield _decode(kind, bytes(payload[position : position + length]))
        position += length


def attempts_of(messages: Iterable[bytes]) -> bytes:
    """Return attempts and ids of message frames, as `Delivered` holds them."""
    return b"".join([message[16:34] for message in messages])
