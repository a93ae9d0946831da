"""The certificate of an HTTPS server, which is read again when its files change."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue, warn_of_exposure


def server_certificate(
    cert: Path, key: Path, client_ca: Path | None = None
) -> ReloadedValue[ssl.SSLContext]:
    """Return the TLS context of a server; ask for it to have its new connections use new files.

    The context is always the same one. With ``client_ca`` a client may have a certificate, which
    this CA must have issued. Raises `ConfigurationError`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # TLS 1.3 has its own
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as exc:
            raise ConfigurationError(f"cannot use {client_ca} ({exc.strerror or exc})") from exc
        context.verify_mode = ssl.CERT_OPTIONAL
    files = str(cert), str(key)
    warn_of_exposure(key)

    def load() -> ssl.SSLContext:
        try:
            # first into another one: half a pair must not be served
            for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                target.load_cert_chain(*files, password=lambda: b"")  # must fail, not ask
        except OSError as exc:
            raise ConfigurationError(
                f"cannot use {cert} with {key} ({exc.strerror or exc})",
                hint="Check --listen-tls-cert and --listen-tls-key.",
            ) from exc
        return context

    return ReloadedValue(files, load)


def common_name_of(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name in what ``getpeercert`` returned, "" without a certificate."""
    subject = (certificate or {}).get("subject", ())
    names = dict(pair for part in subject for pair in part)
    return str(names.get("commonName", ""))
