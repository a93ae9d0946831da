"""IDENTIFY as nsqd reads it: by the rules of Go's decoder, and within bounds.

Durations are in milliseconds, as on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NoReturn

from nsqtools.protocol.go_text import INT32, INT64, go_members
from nsqtools.protocol.requests import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedIdentify:
    """The fields as received; what was absent has Go's zero value."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyLimits:
    """What this nsqd accepts, in milliseconds and bytes."""

    max_heartbeat_interval: int
    min_output_buffer_timeout: int
    max_output_buffer_timeout: int
    max_output_buffer_size: int
    max_msg_timeout: int


_KINDS: dict[str, type | range] = {
    field.name: INT64 if type(field.default) is int else type(field.default)
    for field in fields(ReceivedIdentify)
} | {"sample_rate": INT32}


def decode_identify(body: bytes) -> ReceivedIdentify:
    """Read the body of the command. Raises `RequestError` E_BAD_BODY."""
    try:
        return ReceivedIdentify(**go_members(body, _KINDS))
    except ValueError as exc:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc


def check_identify(identify: ReceivedIdentify, limits: IdentifyLimits) -> None:
    """Refuse values out of bounds, in nsqd's order. Raises `RequestError` E_BAD_BODY."""
    heartbeat = identify.heartbeat_interval
    timeout = identify.output_buffer_timeout
    size = identify.output_buffer_size
    if heartbeat not in (-1, 0) and not 1000 <= heartbeat <= limits.max_heartbeat_interval:
        _refuse(f"heartbeat interval ({heartbeat})")
    allowed = range(limits.min_output_buffer_timeout, limits.max_output_buffer_timeout + 1)
    if timeout not in (-1, 0) and timeout not in allowed:
        _refuse(f"output buffer timeout ({timeout})")
    if size not in (-1, 0) and not 64 <= size <= limits.max_output_buffer_size:
        _refuse(f"output buffer size ({size})")
    if not 0 <= identify.sample_rate <= 99:
        _refuse(f"sample rate ({identify.sample_rate})")
    msg_timeout = identify.msg_timeout
    if msg_timeout and not 1000 <= msg_timeout <= limits.max_msg_timeout:
        _refuse(f"msg timeout ({msg_timeout})")


def _refuse(what: str) -> NoReturn:
    raise RequestError("E_BAD_BODY", f"IDENTIFY {what} is invalid")
