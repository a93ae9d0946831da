"""Protocol V1 of nsqd and nsqlookupd, for both sides: lines to nsqlookupd, sized responses back.

A response has no frame type: ``int32 size | data``. Errors are responses, too; their data begins
with ``E_``, and the connection ends with them.

The readers of nsqlookupd work as those of `requests`: a value and the position after it,
`RequestError` for what is refused, in nsqlookupd's own words, `Incomplete` until the bytes are
there. Traps: nsqlookupd trims a line before it splits it at single blanks, quotes names in single
quotes, and believes the size of IDENTIFY whatever it is. A size that no nsqd sends is refused here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nsqtools.errors import ProtocolError
from nsqtools.protocol.commands import sized
from nsqtools.protocol.frames import RequestError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.requests import read_body, read_line
from nsqtools.protocol.text import INT64, go_json, go_members

MAGIC_V1 = b"  V1"
PING = b"PING\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """Who a daemon says it is; the fields of the JSON in Go's order."""

    broadcast_address: str
    hostname: str = ""
    http_port: int
    tcp_port: int
    version: str

    def encode(self) -> bytes:
        """Return the JSON: the body of IDENTIFY, and nsqlookupd's answer to it."""
        return go_json(asdict(self))


def decode_peer_info(data: bytes) -> PeerInfo:
    """Read a daemon's JSON; unknown keys are ignored. Raises `ProtocolError`."""
    try:
        document = json.loads(data)
        info = PeerInfo(
            broadcast_address=document.get("broadcast_address") or "",
            hostname=document.get("hostname") or "",
            http_port=document.get("http_port") or 0,
            tcp_port=document.get("tcp_port") or 0,
            version=document.get("version") or "",
        )
    except (ValueError, AttributeError, RecursionError) as exc:
        raise ProtocolError(f"no description of a daemon: {data[:60]!r}") from exc
    texts = (info.broadcast_address, info.hostname, info.version)
    ports = (info.http_port, info.tcp_port)
    if not all(type(text) is str for text in texts) or not all(type(p) is int for p in ports):
        raise ProtocolError(f"a field has the wrong type: {data[:60]!r}")
    return info


def encode_identify(info: PeerInfo) -> bytes:
    """Return the IDENTIFY command."""
    return b"IDENTIFY\n" + sized(info.encode())


def encode_register(topic: str, channel: str = "") -> bytes:
    """Return the command that announces a topic or a channel."""
    return f"REGISTER {topic} {channel}".rstrip().encode() + b"\n"


def encode_unregister(topic: str, channel: str = "") -> bytes:
    """Return the command that withdraws a topic or a channel."""
    return f"UNREGISTER {topic} {channel}".rstrip().encode() + b"\n"


def encode_response(data: bytes) -> bytes:
    """Return the response as nsqlookupd writes it."""
    return sized(data)


MAX_IDENTIFY_SIZE = 1 << 16  # nsqd sends some 150 bytes

_KINDS: dict[str, type | range] = {
    "remote_address": str,  # nsqlookupd reads it, and puts the real one in its place
    "hostname": str,
    "broadcast_address": str,
    "tcp_port": INT64,
    "http_port": INT64,
    "version": str,
}


def read_words(data: bytes, position: int) -> tuple[list[bytes], int]:
    """Split the command line at ``position`` into words, at least one."""
    words, after = read_line(data, position)
    return b" ".join(words).strip().split(b" "), after


def read_identify(data: bytes, position: int, start: int) -> tuple[PeerInfo, int]:
    """Read the body of IDENTIFY; ``start`` is where the command began."""
    body, position = read_body(
        data, position, start, "IDENTIFY", MAX_IDENTIFY_SIZE, min_body_size=0
    )
    try:
        members = go_members(body, _KINDS)
    except ValueError as exc:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc
    info = PeerInfo(
        broadcast_address=members.get("broadcast_address", ""),
        hostname=members.get("hostname", ""),
        http_port=members.get("http_port", 0),
        tcp_port=members.get("tcp_port", 0),
        version=members.get("version", ""),
    )
    if not (info.broadcast_address and info.http_port and info.tcp_port and info.version):
        raise RequestError("E_BAD_BODY", "IDENTIFY missing fields")
    return info, position


def topic_and_channel(words: list[bytes]) -> tuple[str, str]:
    """Check the parameters of REGISTER and UNREGISTER; the channel may be ``""``."""
    command = words[0]
    if len(words) < 2:
        raise RequestError("E_INVALID", command + b" insufficient number of params")
    topic = _name("E_BAD_TOPIC", command + b" topic", words[1])
    channel = words[2] if len(words) > 2 else b""
    return topic, _name("E_BAD_CHANNEL", command + b" channel", channel) if channel else ""


def _name(code: str, what: bytes, word: bytes) -> str:
    name = word.decode("latin-1")
    if not is_valid_name(name):
        raise RequestError(code, what + b" name '" + word + b"' is not valid")
    return name
