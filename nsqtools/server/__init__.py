"""nsqd and nsqlookupd in Python: real servers for a machine that has no NSQ, and for tests.

`EmbeddedNsqd` and `EmbeddedNsqlookupd` run a daemon in a thread of this process. ``nsq nsqd`` and
``nsq nsqlookupd`` run the same daemons in the foreground. All work of one daemon is done in one
asyncio loop, so no locks are needed.

    *_daemon            the two daemons: bind, load, serve, stop
    foreground embedded run them in the foreground, or in a thread
    job_nsqd            an nsqd whose queues a job fills: what nsqtools.one_channel uses
    client_connection   a TCP client: its input and output, TLS and compression
    protocol_v2         nsqd's commands
    negotiation auth    IDENTIFY and TLS, AUTH
    queues/             topics, channels and their queues: in memory first, then in files
    durable_*           --durable: the database, its transactions, and its files
    stored_queues       reads a data directory without changing it
    recovery            from the database of --durable to the files of the Go nsqd, and back
    nsqd_http           the endpoints of nsqd, served by nsqtools.http
    options go_flags    the options of both daemons; flags in Go's syntax, TOML files
    stats               /stats, /metrics and statsd
    lookup_peers        registers with nsqlookupd
    http_get            the HTTP requests of lookup_peers and auth
    registrations       the registrations of an nsqlookupd

The two classes are imported on their first use: ``nsq nsqd --help`` must not load a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqtools.server.embedded import EmbeddedNsqd, EmbeddedNsqlookupd

__all__ = ["EmbeddedNsqd", "EmbeddedNsqlookupd"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nsqtools.server import embedded

        return getattr(embedded, name)
    raise AttributeError(name)
