"""The flags that stand for client options, and how they go together with ``--consumer-opt``.

Every flag and every ``--consumer-opt`` is a `Statement`: an option under go-nsq's name, a value as
text, and where it was said. `settle` makes one mapping of them. (The options themselves are
imported there and not before: a help page does not need them.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Context, Option

from nsqtools.cli.profile import origin_of, setting_of
from nsqtools.errors import ConfigurationError
from nsqtools.settings import Origin

PANEL = "TLS, compression, secret"

OPTION_OF_FLAG = {
    "tls": "tls_v1",
    "tls_ca_file": "tls_root_ca_file",
    "tls_insecure": "tls_insecure_skip_verify",
}
"""go-nsq's names, where they are not the flag's own."""


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


class Statement(NamedTuple):
    """``option`` shall be ``text``, says ``speaker``."""

    option: str
    text: str
    origin: Origin
    speaker: str


def flag_statements(context: Context, flags: ClientFlags) -> Iterator[Statement]:
    """What the flags say. Reads the secret's file. Raises `ConfigurationError`."""
    for name, value in flags._asdict().items():
        if value is None or name == "auth_secret_file":
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        origin = origin_of(context, name)
        speaker = "--" + name.replace("_", "-")
        yield Statement(OPTION_OF_FLAG.get(name, name), text, origin, speaker)
        if name == "deflate_level" and flags.deflate is None:
            yield Statement("deflate", "true", origin, speaker)
    if flags.auth_secret_file is not None:
        origin = origin_of(context, "auth_secret_file")
        secret = read_secret(flags.auth_secret_file)
        yield Statement("auth_secret", secret, origin, "--auth-secret-file")
    if secret := context.obj.environ.get("NSQ_AUTH_SECRET"):
        yield Statement("auth_secret", secret, Origin.ENVIRONMENT, "NSQ_AUTH_SECRET")


def opt_statements(context: Context, name: str, values: Iterable[str]) -> Iterator[Statement]:
    """What ``--consumer-opt`` (or ``--producer-opt``) says: ``key,value``, ``key=value``, ``key``.

    The file's options hold beside those of the command line: each key is a setting of its own.
    """
    setting = setting_of(context, name)
    origin = origin_of(context, name)
    if setting is not None and setting.origin < origin and isinstance(setting.value, list):
        yield from _opts(setting.value, setting.origin, name)
    yield from _opts(values, origin, name)


def _opts(values: Iterable[str], origin: Origin, name: str) -> Iterator[Statement]:
    latest = {}
    for value in values:
        end = min((value.index(mark) for mark in ",=" if mark in value), default=len(value))
        latest[value[:end].strip().replace("-", "_")] = value[end + 1 :].strip()
    speaker = "--" + name.replace("_", "-")
    for key, text in latest.items():
        yield Statement(key, text, origin, f"{speaker} {key}")


def settle(statements: Iterable[Statement]) -> dict[str, Statement]:
    """The statement that holds for each option: the one of the stronger origin.

    Raises `ConfigurationError` for an unknown option, and where two of the same origin differ.
    """
    from nsqtools.client.options import read_option

    settled: dict[str, Statement] = {}
    for said in statements:
        before = settled.get(said.option)
        _, value = read_option(said.option, said.text)
        if before is None or said.origin > before.origin:
            settled[said.option] = said
        elif said.origin == before.origin and value != read_option(*before[:2])[1]:
            raise ConfigurationError(
                f"{before.speaker} and {said.speaker} contradict each other",
                hint=f"Keep one of them: both set the client option {said.option}.",
            )
    return settled


def read_secret(path: Path) -> str:
    """The secret in a file, without the newline at its end. Raises `ConfigurationError`."""
    try:
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"cannot read the auth secret from {path} ({reason})",
            hint="The file holds the secret and nothing else.",
        ) from error
    if not secret:
        raise ConfigurationError(f"the auth secret file {path} is empty")
    return secret
