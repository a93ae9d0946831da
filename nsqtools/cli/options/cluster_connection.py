"""Which cluster to ask over HTTP, and how: the options of every command that looks or administers.

A command declares ``cluster: ClusterConnection`` and opens it: ``with cluster.open() as c``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Context, Option

from nsqtools.cli.options.connection import TLSCaFile, TLSCert, TLSInsecure, TLSKey, TLSMinVersion
from nsqtools.cli.options.origins import (
    CONNECTION,
    AddressMap,
    LookupdHttpAddresses,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    Profile,
    given_addresses,
)
from nsqtools.cli.options.params import Seconds
from nsqtools.cli.parsing.binding import From
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    OPTION_OF_FLAG,
    parse_address_map,
)
from nsqtools.records.units import parse_span

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

DEFAULT_NSQD_HTTP_ADDRESS = "127.0.0.1:4151"
TIMEOUT_S = 5.0


class HTTPSFlags(NamedTuple):
    """Flags for https addresses. None means: not said."""

    tls_ca_file: TLSCaFile = None
    tls_cert: TLSCert = None
    tls_key: TLSKey = None
    tls_insecure: TLSInsecure = None
    tls_min_version: TLSMinVersion = None


@dataclass(frozen=True)
class ClusterSettings:
    """Addresses as text, TLS options as text under go-nsq's names, and the time for an answer."""

    nsqd_http_addresses: tuple[str, ...]
    lookupd_http_addresses: tuple[str, ...]
    nsqd_tcp_addresses: tuple[str, ...]
    address_map: dict[str, str]
    tls_options: dict[str, str]
    timeout_s: Seconds

    def open(self, timeout_s: Seconds | None = None) -> Cluster:
        """The `Cluster`, to be closed. Raises `ConfigurationError`."""
        from nsqtools.client.handshake import client_tls_context
        from nsqtools.client.options import ClientOptions
        from nsqtools.cluster.directory import Cluster, Places

        timeout_s = timeout_s or self.timeout_s
        addresses = (*self.nsqd_http_addresses, *self.lookupd_http_addresses)
        uses_tls = any(address.startswith("https:") for address in addresses)
        options = ClientOptions(tls_v1=True).with_options(self.tls_options) if uses_tls else None
        return Cluster(
            Places(
                self.nsqd_http_addresses,
                self.lookupd_http_addresses,
                self.nsqd_tcp_addresses,
                self.address_map,
            ),
            connect_timeout_s=min(2.0, timeout_s),
            timeout_s=timeout_s,
            tls=client_tls_context(options) if options is not None else None,
        )


def cluster_connection(
    context: Context,
    nsqd_http_address: NsqdHttpAddresses = None,
    lookupd_http_address: LookupdHttpAddresses = None,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    address_map: AddressMap = None,
    profile: Profile = None,
    timeout: Annotated[
        Seconds | None,
        Option(
            "--timeout",
            parser=parse_span,
            metavar="DURATION",
            show_default="5s",
            help="How long a daemon may take to answer.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    *,
    flags: Annotated[HTTPSFlags, From(HTTPSFlags)],
) -> ClusterSettings:
    """The cluster; without any address, the HTTP port of the nsqd on this machine."""
    nsqd_tcp, lookupd, nsqd_http = given_addresses(context)
    if not (lookupd or nsqd_http) and nsqd_tcp == (DEFAULT_NSQD_TCP_ADDRESS,):
        nsqd_tcp, nsqd_http = (), (DEFAULT_NSQD_HTTP_ADDRESS,)
    if lookupd or nsqd_http:
        nsqd_tcp = ()
    return ClusterSettings(
        nsqd_http,
        lookupd,
        nsqd_tcp,
        parse_address_map(address_map or (), "--address-map"),
        {
            OPTION_OF_FLAG.get(name, name): str(value)
            for name, value in flags._asdict().items()
            if value is not None
        },
        timeout or TIMEOUT_S,
    )


ClusterConnection = Annotated[ClusterSettings, From(cluster_connection)]
