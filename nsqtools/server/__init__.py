"""nsqd and nsqlookupd in Python: real servers for a machine that has no NSQ, and for tests.

`EmbeddedNsqd` and `EmbeddedNsqlookupd` run one in a thread of this process; ``nsq nsqd`` and
``nsq nsqlookupd`` run the same daemons in front.
Everything of one daemon happens in one asyncio loop, so nothing in here takes a lock.

    daemon.py            binds, loads, serves, stops; embedded.py puts it in a thread
    connection.py        bytes of one TCP client in and out, its layers and deadlines
    protocol_v2.py       the commands of nsqd; consumer.py pushes messages within RDY
    nsqd.py topic.py channel.py   where messages go; pure but for the timers of the loop
    backlog.py disk_queue.py      memory, then files in Go's formats
    http_foundation.py nsqd_http.py   the HTTP API
    nsqlookupd.py        binds, serves, stops; lookup_protocol_v1.py nsqlookupd_http.py its clients
    registrations.py     what it knows; pure
"""

from __future__ import annotations

from nsqtools.server.embedded import EmbeddedNsqd
from nsqtools.server.nsqlookupd import EmbeddedNsqlookupd

__all__ = ["EmbeddedNsqd", "EmbeddedNsqlookupd"]
