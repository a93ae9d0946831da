"""The nsqd that a producer publishes to, and which of them is next. On the I/O thread.

Addresses that were given are used for ever. Those that nsqlookupd list come in an order drawn by
chance, or a fleet of producers would all use the same one. One that is listed no longer gets
publishes only while no other is connected, because an nsqlookupd that was just started lists none;
then it is let go.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator

from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import LoopMember
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_link import LinkUser, ProducerLink
from nsqtools.client.spread import PublishMode
from nsqtools.errors import ConnectionFailed, DeadlineExceeded, NsqError, RefusedError
from nsqtools.protocol.addresses import Address

log = logging.getLogger("nsqtools")

PATIENCE_S = 1.0  # for an nsqd that does not answer to connecting, before the next one is tried


class ProducerLinks:
    """One link for each nsqd: what is listed comes first, in the order in which to try them.

    ``user`` is called with the outcome of publications, and when something has changed.
    """

    def __init__(
        self,
        addresses: Iterable[Address],
        discovery: Discovery | None,
        options: ClientOptions,
        mode: PublishMode,
        loop: LoopMember,
        user: LinkUser,
    ) -> None:
        self._discovery = discovery
        self._options = options
        self._mode = mode
        self._loop = loop
        self._user = user
        self._links = [self._make_link(address, is_announced=False) for address in addresses]
        self._turn = 0
        self._expects_lookup = discovery is not None
        self._lookup_error: NsqError | None = None

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(list(self._links))

    def __len__(self) -> int:
        return len(self._links)

    def _make_link(self, address: Address, *, is_announced: bool) -> ProducerLink:
        return ProducerLink(
            address, self._options, self._loop, self._user, is_announced=is_announced
        )

    def begin(self) -> None:
        """Begin to ask for nsqd."""
        if self._discovery is not None:
            self._discovery.begin(self._loop, self._listed)

    # -- choosing -------------------------------------------------------------------------------

    def choose(self) -> ProducerLink | None:
        """Return a connected link, or None; what may connect begins to, for later."""
        links = self._links
        if self._mode is PublishMode.ROUND_ROBIN:
            return self._choose_in_turn()
        if links and links[0].connection is not None:  # the usual case, once a turn
            return links[0]
        now = self._loop.now()
        is_any_connected = any(link.connection is not None for link in links)
        for link in links:
            if link.connection is not None:
                return link
            link.connect_if_due(now)
            is_fresh = link.is_connecting and now - link.tried_at < PATIENCE_S
            if is_fresh and not is_any_connected:
                return None
        return None

    def _choose_in_turn(self) -> ProducerLink | None:
        now, links = self._loop.now(), self._links
        for link in links:
            link.connect_if_due(now)
        first = self._turn % max(1, len(links))
        in_order = links[first:] + links[:first]
        connected = [link for link in in_order if link.connection is not None]
        return next((link for link in connected if link.is_listed), next(iter(connected), None))

    def choose_after(self, chosen: ProducerLink) -> ProducerLink | None:
        """Return the link for what follows something that went to the one chosen before."""
        if self._mode is not PublishMode.ROUND_ROBIN:
            return chosen
        self._turn += 1
        return self._choose_in_turn()

    @property
    def may_connect(self) -> bool:
        """Tell whether some nsqd is connected, or may be soon."""
        return self._expects_lookup or any(
            link.connection is not None or link.is_connecting for link in self._links
        )

    def next_try_in_s(self) -> float:
        """Return in how many seconds it is worth to `choose` again; a lookup wakes by itself."""
        if self._discovery is not None:
            self._discovery.ask_soon()
        not_before = [link.not_before for link in self._links if link.is_listed]
        return min(not_before, default=self._loop.now() + PATIENCE_S) - self._loop.now()

    def last_error(self) -> NsqError | None:
        """Why nothing can be sent; a refusal only when every nsqd refuses."""
        errors = [link.last_error for link in self._links if link.last_error is not None]
        if self._lookup_error is not None:
            errors.append(self._lookup_error)
        elif not self._links and not self._expects_lookup:
            errors.append(
                ConnectionFailed(
                    "nsqlookupd know no nsqd that messages can be published to",
                    hint="Is nsqd running with --lookupd-tcp-address, and does allow_announced"
                    " allow its address?",
                )
            )
        errors.sort(key=lambda error: isinstance(error, RefusedError))
        return errors[0] if errors else None

    # -- what nsqlookupd list -------------------------------------------------------------------

    def _listed(self, found: set[Address], errors: list[NsqError]) -> None:
        self._expects_lookup = False
        self._lookup_error = errors[0] if errors else None
        if not errors:
            self._fit(found)
        self._user.link_changed()

    def _fit(self, found: set[Address]) -> None:
        known = {link.address for link in self._links}
        for link in self._links:
            link.is_listed = link.address in found or not link.is_announced
        new = sorted(found - known)
        random.shuffle(new)
        count = sum(link.is_announced and link.is_listed for link in self._links)
        room = max(0, self._options.max_discovered_nsqd - count)
        if len(new) > room:
            log.warning(
                "%d of the nsqd that nsqlookupd announces are left out: they are more than "
                "max_discovered_nsqd (%d)",
                len(new) - room,
                self._options.max_discovered_nsqd,
            )
        self._links += [self._make_link(address, is_announced=True) for address in new[:room]]
        self._links.sort(key=lambda link: not link.is_listed)

    def changed(self) -> None:
        """A link was made or lost, or the list has changed: let go what is not needed."""
        has_listed = any(link.is_listed and link.connection is not None for link in self._links)
        for link in list(self._links):
            is_needed = link.outstanding or (link.connection is not None and not has_listed)
            if not link.is_listed and not is_needed:
                self._links.remove(link)
                link.close(DeadlineExceeded(f"{link.address} is listed no longer"))
        if self._discovery is not None and any(link.has_failed for link in self._links):
            self._discovery.ask_soon()

    # -- all of them ----------------------------------------------------------------------------

    @property
    def has_outstanding(self) -> bool:
        return any(link.outstanding for link in self._links)

    def check(self, now: float) -> None:
        """Give up the connections that are dead."""
        for link in self:
            link.check(now)

    def close(self, error: NsqError) -> None:
        """Close for good."""
        if self._discovery is not None:
            self._discovery.stop()
        for link in self:
            link.close(error)
