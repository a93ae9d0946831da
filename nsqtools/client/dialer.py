"""Connecting a consumer to the nsqd it should be on, again and again: peers, timers, threads.

`Peers` decides what is due; here it is done. All methods run on the loop's thread. An address is
busy from the moment its connecting begins until `ended` is told that it failed or was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nsqtools.client.connection import Connection
from nsqtools.client.connector import connect_in_background
from nsqtools.client.io_loop import IOLoop, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.reconnect import Peers
from nsqtools.errors import NsqError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.commands import Subscribe

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")


class Dialer:
    """Connects to ``addresses`` and to what lookups list, from `begin` until `stop`.

    ``done`` gets each connection, or the error that was had instead.
    """

    def __init__(
        self,
        loop: IOLoop,
        addresses: Iterable[Address],
        options: ClientOptions,
        tls: ssl.SSLContext | None,
        subscribe: Subscribe,
        done: Callable[[Address, Connection | NsqError], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._tls = tls
        self._subscribe = subscribe
        self._done = done
        self._connecting = 0
        self._timer: Timer | None = None
        self._is_stopped = False
        self._peers = Peers(
            addresses,
            loop.now(),
            base_s=options.reconnect_base_s,
            maximum_s=options.reconnect_max_s,
            discovered_maximum_s=options.lookupd_poll_interval_s,
        )

    @property
    def is_connecting(self) -> bool:
        """Tell whether some try has not ended yet."""
        return self._connecting > 0

    def begin(self) -> None:
        """Connect to what is due, and see to the rest in time."""
        if self._is_stopped:
            return
        now = self._loop.now()
        for address in self._peers.take_due(now):
            self._connecting += 1
            connect_in_background(
                self._loop, address, self._options, self._tls, self._subscribe, self._connected
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_due = self._peers.next_due()
        if next_due is not None:
            self._timer = self._loop.call_later(next_due - now, self.begin)

    def listed(self, addresses: Iterable[Address]) -> None:
        """A lookup round has found these."""
        self._peers.listed(addresses, self._loop.now())
        self.begin()

    def proven(self, address: Address) -> None:
        """The connection has brought something: its address is good."""
        self._peers.proven(address)

    def ended(self, address: Address, error: NsqError, *, quietly: bool = False) -> bool:
        """A try or connection has ended; it is tried again in time, or when a lookup lists it.

        Return whether it depends on a lookup.
        """
        delay_s = self._peers.failed(address, self._loop.now())
        is_direct = self._peers.is_direct(address)
        again = f"in {delay_s:.1f} s" if is_direct else "when nsqlookupd lists it"
        log.log(logging.INFO if quietly else logging.WARNING, "%s; trying again %s", error, again)
        self.begin()
        return not is_direct

    def stop(self) -> None:
        """Connect no more. What is being connected is closed as soon as it is there."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _connected(self, address: Address, result: Connection | NsqError) -> None:
        self._connecting -= 1
        if not self._is_stopped:
            self._done(address, result)
        elif isinstance(result, Connection):
            result.close()
