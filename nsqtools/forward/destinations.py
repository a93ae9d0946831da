"""The nsqd of a destination, as its nsqlookupd announce them now.

They are asked at the start, then at the interval of every client, and soon after nothing could be
delivered. What was given by address always stays. An nsqd is let go only when every nsqlookupd has
answered and none names it, and never all of them: an nsqlookupd that was restarted knows nobody.

`look` is called on the forwarder's thread; asking itself happens in the background.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

from nsqtools.client.background import run_in_background
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import open_cluster
from nsqtools.errors import NotFoundError, NsqError

log = logging.getLogger("nsqtools")

SOON_S = 1.0
SOON_APART_S = 5.0


class Destinations:
    """``settings`` are those of the destination with the addresses of now.

    Raises the error when no nsqlookupd answers, and `NotFoundError` when none knows an nsqd.
    """

    def __init__(self, given: ConnectionSettings, now: float) -> None:
        self._given = given
        self._interval_s = given.client_options().lookupd_poll_interval_s
        self._found: ConnectionSettings | None = None
        self._is_asking = False
        self.settings = given
        self.settings = self._ask()
        self._asked_at = now
        self._next_at = self._after(now)

    def look(self, now: float) -> bool:
        """Ask when it is time; return whether `settings` has other addresses than before."""
        if now >= self._next_at and self._given.lookupd_http_addresses and not self._is_asking:
            self._asked_at = now
            self._next_at = self._after(now)
            self._is_asking = True
            try:
                run_in_background(self._given.lookupd_http_addresses, self._ask_in_background)
            except RuntimeError:  # no threads are left
                self._is_asking = False
        found, self._found = self._found, None
        if found is None or found.nsqd_tcp_addresses == self.settings.nsqd_tcp_addresses:
            return False
        log.warning("the destination is now %s", ", ".join(found.nsqd_tcp_addresses))
        self.settings = found
        return True

    def look_soon(self, now: float) -> None:
        """Nothing could be delivered: ask earlier."""
        self._next_at = min(self._next_at, max(now + SOON_S, self._asked_at + SOON_APART_S))

    def _after(self, now: float) -> float:
        return now + self._interval_s * random.uniform(1, 1.3)

    def _ask_in_background(self) -> bool:
        try:
            self._found = self._ask()
        except NsqError as exc:
            log.info("cannot ask for the nsqd of the destination: %s", exc)
            return False
        finally:
            self._is_asking = False
        return True

    def _ask(self) -> ConnectionSettings:
        given, known = self._given, set(self.settings.nsqd_tcp_addresses)
        if not given.lookupd_http_addresses:
            return given
        with open_cluster(given) as cluster:
            answers, failures = cluster.known_nodes()
            if failures and not answers:
                raise failures[0].error
            found = {
                str(cluster.reachable(known.node.tcp))
                for nodes in answers.values()
                for known in nodes
                if known.node.tcp is not None
            }
        found |= set(given.nsqd_tcp_addresses)
        if failures or not found:
            found |= known
        if not found:
            raise NotFoundError("the nsqlookupd of the destination know no nsqd")
        return replace(given, nsqd_tcp_addresses=tuple(sorted(found)))
