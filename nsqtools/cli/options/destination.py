"""Another cluster to publish to: the options of a second connection, each with ``--destination-``.

The two sides share nothing: a secret or a certificate of one is never shown to the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Context, Option

from nsqtools.cli.options import origins
from nsqtools.cli.options.connection import client_opt, opt_statements
from nsqtools.cli.options.origins import origin_of, strongest_addresses
from nsqtools.cli.parsing.binding import From
from nsqtools.client.connection_settings import (
    OPTION_OF_FLAG,
    ConnectionSettings,
    GivenOption,
    check_tls,
    parse_address_map,
    read_secret,
    resolve_options,
    texts_of,
)
from nsqtools.errors import ConfigurationError

PANEL = "Destination"
PREFIX = "destination_"
KINDS = tuple(PREFIX + kind for kind in origins.KINDS)


def _option(name: str, help: str, metavar: str | None = None) -> Any:
    return Option(f"--destination-{name}", metavar=metavar, help=help, rich_help_panel=PANEL)


class DestinationFlags(NamedTuple):
    """Flags for the connection to the destination. None means: not given."""

    destination_tls: Annotated[
        bool | None, _option("tls", "Require TLS; never fall back to plain text.")
    ] = None
    destination_tls_ca_file: Annotated[
        Path | None, _option("tls-ca-file", "Certificates to trust, PEM.", "FILE")
    ] = None
    destination_tls_cert: Annotated[
        Path | None, _option("tls-cert", "Client certificate, PEM.", "FILE")
    ] = None
    destination_tls_key: Annotated[
        Path | None, _option("tls-key", "Key of the client certificate, PEM.", "FILE")
    ] = None
    destination_tls_insecure: Annotated[
        bool | None, _option("tls-insecure", "Do not verify the certificate of nsqd.")
    ] = None
    destination_snappy: Annotated[bool | None, _option("snappy", "Compress with snappy.")] = None
    destination_deflate: Annotated[bool | None, _option("deflate", "Compress with deflate.")] = None


def destination(
    context: Context,
    destination_nsqd_tcp_address: Annotated[
        list[str] | None, _option("nsqd-tcp-address", "nsqd, over TCP.", "HOST:PORT")
    ] = None,
    destination_lookupd_http_address: Annotated[
        list[str] | None,
        _option("lookupd-http-address", "nsqlookupd: publish to every nsqd it has.", "HOST:PORT"),
    ] = None,
    destination_nsqd_http_address: Annotated[
        list[str] | None,
        _option("nsqd-http-address", "nsqd, over HTTP; checked for loops.", "HOST:PORT"),
    ] = None,
    destination_address_map: Annotated[
        list[str] | None,
        _option("address-map", "Connect to NEW in place of OLD.", "OLD=NEW"),
    ] = None,
    destination_auth_secret_file: Annotated[
        Path | None, _option("auth-secret-file", "File with the auth secret.", "FILE")
    ] = None,
    producer_opt: Annotated[list[str] | None, client_opt("--producer-opt", "producer")] = None,
    *,
    flags: Annotated[DestinationFlags, From(DestinationFlags)],
) -> ConnectionSettings:
    """The cluster to publish to."""
    nsqds, lookupds, https = strongest_addresses(context, KINDS)
    if not nsqds and not lookupds:
        raise ConfigurationError(
            "no destination given", hint="Give --destination-nsqd-tcp-address."
        )
    given = [*opt_statements(context, "producer_opt", producer_opt or ())]
    for name, value in flags._asdict().items():
        if value is not None:
            option = name.removeprefix(PREFIX)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            given.append(
                GivenOption(
                    OPTION_OF_FLAG.get(option, option),
                    text,
                    origin_of(context, name),
                    "--" + name.replace("_", "-"),
                )
            )
    if destination_auth_secret_file is not None:
        secret = read_secret(destination_auth_secret_file)
        origin = origin_of(context, "destination_auth_secret_file")
        file = str(destination_auth_secret_file.absolute())
        speaker = "--destination-auth-secret-file"
        given.append(GivenOption("auth_secret", secret, origin, speaker, file))
    settled = resolve_options(given)
    check_tls(settled, lookupds, cure="Add --destination-tls.")
    return ConnectionSettings(
        nsqds,
        lookupds,
        https,
        texts_of(settled),
        parse_address_map(destination_address_map or (), "--destination-address-map"),
    )


Destination = Annotated[ConnectionSettings, From(destination)]
