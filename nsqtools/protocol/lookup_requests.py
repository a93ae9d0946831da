"""The receiving side of protocol V1: commands out of bytes, refused with nsqlookupd's own words.

The readers work as those of `requests`: a value and the position after it, `RequestError` for what
is refused, `Incomplete` until the bytes are there. All errors of this protocol are fatal.

Traps: nsqlookupd trims a line before it splits it at single blanks, quotes names in single quotes,
and believes the size of IDENTIFY whatever it is. A size that no nsqd sends is refused here.
"""

from __future__ import annotations

from nsqtools.protocol.go_text import INT64, go_members
from nsqtools.protocol.lookup_v1 import PeerInfo
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.requests import RequestError, read_body, read_line

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
