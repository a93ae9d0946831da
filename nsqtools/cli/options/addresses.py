"""The addresses that a command is given: nsqd over TCP, nsqlookupd, nsqd over HTTP.

Addresses of all kinds are one setting. Those from the strongest origin that gives any (flag,
environment, profile, file) are taken and the rest is ignored: ``--nsqd-tcp-address`` on the command
line never also consumes from the cluster that the profile names.
"""

from __future__ import annotations

from typing import Annotated

from typer import Context, Option

from nsqtools.cli.options.profile import CONNECTION, origin_of
from nsqtools.client.connection_settings import DEFAULT_NSQD_TCP_ADDRESS
from nsqtools.settings import Origin

KINDS = ("nsqd_tcp_address", "lookupd_http_address", "nsqd_http_address")

Addresses = tuple[str, ...]

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


def given_addresses(context: Context) -> tuple[Addresses, Addresses, Addresses]:
    """The nsqd TCP, nsqlookupd and nsqd HTTP addresses that hold; without any, the default nsqd."""
    given = [tuple(context.params.get(kind) or ()) for kind in KINDS]
    origins = [
        origin_of(context, kind) if addresses else Origin.DEFAULT
        for kind, addresses in zip(KINDS, given, strict=True)
    ]
    strongest = max(origins)
    if strongest is Origin.DEFAULT:
        return (DEFAULT_NSQD_TCP_ADDRESS,), (), ()
    nsqd, lookupd, nsqd_http = (
        addresses if origin is strongest else ()
        for addresses, origin in zip(given, origins, strict=True)
    )
    return nsqd, lookupd, nsqd_http
