"""A queued message is the very frame that its next delivery will send.

One ``bytes`` object holds size, frame type, timestamp, attempts, id and body, so a message costs
its wire size plus one object header, all channels of a topic share it until it is requeued, and
delivering it is a join. The attempts in a waiting frame count the delivery that is to come: 1 for
a new message. A disk record holds the attempts made so far, which is one less.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from nsqtools.protocol.frames import MESSAGE
from nsqtools.protocol.message import ID_LENGTH, MIN_MESSAGE_SIZE

_MIDDLE = struct.Struct(">IqH")  # type, timestamp, attempts: the same for a batch of new messages
_ATTEMPTS = struct.Struct(">H")
_TIMESTAMP = struct.Struct(">q")
_ATTEMPTS_AT = 16
_ID_AT = 18
_BODY_AT = _ID_AT + ID_LENGTH
_FRAME_OVERHEAD = 4 + MIN_MESSAGE_SIZE


def new_messages(bodies: Iterable[bytes], ids: Iterable[bytes], timestamp_ns: int) -> list[bytes]:
    """Return one frame a body."""
    middle = _MIDDLE.pack(MESSAGE, timestamp_ns, 1)
    return [
        b"%b%b%b%b" % ((len(body) + _FRAME_OVERHEAD).to_bytes(4, "big"), middle, id_, body)
        for body, id_ in zip(bodies, ids, strict=False)
    ]


def message_ids(messages: list[bytes]) -> list[bytes]:
    """Return the id of each."""
    return [message[_ID_AT:_BODY_AT] for message in messages]


def timestamp_ns(message: bytes) -> int:
    """Return when it was published."""
    stamp: int = _TIMESTAMP.unpack_from(message, 8)[0]
    return stamp


def _add_attempts(message: bytes, difference: int) -> bytes:
    attempts = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0] + difference & 0xFFFF
    return message[:_ATTEMPTS_AT] + _ATTEMPTS.pack(attempts) + message[_ID_AT:]


def again(message: bytes) -> bytes:
    """Return a delivered message as the one to queue for the next delivery."""
    return _add_attempts(message, 1)


def to_record(message: bytes) -> bytes:
    """Return a waiting message as the record of a disk queue."""
    return _add_attempts(message, -1)[8:]


def delivered_to_record(message: bytes) -> bytes:
    """Return a message in flight as the record of a disk queue."""
    return message[8:]


def from_record(record: bytes) -> bytes:
    """Return the message to queue for a record of a disk queue."""
    head = (len(record) + 4).to_bytes(4, "big") + MESSAGE.to_bytes(4, "big")
    return _add_attempts(head + record, 1)
