"""IDENTIFY as nsqd reads it: the JSON rules of Go's decoder, and the bounds of the values.

Keys match in any case, the last duplicate wins, null leaves a field alone, an unknown key is passed
over, an integer must be written as one. Durations are in milliseconds, as on the wire.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from nsqtools.protocol.requests import RequestError

_INT32 = range(-(1 << 31), 1 << 31)
_INT64 = range(-(1 << 63), 1 << 63)


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


_TYPES: dict[str, type] = {field.name: type(field.default) for field in fields(ReceivedIdentify)}


def decode_identify(body: bytes) -> ReceivedIdentify:
    """Read the body of the command. Raises `RequestError` E_BAD_BODY."""
    try:
        pairs = json.loads(
            body.decode("utf-8", "replace"),
            object_pairs_hook=_Pairs,
            parse_constant=_refuse_constant,
        )
        if pairs is None:
            return ReceivedIdentify()
        if not isinstance(pairs, _Pairs):
            raise ValueError("not an object")
        return replace(ReceivedIdentify(), **_known(pairs))
    except (ValueError, RecursionError) as exc:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc


class _Pairs(list[tuple[str, Any]]):
    """The members of an object with their duplicates."""


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _known(pairs: _Pairs) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in pairs:
        name = key if key in _TYPES else key.lower()
        if name not in _TYPES or value is None:
            continue
        if type(value) is not _TYPES[name]:
            raise ValueError(f"{name} has the wrong type")
        if type(value) is int and value not in (_INT32 if name == "sample_rate" else _INT64):
            raise ValueError(f"{name} does not fit")
        known[name] = value
    return known


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
