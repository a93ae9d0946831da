"""Whether anybody listens where a consumer is to connect, found out without subscribing."""

from __future__ import annotations

from collections.abc import Sequence

from nsqtools.errors import ConnectionFailed
from nsqtools.protocol.addresses import parse_address
from nsqtools.transport.stream import Deadline, connect


def require_one(nsqd_tcp_addresses: Sequence[str], timeout_s: float) -> None:
    """Connect to one nsqd, and leave at once. Raises the first `ConnectionFailed` if none answers;
    without addresses nothing."""
    failures = []
    for address in nsqd_tcp_addresses:
        try:
            connect(parse_address(address), Deadline(timeout_s)).close()
        except ConnectionFailed as error:
            failures.append(error)
        else:
            return
    if failures:
        raise failures[0]
