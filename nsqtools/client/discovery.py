"""Discovery: ask every nsqlookupd, again and again, which nsqd have a topic, or which there are.

All of them are asked in every round, at the same time, and the answers are united: nsqlookupd do
not talk to each other, and one that is down, slow or empty must not hide what another knows. An
error costs no connection; it is logged and the next round tries again.

Rounds are ``lookupd_poll_interval`` plus a random share of it apart, drawn for each round, so that
a fleet of clients spreads out. A lost connection asks for an earlier round.

Requests run on the threads of `connecting`, each on a connection of its own: kept ones would be a
thousand where a thousand topics are polled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nsqtools.client.connecting import rng, thread_pool
from nsqtools.client.connection import client_tls, http_access
from nsqtools.client.connection_settings import current_secret
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.errors import DeadlineExceeded, NsqError
from nsqtools.http.http_api import Lookup, NsqlookupdHTTPClient
from nsqtools.protocol.names import LOOKUPD_HTTP_PORT, Address, http_url, shown_url

log = logging.getLogger("nsqtools")

EARLY_AFTER_S = 1.0
EARLY_ROUNDS_APART_S = 5.0
MARGIN_S = 0.5  # for what a request's own time limit does not cover


class Discovery:
    """Polls for one topic, or (None) for every nsqd, from `begin` until `stop`, both on the I/O
    thread.

    Addresses are mapped by ``address_map`` (for broadcast addresses this machine cannot reach).
    ``looked_up`` are addresses that were just asked for: they are the first round. Raises
    `ConfigurationError`.
    """

    def __init__(
        self,
        lookupd_http_addresses: Sequence[str],
        topic: str | None,
        options: ClientOptions,
        address_map: Mapping[str, str] | None = None,
        looked_up: Iterable[Address] = (),
    ) -> None:
        self._urls = [http_url(a, LOOKUPD_HTTP_PORT) for a in lookupd_http_addresses]
        self._topic = topic
        self._options = options
        self._access = http_access(options, self._urls, address_map)
        self._looked_up = set(map(self._access.reachable, looked_up))
        self._loop: LoopMember
        self._on_round: Callable[[set[Address], list[NsqError]], None]
        self._timer: Timer | None = None
        self._round: _Round | None = None  # the one under way
        self._asked: set[str] = set()  # who has not answered yet, in this round or an earlier one
        self._next_at = 0.0
        self._early_not_before = 0.0
        self._is_stopped = False
        self._unknown_at: set[str] = set()

    def begin(
        self, loop: LoopMember, on_round: Callable[[set[Address], list[NsqError]], None]
    ) -> None:
        """Start polling; the first round is at once, unless ``looked_up`` has its answers.

        ``on_round`` gets the union of addresses of each round, and the errors of a round in which
        not one nsqlookupd answered.
        """
        self._loop = loop
        self._on_round = on_round
        if self._is_stopped:
            return
        if self._looked_up:
            self._set_next(self._loop.now() + self.next_delay_s())
            on_round(self._looked_up, [])
        else:
            self._begin_round()

    def stop(self) -> None:
        """Stop polling, without waiting for a round under way."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def ask_soon(self) -> None:
        """Bring the next round forward: a connection was lost."""
        at = max(self._loop.now() + EARLY_AFTER_S, self._early_not_before)
        if at < self._next_at and not self._is_stopped:
            self._early_not_before = at + EARLY_ROUNDS_APART_S
            self._set_next(at)

    def next_delay_s(self) -> float:
        """Draw the delay to the next round, in seconds."""
        options = self._options
        return options.lookupd_poll_interval_s * (1 + rng.uniform(0, options.lookupd_poll_jitter))

    def _set_next(self, at: float) -> None:
        self._next_at, delay_s = at, at - self._loop.now()
        self._timer = self._loop.call_later(delay_s, self._begin_round, instead_of=self._timer)

    def _begin_round(self) -> None:
        self._set_next(self._loop.now() + self.next_delay_s())
        if self._round is not None:  # it waits for its turn, as many others do
            return
        # one that still hangs in the round before is not asked a second time
        urls = [url for url in self._urls if url not in self._asked]
        if not urls:
            return
        self._round = round_ = _Round(len(urls))
        self._asked.update(urls)
        for url in urls:
            ask, done = partial(self._ask, url, round_), partial(self._answered, url, round_)
            thread_pool.run(self._loop, shown_url(url), ask, done)

    # -- on a thread of the pool ----------------------------------------------------------------

    def _ask(self, url: str, round_: _Round) -> Lookup:
        self._loop.call_soon(partial(self._begun, round_))
        access, options = self._access, self._options
        tls = access.tls and client_tls(options).get()  # as its files are now
        access = replace(access, tls=tls, bearer=access.bearer and current_secret(options))
        with access.nsqlookupd(url) as client:
            return client.lookup(self._topic) if self._topic is not None else _registered(client)

    # -- on the I/O thread ----------------------------------------------------------------------

    def _begun(self, round_: _Round) -> None:
        """The time of a round is counted from here: it may have waited for a thread."""
        if not round_.has_begun and not self._is_stopped:
            round_.has_begun = True
            limit_s = self._options.lookupd_poll_timeout_s + MARGIN_S
            self._loop.call_later(limit_s, partial(self._give_up, round_))

    def _answered(self, url: str, round_: _Round, answer: Lookup | NsqError) -> None:
        self._asked.discard(url)
        if round_ is not self._round or self._is_stopped:
            return
        round_.missing -= 1
        if isinstance(answer, NsqError):
            round_.errors.append(answer)
            _report_failure(url, answer)
        else:
            _said.pop(url, None)
            if answer.is_known:
                self._unknown_at.discard(url)
            elif url not in self._unknown_at:
                self._unknown_at.add(url)
                log.info("%s does not know topic %s yet", shown_url(url), self._topic)
            round_.answers.append(answer)
        if not round_.missing:
            self._end_round(round_)

    def _give_up(self, round_: _Round) -> None:
        if round_ is not self._round or self._is_stopped:
            return
        for url in self._asked:
            late = DeadlineExceeded(f"{shown_url(url)} did not answer in time")
            round_.errors.append(late)
            _report_failure(url, late)
        self._end_round(round_)

    def _end_round(self, round_: _Round) -> None:
        self._round = None
        found = {self._access.reachable(nsqd) for each in round_.answers for nsqd in each.nsqd}
        self._on_round(found, [] if round_.answers else round_.errors)


def _registered(client: NsqlookupdHTTPClient) -> Lookup:
    """Return every nsqd but those that are being emptied: all their topics are tombstoned."""
    nodes = [each for each in client.nodes() if not each.topics or each.topics > each.tombstoned]
    return Lookup(True, frozenset(), frozenset(each.node for each in nodes))


_said: dict[str, str] = {}  # of nsqlookupd that fail: a thousand topics ask the same one


def _report_failure(url: str, error: NsqError) -> None:
    """Log a failure when it begins or changes, and in detail each time."""
    is_known = _said.get(url) == str(error)
    log.log(logging.INFO if is_known else logging.WARNING, "lookup failed: %s", error)
    _said[url] = str(error)


@dataclass(slots=True, eq=False)
class _Round:
    """What came back of one round so far. ``missing`` have not answered."""

    missing: int
    answers: list[Lookup] = field(default_factory=list)
    errors: list[NsqError] = field(default_factory=list)
    has_begun: bool = False
