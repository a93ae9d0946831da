"""When a connection that is not broken is dead all the same. Pure.

TCP says nothing of a peer that lost power. nsqd sends a heartbeat every interval, so silence for
two of them and a second more means that nobody is there (pynsq's rule; `read_timeout` is the
ceiling, but one heartbeat must have had time to come). And a peer that takes no bytes for
`write_timeout` while some wait is stuck.
"""

from __future__ import annotations

from nsqtools.client.options import ClientOptions
from nsqtools.errors import DeadlineExceeded

TICK_S = 1.0  # how often it is worth looking


def find_dead(
    peer: str, silent_s: float, stalled_s: float, options: ClientOptions
) -> DeadlineExceeded | None:
    """Return why the connection must be given up, or None.

    ``silent_s`` is the time since the last read, ``stalled_s`` the time since the last progress of
    writing, or 0 when nothing waits to be written.
    """
    if options.heartbeat_interval_s > 0:
        interval_s = options.heartbeat_interval_s
        limit_s = max(interval_s + 1, min(2 * interval_s + 1, options.read_timeout_s))
        if silent_s > limit_s:
            return DeadlineExceeded(f"{peer} was silent for {limit_s:.0f} s")
    if stalled_s > options.write_timeout_s:
        return DeadlineExceeded(f"{peer} took no bytes for {options.write_timeout_s:.0f} s")
    return None
