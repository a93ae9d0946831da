"""A queued message is the very frame that its next delivery will send; and the ids of new ones.

One ``bytes`` object holds size, frame type, timestamp, attempts, id and body, so a message costs
its wire size plus one object header, all channels of a topic share it until it is requeued, and
delivering it is a join. The attempts in a waiting frame count the delivery that is to come: 1 for
a new message. A disk record holds the attempts made so far, which is one less.

An id is 16 hexadecimal digits of time, node and sequence, increasing within a topic. A tick is 2^20
ns; in each there are 4096 ids. Where nsqd sleeps a millisecond when they run out or the clock goes
back, this generator continues in the next tick: the ids stay unique and increasing, and the loop
never waits. Two topics can produce the same id, as in nsqd.
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
ID_AT = 18
BODY_AT = ID_AT + ID_LENGTH
_SIZE_OVERHEAD = 4 + MIN_MESSAGE_SIZE  # what the size counts besides the body


def new_messages(bodies: Iterable[bytes], ids: Iterable[bytes], timestamp_ns: int) -> list[bytes]:
    """Return one frame a body."""
    middle = _MIDDLE.pack(MESSAGE, timestamp_ns, 1)
    return [
        b"%b%b%b%b" % ((len(body) + _SIZE_OVERHEAD).to_bytes(4, "big"), middle, id_, body)
        for body, id_ in zip(bodies, ids, strict=False)
    ]


def new_message(body: bytes, id_: bytes, timestamp_ns: int) -> bytes:
    """Return one frame."""
    middle = _MIDDLE.pack(MESSAGE, timestamp_ns, 1)
    return b"%b%b%b%b" % ((len(body) + _SIZE_OVERHEAD).to_bytes(4, "big"), middle, id_, body)


def message_ids(messages: list[bytes]) -> list[bytes]:
    """Return the id of each."""
    return [message[ID_AT:BODY_AT] for message in messages]


def timestamp_ns(message: bytes) -> int:
    """Return when it was published."""
    stamp: int = _TIMESTAMP.unpack_from(message, 8)[0]
    return stamp


def attempts_of(message: bytes) -> int:
    """Return the attempts in a frame: for one in flight, those made."""
    attempts: int = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0]
    return attempts


def _add_attempts(message: bytes, difference: int) -> bytes:
    attempts = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0] + difference & 0xFFFF
    return message[:_ATTEMPTS_AT] + _ATTEMPTS.pack(attempts) + message[ID_AT:]


def again(message: bytes) -> bytes:
    """Return a delivered message as the one to queue for the next delivery."""
    return _add_attempts(message, 1)


def to_record(message: bytes) -> bytes:
    """Return a waiting message as the record of a disk queue."""
    if message[_ATTEMPTS_AT:ID_AT] == b"\0\1":  # new, as most are
        return b"%b\0\0%b" % (message[8:_ATTEMPTS_AT], message[ID_AT:])
    return _add_attempts(message, -1)[8:]


def delivered_to_record(message: bytes) -> bytes:
    """Return a message in flight as the record of a disk queue."""
    return message[8:]


def from_record(record: bytes) -> bytes:
    """Return the message to queue for a record of a disk queue."""
    head = (len(record) + 4).to_bytes(4, "big") + MESSAGE.to_bytes(4, "big")
    return _add_attempts(head + record, 1)


_FIRST_TICK = 1288834974288  # nsqd's epoch, in ticks
_PER_TICK = 4096
_SEQUENCES = [b"%03x" % number for number in range(_PER_TICK)]


class MessageIds:
    """The ids of one topic. ``node_id`` is 0 to 1023."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._tick = 0
        self._next = 0  # sequence number in this tick
        self._head, self._head_tick = b"", -1  # the first digits in a tick

    def take_one(self, now_ns: int) -> bytes:
        """Return a new id."""
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick <= self._tick and self._next < _PER_TICK and self._head_tick == self._tick:
            self._next += 1
            return self._head + _SEQUENCES[self._next - 1]
        [id_] = self.take(1, now_ns)
        self._head, self._head_tick = id_[:13], self._tick
        return id_

    def take(self, count: int, now_ns: int) -> list[bytes]:
        """Return ``count`` new ids."""
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick > self._tick:
            self._tick = tick
            self._next = 0
        ids: list[bytes] = []
        while count:
            if self._next == _PER_TICK:
                self._tick += 1
                self._next = 0
            # the last three digits are the sequence number, the rest is the same in a tick
            head = b"%013x" % (self._tick << 10 | self._node_id)
            run = _SEQUENCES[self._next : self._next + count]
            ids += [head + sequence for sequence in run]
            self._next += len(run)
            count -= len(run)
        return ids
