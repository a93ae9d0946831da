"""nsqd and nsqlookupd in Python: real servers for a machine that has no NSQ, and for tests.

`EmbeddedNsqd` and `EmbeddedNsqlookupd` run one in a thread of this process; ``nsq nsqd`` and
``nsq nsqlookupd`` run the same daemons in the foreground. Everything of one daemon happens in one
asyncio loop, so no lock is taken here.

    *_daemon            the two daemons: bind, load, serve, stop
    foreground embedded run them in the foreground, or in a thread
    job_nsqd            an nsqd whose queues a job fills: what nsqtools.one_channel uses
    client_connection   a TCP client: its bytes, layers and turns
    protocol_v2         nsqd's commands; negotiation, TLS and auth are beside it
    queues/             the queues of nsqd, topics, channels: memory first, then files
    durable_*           --durable: the database, its transactions, and its files
    stored_queues       what a data directory holds, read without touching it
    recovery            from the database of --durable to the files of Go's nsqd, and back
    nsqd_http           the endpoints of nsqd, served by nsqtools.http
    options go_flags    the options of both daemons; flags in Go's syntax, TOML files
    stats               /stats, /metrics, and what goes to statsd
    lookup_peers        registering with nsqlookupd
    http_get            what they and auth ask by HTTP
    registrations       what nsqlookupd knows

The two classes are imported when they are asked for: ``nsq nsqd --help`` must not load a server.
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
