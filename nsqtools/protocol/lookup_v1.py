"""Protocol V1, between nsqd and nsqlookupd: lines to it, sized responses back.

A response has no frame type: ``int32 size | data``. Errors are responses, too; their data begins
with ``E_``, and the connection ends with them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nsqtools.errors import ProtocolError
from nsqtools.protocol.commands import sized
from nsqtools.protocol.go_text import go_json

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
    """Read a daemon's JSON; unknown keys are passed over. Raises `ProtocolError`."""
    try:
        document = json.loads(data)
        info = PeerInfo(
            broadcast_address=document.get("broadcast_address") or "",
            hostname=document.get("hostname") or "",
            http_port=document.get("http_port") or 0,
            tcp_port=document.get("tcp_port") or 0,
            version=document.get("version") or "",
        )
    except (ValueError, AttributeError) as exc:
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
    """Return the command that takes a topic or a channel back."""
    return f"UNREGISTER {topic} {channel}".rstrip().encode() + b"\n"


def encode_response(data: bytes) -> bytes:
    """Return the response as nsqlookupd writes it."""
    return sized(data)
