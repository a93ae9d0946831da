"""nsqd and nsqlookupd in Python: real servers for a machine that has no NSQ, and for tests.

`EmbeddedNsqd` and `EmbeddedNsqlookupd` run one in a thread of this process; ``nsq nsqd`` and
``nsq nsqlookupd`` run the same daemons in front. Everything of one daemon happens in one asyncio
loop, so nothing in here takes a lock.

    life        daemon (nsqd: binds, loads, serves, stops), nsqlookupd, daemon_thread, foreground
    settings    options, setting_kinds, go_flags, config_file
    TCP         connection (bytes, layers, deadlines), protocol_v2 with publishing, authorization,
                negotiation and subscription (pushes messages within RDY); lookup_protocol_v1
    queues      nsqd, topic, channel: where messages go; in_flight, deferred: what they wait for;
                backlog: memory, then disk_queue: files in Go's formats, record_file, metadata
    HTTP        http_routes, http_foundation, http_server; nsqd_http, stats_http, debug_http,
                nsqlookupd_http
    telling     stats, stats_page, statsd, latency, lookup_registry with lookup_peer
    knowing     registrations: what nsqlookupd knows; pure
"""

from __future__ import annotations

from nsqtools.server.embedded import EmbeddedNsqd
from nsqtools.server.nsqlookupd import EmbeddedNsqlookupd

__all__ = ["EmbeddedNsqd", "EmbeddedNsqlookupd"]
