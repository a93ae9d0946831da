"""The commands of protocol V2, client to nsqd: one frozen value each.

``encode()`` gives the bytes for the wire. A line ends in a newline; bodies have a big-endian int32
size in front. Names are checked where they enter the program (`names`), sizes by the caller, who
knows the server's limits.

The answers to messages go out by the hundred, so there are also functions that encode a whole
batch in one join.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_COUNTS = struct.Struct(">II")

SIZE_BYTES = 4
"""Of the count of an MPUB, and of the size before each of its messages."""

MAGIC_V2 = b"  V2"

MAX_DELAY_S = 3600.0
"""nsqd's default --max-req-timeout: the longest delay of DPUB and REQ. Beyond it nsqd before 1.2
closes the connection."""

NOP = b"NOP\n"
CLS = b"CLS\n"


def pack_size(number: int) -> bytes:
    """Return a size or count as the int32 of the wire."""
    return number.to_bytes(4, "big")


def sized(body: bytes) -> bytes:
    """Return the body preceded by its size."""
    return len(body).to_bytes(4, "big") + body


@dataclass(frozen=True, slots=True)
class Identify:
    """``IDENTIFY``: who the client is and which features it asks for, as JSON (`identify`)."""

    body: bytes

    def encode(self) -> bytes:
        return b"IDENTIFY\n" + sized(self.body)


@dataclass(frozen=True, slots=True)
class Auth:
    """``AUTH``: the secret that nsqd passes to its auth servers."""

    secret: bytes

    def encode(self) -> bytes:
        return b"AUTH\n" + sized(self.secret)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """``SUB``: consume a channel of a topic; both are created when they do not exist."""

    topic: str
    channel: str

    def encode(self) -> bytes:
        return b"SUB %b %b\n" % (self.topic.encode(), self.channel.encode())


@dataclass(frozen=True, slots=True)
class Publish:
    """``PUB``: one message."""

    topic: str
    body: bytes

    def encode(self) -> bytes:
        return b"PUB %b\n" % self.topic.encode() + sized(self.body)


@dataclass(frozen=True, slots=True)
class DeferredPublish:
    """``DPUB``: one message, delivered to channels after ``defer_ms`` milliseconds."""

    topic: str
    defer_ms: int
    body: bytes

    def encode(self) -> bytes:
        return b"DPUB %b %d\n" % (self.topic.encode(), self.defer_ms) + sized(self.body)


@dataclass(frozen=True, slots=True)
class MultiPublish:
    """``MPUB``: several messages, taken all or none."""

    topic: str
    bodies: Sequence[bytes]

    def encode(self) -> bytes:
        count = len(self.bodies)
        lengths = list(map(len, self.bodies))
        packed = {length: pack_size(length) for length in set(lengths)}  # many have the same
        parts = [b""] * (2 * count + 1)
        parts[0] = b"MPUB %b\n" % self.topic.encode() + _COUNTS.pack(mpub_size(lengths), count)
        parts[1::2] = [packed[length] for length in lengths]
        parts[2::2] = self.bodies
        return b"".join(parts)  # a batch is large: one copy of it is enough


@dataclass(frozen=True, slots=True)
class Ready:
    """``RDY``: the most messages that may be in flight to this connection at a time."""

    count: int

    def encode(self) -> bytes:
        return b"RDY %d\n" % self.count


@dataclass(frozen=True, slots=True)
class Finish:
    """``FIN``: the message is finished."""

    id: bytes

    def encode(self) -> bytes:
        return b"FIN %b\n" % self.id


@dataclass(frozen=True, slots=True)
class Requeue:
    """``REQ``: deliver the message again, after ``delay_ms`` milliseconds (0: at once)."""

    id: bytes
    delay_ms: int

    def encode(self) -> bytes:
        return b"REQ %b %d\n" % (self.id, self.delay_ms)


@dataclass(frozen=True, slots=True)
class Touch:
    """``TOUCH``: restart the message's timeout."""

    id: bytes

    def encode(self) -> bytes:
        return b"TOUCH %b\n" % self.id


def encode_finishes(ids: Iterable[bytes]) -> bytes:
    """Return one FIN for each id, in one join. ``ids`` must not be empty."""
    return b"FIN " + b"\nFIN ".join(ids) + b"\n"


def mpub_size(lengths: Sequence[int]) -> int:
    """Return the size that nsqd compares with ``--max-body-size``, from those of the bodies."""
    return SIZE_BYTES + sum(lengths) + SIZE_BYTES * len(lengths)
