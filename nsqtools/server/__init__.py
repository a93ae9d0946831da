"""nsqd and nsqlookupd in Python: real servers for a machine that has no NSQ, and for tests.

`EmbeddedNsqd` and `EmbeddedNsqlookupd` run one in a thread of this process; ``nsq nsqd`` and
``nsq nsqlookupd`` run the same daemons in front. Everything of one daemon happens in one asyncio
loop, so nothing in here takes a lock.

    daemon nsqlookupd   the two daemons: bind, load, serve, stop; in a thread or in front
    tcp/                connections, their layers and deadlines, the commands of the protocols
    queues/             nsqd, topics, channels: where messages go; memory first, then files
    http/               routing and errors as Go's, and the endpoints
    settings/           options, flags in Go's syntax, TOML files
    stats/ lookup/      /stats and statsd; registering with nsqlookupd, and what it knows
"""

from __future__ import annotations

from nsqtools.server.embedded import EmbeddedNsqd
from nsqtools.server.nsqlookupd import EmbeddedNsqlookupd

__all__ = ["EmbeddedNsqd", "EmbeddedNsqlookupd"]
