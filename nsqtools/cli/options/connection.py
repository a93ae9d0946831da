"""Where to connect and how: the options every command that talks to NSQ has, made into one value.

A command declares ``connection: ConsumerConnection`` (or ``ProducerConnection``) and gets a frozen
`ConnectionSettings`. Which of several origins holds is decided in `addresses` for the addresses
and in `client_flags` for the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any

from typer import Context, Exit, Option

from nsqtools.cli.options.addresses import (
    AddressMap,
    LookupdHttpAddresses,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    given_addresses,
)
from nsqtools.cli.options.client_flags import (
    ClientFlags,
    flag_statements,
    opt_statements,
)
from nsqtools.cli.options.profile import CONNECTION, Profile, origin_of
from nsqtools.cli.parsing.inject import From, flatten
from nsqtools.client.connection_settings import (
    ConnectionSettings,
    GivenOption,
    check_tls,
    parse_address_map,
    resolve_options,
)

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


def client_opt(name: str, kind: str, *short: str) -> Any:
    """Declare the option that takes any client option; its value ``list`` lists them all."""
    return Option(
        name,
        *short,
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

    write_client_options(context.obj, json=False)
    raise Exit


def consumer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    lookupd_http_address: LookupdHttpAddresses = None,
    nsqd_http_address: NsqdHttpAddresses = None,
    address_map: AddressMap = None,
    profile: Profile = None,
    max_in_flight: MaxInFlight = None,
    consumer_opt: Annotated[
        list[str] | None, client_opt("--consumer-opt", "consumer", "-X")
    ] = None,
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
        statements.append(
            GivenOption("max_in_flight", str(max_in_flight), origin, "--max-in-flight")
        )
    return _connection(context, statements, address_map or ())


def producer_connection(
    context: Context,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    profile: Profile = None,
    producer_opt: Annotated[
        list[str] | None, client_opt("--producer-opt", "producer", "-X")
    ] = None,
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
    context: Context, statements: Iterable[GivenOption], address_map: Iterable[str]
) -> ConnectionSettings:
    nsqd, lookupd, nsqd_http = given_addresses(context)
    settled = resolve_options(statements)
    check_tls(settled, [*lookupd, *nsqd_http], cure="Add --tls (or --no-tls).")
    options = {option: said.text for option, said in settled.items()}
    mapping = parse_address_map(address_map, "--address-map")
    return ConnectionSettings(nsqd, lookupd, nsqd_http, options, mapping)
