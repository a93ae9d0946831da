"""Connection options of every command that talks to NSQ, built into one value.

A command declares ``connection: ConsumerConnection`` (or ``ProducerConnection``, ``Destination``)
and gets a frozen `ConnectionSettings`. A command that inspects or administers a cluster over HTTP
declares ``cluster: ClusterConnection`` and opens it: ``with cluster.open() as c``.

The origin of a value decides its precedence. typer reads ``default_map`` for options that are
neither on the command line nor in the environment, so a profile is loaded into that map.
``--profile`` is eager, so the map is filled before other options are read.

Addresses of all kinds are one setting. Only those from the strongest origin (flag, environment,
profile, file) are used, so ``--nsqd-tcp-address`` on the command line never also consumes from the
cluster of the profile. Each other flag and each ``--consumer-opt`` is a `SourcedOption`, and
`resolve_options` chooses the effective one. All of this reads typer's context: a provider below
declares its options only to make them options of the command.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Context

from nsqtools.cli.parsing.binding import OptionSet, Provided, in_panel, opt, subset
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    ConnectionSettings,
    SourcedOption,
    check_tls,
    parse_address_map,
    read_secret,
    resolve_options,
    texts_of,
)
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import warn_of_exposure
from nsqtools.protocol.option_names import ENV, OPTION_OF_FLAG, split_option
from nsqtools.protocol.text import format_duration, plain_text
from nsqtools.settings import (
    Origin,
    Setting,
    check_ownership,
    config_path,
    load_settings,
    selected_profile,
)

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

# Headings of help pages.
CONNECTION = "Connection"
TLS = "TLS, compression, secret"
DESTINATION = "Destination"

DEFAULT_NSQD_HTTP_ADDRESS = "127.0.0.1:4151"
PREFIX = "destination_"

# Keys in the ``meta`` of typer's context.
SETTINGS = "nsqtools.settings"
NO_PROFILE = "nsqtools.no_profile"
ORIGIN_OF_SOURCE = {"COMMANDLINE": Origin.FLAG, "ENVIRONMENT": Origin.ENVIRONMENT}


# -- origins ------------------------------------------------------------------------------------


def forget_profile(context: Context, is_given: bool) -> bool:
    """Record ``--no-profile``, which typer reads before a profile from the environment."""
    if is_given:
        if context.get_parameter_source("profile") is not None:
            raise ConfigurationError("--profile and --no-profile contradict each other")
        context.meta[NO_PROFILE] = True
    return is_given


def apply_profile(context: Context, name: str | None) -> str | None:
    """Load the configuration file, with the chosen profile if any, into typer's context."""
    environ = context.obj.environ
    path = config_path(environ)
    if context.meta.get(NO_PROFILE):
        if origin_of(context, "profile") is Origin.FLAG:
            raise ConfigurationError("--profile and --no-profile contradict each other")
        name = None
    elif name is None:
        name = selected_profile(environ)
    if not (name or os.path.exists(path)):
        return name
    try:
        settings = load_settings(path, name, REPEATABLE)
    except ConfigurationError as error:
        # Programs such as setpriv keep the HOME of another user, whose file may be unreadable.
        # That is an error only if a profile was requested.
        if not name and isinstance(error.__cause__, OSError):
            context.obj.info(f"nsq: {str(error).splitlines()[0]}; continuing without it")
            return name
        if name and origin_of(context, "profile") is Origin.DEFAULT:
            error.hint += f" nsq config use chose {name}; --no-profile ignores it."
        raise
    if problem := check_ownership(path):
        context.obj.info(f"nsq: warning: {problem}; it decides where nsq connects")
    context.meta[SETTINGS] = settings
    context.default_map = {key: setting.value for key, setting in settings.items()}
    return name


def setting_of(context: Context, name: str) -> Setting | None:
    """Return the setting of an option in the configuration file, effective or not."""
    settings: dict[str, Setting] = context.meta.get(SETTINGS, {})
    return settings.get(name)


def active_setting(context: Context, name: str) -> Setting | None:
    """Return the setting that an option has its value from, None for another origin."""
    source = context.get_parameter_source(name)
    return setting_of(context, name) if source and source.name == "DEFAULT_MAP" else None


def origin_of(context: Context, name: str) -> Origin:
    """Return the origin of an option's value."""
    if setting := active_setting(context, name):
        return setting.origin
    source = context.get_parameter_source(name)
    return ORIGIN_OF_SOURCE.get(source.name if source else "", Origin.DEFAULT)


def refuse_flags(context: Context, names: Container[str], problem: str) -> None:
    """Raise `ConfigurationError` if one of these options is on the command line."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and origin_of(context, name) is Origin.FLAG:
            raise ConfigurationError(f"{parameter.opts[0]} {problem}")


class EffectiveAddresses(NamedTuple):
    """The effective addresses of each kind."""

    nsqd_tcp_address: tuple[str, ...] = ()
    lookupd_http_address: tuple[str, ...] = ()
    nsqd_http_address: tuple[str, ...] = ()


def addresses_or_default(context: Context) -> EffectiveAddresses:
    """Return the effective addresses, or the default nsqd."""
    addresses = effective_addresses(context)
    return addresses if any(addresses) else EffectiveAddresses((DEFAULT_NSQD_TCP_ADDRESS,))


def split_addresses(texts: Iterable[str] | None) -> tuple[str, ...]:
    """Split lists of addresses at commas, which most environment variables contain.

    A list may end with a comma, as in ``a:4161, b:4161``, which typer splits at the space first. An
    empty list remains an empty address, which is refused: it is the unset variable of a script, and
    the default would be another cluster.
    """
    lists = ([address.strip() for address in text.split(",")] for text in texts or ())
    return tuple(address for parts in lists for address in [*filter(None, parts)] or parts[:1])


def effective_addresses(context: Context, prefix: str = "") -> EffectiveAddresses:
    """Return the addresses from the strongest origin that has any.

    Raises `ConfigurationError` if that origin is the file although the profile has addresses of a
    kind that the command does not accept: the command would use another cluster.
    """
    kinds = EffectiveAddresses._fields
    by_kind = {kind: split_addresses(context.params.get(prefix + kind)) for kind in kinds}
    origins = {kind: origin_of(context, prefix + kind) for kind in kinds if by_kind[kind]}
    strongest = max(origins.values(), default=Origin.DEFAULT)
    # With --channel the nsqlookupd of the profile lead to the consumers.
    if strongest is Origin.FILE and not context.params.get("channel"):
        for setting in filter(None, (setting_of(context, prefix + kind) for kind in kinds)):
            if setting.origin is Origin.PROFILE and setting.value:
                raise ConfigurationError(
                    f"this command does not use {setting.place}, and the profile has no other",
                    hint="Give --nsqd-tcp-address: that of the file is for another cluster.",
                )
    return EffectiveAddresses(
        **{kind: by_kind[kind] for kind in origins if origins[kind] is strongest}
    )


# -- options ------------------------------------------------------------------------------------


def client_opt(kind: str, short: str = "") -> Any:
    """Declare the option that sets any client option."""
    return opt(
        f"{short} KEY=VALUE",
        f"Any option of the {kind}; nsq config show lists them.",
        CONNECTION,
        envvar=ENV,
    )


def describe_option(option: Any) -> tuple[str, str, str, str]:
    """Return name, default, bounds and help of a field of `ClientOptions`, as text."""
    from nsqtools.client.options import option_name

    show = format_duration if option.metadata["kind"] == "duration" else plain_text
    low, high = option.metadata["low"], option.metadata["high"]
    bounds = "|".join(option.metadata["choices"])
    if low is not None:
        bounds = f"{show(low)} to {show(high)}" if high is not None else f"{show(low)} or more"
    return option_name(option), show(option.default), bounds, option.metadata["help"]


_flag = partial(opt, envvar=ENV)


class AddressFlags(OptionSet):
    """Addresses, and the profile that may contain them."""

    panel = CONNECTION
    nsqd_tcp_address: list[str] | None = _flag(
        "HOST:PORT", f"nsqd, over TCP; {DEFAULT_NSQD_TCP_ADDRESS} if no address is given."
    )
    lookupd_http_address: list[str] | None = _flag(
        "HOST:PORT", "nsqlookupd, over HTTP; finds the nsqd of a topic."
    )
    nsqd_http_address: list[str] | None = _flag("HOST:PORT", "nsqd, over HTTP.")
    address_map: list[str] | None = _flag("OLD=NEW", "Connect to NEW where an nsqd announces OLD.")
    profile: str | None = _flag(
        "-P NAME",
        "Named settings from the configuration file.",
        is_eager=True,
        callback=apply_profile,
    )
    no_profile: bool = opt(
        "",
        "Use no profile: neither NSQ_PROFILE nor the choice of nsq config use.",
        is_eager=True,
        callback=forget_profile,
    )


class LookupFlags(OptionSet):
    """Flags for requests to daemons over HTTP, except TLS. None is the value of an absent flag."""

    panel = CONNECTION
    timeout: float | None = _flag(
        "DURATION",
        "How long a daemon may take to answer over HTTP.",
        show_default="2s; 5s for changes and consumers",
    )
    lookupd_authorization: bool | None = _flag(
        "--lookupd-authorization/--no-lookupd-authorization",
        "Send the auth secret to nsqlookupd, as a bearer token.",
        TLS,
    )
    allow_announced: list[str] | None = _flag(
        "PATTERN", "Connect to announced nsqd at these addresses only: '*.internal:4150'."
    )


class ClientFlags(OptionSet):
    """Flags for the connection to nsqd. None is the value of an absent flag."""

    panel = TLS
    tls: bool | None = _flag("--tls/--no-tls", "Require TLS; never fall back to plain text.")
    tls_ca_file: Path | None = _flag("FILE", "Certificates to trust, PEM.")
    tls_cert: Path | None = _flag("FILE", "Client certificate, PEM.")
    tls_key: Path | None = _flag("FILE", "Key of the client certificate, PEM.")
    tls_insecure: bool | None = _flag("", "Do not verify the certificate of nsqd.")
    tls_min_version: str | None = _flag("VERSION", "Lowest version: tls1.2 or tls1.3.")
    snappy: bool | None = _flag("--snappy/--no-snappy", "Compress with snappy.")
    deflate: bool | None = _flag("--deflate/--no-deflate", "Compress with deflate.")
    deflate_level: int | None = _flag("N", "Compress with deflate at this level, 1 to 9.")
    auth_secret_file: Path | None = _flag(
        "FILE", "File with the auth secret, unless NSQ_AUTH_SECRET has it."
    )
    auth_requires_tls: bool | None = _flag(
        "--auth-requires-tls/--no-auth-requires-tls", "Never send the auth secret without TLS."
    )
    tls_pin_sha256: list[str] | None = _flag(
        "HEX", "SHA-256 fingerprint of the only server certificate to accept."
    )


def _takes_several(options: type[OptionSet]) -> dict[str, bool]:
    """Map the options of a set to whether they take several values."""
    kinds = options.__annotations__.items()
    return {name: kind.startswith("list") for name, kind in kinds if "profile" not in name}


# The settings that the file may contain, mapped to whether they take several values.
REPEATABLE = {
    **_takes_several(AddressFlags),
    "max_in_flight": False,
    "consumer_opt": True,
    **_takes_several(ClientFlags),
    **_takes_several(LookupFlags),
    "producer_opt": True,
}
REPEATABLE |= {
    PREFIX + name: takes_several
    for flags in (AddressFlags, ClientFlags)
    for name, takes_several in _takes_several(flags).items()
}

HTTPS_FLAGS = [name for name in ClientFlags.__annotations__ if name.startswith(("tls_", "auth_"))]

MaxInFlight = Annotated[
    int | None,
    opt(
        "--max-in-flight N",
        "Most messages in flight at a time, for all nsqd together.",
        CONNECTION,
        envvar=f"{ENV}MAX_IN_FLIGHT",
        min=1,
    ),
]


# -- effective options --------------------------------------------------------------------------


def options_from_flags(context: Context, prefix: str = "") -> Iterator[SourcedOption]:
    """Iterate over the client options from the command's flags with ``prefix``.

    Reads the file of the auth secret. Raises `ConfigurationError`.
    """
    for name in OPTION_OF_FLAG:
        flag = prefix + name
        value = context.params.get(flag)
        if value in (None, [], ()):
            continue
        origin, setting = origin_of(context, flag), active_setting(context, flag)
        given_as = "--" + flag.replace("_", "-")
        if name == "auth_secret_file":
            secret, file = read_secret(value), str(value.absolute())
            yield SourcedOption("auth_secret", secret, origin, given_as, file)
            continue
        text = " ".join(value) if isinstance(value, list | tuple) else plain_text(value)
        if isinstance(value, float):
            text = format_duration(value)
        place = setting.place if setting is not None else ""
        yield SourcedOption(OPTION_OF_FLAG[name], text, origin, given_as, place=place)
        if name == "deflate_level" and context.params.get(f"{prefix}deflate") is None:
            yield SourcedOption("deflate", "true", origin, given_as)
    if not prefix and (secret := context.obj.environ.get("NSQ_AUTH_SECRET")):
        yield SourcedOption("auth_secret", secret, Origin.ENVIRONMENT, "NSQ_AUTH_SECRET")


def options_from_client_opt(context: Context, name: str) -> Iterator[SourcedOption]:
    """Iterate over the client options from ``--consumer-opt`` or ``--producer-opt``.

    Each key is a separate setting, so the options of the file are effective in addition to those of
    the command line.
    """
    setting = setting_of(context, name)
    origin = origin_of(context, name)
    if setting is not None and setting.origin < origin and isinstance(setting.value, list):
        yield from _sourced_options(setting.value, setting.origin, name, setting.place)
    place = setting.place if setting is not None and setting.origin == origin else ""
    for option in _sourced_options(context.params.get(name) or (), origin, name, place):
        if option.option == "auth_secret":
            _warn_of_visible_secret(context, option.origin)
        yield option


def effective_options(
    context: Context, opts: str = "", prefix: str = ""
) -> dict[str, SourcedOption]:
    """Return the effective client options of the flags, and of ``opts``.

    ``opts`` is ``consumer_opt`` or ``producer_opt``. Raises `ConfigurationError`.
    """
    return resolve_options(
        [*options_from_flags(context, prefix), *options_from_client_opt(context, opts)]
    )


def _warn_of_visible_secret(context: Context, origin: int) -> None:
    """Warn of a secret on the command line, or in a file that other users can read."""
    if origin == Origin.FLAG:
        context.obj.info(
            "nsq: warning: the list of processes shows the secret on the command line to all users;"
            " use --auth-secret-file or NSQ_AUTH_SECRET"
        )
    else:
        warn_of_exposure(config_path(context.obj.environ))


def _sourced_options(
    values: Iterable[str], origin: Origin, name: str, place: str
) -> Iterator[SourcedOption]:
    given_as = "--" + name.replace("_", "-")
    for key, text in dict(map(split_option, values)).items():
        yield SourcedOption(key, text, origin, f"{given_as} {key}", place=place)


# -- connections --------------------------------------------------------------------------------


class ConsumerFlags(OptionSet):
    """Connection options of commands that receive messages."""

    addresses: AddressFlags
    consumer_opt: list[str] | None = client_opt("consumer", "-X")
    flags: ClientFlags
    lookup: LookupFlags


def consumer_connection(
    context: Context, options: ConsumerFlags, max_in_flight: MaxInFlight = None
) -> ConnectionSettings:
    """Return the connection of a command that consumes."""
    return client_connection(context, "consumer_opt")


def producer_connection(
    context: Context,
    *,
    addresses: Annotated[
        Any, Provided(subset(AddressFlags, "nsqd_tcp_address", "profile", "no_profile"))
    ],
    producer_opt: list[str] | None = client_opt("producer", "-X"),
    flags: ClientFlags,
) -> ConnectionSettings:
    """Return the connection of a command that publishes."""
    return client_connection(context, "producer_opt")


def client_connection(context: Context, opts: str) -> ConnectionSettings:
    """Return the connection of a client whose further options are in ``opts``."""
    addresses, options = addresses_or_default(context), effective_options(context, opts)
    over_http = [*addresses.lookupd_http_address, *addresses.nsqd_http_address]
    check_tls(options, over_http, cure="Add --tls (or --no-tls).")
    return _connection(context, addresses, options)


def _connection(
    context: Context,
    addresses: EffectiveAddresses,
    options: Mapping[str, SourcedOption],
    prefix: str = "",
) -> ConnectionSettings:
    flag = f"{prefix}address_map"
    return ConnectionSettings(
        nsqd_tcp_addresses=addresses.nsqd_tcp_address,
        lookupd_http_addresses=addresses.lookupd_http_address,
        nsqd_http_addresses=addresses.nsqd_http_address,
        options=texts_of(options),
        address_map=parse_address_map(
            context.params.get(flag) or (), "--" + flag.replace("_", "-")
        ),
    )


@in_panel(DESTINATION)
def destination(
    context: Context,
    destination_nsqd_tcp_address: list[str] | None = opt("HOST:PORT", "nsqd, over TCP."),
    destination_lookupd_http_address: list[str] | None = opt(
        "HOST:PORT", "nsqlookupd: publish to every nsqd it has."
    ),
    destination_nsqd_http_address: list[str] | None = opt(
        "HOST:PORT", "nsqd, over HTTP; checked for loops."
    ),
    destination_address_map: list[str] | None = opt("OLD=NEW", "Connect to NEW in place of OLD."),
    destination_auth_secret_file: Path | None = opt("FILE", "File with the auth secret."),
    producer_opt: list[str] | None = client_opt("producer"),
    *,
    flags: Annotated[
        dict[str, Any], Provided(subset(ClientFlags, prefix=PREFIX, panel=DESTINATION))
    ],
) -> ConnectionSettings:
    """Return the connection to another cluster, to publish to.

    It shares no option with the source: neither cluster gets the secret or certificate of the
    other.
    """
    addresses = effective_addresses(context, PREFIX)
    if not addresses.nsqd_tcp_address and not addresses.lookupd_http_address:
        raise ConfigurationError(
            "no destination given", hint="Give --destination-nsqd-tcp-address."
        )
    options = effective_options(context, "producer_opt", PREFIX)
    check_tls(options, addresses.lookupd_http_address, cure="Add --destination-tls.")
    return _connection(context, addresses, options, PREFIX)


@dataclass(frozen=True)
class ClusterSettings:
    """The connection to the daemons of a cluster, over HTTP."""

    connection: ConnectionSettings

    def open(self, timeout_s: float = 2.0) -> Cluster:
        """Return the `Cluster`, which the caller must close. ``timeout_s`` is the default.

        Raises `ConfigurationError`.
        """
        from nsqtools.cluster.directory import open_cluster

        return open_cluster(self.connection, lookupd_poll_timeout_s=timeout_s)


def cluster_connection(
    context: Context,
    addresses: AddressFlags,
    consumer_opt: list[str] | None = client_opt("consumer", "-X"),
    *,
    https: Annotated[dict[str, Any], Provided(subset(ClientFlags, *HTTPS_FLAGS))],
    lookup: LookupFlags,
) -> ClusterSettings:
    """Return the cluster of a command that uses HTTP only."""
    return _cluster(context)


def viewed_cluster(context: Context, options: ConsumerFlags) -> ClusterSettings:
    """Return the cluster of a command that shows messages too, with the flags for TCP."""
    return _cluster(context)


def _cluster(context: Context) -> ClusterSettings:
    """Return the cluster, by default the HTTP port of the nsqd on this machine."""
    addresses = addresses_or_default(context)
    if addresses == EffectiveAddresses((DEFAULT_NSQD_TCP_ADDRESS,)):
        addresses = EffectiveAddresses(nsqd_http_address=(DEFAULT_NSQD_HTTP_ADDRESS,))
    options = effective_options(context, "consumer_opt")
    return ClusterSettings(_connection(context, addresses, options))


ConsumerConnection = Annotated[ConnectionSettings, Provided(consumer_connection)]
ProducerConnection = Annotated[ConnectionSettings, Provided(producer_connection)]
Destination = Annotated[ConnectionSettings, Provided(destination)]
ClusterConnection = Annotated[ClusterSettings, Provided(cluster_connection)]
ViewedCluster = Annotated[ClusterSettings, Provided(viewed_cluster)]
