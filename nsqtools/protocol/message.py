"""The layout of a message: what a message frame carries and what a disk queue record stores.

``int64`` nanoseconds since 1970, ``uint16`` attempts, 16 bytes of hexadecimal id, the body.
Attempts are unsigned: the old clients that read them signed turned 40,000 attempts negative.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

ID_LENGTH = 16
HEADER = struct.Struct(">qH16s")
MIN_MESSAGE_SIZE = HEADER.size  # 26: an empty body


class WireMessage(NamedTuple):
    """A message as bytes and numbers, without a connection to answer on."""

    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes

    def encode(self) -> bytes:
        """Return the data of the message's frame."""
        return HEADER.pack(self.timestamp_ns, self.attempts, self.id) + self.body


def decode_message(data: bytes) -> WireMessage:
    """Read the data of a message frame. Raises ``struct.error`` when it has under 26 bytes."""
    timestamp_ns, attempts, message_id = HEADER.unpack_from(data)
    return WireMessage(timestamp_ns, attempts, message_id, data[MIN_MESSAGE_SIZE:])
