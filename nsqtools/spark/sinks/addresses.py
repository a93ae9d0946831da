"""Find the nsqd to publish to, once for a job and on the driver."""

from __future__ import annotations

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.discovery import reachable
from nsqtools.client.handshake import client_tls_context
from nsqtools.cluster.directory import Cluster, Places
from nsqtools.errors import NotFoundError
from nsqtools.protocol.addresses import parse_address


def producer_addresses(settings: ConnectionSettings) -> tuple[str, ...]:
    """The nsqd given by address; without any, all that some nsqlookupd knows.

    Raises `ConfigurationError` for a bad address, `ConnectionFailed` when no nsqlookupd answers and
    `NotFoundError` when none knows an nsqd.
    """
    if settings.nsqd_tcp_addresses:
        return tuple(str(parse_address(text)) for text in settings.nsqd_tcp_addresses)
    options = settings.client_options()
    lookupds = settings.lookupd_http_addresses
    tls = client_tls_context(options) if any(a.startswith("https:") for a in lookupds) else None
    places = Places(lookupd_http_addresses=lookupds)
    with Cluster(places, timeout_s=options.lookupd_poll_timeout_s, tls=tls) as cluster:
        answers, failures = cluster.known_nodes()
    if failures and not answers:
        raise failures[0].error
    found = {
        str(reachable(known.node.tcp, settings.address_map))
        for nodes in answers.values()
        for known in nodes
    }
    if not found:
        raise NotFoundError(
            f"no nsqd is known to {', '.join(lookupds)}",
            hint="Give one by its address: nsqdTcpAddress.",
        )
    return tuple(sorted(found))
