"""Keeping a consumer connected to the nsqd it should be on.

`reconnect.KnownNsqd` decides when each address is due; this module connects and keeps the timer.
All methods run on the loop's thread. An address is busy from the moment its connecting begins
until `ended` reports that it failed or was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from nsqtools.client.connection import Connection
from nsqtools.client.handshake import open_in_background
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.reconnect import KnownNsqd
from nsqtools.errors import NsqError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.commands import Subscribe

log = logging.getLogger("nsqtools")


class Dialer:
    """Connects to ``addresses`` and to what lookups list, from `begin` until `stop`.

    ``done`` gets each connection, or the error.
    """

    def __init__(
        self,
        loop: LoopMember,
        addresses: Iterable[Address],
        options: ClientOptions,
        subscribe: Subscribe,
        done: Callable[[Address, Connection | NsqError], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._subscribe = subscribe
        self._done = done
        self._connecting = 0
        self._timer: Timer | None = None
        self._is_stopped = False
        self._known = KnownNsqd(
            addresses,
            loop.now(),
            base_s=options.reconnect_base_s,
            maximum_s=options.reconnect_max_s,
            discovered_maximum_s=options.lookupd_poll_interval_s,
            max_discovered=options.max_discovered_nsqd,
        )

    @property
    def is_connecting(self) -> bool:
        """Tell whether some attempt is under way."""
        return self._connecting > 0

    def begin(self) -> None:
        """Connect to what is due, and come back when the next address is."""
        if self._is_stopped:
            return
        now = self._loop.now()
        for address in self._known.take_due(now):
            self._connecting += 1
            self._connect(address)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_due = self._known.next_due()
        if next_due is not None:
            self._timer = self._loop.call_later(next_due - now, self.begin)

    def _connect(self, address: Address) -> None:
        def done(result: Connection | NsqError) -> None:  # on the connecting thread
            self._loop.call_soon(lambda: self._connected(address, result))

        open_in_background(
            address,
            self._options,
            self._subscribe,
            done,
            is_announced=not self._known.is_direct(address),
        )

    def listed(self, addresses: Iterable[Address]) -> None:
        """A lookup round has found these."""
        left_out = self._known.listed(addresses, self._loop.now())
        if left_out:
            log.warning(
                "%d of the nsqd that nsqlookupd announces are left out: they are more than "
                "max_discovered_nsqd (%d)",
                left_out,
                self._options.max_discovered_nsqd,
            )
        self.begin()

    def ended(
        self, address: Address, error: NsqError, *, was_proven: bool, quietly: bool = False
    ) -> bool:
        """A try or connection has ended; it is retried in time, or when a lookup lists it.

        Return whether it depends on a lookup.
        """
        delay_s = self._known.failed(address, self._loop.now(), was_proven=was_proven)
        is_direct = self._known.is_direct(address)
        again = f"in {delay_s:.1f} s" if is_direct else "when nsqlookupd lists it"
        log.log(logging.INFO if quietly else logging.WARNING, "%s; trying again %s", error, again)
        self.begin()
        return not is_direct

    def stop(self) -> None:
        """Stop connecting. A connection that is being made is closed as soon as it exists."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _connected(self, address: Address, result: Connection | NsqError) -> None:
        self._connecting -= 1
        if not self._is_stopped:
            self._done(address, result)
        elif isinstance(result, Connection):
            result.close()
