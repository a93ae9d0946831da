"""Where to connect and how: the options every command that talks to NSQ has, made into one value.

A command declares ``connection: ConsumerConnection`` (or ``ProducerConnection``) and gets a frozen
`ConnectionSettings`. Two rules are decided here:

- Addresses of all kinds are one setting. Those from the strongest origin that gives any (flag,
  environment, profile, file) are taken and the rest is ignored: ``--nsqd-tcp-address`` on the
  command line never also consumes from the cluster that the profile names.
- A flag and ``--consumer-opt`` may say the same thing twice. The stronger origin wins; when both
  stand on the command line and differ, that is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from nsqtools.cli.client_flags import (
    ClientFlags,
    Statement,
    flag_statements,
    opt_statements,
    settle,
)
from nsqtools.cli.inject import From, flatten
from nsqtools.cli.profile import Profile, origin_of
from nsqtools.errors import ConfigurationError
from nsqtools.settings import Origin

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions

CONNECTION = "Connection"

DEFAULT_NSQD_TCP_ADDRESS = "127.0.0.1:4150"
ADDRESS_KINDS = ("nsqd_tcp_address", "lookupd_http_address", "nsqd_http_address")


@dataclass(frozen=True)
class ConnectionSettings:
    """Addresses as text, the client's options as text under go-nsq's names, and the address map."""

    nsqd_tcp_addresses: tuple[str, ...] = (DEFAULT_NSQD_TCP_ADDRESS,)
    lookupd_http_addresses: tuple[str, ...] = ()
    nsqd_http_addresses: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    address_map: Mapping[str, str] = field(default_factory=dict)
    """Address as announced -> address to connect to."""

    def client_options(self, **defaults: Any) -> ClientOptions:
        """The `ClientOptions`: what the user set, over a command's own ``defaults``.

        Raises `ConfigurationError` for an unknown option or a value out of bounds.
        """
        from nsqtools.client.options import ClientOptions

        return ClientOptions(**defaults).with_options(self.options)


NsqdTcpAddresses = Annotated[
    list[str] | None,
    Option(
        "--nsqd-tcp-address",
        metavar="HOST:PORT",
        envvar="NSQ_NSQD_TCP_ADDRESS",
        help=f"nsqd, over TCP; {DEFAULT_NSQD_TCP_ADDRESS} when no address is given.",
        rich_help_panel=CONNECTION,
    ),
]
LookupdHttpAddresses = Annotated[
    list[str] | None,
    Option(
        "--lookupd-http-address",
        metavar="HOST:PORT",
        envvar="NSQ_LOOKUPD_HTTP_ADDRESS",
        help="nsqlookupd that knows the nsqd of a topic.",
        rich_help_panel=CONNECTION,
    ),
]
NsqdHttpAddresses = Annotated[
    list[str] | None,
    Option(
        "--nsqd-http-address",
        metavar="HOST:PORT",
        envvar="NSQ_NSQD_HTTP_ADDRESS",
        help="nsqd, over HTTP.",
        rich_help_panel=CONNECTION,
    ),
]
AddressMap = Annotated[
    list[str] | None,
    Option(
        "--address-map",
        metavar="OLD=NEW",
        help="Connect to NEW where an nsqd announces itself as OLD.",
        rich_help_panel=CONNECTION,
    ),
]
MaxInFlight = Annotated[
    int | None,
    Option(
        "--max-in-flight",
        metavar="N",
        min=1,
        help="Messages in flight at a time, all nsqd together.",
        rich_help_panel=CONNECTION,
    ),
]


def _opt(name: str, kind: str) -> Any:
    return Option(
        name,
        metavar="KEY=VALUE",
        help=f"Any option of the {kind}; nsq options lists them.",
        rich_help_panel=CONNECTION,
    )


def consumer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    lookupd_http_address: LookupdHttpAddresses = None,
    nsqd_http_address: NsqdHttpAddresses = None,
    address_map: AddressMap = None,
    profile: Profile = None,
    max_in_flight: MaxInFlight = None,
    consumer_opt: Annotated[list[str] | None, _opt("--consumer-opt", "consumer")] = None,
    *,
    flags: Annotated[ClientFlags, From(ClientFlags)],
) -> ConnectionSettings:
    """The connection of a command that consumes."""
    statements = [
        *flag_statements(context, flags),
        *opt_statements(context, "consumer_opt", consumer_opt or ()),
    ]
    if max_in_flight is not None:
        origin = origin_of(context, "max_in_flight")
        statements.append(Statement("max_in_flight", str(max_in_flight), origin, "--max-in-flight"))
    return _connection(context, statements, address_map or ())


def producer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    profile: Profile = None,
    producer_opt: Annotated[list[str] | None, _opt("--producer-opt", "producer")] = None,
    *,
    flags: Annotated[ClientFlags, From(ClientFlags)],
) -> ConnectionSettings:
    """The connection of a command that publishes."""
    statements = [
        *flag_statements(context, flags),
        *opt_statements(context, "producer_opt", producer_opt or ()),
    ]
    return _connection(context, statements, ())


ConsumerConnection = Annotated[ConnectionSettings, From(consumer_connection)]
ProducerConnection = Annotated[ConnectionSettings, From(producer_connection)]


def profile_keys() -> dict[str, bool]:
    """The settings that the configuration file may hold, each with whether it is repeatable."""
    parameters: dict[str, inspect.Parameter] = {}
    for provider in (consumer_connection, producer_connection):
        parameters.update(inspect.signature(flatten(provider)).parameters)
    return {
        name: "list" in str(parameter.annotation.__origin__)
        for name, parameter in parameters.items()
        if name not in ("context", "profile")
    }


def _connection(
    context: Context, statements: Iterable[Statement], address_map: Iterable[str]
) -> ConnectionSettings:
    given = {kind: tuple(context.params.get(kind) or ()) for kind in ADDRESS_KINDS}
    origins = {kind: origin_of(context, kind) for kind, addresses in given.items() if addresses}
    nsqd, lookupd, nsqd_http = strongest(given, origins)
    settled = settle(statements)
    check_tls(settled, [*lookupd, *nsqd_http])
    options = {option: said.text for option, said in settled.items()}
    if not (nsqd or lookupd or nsqd_http):
        nsqd = (DEFAULT_NSQD_TCP_ADDRESS,)
    return ConnectionSettings(nsqd, lookupd, nsqd_http, options, parse_address_map(address_map))


def strongest(
    given: Mapping[str, tuple[str, ...]], origins: Mapping[str, Origin]
) -> list[tuple[str, ...]]:
    """The addresses of each kind that come from the strongest origin; of the others, none."""
    best = max(origins.values(), default=Origin.DEFAULT)
    return [given[kind] if origins.get(kind) == best else () for kind in ADDRESS_KINDS]


def check_tls(settled: Mapping[str, Statement], http_addresses: Iterable[str]) -> None:
    """Refuse TLS settings that would do nothing: the connection would be plain text unnoticed."""
    asked = [said for option, said in settled.items() if option.startswith("tls_")]
    if not asked or "tls_v1" in settled:
        return
    if not any(address.startswith("https://") for address in http_addresses):
        raise ConfigurationError(
            f"{asked[0].speaker} is given, but TLS is not switched on",
            hint="Add --tls (or --no-tls).",
        )


def parse_address_map(pairs: Iterable[str]) -> dict[str, str]:
    """Read ``OLD=NEW`` pairs. Raises `ConfigurationError`."""
    mapping = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigurationError(
                f"--address-map {pair!r} is not OLD=NEW",
                hint="For example: --address-map nsqd-1:4150=127.0.0.1:4150",
            )
        mapping[old.strip()] = new.strip()
    return mapping
