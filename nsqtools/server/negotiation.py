"""The result of IDENTIFY: the terms of a connection, and its TLS layer.

The TLS layer works in memory, not on the socket. nsqd switches to TLS in the middle of a connection
and sends the error of a failed handshake in plain text, which needs access to the encrypted bytes.

With the policy ``require``, the Go nsqd accepts any client certificate without verification.
Python's ssl cannot request a certificate without verifying it. So ``require`` verifies like
``require-verify`` here, with ``--tls-root-ca-file`` or the system's authorities. That is stricter
than nsqd, and never weaker.
"""

from __future__ import annotations

import ssl
import warnings
from dataclasses import dataclass, replace

from nsqtools.errors import ConfigurationError, ProtocolError
from nsqtools.http.listen import common_name_of
from nsqtools.protocol.commands import IdentifyReply, ReceivedIdentify
from nsqtools.protocol.frames import RequestError
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.options import NsqdOptions

_DEFAULT_DEFLATE_LEVEL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """The terms of one connection, with the defaults before IDENTIFY. Times are in seconds.

    ``heartbeat_s`` 0 means no heartbeats, ``output_buffer_timeout_s`` 0 no flush by time, and
    ``sample_rate`` 0 no sampling. nsqd delivers one percent more than the rate.
    """

    client_id: str
    hostname: str
    user_agent: str = ""
    heartbeat_s: float = 30.0
    output_buffer_size: int = 16384
    output_buffer_timeout_s: float
    sample_rate: int = 0
    msg_timeout_s: float
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = _DEFAULT_DEFLATE_LEVEL


def negotiate(
    terms: Negotiated, identify: ReceivedIdentify, options: NsqdOptions, *, has_tls: bool
) -> Negotiated:
    """Return the new terms. Raises `RequestError` for values out of bounds."""
    _check(identify, options)
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
    if identify.output_buffer_size < 0:  # unbuffered: a timer would find nothing to flush
        terms = replace(terms, output_buffer_size=1, output_buffer_timeout_s=0.0)
    if not identify.feature_negotiation:
        return terms
    snappy = options.snappy and identify.snappy
    deflate = options.deflate and identify.deflate
    if snappy and deflate:
        raise RequestError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    requested = identify.deflate_level if deflate else 0
    level = requested if requested > 0 else _DEFAULT_DEFLATE_LEVEL
    return replace(
        terms,
        tls_v1=has_tls and identify.tls_v1,
        snappy=snappy,
        deflate=deflate,
        deflate_level=min(level, options.max_deflate_level),
    )


def _or_off(requested_s: float, default_s: float) -> float:
    """Return the requested time, 0 for a negative one, and the default for 0."""
    return 0.0 if requested_s < 0 else requested_s or default_s


def _check(identify: ReceivedIdentify, options: NsqdOptions) -> None:
    """Check the bounds of all values, in nsqd's order. Raises `RequestError` E_BAD_BODY.

    0 is always allowed, and -1 where it turns a feature off.
    """
    heartbeat, timeout = identify.heartbeat_interval, identify.output_buffer_timeout
    shortest, longest = options.min_output_buffer_timeout, options.max_output_buffer_timeout
    for name, value, off, low, high in (
        ("heartbeat interval", heartbeat, -1, 1000, _ms(options.max_heartbeat_interval)),
        ("output buffer timeout", timeout, -1, _ms(shortest), _ms(longest)),
        ("output buffer size", identify.output_buffer_size, -1, 64, options.max_output_buffer_size),
        ("sample rate", identify.sample_rate, 0, 0, 99),
        ("msg timeout", identify.msg_timeout, 0, 1000, _ms(options.max_msg_timeout)),
    ):
        if value not in (0, off) and not low <= value <= high:
            raise RequestError("E_BAD_BODY", f"IDENTIFY {name} ({value}) is invalid")


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


# -- TLS -------------------------------------------------------------------------------------------

HANDSHAKE_S = 5.0  # the timeout of nsqd's handshake

_READ_SIZE = 1 << 16


class HandshakeFailed(Exception):
    """The TLS handshake failed; the text is the reason."""


def server_context(options: NsqdOptions) -> ssl.SSLContext | None:
    """Build the context for TCP and HTTPS, None without a certificate.

    Raises `ConfigurationError` when the files cannot be used.
    """
    if not options.has_tls:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with warnings.catch_warnings():
            # nsqd's default minimum is TLS 1.0, for which Python's ssl warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion(options.tls_min_version)
        if options.tls_min_version < 0x0303:
            # OpenSSL allows TLS 1.0 and 1.1 only at its security level 0.
            context.set_ciphers("DEFAULT@SECLEVEL=0")
        # Without a password function OpenSSL would ask on the terminal for an encrypted key.
        context.load_cert_chain(options.tls_cert, options.tls_key, lambda: b"")
        if options.tls_root_ca_file:
            context.load_verify_locations(options.tls_root_ca_file)
        if options.tls_client_auth_policy:
            context.verify_mode = ssl.CERT_REQUIRED
            if not options.tls_root_ca_file:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    except (OSError, ssl.SSLError) as exc:
        files = options.tls_cert, options.tls_key, options.tls_root_ca_file
        paths = ", ".join(filter(None, files))
        raise ConfigurationError(f"failed to build TLS config - {exc} ({paths})") from exc
    return context


class TLSLayer:
    """The TLS of one connection, between encrypted and plain bytes.

    ``is_ready`` is true after the handshake. ``has_ended`` is true after the client's close_notify;
    some clients, such as asyncio's, then wait for the end of the connection. ``failure`` is set
    after an invalid record, when the bytes before it have been returned.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_ready = self.has_ended = False
        self.failure: ProtocolError | None = None

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt bytes of the socket. Raises `HandshakeFailed`.

        The caller must then send the bytes of `pending`.
        """
        self._incoming.write(data)
        try:
            if not self.is_ready:
                self._object.do_handshake()
                self.is_ready = True
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as exc:
            raise HandshakeFailed(_go_text(exc)) from exc
        return self._read()

    def _read(self) -> bytes:
        chunks = []
        try:
            while chunk := self._object.read(_READ_SIZE):
                chunks.append(chunk)
            self.has_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.has_ended = True
        except ssl.SSLError as exc:
            self.failure = ProtocolError(f"broken TLS record ({exc.reason})")
        return b"".join(chunks)

    def encrypt(self, data: bytes) -> bytes:
        """Encrypt bytes for the socket; return none after an invalid record and its alert."""
        if self.failure is not None:
            return b""
        self._object.write(data)
        return self._outgoing.read()

    def pending(self) -> bytes:
        """Return handshake bytes and alerts to send."""
        return self._outgoing.read()

    @property
    def version(self) -> str:
        """The negotiated version in nsqd's format, such as ``TLS1.3``."""
        return (self._object.version() or "").replace("TLSv1.", "TLS1.").replace("TLSv1", "TLS1.0")

    @property
    def cipher_suite(self) -> str:
        """The cipher suite by OpenSSL's name, where nsqd shows a number for most."""
        cipher = self._object.cipher()
        return cipher[0] if cipher is not None else ""

    @property
    def common_name(self) -> str:
        """The common name of the client's certificate, or ``""``."""
        return common_name_of(self._object.getpeercert())


def _go_text(error: ssl.SSLError) -> str:
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
        return "tls: first record does not look like a TLS handshake"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "tls: client didn't provide a certificate"
    return f"tls: {error.reason or error}".lower().replace("_", " ")
