"""The flags that stand for client options, and ``--consumer-opt``: what each of them states.

Which of several statements holds is decided in `nsqtools.client.connection_settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Context, Option

from nsqtools.cli.options.profile import origin_of, setting_of
from nsqtools.client.connection_settings import OPTION_OF_FLAG, GivenOption, read_secret
from nsqtools.settings import Origin

PANEL = "TLS, compression, secret"


def _flag(declaration: str, help: str, metavar: str | None = None) -> Any:
    return Option(declaration, metavar=metavar, help=help, rich_help_panel=PANEL)


TLSCaFile = Annotated[Path | None, _flag("--tls-ca-file", "Certificates to trust, PEM.", "FILE")]
TLSCert = Annotated[Path | None, _flag("--tls-cert", "Client certificate, PEM.", "FILE")]
TLSKey = Annotated[Path | None, _flag("--tls-key", "Key of the client certificate, PEM.", "FILE")]
TLSInsecure = Annotated[
    bool | None, _flag("--tls-insecure", "Do not verify the certificate of nsqd.")
]
TLSMinVersion = Annotated[
    str | None, _flag("--tls-min-version", "Lowest version: tls1.2 or tls1.3.", "VERSION")
]


class ClientFlags(NamedTuple):
    """Flags for the way to nsqd. None means: not said."""

    tls: Annotated[bool | None, _flag("--tls/--no-tls", "Use TLS, and nothing else.")] = None
    tls_ca_file: TLSCaFile = None
    tls_cert: TLSCert = None
    tls_key: TLSKey = None
    tls_insecure: TLSInsecure = None
    tls_min_version: TLSMinVersion = None
    snappy: Annotated[bool | None, _flag("--snappy/--no-snappy", "Compress with snappy.")] = None
    deflate: Annotated[bool | None, _flag("--deflate/--no-deflate", "Compress with deflate.")] = (
        None
    )
    deflate_level: Annotated[
        int | None, _flag("--deflate-level", "Compress with deflate at this level, 1 to 9.", "N")
    ] = None
    auth_secret_file: Annotated[
        Path | None,
        _flag("--auth-secret-file", "File with the auth secret; or set NSQ_AUTH_SECRET.", "FILE"),
    ] = None


def flag_statements(context: Context, flags: ClientFlags) -> Iterator[GivenOption]:
    """What the flags say. Reads the secret's file. Raises `ConfigurationError`."""
    for name, value in flags._asdict().items():
        if value is None or name == "auth_secret_file":
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        origin = origin_of(context, name)
        speaker = "--" + name.replace("_", "-")
        yield GivenOption(OPTION_OF_FLAG.get(name, name), text, origin, speaker)
        if name == "deflate_level" and flags.deflate is None:
            yield GivenOption("deflate", "true", origin, speaker)
    if flags.auth_secret_file is not None:
        origin = origin_of(context, "auth_secret_file")
        secret = read_secret(flags.auth_secret_file)
        yield GivenOption("auth_secret", secret, origin, "--auth-secret-file")
    if secret := context.obj.environ.get("NSQ_AUTH_SECRET"):
        yield GivenOption("auth_secret", secret, Origin.ENVIRONMENT, "NSQ_AUTH_SECRET")


def opt_statements(context: Context, name: str, values: Iterable[str]) -> Iterator[GivenOption]:
    """What ``--consumer-opt`` (or ``--producer-opt``) says: ``key,value``, ``key=value``, ``key``.

    The file's options hold beside those of the command line: each key is a setting of its own.
    """
    setting = setting_of(context, name)
    origin = origin_of(context, name)
    if setting is not None and setting.origin < origin and isinstance(setting.value, list):
        yield from _opts(setting.value, setting.origin, name)
    yield from _opts(values, origin, name)


def _opts(values: Iterable[str], origin: Origin, name: str) -> Iterator[GivenOption]:
    latest = {}
    for value in values:
        end = min((value.index(mark) for mark in ",=" if mark in value), default=len(value))
        latest[value[:end].strip().replace("-", "_")] = value[end + 1 :].strip()
    speaker = "--" + name.replace("_", "-")
    for key, text in latest.items():
        yield GivenOption(key, text, origin, f"{speaker} {key}")
