"""Frames, nsqd's direction of the stream: ``int32 size | int32 type | data``, big endian.

`FrameBuffer` buffers the bytes of a socket and has two ways to take frames. `next_frame` takes
one, for negotiation. `take` slices all complete frames in one pass and builds the messages on the
way. One call per read, instead of one per message, is where the speed of the client comes from, and
the reason why its loop is written flat.

Traps: a frame's size counts its type but not itself. A size that spells ``HTTP`` means that the
peer is an HTTP port; without the check the client would wait for 1.2 GB. nsqlookupd's TCP port
refuses clients with a sized text that has no type.

A message, in a frame and in a record of a disk queue: ``int64`` nanoseconds since 1970,
``uint16`` attempts, 16 bytes of hexadecimal id, the body. Attempts are unsigned: old clients that
read them as signed turned 40,000 attempts negative.

Errors: only the three answers to a late FIN, REQ or TOUCH leave the connection open. Every other
``E_*`` code, known or not, is fatal (protocol page, and nsqd/protocol_v2.go). The data of an error
frame is the code, a blank and a text for people. The text may name ids and may change, so only the
code is compared, with one exception: an nsqd that requires TLS mentions it only in the text of
E_INVALID. The text is escaped, because it is logged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from nsqtools.errors import ProtocolError, ServerError, ServerRefused
from nsqtools.protocol.text import escape_line

SURVIVABLE_CODES = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
REFUSING_CODES = frozenset({"E_AUTH_FAILED", "E_AUTH_ERROR", "E_AUTH_FIRST", "E_UNAUTHORIZED"})

_HINTS = {
    "E_AUTH_FIRST": "Set auth_secret (nsq: --auth-secret-file or NSQ_AUTH_SECRET).",
    "E_AUTH_FAILED": "The auth server did not accept the secret, or nsqd could not reach it.",
    "E_UNAUTHORIZED": "The secret does not allow this on this topic and channel.",
    "E_BAD_PROTOCOL": "Is this nsqd's TCP port? nsqlookupd's TCP port answers like this.",
    "E_BAD_BODY": "This is outside nsqd's limits: see its flags, and nsq config show for ours.",
    "E_BAD_MESSAGE": "nsqd's --max-msg-size bounds a message, and an empty message is refused.",
}

_TLS_REQUIRED = "TLS required"
_HINT_TLS = "This nsqd takes TLS only: set tls_v1 (nsq: --tls)."


def decode_error(data: bytes, where: str = "") -> ServerError:
    """Turn the data of an error frame into the error to raise; ``where`` names the peer."""
    code, _, text = escape_line(data.decode("utf-8", "backslashreplace")).partition(" ")
    requires_tls = code == "E_INVALID" and _TLS_REQUIRED in text
    kind = ServerRefused if code in REFUSING_CODES or requires_tls else ServerError
    hint = _HINT_TLS if requires_tls else _HINTS.get(code, "")
    return kind(code, text, fatal=code not in SURVIVABLE_CODES, where=where, hint=hint)


class RequestError(Exception):
    """A refused request, which closes the connection: code and text of the error frame."""

    def __init__(self, code: str, text: str | bytes) -> None:
        super().__init__(code, text)
        self.data = code.encode() + b" " + (text.encode() if isinstance(text, str) else text)


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


RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2

HEARTBEAT: Final = b"_heartbeat_"
OK: Final = b"OK"
CLOSE_WAIT: Final = b"CLOSE_WAIT"

_HEAD = struct.Struct(">II")
_MESSAGE_HEAD = struct.Struct(">IIqH16s")
_MESSAGE_HEAD_SIZE = _MESSAGE_HEAD.size  # 34
_MIN_MESSAGE_FRAME = _MESSAGE_HEAD_SIZE - 4
_SIZE_THAT_SPELLS_HTTP = int.from_bytes(b"HTTP", "big")
_TYPE_THAT_SPELLS_AN_ERROR = int.from_bytes(b"E_BA", "big")  # E_BAD_PROTOCOL
# Responses and errors have less than 1 KiB, so a larger size comes from a peer that is no nsqd.
_MAX_OTHER_FRAME = 1 << 16

M = TypeVar("M")
S = TypeVar("S")


def encode_frame(frame_type: int, data: bytes) -> bytes:
    """Return the frame as nsqd writes it."""
    return _HEAD.pack(len(data) + 4, frame_type) + data


OK_FRAME: Final = encode_frame(RESPONSE, OK)


class FrameBuffer:
    """Received bytes that have not been taken as frames yet.

    ``max_message_frame`` bounds the size field of messages (0: no bound). A larger size raises
    `ProtocolError` immediately, before the buffer waits for the frame. ``is_damaged`` is true after
    `take` returned the frames before bytes that are no frame; its next call raises.
    """

    def __init__(self, max_message_frame: int = 0) -> None:
        self._chunks: list[bytes] = []
        self._length = 0
        self.is_damaged = False
        # With fewer bytes than the next frame needs, nothing is joined: a frame that comes in a
        # thousand reads would be copied a thousand times.
        self._needed = 8
        self._max_message_frame = max_message_frame or 0x7FFFFFFF

    def __len__(self) -> int:
        return self._length

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._chunks.append(data)
        self._length += len(data)

    def take_surplus(self) -> bytes:
        """Remove and return the buffered bytes, which after IDENTIFY belong to the next codec."""
        data = b"".join(self._chunks)
        self._keep(b"")
        return data

    def _keep(self, rest: bytes) -> None:
        self._chunks = [rest] if rest else []
        self._length = len(rest)
        self._needed = 8

    def next_frame(self) -> tuple[int, bytes] | None:
        """Return the next frame as (type, data), or None while it is incomplete.

        Raises `ProtocolError` if the bytes are not a frame.
        """
        if self._length < self._needed:
            return None
        data = b"".join(self._chunks)
        self._keep(data)
        size, frame_type = _HEAD.unpack_from(data)
        self._check_head(size, frame_type)
        if len(data) < 4 + size:
            self._needed = 4 + size
            return None
        self._keep(data[4 + size :])
        return frame_type, data[8 : 4 + size]

    def take(
        self, make: Callable[[S, int, int, bytes, bytes], M], source: S, data: bytes = b""
    ) -> tuple[list[M], list[tuple[int, bytes]]]:
        """Take every complete frame: the messages, and the other frames as (type, data).

        ``data`` is fed first. Each message is built by
        ``make(source, timestamp_ns, attempts, id, body)``. Raises `ProtocolError` for bytes that
        are not frames, but only after the frames before them have been returned: one of them may
        confirm a publish.
        """
        messages: list[M] = []
        others: list[tuple[int, bytes]] = []
        chunks = self._chunks
        if chunks or len(data) < self._needed:
            if data:
                self.feed(data)
            if self._length < self._needed:
                return messages, others
            data = b"".join(chunks)
        end = len(data)
        limit = self._max_message_frame
        unpack = _MESSAGE_HEAD.unpack_from
        position = 0
        needed = 8
        append = messages.append
        while end - position >= _MESSAGE_HEAD_SIZE:
            size, frame_type, timestamp_ns, attempts, message_id = unpack(data, position)
            after = position + 4 + size
            if frame_type != MESSAGE or size < _MIN_MESSAGE_FRAME or size > limit:
                # The frame is of another type, or the bytes are no frame.
                try:
                    self._check_head(size, frame_type)
                except ProtocolError:
                    self.is_damaged = True
                    break
                if after > end:
                    needed = after - position
                    break
                others.append((frame_type, data[position + 8 : after]))
            elif after > end:
                needed = after - position
                break
            else:
                body = data[position + _MESSAGE_HEAD_SIZE : after]
                append(make(source, timestamp_ns, attempts, message_id, body))
            position = after
        if position == end and not chunks:  # Whole frames are usual with many connections.
            return messages, others
        self._keep(data[position:])
        self._needed = needed
        # The remaining bytes are shorter than the head of a message, but may have whole responses.
        if self._length < _MESSAGE_HEAD_SIZE or self.is_damaged:
            try:
                while (frame := self.next_frame()) is not None:
                    others.append(frame)
            except ProtocolError:
                if not (messages or others):
                    raise
                self.is_damaged = True
        return messages, others

    def _check_head(self, size: int, frame_type: int) -> None:
        if size == _SIZE_THAT_SPELLS_HTTP:
            hint = "This is an HTTP port; nsqd's TCP port is usually 4150."
            raise ProtocolError("the peer speaks HTTP", hint=hint)
        if frame_type == _TYPE_THAT_SPELLS_AN_ERROR:
            raise ProtocolError(
                "the peer is not an nsqd (it answers E_BAD_PROTOCOL)",
                hint="nsqlookupd's TCP port answers like this; nsqd's is usually 4150.",
            )
        if size < 4:
            raise ProtocolError(f"frame size {size} is below 4")
        if frame_type > MESSAGE:
            raise ProtocolError(f"unknown frame type {frame_type}")
        if frame_type == MESSAGE and size < _MIN_MESSAGE_FRAME:
            raise ProtocolError(f"message frame of {size} bytes is too short")
        limit = self._max_message_frame if frame_type == MESSAGE else _MAX_OTHER_FRAME
        if size > limit:
            option = " (max_msg_size)" if frame_type == MESSAGE else ""
            raise ProtocolError(f"frame size {size} is above the limit of {limit} bytes{option}")
