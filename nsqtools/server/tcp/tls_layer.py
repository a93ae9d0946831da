"""TLS of the server side: contexts from nsqd's options, and a layer between socket and protocol.

The layer works on memory, because nsqd switches to TLS in the middle of a connection and sends the
error of a failed handshake in plain text: with the bytes in hand both are simple.

Policy ``require`` takes any client certificate in the Go nsqd, unverified. Python's ssl cannot ask
for a certificate without verifying it, so here ``require`` verifies like ``require-verify``, with
``--tls-root-ca-file`` or the system's authorities: stricter than asked, never weaker.
"""

from __future__ import annotations

import ssl
import warnings
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

from nsqtools.errors import ConfigurationError, ProtocolError
from nsqtools.server.options import NsqdOptions

HANDSHAKE_TIMEOUT_S = 5.0

_VERSIONS = {
    0x0301: ssl.TLSVersion.TLSv1,
    0x0302: ssl.TLSVersion.TLSv1_1,
    0x0303: ssl.TLSVersion.TLSv1_2,
    0x0304: ssl.TLSVersion.TLSv1_3,
}
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
            # nsqd's default minimum is TLS 1.0, which Python's ssl calls deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = _VERSIONS[options.tls_min_version]
        if options.tls_min_version < 0x0303:
            # OpenSSL counts TLS 1.0 and 1.1 as below its level 1
            context.set_ciphers("DEFAULT@SECLEVEL=0")
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if options.tls_client_auth_policy in ("require", "require-verify"):
            context.verify_mode = ssl.CERT_REQUIRED
            if options.tls_root_ca_file:
                context.load_verify_locations(options.tls_root_ca_file)
            else:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
        elif options.tls_root_ca_file:
            context.load_verify_locations(options.tls_root_ca_file)
    except (OSError, ssl.SSLError) as exc:
        paths = f"{options.tls_cert!r}, {options.tls_key!r}"
        raise ConfigurationError(f"failed to build TLS config - {exc} ({paths})") from exc
    return context


class TLSLayer:
    """One connection's TLS: encrypted bytes in, plain ones out, and back.

    ``is_ready`` is true once the handshake is done.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_ready = False
        self._then: Callable[[], None] | None = None
        self._timer: TimerHandle | None = None

    def when_ready(self, then: Callable[[], None], timer: TimerHandle) -> None:
        """Have `announce` call ``then`` after the handshake; ``timer`` bounds it until then."""
        self._then = then
        self._timer = timer

    def decrypt(self, data: bytes) -> bytes:
        """Take bytes of the socket and return what they decrypt to. Raises `HandshakeFailed`.

        `pending` may have something to send afterwards.
        """
        self._incoming.write(data)
        try:
            if not self.is_ready:
                self._object.do_handshake()
                self.is_ready = True
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as exc:
            if self.is_ready:
                raise ProtocolError(f"broken TLS record ({exc.reason})") from exc
            raise HandshakeFailed(_as_go_says(exc)) from exc

    def _read(self) -> bytes:
        chunks = []
        try:
            while chunk := self._object.read(_READ_SIZE):
                chunks.append(chunk)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # after the peer's close_notify the socket's end follows
        return b"".join(chunks)

    def announce(self) -> None:
        """Call ``then`` once, when the handshake is done."""
        if self.is_ready and self._then is not None:
            then, self._then = self._then, None
            self.cancel()
            then()

    def cancel(self) -> None:
        """Stop waiting for the handshake."""
        if self._timer is not None:
            self._timer.cancel()

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes for the socket."""
        self._object.write(data)
        return self._outgoing.read()

    def pending(self) -> bytes:
        """Return handshake bytes and alerts that have to be sent."""
        return self._outgoing.read()

    @property
    def version(self) -> str:
        """The negotiated version in nsqd's words, such as ``TLS1.3``."""
        return (self._object.version() or "").replace("TLSv1.", "TLS1.").replace("TLSv1", "TLS1.0")

    @property
    def cipher_suite(self) -> str:
        """The suite in nsqd's words: Go's name for the old ones, else its number."""
        cipher = self._object.cipher()
        if cipher is None:
            return ""
        return _GO_SUITES.get(cipher[0]) or f"Unknown {_TLS13_SUITES.get(cipher[0], 0)}"

    @property
    def common_name(self) -> str:
        """The common name of the client's certificate, or ``""``."""
        certificate: Any = self._object.getpeercert() or {}
        for part in certificate.get("subject", ()):
            for key, value in part:
                if key == "commonName":
                    return str(value)
        return ""


def _as_go_says(error: ssl.SSLError) -> str:
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
        return "tls: first record does not look like a TLS handshake"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "tls: client didn't provide a certificate"
    return f"tls: {error.reason or error}".lower().replace("_", " ")


_GO_SUITES = {
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "ECDHE-ECDSA-AES128-SHA": "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "ECDHE-ECDSA-AES256-SHA": "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
}
_TLS13_SUITES = {
    "TLS_AES_128_GCM_SHA256": 0x1301,
    "TLS_AES_256_GCM_SHA384": 0x1302,
    "TLS_CHACHA20_POLY1305_SHA256": 0x1303,
    "ECDHE-ECDSA-AES256-GCM-SHA384": 0xC02C,
    "ECDHE-RSA-AES256-GCM-SHA384": 0xC030,
    "ECDHE-RSA-CHACHA20-POLY1305": 0xCCA8,
    "ECDHE-ECDSA-CHACHA20-POLY1305": 0xCCA9,
}
