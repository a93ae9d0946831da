"""TLS for HTTP endpoints: verified, with the system's certificates or given ones.

Their files are read again when they have changed: see `RenewedContext`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.errors import ConfigurationError
from nsqtools.transport.tls import RenewedContext

if TYPE_CHECKING:
    import ssl


def tls_context(
    ca_file: Path | None, cert: Path | None, key: Path | None, *, is_insecure: bool
) -> RenewedContext:
    """Return the context. Raises `ConfigurationError` for files that cannot be used."""
    if (cert is None) != (key is None):
        raise ConfigurationError("--http-cert and --http-key are given together or not at all")
    files = [str(path or "") for path in (ca_file, cert, key)]
    return RenewedContext(files, lambda: _build(ca_file, cert, key, is_insecure=is_insecure))


def _build(
    ca_file: Path | None, cert: Path | None, key: Path | None, *, is_insecure: bool
) -> ssl.SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key)
    except OSError as exc:  # those of TLS are among them
        files = ", ".join(str(path) for path in (ca_file, cert, key) if path is not None)
        raise ConfigurationError(f"cannot use {files} ({exc.strerror or exc})") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
