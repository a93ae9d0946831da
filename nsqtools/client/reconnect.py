"""When to try an address again. Pure: the caller keeps the clock.

An nsqd given by address is tried after 8, 16, 32, 64 and then every 120 seconds, each delay a
little shorter by chance so that a fleet does not return in step (client guide). An nsqd found
through nsqlookupd is tried when a lookup lists it, but not before a floor that starts at a second
and doubles: without it an unauthorised topic is tried in a hot loop.

A connection proves itself by a heartbeat, a message or `PROVEN_AFTER_S`, not by being accepted:
an nsqd that accepts and dies at once must not reset the delays.
"""

from __future__ import annotations

import random

PROVEN_AFTER_S = 30.0
DISCOVERED_BASE_S = 1.0


class RetryDelays:
    """The delays of one address: doubling from ``base_s`` to ``maximum_s``, less some jitter.

    ``jitter`` is the largest share taken off a delay.
    """

    def __init__(
        self,
        base_s: float,
        maximum_s: float,
        *,
        jitter: float = 0.1,
        rng: random.Random | None = None,
    ) -> None:
        self._base_s = base_s
        self._maximum_s = maximum_s
        self._jitter = jitter
        self._rng = rng or random.Random()
        self._failures = 0

    def next_delay_s(self) -> float:
        """Return the seconds to wait after the try or connection that just failed."""
        delay_s = min(self._maximum_s, self._base_s * 2.0 ** min(self._failures, 62))
        self._failures += 1
        return delay_s * (1 - self._rng.uniform(0, self._jitter))

    def reset(self) -> None:
        """The connection has proven itself."""
        self._failures = 0
