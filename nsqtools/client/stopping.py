"""Stopping a consumer without losing a FIN. Pure: fed with connections and the time.

Closing a socket right after CLS and FINs loses them: nsqd may be writing, the close becomes a
reset, and what it had not read is gone (measured: all of 250 FINs, in half of the runs). So each
connection goes through: CLS sent; CLOSE_WAIT seen (or a second passed); every message answered and
every byte sent; our direction shut down; nsqd's end of stream read (or a second passed); closed.

CLOSE_WAIT is not quite the end: nsqd answers CLS on one goroutine while another may just be taking
a message for us, which arrives a moment later (measured: in 3 % of the stops on a busy machine).
So that moment is waited for, and such a message is requeued like the others.

A disconnect does not requeue, it leaves messages in flight until their timeout; so what is not
handled by the deadline is requeued explicitly first.
"""

from __future__ import annotations

from typing import Literal, Protocol

GRACE_S = 1.0
STRAGGLERS_S = 0.05

Step = Literal["wait", "requeue", "shutdown", "close"]


class StoppableConnection(Protocol):
    """What `Stopping` looks at."""

    saw_close_wait: bool

    @property
    def is_drained(self) -> bool: ...


class Stopping:
    """One stop under way. Times are readings of the caller's clock."""

    def __init__(self, now: float, drain_timeout_s: float, drain: bool) -> None:
        self.drain = drain
        self._close_wait_by = now + GRACE_S
        self._drained_by = now + drain_timeout_s
        self._quiet_at: dict[StoppableConnection, float] = {}
        self._closed_by: dict[StoppableConnection, float] = {}
        self._requeued: set[StoppableConnection] = set()

    def refuses(self, now: float) -> bool:
        """Tell whether messages that still arrive go back at once."""
        return not self.drain or now >= self._drained_by

    def expire(self, now: float) -> None:
        """Do not wait for handlers any longer."""
        self._drained_by = now

    def is_quiet(self, connection: StoppableConnection, now: float) -> bool:
        """Tell whether no more messages are to be expected from a connection."""
        if connection.saw_close_wait:
            return now >= self._quiet_at.setdefault(connection, now + STRAGGLERS_S)
        return now >= self._close_wait_by

    def next_change(self, now: float) -> float | None:
        """Return when time alone will change an answer of `next_step` or `is_quiet`."""
        ends = (self._close_wait_by, self._drained_by, self._drained_by + GRACE_S)
        times = [*ends, *self._quiet_at.values(), *self._closed_by.values()]
        return min((at for at in times if at > now), default=None)

    def next_step(self, connection: StoppableConnection, now: float) -> Step:
        """Return what to do with a connection now; each step but "wait" is returned once."""
        if connection in self._closed_by:
            return "close" if now >= self._closed_by[connection] else "wait"
        if self.is_quiet(connection, now) and connection.is_drained:
            self._closed_by[connection] = now + GRACE_S
            return "shutdown"
        if now >= self._drained_by:
            if connection not in self._requeued:
                self._requeued.add(connection)
                return "requeue"
            if now >= self._drained_by + GRACE_S:  # not even the requeues get through
                return "close"
        return "wait"
