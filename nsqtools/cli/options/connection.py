"""Where to connect and how: the options every command that talks to NSQ has, made into one value.

A command declares ``connection: ConsumerConnection`` (or ``ProducerConnection``) and gets a frozen
`ConnectionSettings`. Which of several origins holds is decided in `origins` for the addresses. For
the rest each flag and each ``--consumer-opt`` is a `GivenOption`, and `resolve_options` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Context, Exit, Option

from nsqtools.cli.options.origins import (
    CONNECTION,
    AddressMap,
    LookupdHttpAddresses,
    NoProfile,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    Profile,
    given_addresses,
    origin_of,
    setting_of,
    variable_of,
)
from nsqtools.cli.options.params import Seconds
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.client.connection_settings import (
    OPTION_OF_FLAG,
    ConnectionSettings,
    GivenOption,
    check_tls,
    exposure_of_secret,
    parse_address_map,
    read_secret,
    resolve_options,
    texts_of,
)
from nsqtools.protocol.durations import format_duration
from nsqtools.settings import Origin, config_path

PANEL = "TLS, compression, secret"


def _flag(declaration: str, help: str, metavar: str | None = None) -> Any:
    name = declaration.partition("/")[0]
    return Option(
        declaration, metavar=metavar, help=help, envvar=variable_of(name), rich_help_panel=PANEL
    )


TLSCaFile = Annotated[Path | None, _flag("--tls-ca-file", "Certificates to trust, PEM.", "FILE")]
TLSCert = Annotated[Path | None, _flag("--tls-cert", "Client certificate, PEM.", "FILE")]
TLSKey = Annotated[Path | None, _flag("--tls-key", "Key of the client certificate, PEM.", "FILE")]
TLSInsecure = Annotated[
    bool | None, _flag("--tls-insecure", "Do not verify the certificate of nsqd.")
]
TLSMinVersion = Annotated[
    str | None, _flag("--tls-min-version", "Lowest version: tls1.2 or tls1.3.", "VERSION")
]
AuthSecretFile = Annotated[
    Path | None,
    _flag("--auth-secret-file", "File with the auth secret; or NSQ_AUTH_SECRET has it.", "FILE"),
]


TLSPin = Annotated[
    list[str] | None,
    _flag(
        "--tls-pin-sha256",
        "SHA-256 fingerprint of a server certificate to accept, and no other.",
        "HEX",
    ),
]
AuthRequiresTLS = Annotated[
    bool | None,
    _flag("--auth-requires-tls/--no-auth-requires-tls", "Never send the auth secret without TLS."),
]


class LookupFlags(NamedTuple):
    """Flags for asking daemons over HTTP, besides TLS. None means: not said."""

    timeout: Seconds | None = opt(
        "--timeout DURATION",
        "How long a daemon may take to answer over HTTP.",
        CONNECTION,
        envvar=variable_of("--timeout"),
        show_default="5s",
    )
    lookupd_authorization: Annotated[
        bool | None,
        _flag(
            "--lookupd-authorization/--no-lookupd-authorization",
            "Send the auth secret to nsqlookupd, as a bearer token.",
        ),
    ] = None
    allow_announced: list[str] | None = opt(
        "--allow-announced PATTERN",
        "Connect to announced nsqd at these addresses only: '*.internal:4150'.",
        CONNECTION,
        envvar=variable_of("--allow-announced"),
    )


class ClientFlags(NamedTuple):
    """Flags for the connection to nsqd. None means: not given."""

    tls: Annotated[
        bool | None, _flag("--tls/--no-tls", "Require TLS; never fall back to plain text.")
    ] = None
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
    auth_secret_file: AuthSecretFile = None
    auth_requires_tls: AuthRequiresTLS = None
    tls_pin_sha256: TLSPin = None


def flag_statements(context: Context, flags: Mapping[str, object]) -> Iterator[GivenOption]:
    """What the flags say. Reads the secret's file. Raises `ConfigurationError`."""
    for name, value in flags.items():
        if value in (None, [], ()) or name == "auth_secret_file":
            continue
        text = " ".join(value) if isinstance(value, list | tuple) else str(value)
        if isinstance(value, bool):
            text = text.lower()
        elif isinstance(value, float):
            text = format_duration(value)
        origin = origin_of(context, name)
        speaker = "--" + name.replace("_", "-")
        yield GivenOption(OPTION_OF_FLAG.get(name, name), text, origin, speaker)
        if name == "deflate_level" and flags["deflate"] is None:
            yield GivenOption("deflate", "true", origin, speaker)
    if isinstance(path := flags.get("auth_secret_file"), Path):
        origin = origin_of(context, "auth_secret_file")
        if problem := exposure_of_secret(path):
            context.obj.tell(f"nsq: warning: {problem}")
        secret = read_secret(path)
        file = str(path.absolute())
        yield GivenOption("auth_secret", secret, origin, "--auth-secret-file", file)
    if secret := context.obj.environ.get("NSQ_AUTH_SECRET"):
        yield GivenOption("auth_secret", secret, Origin.ENVIRONMENT, "NSQ_AUTH_SECRET")


def opt_statements(context: Context, name: str, values: Iterable[str]) -> Iterator[GivenOption]:
    """What ``--consumer-opt`` (or ``--producer-opt``) says: ``key,value``, ``key=value``, ``key``.

    The file's options hold beside those of the command line: each key is a setting of its own.
    """
    setting = setting_of(context, name)
    origin = origin_of(context, name)
    if setting is not None and setting.origin < origin and isinstance(setting.value, list):
        yield from _opts(setting.value, setting.origin, name, setting.place)
    in_force = setting is not None and setting.origin == origin
    for given in _opts(values, origin, name, setting.place if in_force and setting else ""):
        if given.option == "auth_secret":
            _warn_of_visible_secret(context, given)
        yield given


def _warn_of_visible_secret(context: Context, given: GivenOption) -> None:
    """A secret on the command line is in the list of processes; one in the file may be read."""
    if given.origin == Origin.FLAG:
        context.obj.tell(
            "nsq: warning: the list of processes shows the secret on the command line to"
            " everybody; use --auth-secret-file or NSQ_AUTH_SECRET"
        )
    elif problem := exposure_of_secret(config_path(context.obj.environ)):
        context.obj.tell(f"nsq: warning: {problem}")


def _opts(values: Iterable[str], origin: Origin, name: str, place: str) -> Iterator[GivenOption]:
    latest = {}
    for value in values:
        end = min((value.index(mark) for mark in ",=" if mark in value), default=len(value))
        latest[value[:end].strip().replace("-", "_")] = value[end + 1 :].strip()
    speaker = "--" + name.replace("_", "-")
    for key, text in latest.items():
        yield GivenOption(key, text, origin, f"{speaker} {key}", place=place)


MaxInFlight = Annotated[
    int | None,
    opt(
        "--max-in-flight N",
        "Messages in flight at a time, all nsqd together.",
        CONNECTION,
        envvar=variable_of("--max-in-flight"),
        min=1,
    ),
]


def client_opt(name: str, kind: str, *short: str) -> Any:
    """Declare the option that takes any client option; its value ``list`` lists them all."""
    return Option(
        name,
        *short,
        envvar=variable_of(name),
        metavar="KEY=VALUE",
        is_eager=True,  # so that the list is shown whatever else is missing
        callback=_list_if_asked,
        help=f"Any option of the {kind}; 'list' lists them.",
        rich_help_panel=CONNECTION,
    )


def _list_if_asked(context: Context, values: list[str] | None) -> list[str] | None:
    if context.resilient_parsing or "list" not in (values or ()):
        return values
    from nsqtools.cli.options.client_options import write_client_options

    write_client_options(context.obj)
    raise Exit


def consumer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    lookupd_http_address: LookupdHttpAddresses = None,
    nsqd_http_address: NsqdHttpAddresses = None,
    address_map: AddressMap = None,
    profile: Profile = None,
    no_profile: NoProfile = False,
    max_in_flight: MaxInFlight = None,
    consumer_opt: Annotated[
        list[str] | None, client_opt("--consumer-opt", "consumer", "-X")
    ] = None,
    *,
    flags: Annotated[ClientFlags, From(ClientFlags)],
    lookup: Annotated[LookupFlags, From(LookupFlags)],
) -> ConnectionSettings:
    """The connection of a command that consumes."""
    statements = [
        *flag_statements(context, {**flags._asdict(), **lookup._asdict()}),
        *opt_statements(context, "consumer_opt", consumer_opt or ()),
    ]
    if max_in_flight is not None:
        origin = origin_of(context, "max_in_flight")
        statements.append(
            GivenOption("max_in_flight", str(max_in_flight), origin, "--max-in-flight")
        )
    return _connection(context, statements, address_map or ())


def producer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    profile: Profile = None,
    no_profile: NoProfile = False,
    producer_opt: Annotated[
        list[str] | None, client_opt("--producer-opt", "producer", "-X")
    ] = None,
    *,
    flags: Annotated[ClientFlags, From(ClientFlags)],
) -> ConnectionSettings:
    """The connection of a command that publishes."""
    statements = [
        *flag_statements(context, flags._asdict()),
        *opt_statements(context, "producer_opt", producer_opt or ()),
    ]
    return _connection(context, statements, ())


ConsumerConnection = Annotated[ConnectionSettings, From(consumer_connection)]
ProducerConnection = Annotated[ConnectionSettings, From(producer_connection)]


def _connection(
    context: Context, statements: Iterable[GivenOption], address_map: Iterable[str]
) -> ConnectionSettings:
    nsqd, lookupd, nsqd_http = given_addresses(context)
    settled = resolve_options(statements)
    check_tls(settled, [*lookupd, *nsqd_http], cure="Add --tls (or --no-tls).")
    options = texts_of(settled)
    mapping = parse_address_map(address_map, "--address-map")
    return ConnectionSettings(nsqd, lookupd, nsqd_http, options, mapping)
