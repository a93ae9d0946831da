"""Where to connect and how: the options of every command that talks to NSQ, made into one value.

A command declares ``connection: ConsumerConnection`` (or ``ProducerConnection``, ``Destination``)
and gets a frozen `ConnectionSettings`; one that looks or administers over HTTP declares
``cluster: ClusterConnection`` and opens it: ``with cluster.open() as c``.

Where a value comes from decides. typer asks ``default_map`` for what neither the command line nor
the environment says, which is just where a profile belongs; ``--profile`` is eager, so the map is
there before other options are read. Addresses of all kinds are one setting: those from the
strongest origin that gives any (flag, environment, profile, file) are taken and the rest is
ignored, so that ``--nsqd-tcp-address`` on the command line never also consumes from the cluster
that the profile names. For the rest each flag and each ``--consumer-opt`` is a `SourcedOption`, and
`resolve_options` decides. All of this is read from typer's context: that a provider below names its
options makes them options of the command.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Context

from nsqtools.cli.parsing.binding import From, OptionSet, heading, opt, some
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    OPTION_OF_FLAG,
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
from nsqtools.protocol.text import format_duration
from nsqtools.settings import (
    Origin,
    Setting,
    config_path,
    load_settings,
    selected_profile,
    who_else_can_write,
)

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

# Headings of help pages.
CONNECTION = "Connection"
TLS = "TLS, compression, secret"
DESTINATION = "Destination"

DEFAULT_NSQD_HTTP_ADDRESS = "127.0.0.1:4151"
ENV = "NSQ_"  # and the name of the option
PREFIX = "destination_"

SETTINGS = "nsqtools.settings"  # the keys in typer's context
NO_PROFILE = "nsqtools.no_profile"
ORIGIN_OF_SOURCE = {"COMMANDLINE": Origin.FLAG, "ENVIRONMENT": Origin.ENVIRONMENT}


# -- origins ------------------------------------------------------------------------------------


def forget_profile(context: Context, is_given: bool) -> bool:
    """Note ``--no-profile``, which typer reads before a profile that the environment names."""
    if is_given:
        if context.get_parameter_source("profile") is not None:
            raise ConfigurationError("--profile and --no-profile contradict each other")
        context.meta[NO_PROFILE] = True
    return is_given


def apply_profile(context: Context, name: str | None) -> str | None:
    """Load the file, and the profile if one is named; remember where each value is."""
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
        # setpriv and its like leave the HOME of another user: only what was asked for must be read
        if not name and isinstance(error.__cause__, OSError):
            context.obj.info(f"nsq: {str(error).splitlines()[0]}; continuing without it")
            return name
        if name and origin_of(context, "profile") is Origin.DEFAULT:
            error.hint += f" nsq config use chose {name}; --no-profile leaves it out."
        raise
    if problem := who_else_can_write(path):
        context.obj.info(f"nsq: warning: {problem}; it decides where this connects")
    context.meta[SETTINGS] = settings
    context.default_map = {key: setting.value for key, setting in settings.items()}
    return name


def setting_of(context: Context, name: str) -> Setting | None:
    """What the configuration file says about the option ``name``, be it in force or not."""
    settings: dict[str, Setting] = context.meta.get(SETTINGS, {})
    return settings.get(name)


def active_setting(context: Context, name: str) -> Setting | None:
    """The setting that the option ``name`` has its value from, if it is from the file."""
    source = context.get_parameter_source(name)
    return setting_of(context, name) if source and source.name == "DEFAULT_MAP" else None


def origin_of(context: Context, name: str) -> Origin:
    """Where the value of the option ``name`` comes from."""
    if setting := active_setting(context, name):
        return setting.origin
    source = context.get_parameter_source(name)
    return ORIGIN_OF_SOURCE.get(source.name if source else "", Origin.DEFAULT)


class GivenAddresses(NamedTuple):
    """The addresses that hold, of each kind."""

    nsqd_tcp_address: tuple[str, ...] = ()
    lookupd_http_address: tuple[str, ...] = ()
    nsqd_http_address: tuple[str, ...] = ()


def given_addresses(context: Context) -> GivenAddresses:
    """The addresses that hold; without any, the default nsqd."""
    given = effective_addresses(context)
    return given if any(given) else GivenAddresses((DEFAULT_NSQD_TCP_ADDRESS,))


def split_addresses(texts: Iterable[str] | None) -> tuple[str, ...]:
    """Return each address: commas separate them too, as in most variables."""
    return tuple(each.strip() for text in texts or () for each in text.split(","))


def effective_addresses(context: Context, prefix: str = "") -> GivenAddresses:
    """The addresses of each kind, of those from the strongest origin that gives any.

    Raises `ConfigurationError` where that is the file, and the profile has only a kind which the
    command does not take: what is for one cluster would go to another.
    """
    found = {
        kind: split_addresses(context.params.get(prefix + kind)) for kind in GivenAddresses._fields
    }
    origins = {kind: origin_of(context, prefix + kind) for kind, given in found.items() if given}
    strongest = max(origins.values(), default=Origin.DEFAULT)
    if strongest is Origin.FILE and not context.params.get("channel"):  # which nsqlookupd leads to
        for setting in filter(None, (setting_of(context, prefix + kind) for kind in found)):
            if setting.origin is Origin.PROFILE and setting.value:
                raise ConfigurationError(
                    f"{setting.place} is not for this command, and the profile has none that is",
                    hint="Give --nsqd-tcp-address: that of the file is for another cluster.",
                )
    return GivenAddresses(**{kind: found[kind] for kind in origins if origins[kind] is strongest})


# -- options ------------------------------------------------------------------------------------


def client_opt(kind: str, short: str = "") -> Any:
    """Declare the option that takes any client option."""
    return opt(
        f"{short} KEY=VALUE",
        f"Any option of the {kind}; nsq config show lists them.",
        CONNECTION,
        envvar=ENV,
    )


def describe_option(option: Any) -> tuple[str, str, str, str]:
    """Name, default, bounds and help of a field of `ClientOptions`, as text."""
    from nsqtools.client.options import option_name

    show = format_duration if option.metadata["kind"] == "duration" else _plain
    low, high = option.metadata["low"], option.metadata["high"]
    bounds = "|".join(option.metadata["choices"])
    if low is not None:
        bounds = f"{show(low)} to {show(high)}" if high is not None else f"{show(low)} or more"
    return option_name(option), show(option.default), bounds, option.metadata["help"]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_flag = partial(opt, envvar=ENV)


class Where(OptionSet):
    """Addresses, and the profile that may give them."""

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
    """Flags for asking daemons over HTTP, besides TLS. None means: not given."""

    panel = CONNECTION
    timeout: float | None = _flag(
        "DURATION",
        "How long a daemon may take to answer over HTTP.",
        show_default="2s; in what runs on, and for changes, 5s",
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
    """Flags for the connection to nsqd. None means: not given."""

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
        "HEX", "SHA-256 fingerprint of a server certificate to accept, and no other."
    )


def _several(options: type[OptionSet]) -> dict[str, bool]:
    """The options of a set, each with whether it takes several values."""
    kinds = options.__annotations__.items()
    return {name: kind.startswith("list") for name, kind in kinds if "profile" not in name}


REPEATABLE = {
    **_several(Where),
    "max_in_flight": False,
    "consumer_opt": True,
    **_several(ClientFlags),
    **_several(LookupFlags),
    "producer_opt": True,
}
REPEATABLE |= {
    PREFIX + name: several for name, several in (_several(Where) | _several(ClientFlags)).items()
}
"""The settings that the file may hold, each with whether it takes several values."""

FLAGS = (*ClientFlags.__annotations__, *LookupFlags.__annotations__, "max_in_flight")
HTTPS_FLAGS = [name for name in ClientFlags.__annotations__ if name.startswith(("tls_", "auth_"))]

MaxInFlight = Annotated[
    int | None,
    opt(
        "--max-in-flight N",
        "Messages in flight at a time, all nsqd together.",
        CONNECTION,
        envvar=f"{ENV}MAX_IN_FLIGHT",
        min=1,
    ),
]


# -- what they say ------------------------------------------------------------------------------


def options_from_flags(context: Context, prefix: str = "") -> Iterator[SourcedOption]:
    """What the flags of the command say, of those with ``prefix``. Reads the secret's file.

    Raises `ConfigurationError`.
    """
    for name in FLAGS:
        flag = prefix + name
        value = context.params.get(flag)
        if value in (None, [], ()):
            continue
        origin, setting = origin_of(context, flag), active_setting(context, flag)
        speaker = "--" + flag.replace("_", "-")
        if name == "auth_secret_file":
            secret, file = read_secret(value), str(value.absolute())
            yield SourcedOption("auth_secret", secret, origin, speaker, file)
            continue
        text = " ".join(value) if isinstance(value, list | tuple) else _plain(value)
        if isinstance(value, float):
            text = format_duration(value)
        place = setting.place if setting is not None else ""
        yield SourcedOption(OPTION_OF_FLAG.get(name, name), text, origin, speaker, place=place)
        if name == "deflate_level" and context.params.get(f"{prefix}deflate") is None:
            yield SourcedOption("deflate", "true", origin, speaker)
    if not prefix and (secret := context.obj.environ.get("NSQ_AUTH_SECRET")):
        yield SourcedOption("auth_secret", secret, Origin.ENVIRONMENT, "NSQ_AUTH_SECRET")


def opt_statements(context: Context, name: str) -> Iterator[SourcedOption]:
    """What ``--consumer-opt`` (or ``--producer-opt``) says: ``key,value``, ``key=value``, ``key``.

    The file's options hold beside those of the command line: each key is a setting of its own.
    """
    setting = setting_of(context, name)
    origin = origin_of(context, name)
    if setting is not None and setting.origin < origin and isinstance(setting.value, list):
        yield from _opts(setting.value, setting.origin, name, setting.place)
    place = setting.place if setting is not None and setting.origin == origin else ""
    for given in _opts(context.params.get(name) or (), origin, name, place):
        if given.option == "auth_secret":
            _warn_of_visible_secret(context, given)
        yield given


def settled(context: Context, opts: str = "", prefix: str = "") -> dict[str, SourcedOption]:
    """What holds of flags, and of ``opts``: ``consumer_opt`` or ``producer_opt``.

    Raises `ConfigurationError`.
    """
    return resolve_options([*options_from_flags(context, prefix), *opt_statements(context, opts)])


def _warn_of_visible_secret(context: Context, given: SourcedOption) -> None:
    """A secret on the command line is in the list of processes; one in the file may be read."""
    if given.origin == Origin.FLAG:
        context.obj.info(
            "nsq: warning: the list of processes shows the secret on the command line to all users;"
            " use --auth-secret-file or NSQ_AUTH_SECRET"
        )
    else:
        warn_of_exposure(config_path(context.obj.environ))


def option_of(text: str) -> tuple[str, str]:
    """Return name and value of a client's option: ``key,value``, ``key=value`` or ``key``."""
    end = min((text.index(mark) for mark in ",=" if mark in text), default=len(text))
    return text[:end].strip().replace("-", "_"), text[end + 1 :].strip()


def _opts(values: Iterable[str], origin: Origin, name: str, place: str) -> Iterator[SourcedOption]:
    speaker = "--" + name.replace("_", "-")
    for key, text in dict(map(option_of, values)).items():
        yield SourcedOption(key, text, origin, f"{speaker} {key}", place=place)


# -- connections --------------------------------------------------------------------------------


class Reaching(OptionSet):
    """Where to connect and how, for commands that get messages."""

    where: Where
    consumer_opt: list[str] | None = client_opt("consumer", "-X")
    flags: ClientFlags
    lookup: LookupFlags


def consumer_connection(
    context: Context, options: Reaching, max_in_flight: MaxInFlight = None
) -> ConnectionSettings:
    """The connection of a command that consumes."""
    return client_connection(context, "consumer_opt")


def producer_connection(
    context: Context,
    *,
    where: Annotated[Any, From(some(Where, "nsqd_tcp_address", "profile", "no_profile"))],
    producer_opt: list[str] | None = client_opt("producer", "-X"),
    flags: ClientFlags,
) -> ConnectionSettings:
    """The connection of a command that publishes."""
    return client_connection(context, "producer_opt")


def client_connection(context: Context, opts: str) -> ConnectionSettings:
    given, options = given_addresses(context), settled(context, opts)
    over_http = [*given.lookupd_http_address, *given.nsqd_http_address]
    check_tls(options, over_http, cure="Add --tls (or --no-tls).")
    return _connection(context, given, options)


def _connection(
    context: Context, given: GivenAddresses, options: Mapping[str, SourcedOption], prefix: str = ""
) -> ConnectionSettings:
    flag = f"{prefix}address_map"
    mapping = parse_address_map(context.params.get(flag) or (), "--" + flag.replace("_", "-"))
    return ConnectionSettings(*given, texts_of(options), mapping)


@heading(DESTINATION)
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
    flags: Annotated[dict[str, Any], From(some(ClientFlags, prefix=PREFIX, panel=DESTINATION))],
) -> ConnectionSettings:
    """Another cluster, to publish to. The two sides share nothing: a secret or a certificate of one
    is never shown to the other."""
    given = effective_addresses(context, PREFIX)
    if not given.nsqd_tcp_address and not given.lookupd_http_address:
        raise ConfigurationError(
            "no destination given", hint="Give --destination-nsqd-tcp-address."
        )
    options = settled(context, "producer_opt", PREFIX)
    check_tls(options, given.lookupd_http_address, cure="Add --destination-tls.")
    return _connection(context, given, options, PREFIX)


@dataclass(frozen=True)
class ClusterSettings:
    """How to reach a cluster."""

    connection: ConnectionSettings

    def open(self, timeout_s: float = 2.0) -> Cluster:
        """Return the `Cluster`, to be closed; ``timeout_s`` is where the user gave none.

        Raises `ConfigurationError`.
        """
        from nsqtools.cluster.directory import open_cluster

        return open_cluster(self.connection, lookupd_poll_timeout_s=timeout_s)


def cluster_connection(
    context: Context,
    where: Where,
    consumer_opt: list[str] | None = client_opt("consumer", "-X"),
    *,
    https: Annotated[dict[str, Any], From(some(ClientFlags, *HTTPS_FLAGS))],
    lookup: LookupFlags,
) -> ClusterSettings:
    """The cluster, over HTTP."""
    return _cluster(context)


def viewed_cluster(context: Context, options: Reaching) -> ClusterSettings:
    """The cluster of a command that shows messages too: with the flags for TCP."""
    return _cluster(context)


def _cluster(context: Context) -> ClusterSettings:
    """The cluster; without any address, the HTTP port of the nsqd on this machine."""
    given = given_addresses(context)
    if given == GivenAddresses((DEFAULT_NSQD_TCP_ADDRESS,)):
        given = GivenAddresses(nsqd_http_address=(DEFAULT_NSQD_HTTP_ADDRESS,))
    return ClusterSettings(_connection(context, given, settled(context, "consumer_opt")))


ConsumerConnection = Annotated[ConnectionSettings, From(consumer_connection)]
ProducerConnection = Annotated[ConnectionSettings, From(producer_connection)]
Destination = Annotated[ConnectionSettings, From(destination)]
ClusterConnection = Annotated[ClusterSettings, From(cluster_connection)]
ViewedCluster = Annotated[ClusterSettings, From(viewed_cluster)]
