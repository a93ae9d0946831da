"""Which cluster to ask over HTTP, and how: the options of every command that looks or administers.

A command declares ``cluster: ClusterConnection`` and opens it: ``with cluster.open() as c``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Context

from nsqtools.cli.options.connection import (
    AuthRequiresTLS,
    AuthSecretFile,
    LookupFlags,
    TLSCaFile,
    TLSCert,
    TLSInsecure,
    TLSKey,
    TLSMinVersion,
    TLSPin,
    flag_statements,
)
from nsqtools.cli.options.origins import (
    AddressMap,
    LookupdHttpAddresses,
    NoProfile,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    Profile,
    given_addresses,
)
from nsqtools.cli.parsing.binding import From
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    ConnectionSettings,
    parse_address_map,
    resolve_options,
    texts_of,
)

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

DEFAULT_NSQD_HTTP_ADDRESS = "127.0.0.1:4151"


class HTTPSFlags(NamedTuple):
    """Flags for https addresses and for the secret. None means: not said."""

    tls_ca_file: TLSCaFile = None
    tls_cert: TLSCert = None
    tls_key: TLSKey = None
    tls_insecure: TLSInsecure = None
    tls_min_version: TLSMinVersion = None
    auth_secret_file: AuthSecretFile = None
    auth_requires_tls: AuthRequiresTLS = None
    tls_pin_sha256: TLSPin = None


@dataclass(frozen=True)
class ClusterSettings:
    """How to reach a cluster."""

    connection: ConnectionSettings

    def open(self, timeout: str = "") -> Cluster:
        """Return the `Cluster`, to be closed. ``timeout`` overrides the one that was given.

        Raises `ConfigurationError`.
        """
        from nsqtools.cluster.directory import open_cluster

        options = {**self.connection.options}
        if timeout:
            options["lookupd_poll_timeout"] = timeout
        return open_cluster(replace(self.connection, options=options))


def cluster_connection(
    context: Context,
    nsqd_http_address: NsqdHttpAddresses = None,
    lookupd_http_address: LookupdHttpAddresses = None,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    address_map: AddressMap = None,
    profile: Profile = None,
    no_profile: NoProfile = False,
    *,
    https: Annotated[HTTPSFlags, From(HTTPSFlags)],
    lookup: Annotated[LookupFlags, From(LookupFlags)],
) -> ClusterSettings:
    """The cluster; without any address, the HTTP port of the nsqd on this machine."""
    nsqd_tcp, lookupd, nsqd_http = given_addresses(context)
    if not (lookupd or nsqd_http) and nsqd_tcp == (DEFAULT_NSQD_TCP_ADDRESS,):
        nsqd_tcp, nsqd_http = (), (DEFAULT_NSQD_HTTP_ADDRESS,)
    if lookupd or nsqd_http:
        nsqd_tcp = ()
    settled = resolve_options(flag_statements(context, {**https._asdict(), **lookup._asdict()}))
    options = texts_of(settled)
    mapping = parse_address_map(address_map or (), "--address-map")
    return ClusterSettings(ConnectionSettings(nsqd_tcp, lookupd, nsqd_http, options, mapping))


ClusterConnection = Annotated[ClusterSettings, From(cluster_connection)]
