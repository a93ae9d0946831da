"""Frames, nsqd's direction of the stream: ``int32 size | int32 type | data``, big endian.

`FrameBuffer` is fed what the socket gave and hands out frames in two ways. `next_frame` is the
readable one, for negotiation. `take` slices everything complete in one pass and builds the
messages on the way: one call per read instead of one per message is where the client's speed
comes from, and why the loop in it is written flat.

Traps: a frame's size counts its type but not itself; a size that spells ``HTTP`` means that the
peer is an HTTP port, and without the check the client would wait for 1.2 GB. nsqlookupd's TCP port
refuses us with a sized text that has no type.

A message, in a frame and in a record of a disk queue: ``int64`` nanoseconds since 1970,
``uint16`` attempts, 16 bytes of hexadecimal id, the body.
Attempts are unsigned: the old clients that read them signed turned 40,000 attempts negative.

Errors: the ``E_*`` codes, which close the connection, and which error each becomes.
Only the three answers to a late FIN, REQ or TOUCH leave the connection open; every other code,
known or not, is fatal (protocol page, and nsqd/protocol_v2.go). A frame's data is the code, a
blank and a text for people: the text may name ids and may change, so only the code is compared. The
one exception is an nsqd that requires TLS, which says so only in the text of E_INVALID. The text is
escaped, because it goes into log lines.
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

_WANTS_TLS = "TLS required"
_HINT_TLS = "This nsqd takes TLS only: set tls_v1 (nsq: --tls)."


def decode_error(data: bytes, where: str = "") -> ServerError:
    """Turn the data of an error frame into the error to raise; ``where`` names the peer."""
    code, _, text = escape_line(data.decode("utf-8", "backslashreplace")).partition(" ")
    wants_tls = code == "E_INVALID" and _WANTS_TLS in text
    kind = ServerRefused if code in REFUSING_CODES or wants_tls else ServerError
    hint = _HINT_TLS if wants_tls else _HINTS.get(code, "")
    return kind(code, text, fatal=code not in SURVIVABLE_CODES, where=where, hint=hint)


class RequestError(Exception):
    """A request that is refused, and the connection with it: code and text of the error frame."""

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
_MAX_OTHER_FRAME = 1 << 16  # responses and errors are small, whatever messages are

M = TypeVar("M")
S = TypeVar("S")


def encode_frame(frame_type: int, data: bytes) -> bytes:
    """Return the frame as nsqd writes it."""
    return _HEAD.pack(len(data) + 4, frame_type) + data


class FrameBuffer:
    """Bytes received and not yet taken as frames.

    ``max_message_frame`` bounds the size field of messages (0: no bound); a larger one is a
    `ProtocolError` before a byte of it is waited for. ``is_damaged`` says that `take` returned what
    came before bytes that are no frame, and that its next call raises.
    """

    def __init__(self, max_message_frame: int = 0) -> None:
        self._chunks: list[bytes] = []
        self._length = 0
        self.is_damaged = False
        self._wanted = 8  # bytes that the next frame is known to need: below it nothing is joined
        self._max_message_frame = max_message_frame or 0x7FFFFFFF

    def __len__(self) -> int:
        return self._length

    def feed(self, data: bytes) -> None:
        """Append what was read."""
        self._chunks.append(data)
        self._length += len(data)

    def take_surplus(self) -> bytes:
        """Return and forget what is left: after IDENTIFY it belongs to the next layer's decoder."""
        data = b"".join(self._chunks)
        self._keep(b"")
        return data

    def _keep(self, rest: bytes) -> None:
        self._chunks = [rest] if rest else []
        self._length = len(rest)
        self._wanted = 8

    def next_frame(self) -> tuple[int, bytes] | None:
        """Return the next frame as (type, data), or None while it is incomplete.

        Raises `ProtocolError` if the bytes are not a frame.
        """
        if self._length < self._wanted:
            return None
        data = b"".join(self._chunks)
        self._keep(data)
        size, frame_type = _HEAD.unpack_from(data)
        self._check_head(size, frame_type)
        if len(data) < 4 + size:
            self._wanted = 4 + size
            return None
        self._keep(data[4 + size :])
        return frame_type, data[8 : 4 + size]

    def take(
        self, make: Callable[[S, int, int, bytes, bytes], M], source: S, data: bytes = b""
    ) -> tuple[list[M], list[tuple[int, bytes]]]:
        """Take every complete frame: the messages, and the other frames as (type, data).

        ``data`` is what was read since, as if it were fed before.

        Each message is built by ``make(source, timestamp_ns, attempts, id, body)``. Raises
        `ProtocolError` if the bytes are not frames. What came before them is returned first: it may
        confirm a publish.
        """
        messages: list[M] = []
        others: list[tuple[int, bytes]] = []
        chunks = self._chunks
        if chunks or len(data) < self._wanted:
            if data:
                self.feed(data)
            if self._length < self._wanted:
                return messages, others
            data = b"".join(chunks)
        end = len(data)
        limit = self._max_message_frame
        unpack = _MESSAGE_HEAD.unpack_from
        position = 0
        wanted = 8
        append = messages.append
        while end - position >= _MESSAGE_HEAD_SIZE:
            size, frame_type, timestamp_ns, attempts, message_id = unpack(data, position)
            after = position + 4 + size
            if frame_type != MESSAGE or size < _MIN_MESSAGE_FRAME or size > limit:
                # another frame, or none at all
                try:
                    self._check_head(size, frame_type)
                except ProtocolError:
                    self.is_damaged = True
                    break
                if after > end:
                    wanted = after - position
                    break
                others.append((frame_type, data[position + 8 : after]))
            elif after > end:
                wanted = after - position
                break
            else:
                body = data[position + _MESSAGE_HEAD_SIZE : after]
                append(make(source, timestamp_ns, attempts, message_id, body))
            position = after
        if position == end and not chunks:  # whole messages: usual with many connections
            return messages, others
        self._keep(data[position:])
        self._wanted = wanted
        # Fewer bytes are left than a message's head; whole responses can still be among them.
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
