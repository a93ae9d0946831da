"""When to try an address again. Pure: the caller keeps the clock.

An nsqd given by address is tried after 8, 16, 32, 64 and then every 120 seconds, each delay a
little shorter by chance so that a fleet does not return in step (client guide). An nsqd found
through nsqlookupd is tried when a lookup lists it, but not before a floor that starts at a second
and doubles: without it an unauthorized topic is tried in a hot loop.

A connection that has proven itself (`Connection.is_proven`) resets the delays of its address.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from nsqtools.protocol.addresses import Address

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


@dataclass(slots=True)
class _Nsqd:
    """One nsqd that the consumer knows of. Times are readings of the caller's clock."""

    delays: RetryDelays
    is_direct: bool
    not_before: float
    is_listed: bool = True  # by the last lookup; a direct address always is
    is_busy: bool = False  # connecting or connected


class KnownNsqd:
    """Which nsqd to connect to, and when.

    ``direct`` addresses were given by the user and are tried for ever; others come and go with
    `listed`. An address is never connected twice at a time.
    """

    def __init__(
        self,
        direct: Iterable[Address],
        now: float,
        *,
        base_s: float = 8.0,
        maximum_s: float = 120.0,
        discovered_maximum_s: float = 60.0,
        max_discovered: int = 1000,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random()
        self._discovered_maximum_s = discovered_maximum_s
        self._max_discovered = max_discovered
        self._nsqds = {
            address: _Nsqd(RetryDelays(base_s, maximum_s, rng=self._rng), True, now)
            for address in direct
        }

    def listed(self, addresses: Iterable[Address], now: float) -> int:
        """A lookup round found these nsqd. A connected one that is missing stays connected.

        One that is missing and not connected is forgotten once its delay is over. Of more than
        ``max_discovered`` those that are busy stay and the others are drawn again, so that nobody
        keeps an nsqd out by announcing many. Return how many are left out.
        """
        listed = set(addresses)
        left_out = self._leave_out(listed)
        for address, nsqd in list(self._nsqds.items()):
            nsqd.is_listed = nsqd.is_direct
            if not (nsqd.is_direct or nsqd.is_busy or address in listed or nsqd.not_before > now):
                del self._nsqds[address]
        for address in listed:
            if address in self._nsqds:
                self._nsqds[address].is_listed = True
            else:
                delays = RetryDelays(DISCOVERED_BASE_S, self._discovered_maximum_s, rng=self._rng)
                self._nsqds[address] = _Nsqd(delays, False, now)
        return left_out

    def _leave_out(self, listed: set[Address]) -> int:
        kept = {a for a, nsqd in self._nsqds.items() if nsqd.is_direct or nsqd.is_busy}
        discovered = sum(not self._nsqds[address].is_direct for address in kept)
        idle = sorted(listed - kept)
        room = max(0, self._max_discovered - discovered)
        if len(idle) <= room:
            return 0
        for address in self._rng.sample(idle, len(idle) - room):
            listed.remove(address)
            self._nsqds.pop(address, None)
        return len(idle) - room

    def __len__(self) -> int:
        return len(self._nsqds)

    def take_due(self, now: float) -> list[Address]:
        """Return the addresses to connect to now; each counts as busy from here on."""
        due = [a for a, p in self._nsqds.items() if self._is_waiting(p) and p.not_before <= now]
        for address in due:
            self._nsqds[address].is_busy = True
        return due

    def next_due(self) -> float | None:
        """Return when `take_due` will have something, or None when nothing waits."""
        waiting = [p.not_before for p in self._nsqds.values() if self._is_waiting(p)]
        return min(waiting, default=None)

    def failed(self, address: Address, now: float, *, was_proven: bool = False) -> float:
        """A try or connection has ended. Return the seconds until the next try is allowed."""
        nsqd = self._nsqds[address]
        if was_proven:
            nsqd.delays.reset()
        delay_s = nsqd.delays.next_delay_s()
        nsqd.is_busy = False
        nsqd.is_listed = nsqd.is_direct
        nsqd.not_before = now + delay_s
        return delay_s

    def is_direct(self, address: Address) -> bool:
        """Tell whether the user gave the address."""
        return self._nsqds[address].is_direct

    @staticmethod
    def _is_waiting(nsqd: _Nsqd) -> bool:
        return nsqd.is_listed and not nsqd.is_busy
