"""Discovery: ask every nsqlookupd periodically which nsqd have a topic, or which nsqd exist.

Each round asks all nsqlookupd at the same time and merges their answers. They do not replicate each
other's data, so one that is down, slow or empty must not hide what another has. An error costs no
connection: it is logged, and the next round tries again.

Rounds are ``lookupd_poll_interval`` apart plus a random share of it, drawn for each round, so that
a fleet of clients does not ask in step. A lost connection brings the next round forward.

Requests run on the threads of `connecting`, each on a connection of its own. Kept connections would
be a thousand for a thousand topics.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nsqtools.client.change_log import ChangeLog
from nsqtools.client.connection import client_tls, http_access
from nsqtools.client.connection_settings import current_secret
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.thread_pool import thread_pool
from nsqtools.errors import DeadlineExceeded, NsqError
from nsqtools.http.http_api import Lookup, NsqlookupdHTTPClient
from nsqtools.protocol.names import LOOKUPD_HTTP_PORT, Address, http_url, shown_url

log = logging.getLogger("nsqtools")

# nsqd registers with a restarted nsqlookupd within seconds, and a second lets other connections
# that are being lost join the same round.
EARLY_AFTER_S = 1.0
# An nsqd that flaps must not cause more than this rate of rounds.
EARLY_ROUNDS_APART_S = 5.0
# A request's own time limit does not cover resolving the name and starting the thread.
MARGIN_S = 0.5

# Shared, because a thousand topics may ask the same nsqlookupd.
_failures = ChangeLog()


class Discovery:
    """Polls for the nsqd of a topic, or of all topics (None), from `begin` until `stop`.

    Both run on the I/O thread. ``address_map`` replaces broadcast addresses that this machine
    cannot reach. ``looked_up`` has the addresses of a lookup that was just made, which replaces the
    first round. Raises `ConfigurationError`.
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
        self._round: _Round | None = None
        self._unanswered: set[str] = set()  # nsqlookupd asked in this round or an earlier one
        self._next_at = 0.0
        self._early_not_before = 0.0
        self._is_stopped = False
        self._lacking_topic: set[str] = set()  # nsqlookupd for which that was logged

    def begin(
        self, loop: LoopMember, on_round: Callable[[set[Address], list[NsqError]], None]
    ) -> None:
        """Start polling, with the first round now unless ``looked_up`` replaces it.

        ``on_round`` gets the merged addresses of each round, and the errors if no nsqlookupd
        answered.
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
        """Stop polling, without waiting for the current round."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def ask_soon(self) -> None:
        """Bring the next round forward, because a connection was lost."""
        at = max(self._loop.now() + EARLY_AFTER_S, self._early_not_before)
        if at < self._next_at and not self._is_stopped:
            self._early_not_before = at + EARLY_ROUNDS_APART_S
            self._set_next(at)

    def next_delay_s(self) -> float:
        """Draw the delay to the next round, in seconds."""
        options = self._options
        jitter = random.SystemRandom().uniform(0, options.lookupd_poll_jitter)
        return options.lookupd_poll_interval_s * (1 + jitter)

    def _set_next(self, at: float) -> None:
        self._next_at, delay_s = at, at - self._loop.now()
        self._timer = self._loop.call_later(delay_s, self._begin_round, instead_of=self._timer)

    def _begin_round(self) -> None:
        self._set_next(self._loop.now() + self.next_delay_s())
        if self._round is not None:  # its requests still wait for a thread
            return
        # An nsqlookupd that has not answered an earlier round is not asked a second time.
        urls = [url for url in self._urls if url not in self._unanswered]
        if not urls:
            return
        self._round = round_ = _Round(len(urls))
        self._unanswered.update(urls)
        for url in urls:
            ask, done = partial(self._ask, url, round_), partial(self._answered, url, round_)
            thread_pool.run(self._loop, shown_url(url), ask, done)

    # -- on a thread of the pool ----------------------------------------------------------------

    def _ask(self, url: str, round_: _Round) -> Lookup:
        self._loop.call_soon(partial(self._begun, round_))
        access, options = self._access, self._options
        tls = access.tls and client_tls(options).get()  # with the current contents of its files
        bearer = current_secret(options) if options.lookupd_authorization else ""
        access = replace(access, tls=tls, bearer=bearer)
        with access.nsqlookupd(url) as client:
            return (
                client.lookup(self._topic) if self._topic is not None else _registered_nsqd(client)
            )

    # -- on the I/O thread ----------------------------------------------------------------------

    def _begun(self, round_: _Round) -> None:
        """Start the time limit of a round, when its first request has got a thread."""
        if not round_.has_begun and not self._is_stopped:
            round_.has_begun = True
            limit_s = self._options.lookupd_poll_timeout_s + MARGIN_S
            self._loop.call_later(limit_s, partial(self._give_up, round_))

    def _answered(self, url: str, round_: _Round, answer: Lookup | NsqError) -> None:
        self._unanswered.discard(url)
        if round_ is not self._round or self._is_stopped:
            return
        round_.missing -= 1
        if isinstance(answer, NsqError):
            round_.errors.append(answer)
            _failures.report(url, f"lookup failed: {answer}")
        else:
            _failures.resolve(url)
            if answer.is_known:
                self._lacking_topic.discard(url)
            elif url not in self._lacking_topic:
                self._lacking_topic.add(url)
                log.info("%s does not list topic %s yet", shown_url(url), self._topic)
            round_.answers.append(answer)
        if not round_.missing:
            self._end_round(round_)

    def _give_up(self, round_: _Round) -> None:
        if round_ is not self._round or self._is_stopped:
            return
        for url in self._unanswered:
            late = DeadlineExceeded(f"{shown_url(url)} did not answer in time")
            round_.errors.append(late)
            _failures.report(url, f"lookup failed: {late}")
        self._end_round(round_)

    def _end_round(self, round_: _Round) -> None:
        self._round = None
        addresses = {
            self._access.reachable(nsqd) for answer in round_.answers for nsqd in answer.nsqd
        }
        self._on_round(addresses, [] if round_.answers else round_.errors)


def _registered_nsqd(client: NsqlookupdHTTPClient) -> Lookup:
    """Return all nsqd except those with only tombstoned topics, which are being drained."""
    nodes = [node for node in client.nodes() if not node.topics or node.topics > node.tombstoned]
    return Lookup(True, frozenset(), frozenset(node.node for node in nodes))


@dataclass(slots=True, eq=False)
class _Round:
    """The answers of one round. ``missing`` nsqlookupd have not answered."""

    missing: int
    answers: list[Lookup] = field(default_factory=list)
    errors: list[NsqError] = field(default_factory=list)
    has_begun: bool = False
