"""TLS settings to an ``ssl.SSLContext``, with errors that name the file at fault.

Verification and host name check are on unless switched off together. ``PROTOCOL_TLS_CLIENT`` alone
trusts nothing, so the system's certificates are loaded when no CA file is given. OpenSSL 3 cannot
do less than TLS 1.2 at its default security level; the lower names are go-nsq's and are honoured
by lowering the level, which the user asked for by writing them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqtools.errors import ConfigurationError

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
    return context


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
