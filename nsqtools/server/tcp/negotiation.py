"""What a client and this nsqd agree on by IDENTIFY. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.identify import (
    IdentifyLimits,
    IdentifyReply,
    ReceivedIdentify,
    check_identify,
)
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.settings.nsqd_options import NsqdOptions

_DEFAULT_HEARTBEAT_S = 30.0
_DEFAULT_OUTPUT_BUFFER_SIZE = 16384
_DEFAULT_DEFLATE_LEVEL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """The terms of one connection; before IDENTIFY the defaults. Times in seconds.

    ``heartbeat_s`` 0 means no heartbeats, ``output_buffer_timeout_s`` 0 no flush by time.
    ``sample_rate`` 0 is off; nsqd's arithmetic delivers one percent more than the rate says.
    """

    client_id: str
    hostname: str
    user_agent: str = ""
    heartbeat_s: float = _DEFAULT_HEARTBEAT_S
    output_buffer_size: int = _DEFAULT_OUTPUT_BUFFER_SIZE
    output_buffer_timeout_s: float
    sample_rate: int = 0
    msg_timeout_s: float
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = _DEFAULT_DEFLATE_LEVEL


def default_terms(options: NsqdOptions, remote_ip: str) -> Negotiated:
    """Return the terms of a client that has not identified itself."""
    return Negotiated(
        client_id=remote_ip,
        hostname=remote_ip,
        output_buffer_timeout_s=options.output_buffer_timeout,
        msg_timeout_s=options.msg_timeout,
    )


def negotiate(
    terms: Negotiated, identify: ReceivedIdentify, options: NsqdOptions, *, has_tls: bool
) -> Negotiated:
    """Return the new terms. Raises `RequestError` for values out of bounds."""
    check_identify(identify, _limits(options))
    terms = replace(
        terms,
        client_id=identify.client_id,
        hostname=identify.hostname,
        user_agent=identify.user_agent,
        heartbeat_s=_or_off(identify.heartbeat_interval / 1000, terms.heartbeat_s),
        output_buffer_timeout_s=_or_off(
            identify.output_buffer_timeout / 1000, terms.output_buffer_timeout_s
        ),
        output_buffer_size=identify.output_buffer_size or terms.output_buffer_size,
        sample_rate=identify.sample_rate,
        msg_timeout_s=identify.msg_timeout / 1000 or terms.msg_timeout_s,
    )
    if identify.output_buffer_size < 0:  # unbuffered: nothing is left for a timer to flush
        terms = replace(terms, output_buffer_size=1, output_buffer_timeout_s=0.0)
    if not identify.feature_negotiation:
        return terms
    snappy = options.snappy and identify.snappy
    deflate = options.deflate and identify.deflate
    if snappy and deflate:
        raise RequestError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    level = _DEFAULT_DEFLATE_LEVEL
    if deflate and identify.deflate_level > 0:
        level = identify.deflate_level
    return replace(
        terms,
        tls_v1=has_tls and identify.tls_v1,
        snappy=snappy,
        deflate=deflate,
        deflate_level=min(level, options.max_deflate_level),
    )


def _or_off(asked_s: float, present_s: float) -> float:
    if asked_s < 0:
        return 0.0
    return asked_s or present_s


def _limits(options: NsqdOptions) -> IdentifyLimits:
    return IdentifyLimits(
        max_heartbeat_interval=_ms(options.max_heartbeat_interval),
        min_output_buffer_timeout=_ms(options.min_output_buffer_timeout),
        max_output_buffer_timeout=_ms(options.max_output_buffer_timeout),
        max_output_buffer_size=options.max_output_buffer_size,
        max_msg_timeout=_ms(options.max_msg_timeout),
    )


def identify_reply(terms: Negotiated, options: NsqdOptions) -> IdentifyReply:
    """Return the answer to a client that negotiates features."""
    return IdentifyReply(
        max_rdy_count=options.max_rdy_count,
        version=NSQ_VERSION,
        max_msg_timeout=_ms(options.max_msg_timeout),
        msg_timeout=_ms(terms.msg_timeout_s),
        tls_v1=terms.tls_v1,
        deflate=terms.deflate,
        deflate_level=terms.deflate_level,
        max_deflate_level=options.max_deflate_level,
        snappy=terms.snappy,
        sample_rate=terms.sample_rate,
        auth_required=bool(options.auth_http_address),
        output_buffer_size=terms.output_buffer_size,
        output_buffer_timeout=_ms(terms.output_buffer_timeout_s),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
