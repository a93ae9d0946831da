"""What requests of ``nsq to-http`` look like: headers, secrets, signatures, batches."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nsqtools.cli.options.params import Seconds, duration_option
from nsqtools.cli.parsing.binding import From
from nsqtools.client.connection_settings import read_secret
from nsqtools.errors import ConfigurationError
from nsqtools.files.renewed import Renewed
from nsqtools.forward import BatchForm
from nsqtools.records.units import parse_size

if TYPE_CHECKING:
    from nsqtools.forward.http_requests import RequestSecrets, RequestSettings

PANEL = "Requests"
OCTETS = "application/octet-stream"


def _option(name: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return Option(name, metavar=metavar, help=help, rich_help_panel=PANEL, **more)


@dataclass(frozen=True)
class HttpRequestOptions:
    """What the options say."""

    content_type: str | None
    headers: tuple[str, ...]
    has_metadata: bool
    secrets: Renewed[RequestSecrets] | None
    form: BatchForm | None
    batch_count: int
    batch_bytes: int
    linger_s: float

    def settings(self, *, is_get: bool) -> RequestSettings:
        """Return the settings of requests. Raises `ConfigurationError`."""
        from nsqtools import __version__
        from nsqtools.forward.http_requests import RequestSettings, parse_header

        if is_get and self.form is not None:
            raise ConfigurationError("--batch is for --post")
        if is_get and self.content_type is not None:
            raise ConfigurationError("--content-type is for --post")
        usual = {BatchForm.JSON: "application/json", BatchForm.NDJSON: "application/x-ndjson"}
        return RequestSettings(
            is_get,
            self.content_type or (usual[self.form] if self.form else OCTETS),
            f"nsqtools/{__version__}",
            tuple(map(parse_header, self.headers)),
            self.secrets,
            self.has_metadata,
            self.form,
        )


def http_request_options(
    content_type: Annotated[
        str | None,
        _option("--content-type", "Content-Type of a POST.", "TYPE", show_default=OCTETS),
    ] = None,
    header: Annotated[
        list[str] | None,
        _option("--header", "A header, its value a template ('X-Id: {id}').", "NAME: TEMPLATE"),
    ] = None,
    metadata: Annotated[
        bool,
        _option(
            "--metadata/--no-metadata",
            "Send Idempotency-Key and X-Nsq-Topic, -Message-Id, -Attempts, -Timestamp.",
        ),
    ] = True,
    basic_auth_file: Annotated[
        Path | None, _option("--basic-auth-file", "File with USER:PASSWORD.", "FILE")
    ] = None,
    bearer_token_file: Annotated[
        Path | None, _option("--bearer-token-file", "File with a bearer token.", "FILE")
    ] = None,
    sign_key_file: Annotated[
        Path | None,
        _option(
            "--sign-key-file",
            "File with a key: sign requests as Standard Webhooks (HMAC-SHA256).",
            "FILE",
        ),
    ] = None,
    batch: Annotated[
        int, _option("--batch", "Send up to N messages in one POST.", "N", min=1, max=10_000)
    ] = 1,
    batch_bytes: Annotated[
        int,
        _option("--batch-bytes", "Send up to SIZE in one POST.", "SIZE", parser=parse_size),
    ] = "1MiB",  # type: ignore[assignment]
    batch_format: Annotated[
        BatchForm, _option("--batch-format", "A batch is a line for each message, or a JSON array.")
    ] = BatchForm.NDJSON,
    linger: Annotated[
        Seconds,
        duration_option(
            "--linger", "How long a message waits for others of its batch.", panel=PANEL
        ),
    ] = "100ms",  # type: ignore[assignment]
) -> HttpRequestOptions:
    """What requests look like. Reads the files. Raises `ConfigurationError`."""
    if basic_auth_file is not None and bearer_token_file is not None:
        raise ConfigurationError("give either --basic-auth-file or --bearer-token-file")
    secrets = None
    files = [str(path) for path in (basic_auth_file, bearer_token_file, sign_key_file) if path]
    if files:
        secrets = Renewed(
            files, lambda: _read_secrets(basic_auth_file, bearer_token_file, sign_key_file)
        )
    return HttpRequestOptions(
        content_type,
        tuple(header or ()),
        metadata,
        secrets,
        batch_format if batch > 1 else None,
        batch,
        batch_bytes,
        linger,
    )


def _read_secrets(basic: Path | None, bearer: Path | None, sign_key: Path | None) -> RequestSecrets:
    from nsqtools.forward.http_requests import RequestSecrets

    authorization = b""
    if basic is not None:
        authorization = b"Basic " + base64.b64encode(read_secret(basic).encode())
    if bearer is not None:
        authorization = b"Bearer " + read_secret(bearer).encode()
    if not authorization.isascii() or any(c < 32 for c in authorization):
        raise ConfigurationError(f"{bearer} is not one line of ASCII")
    key = read_secret(sign_key).encode() if sign_key is not None else b""
    if key.startswith(b"whsec_"):  # as Standard Webhooks writes keys
        try:
            key = base64.b64decode(key[6:], validate=True)
        except ValueError:
            raise ConfigurationError(f"the key in {sign_key} is not base64") from None
    return RequestSecrets(authorization, key)


Requests = Annotated[HttpRequestOptions, From(http_request_options)]
