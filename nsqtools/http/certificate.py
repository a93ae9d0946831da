"""The certificate of an HTTPS server, which is read again when its files change."""

from __future__ import annotations

import ssl
from pathlib import Path

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import ReloadedValue, warn_of_exposure


def server_certificate(cert: Path, key: Path) -> ReloadedValue[ssl.SSLContext]:
    """Return the TLS context of a server; ask for it to have its new connections use new files.

    The context is always the same one. Raises `ConfigurationError`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # TLS 1.3 has its own
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
