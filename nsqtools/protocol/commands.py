"""The commands of protocol V2, client to nsqd, and IDENTIFY for both sides.

One function for each command returns its bytes. A line ends in a newline; bodies follow a
big-endian int32 size. Names are checked where they enter the program (`names`), and sizes by the
caller, which has the limits of the server. FINs are sent by the hundred, so `encode_finishes`
encodes a batch in one join.

The request of IDENTIFY is JSON with times in milliseconds. The reply is a JSON object when features
were negotiated. An nsqd before 0.2.19 replies plain ``OK``, and the old limits hold. nsqd reads the
request by the rules of Go's decoder: absent fields have Go's zero value in `ReceivedIdentify`.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nsqtools.errors import ProtocolError
from nsqtools.protocol.frames import RequestError
from nsqtools.protocol.text import INT32, INT64, go_members

_COUNTS = struct.Struct(">II")

SIZE_BYTES = 4
"""Length of the count in an MPUB, and of the size before each of its messages."""

MAGIC_V2 = b"  V2"

MAX_DELAY_S = 9e9
"""The longest delay of DPUB and REQ that fits into nsqd's 64 bits of nanoseconds: 285 years.

nsqd accepts delays up to its --max-req-timeout, an hour by default, which it does not announce.
"""

NOP = b"NOP\n"
CLS = b"CLS\n"


def sized(body: bytes) -> bytes:
    """Return the body preceded by its size."""
    return len(body).to_bytes(4, "big") + body


def identify(body: bytes) -> bytes:
    """``IDENTIFY``: who the client is and which features it asks for, as JSON."""
    return b"IDENTIFY\n" + sized(body)


def auth(secret: bytes) -> bytes:
    """``AUTH``: the secret that nsqd passes to its auth servers."""
    return b"AUTH\n" + sized(secret)


def subscribe(topic: str, channel: str) -> bytes:
    """``SUB``: consume a channel of a topic; both are created when they do not exist."""
    return b"SUB %b %b\n" % (topic.encode(), channel.encode())


def publish(topic: str, body: bytes) -> bytes:
    """``PUB``: one message."""
    return b"PUB %b\n%b%b" % (topic.encode(), len(body).to_bytes(4, "big"), body)


def deferred_publish(topic: str, defer_ms: int, body: bytes) -> bytes:
    """``DPUB``: one message, delivered to channels after ``defer_ms`` milliseconds."""
    return b"DPUB %b %d\n" % (topic.encode(), defer_ms) + sized(body)


def multi_publish(topic: str, bodies: Sequence[bytes]) -> bytes:
    """``MPUB``: several messages, taken all or none."""
    count = len(bodies)
    lengths = list(map(len, bodies))
    # Messages of a topic tend to repeat lengths, so each length is packed once.
    packed = {length: length.to_bytes(4, "big") for length in set(lengths)}
    parts = [b""] * (2 * count + 1)
    parts[0] = b"MPUB %b\n" % topic.encode() + _COUNTS.pack(mpub_size(lengths), count)
    parts[1::2] = [packed[length] for length in lengths]
    parts[2::2] = bodies
    return b"".join(parts)  # A batch may have megabytes: join copies it only once.


def ready(count: int) -> bytes:
    """``RDY``: set how many messages may be in flight to this connection."""
    return b"RDY %d\n" % count


def finish(message_id: bytes) -> bytes:
    """``FIN``: finish the message."""
    return b"FIN %b\n" % message_id


def requeue(message_id: bytes, delay_ms: int) -> bytes:
    """``REQ``: deliver the message again after ``delay_ms`` milliseconds (0: immediately)."""
    return b"REQ %b %d\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    """``TOUCH``: restart the message's timeout."""
    return b"TOUCH %b\n" % message_id


def encode_finishes(ids: Iterable[bytes]) -> bytes:
    """Return one FIN for each id, in one join. ``ids`` must not be empty."""
    return b"FIN " + b"\nFIN ".join(ids) + b"\n"


def mpub_size(lengths: Sequence[int]) -> int:
    """Return the size that nsqd compares with ``--max-body-size``, given the lengths of bodies."""
    return SIZE_BYTES + sum(lengths) + SIZE_BYTES * len(lengths)


class IdentifyReply(NamedTuple):
    """The negotiated features. The defaults hold when nsqd answers plain ``OK``.

    Times are in milliseconds. ``tls_v1``, ``snappy`` and ``deflate`` mean "requested and granted":
    a client that did not request a feature receives false even if nsqd has it.
    """

    max_rdy_count: int = 2500
    version: str = ""
    max_msg_timeout: int = 0
    msg_timeout: int = 60_000
    tls_v1: bool = False
    deflate: bool = False
    deflate_level: int = 6
    max_deflate_level: int = 6
    snappy: bool = False
    sample_rate: int = 0
    auth_required: bool = False
    output_buffer_size: int = 0
    output_buffer_timeout: int = 0

    def encode(self) -> bytes:
        """Return the JSON of the reply, keys in nsqd's order."""
        return json.dumps(self._asdict(), separators=(",", ":")).encode()


@functools.lru_cache(maxsize=16)  # the nsqd of a cluster answer alike
def decode_identify_reply(data: bytes) -> IdentifyReply:
    """Read the answer to IDENTIFY. Unknown keys are ignored; raises `ProtocolError`."""
    if data == b"OK":
        return IdentifyReply()
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise ProtocolError(f"the answer to IDENTIFY is neither OK nor JSON: {data[:60]!r}")
    values: dict[str, Any] = {}
    for name, default in IdentifyReply._field_defaults.items():
        value = reply.get(name)
        if value is None:
            continue
        kind = type(default)
        if type(value) is not kind or (kind is int and value not in INT64):
            raise ProtocolError(f"the answer to IDENTIFY has {name}={str(value)[:60]!r}")
        # Texts are logged, so control characters are escaped.
        is_plain = not isinstance(value, str) or value.isprintable()
        values[name] = value if is_plain else ascii(value)[1:-1]
    decoded = IdentifyReply(**values)
    # nsqd before 1.1 grants level 0 for any requested level, and then compresses nothing.
    if not 0 <= decoded.deflate_level <= 9 and decoded.deflate:
        raise ProtocolError(f"nsqd granted deflate at level {decoded.deflate_level}")
    if decoded.max_rdy_count < 1:
        raise ProtocolError(f"nsqd allows RDY {decoded.max_rdy_count} at most")
    if decoded.msg_timeout < 1:
        raise ProtocolError(f"nsqd allows {decoded.msg_timeout} ms for a message")
    return decoded


class ReceivedIdentify(NamedTuple):
    """The fields of a request; absent fields have Go's zero value."""

    client_id: str = ""
    hostname: str = ""
    heartbeat_interval: int = 0
    output_buffer_size: int = 0
    output_buffer_timeout: int = 0
    feature_negotiation: bool = False
    tls_v1: bool = False
    deflate: bool = False
    deflate_level: int = 0
    snappy: bool = False
    sample_rate: int = 0
    user_agent: str = ""
    msg_timeout: int = 0


_KINDS: dict[str, type | range] = {
    name: INT64 if type(default) is int else type(default)
    for name, default in ReceivedIdentify._field_defaults.items()
} | {"sample_rate": INT32}


def decode_identify(body: bytes) -> ReceivedIdentify:
    """Read the body of the command. Raises `RequestError` E_BAD_BODY."""
    try:
        return ReceivedIdentify(**go_members(body, _KINDS))
    except ValueError as exc:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc
