"""TLS settings to an ``ssl.SSLContext``, with errors that name the file at fault.

Verification and host name check are on unless switched off together. ``PROTOCOL_TLS_CLIENT`` alone
trusts nothing, so the system's certificates are loaded when no CA file is given. OpenSSL 3 cannot
do less than TLS 1.2 at its default security level; the lower names are go-nsq's and are honoured
by lowering the level, which the user asked for by writing them.

A pinned certificate is checked at the end of the handshake, by the socket itself: so it holds for
whatever uses the context. With verification off, pins are all that is verified.

Certificates are rotated while programs run. `RenewedContext` builds the context again when a file
that it came from has changed, and is asked at each connection.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqtools.errors import ConfigurationError
from nsqtools.files.renewed import Renewed

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class TLSOptions:
    """Paths are of PEM files; "" means not given."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_verify: bool = False
    min_version: str = "tls1.2"
    pins_sha256: str = ""


def parse_pins(text: str) -> frozenset[str]:
    """Read fingerprints, separated by blanks or commas, as ``openssl x509 -fingerprint -sha256``
    prints them or in plain hexadecimal. Raises `ConfigurationError`."""
    pins = frozenset(pin.replace(":", "").lower() for pin in text.replace(",", " ").split())
    for pin in pins:
        if not re.fullmatch("[0-9a-f]{64}", pin):
            raise ConfigurationError(
                f"invalid SHA-256 fingerprint {pin!r}",
                hint="Print one with: openssl x509 -in CERT -noout -fingerprint -sha256",
            )
    return pins


def make_context(options: TLSOptions) -> ssl.SSLContext:
    """Build the client context. Raises `ConfigurationError` for files that cannot be used."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif options.ca_file:
        _load("CA file", options.ca_file, lambda: context.load_verify_locations(options.ca_file))
    else:
        context.load_default_certs()
    if options.cert_file:
        _load(
            "client certificate and key",
            f"{options.cert_file} and {options.key_file}",
            # an encrypted key must fail, not ask on the terminal
            lambda: context.load_cert_chain(
                options.cert_file, options.key_file, password=lambda: b""
            ),
        )
    _set_min_version(context, options.min_version)
    if pins := parse_pins(options.pins_sha256):
        context.sslsocket_class = _pinned_socket(pins)
    return context


RenewedContext = Renewed["ssl.SSLContext"]
"""A context, and the files it was built from."""


@functools.lru_cache(maxsize=64)
def renewed_context(options: TLSOptions) -> RenewedContext:
    """Return the client context of these options, shared by all who connect with them.

    Raises `ConfigurationError` for files that cannot be used.
    """
    files = (options.ca_file, options.cert_file, options.key_file)
    return RenewedContext(files, lambda: make_context(options))


def _pinned_socket(pins: frozenset[str]) -> type[ssl.SSLSocket]:
    import ssl
    from hashlib import sha256

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            found = sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
            if found not in pins:
                error = ssl.SSLCertVerificationError(
                    1, f"the certificate with SHA-256 {found} is not pinned"
                )
                error.verify_message = f"its SHA-256 is {found}, which is not pinned"
                raise error

    return PinnedSocket


def _load(what: str, path: str, load: Callable[[], None]) -> None:
    import ssl

    try:
        load()
    except ssl.SSLError as exc:
        reason = exc.reason or "not PEM"
        raise ConfigurationError(
            f"cannot use the {what} {path} ({reason})",
            hint="Give unencrypted PEM files; certificate and key must belong together.",
        ) from exc
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read the {what} {path} ({exc.strerror})", hint="Check the path and its mode."
        ) from exc


def _set_min_version(context: ssl.SSLContext, name: str) -> None:
    import ssl
    import warnings

    version = {
        "tls1.3": ssl.TLSVersion.TLSv1_3,
        "tls1.2": ssl.TLSVersion.TLSv1_2,
        "tls1.1": ssl.TLSVersion.TLSv1_1,
        "tls1.0": ssl.TLSVersion.TLSv1,
        "ssl3.0": ssl.TLSVersion.TLSv1,
    }[name]
    if version < ssl.TLSVersion.TLSv1_2:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = version
