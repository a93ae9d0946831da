"""Messages to HTTP endpoints: one request each or batches, which endpoint, what an answer means.

A request that fails goes to the next endpoint before its messages go back to the queue. Each
endpoint has a circuit of its own: after a few failures in a row it is left alone for a while that
doubles, and the others take its share; then one request shows whether it works again. Only when all
circuits are open nothing can be delivered, and then the forwarder holds what it has.

Everything but `parts` and `submit` runs on the thread of the pool. With batches, what comes within
``linger_s`` goes together, from whichever topic and nsqd, if URL and headers are the same; with
``hash`` what goes to one endpoint.
"""

from __future__ import annotations

import collections
import email.utils
import enum
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import responses
from itertools import chain
from typing import NamedTuple
from urllib.parse import urljoin

from nsqtools.client.attempts import Key
from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError
from nsqtools.forward import EndpointMode, Redirects
from nsqtools.forward.http_pool import Answer, HttpPool
from nsqtools.forward.http_requests import Endpoint, RequestBuilder
from nsqtools.forward.parcel import (
    DELIVERED,
    Circuit,
    Fate,
    Outcome,
    Parcel,
    Report,
    check_key,
    hash_slot,
)
from nsqtools.protocol.names import Address

FAILURES_TO_OPEN = 5  # in a row
OPEN_BASE_S, OPEN_MAX_S = 0.5, 5.0
MAX_REDIRECTS = 3
MAX_KNOWN = 10_000  # messages; the oldest are forgotten, and may be doubled


class StatusAction(enum.Enum):
    """What follows from a status."""

    OK = "ok"
    RETRY = "retry"
    DROP = "drop"
    DEAD_LETTER = "dead-letter"


DEFAULTS = {
    "2xx": StatusAction.OK,
    "3xx": StatusAction.DEAD_LETTER,
    "4xx": StatusAction.DEAD_LETTER,
    "5xx": StatusAction.RETRY,
    # the request was fine, the moment was not; and what an operator mends without touching messages
    **dict.fromkeys(("401", "403", "404", "408", "425", "429"), StatusAction.RETRY),
}
_RULE = re.compile(r"\s*([2-5](?:[0-9]{2}|(?i:xx)))\s*=\s*(ok|retry|drop|dead-letter)\s*")
SPLITTABLE = (400, 413, 422)  # one message of a batch may be to blame
REDIRECTS = (301, 302, 303, 307, 308)


def parse_policy(rules: Iterable[str] = ()) -> dict[int, StatusAction]:
    """Read ``4xx=drop`` and ``404=retry``, on top of what is usual; return what follows from each
    status. Raises `ConfigurationError`."""
    given: dict[str, StatusAction] = {}
    for rule in rules:
        if (match := _RULE.fullmatch(rule)) is None:
            raise ConfigurationError(
                f"--on-status {rule!r} is not STATUS=ACTION",
                hint="For example 4xx=drop or 404=retry; actions are ok, retry, drop, dead-letter.",
            )
        given[match[1].lower()] = StatusAction(match[2])
    return {
        status: next(
            known[name]
            for known in (given, DEFAULTS)
            for name in (str(status), f"{status // 100}xx")
            if name in known
        )
        for status in range(200, 600)
    }


def describe(status: int) -> str:
    """``HTTP 404 Not Found``."""
    return f"HTTP {status} {responses.get(status, '')}".rstrip()


def retry_after_s(text: str, now_s: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, at most an hour; None without one."""
    text = text.strip()
    if text.isdecimal():
        return float(min(int(text[:9]), 3600))
    try:
        moment_s = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, moment_s - now_s), 3600.0)


class HttpSettings(NamedTuple):
    """How to deliver. ``key`` is what ``hash`` goes by; ``batch_count`` and ``batch_bytes`` limit a
    batch, ``linger_s`` is how long a message waits for others."""

    mode: EndpointMode = EndpointMode.ROUND_ROBIN
    key: Callable[..., bytes] | None = None
    concurrency: int = 100
    policy: Mapping[int, StatusAction] = parse_policy()
    redirects: Redirects = Redirects.REFUSE
    batch_count: int = 1
    batch_bytes: int = 1 << 20
    linger_s: float = 0.0


class _PartialDeliveries:
    """Which endpoints have a message that others lack, for when it comes again (mode ``all``).

    It is kept by message, not by request: what comes again comes in other batches, and a batch that
    was refused is split. `of` may be called on any thread.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[Key, frozenset[Hashable]] = OrderedDict()

    def of(self, key: Key) -> frozenset[Hashable]:
        """Return the endpoints that have a message."""
        return self._holders.get(key, frozenset())

    def holders(self, parcels: Sequence[Parcel]) -> frozenset[Hashable]:
        """Return the endpoints that have every one of the messages."""
        return frozenset.intersection(*map(self.of, _keys(parcels)))

    def note(self, parcels: Sequence[Parcel], endpoint: Hashable) -> None:
        """An endpoint has the messages."""
        for key in _keys(parcels):
            self._holders[key] = self._holders.get(key, frozenset()) | {endpoint}
        while len(self._holders) > MAX_KNOWN:
            self._holders.popitem(last=False)

    def forget(self, parcels: Sequence[Parcel]) -> None:
        """The messages are settled at every endpoint."""
        if self._holders:
            for key in _keys(parcels):
                self._holders.pop(key, None)


def _keys(parcels: Iterable[Parcel]) -> Iterator[Key]:
    return chain.from_iterable(parcel.keys() for parcel in parcels)


@dataclass(slots=True)
class _Gathered:
    """Parcels that wait for others of a batch."""

    since: float
    parcels: list[Parcel] = field(default_factory=list)
    count: int = 0  # messages
    size: int = 0  # bytes


@dataclass(slots=True, eq=False)
class _Exchange:
    """Parcels that travel in one request, and the endpoints that it has been to."""

    parcels: Sequence[Parcel]
    tried: list[Circuit] = field(default_factory=list)
    lacking: list[Circuit] = field(default_factory=list)  # in mode all: those without it
    refusal: Outcome | None = None  # in mode all: of an endpoint that does not want it
    last: Outcome | None = None
    url: str = ""  # that it was sent to last
    target: Endpoint | None = None  # where a redirect leads
    hops: int = 0
    repeated: int = 0

    @property
    def circuit(self) -> Circuit:
        """That of the endpoint it was sent to last."""
        return self.tried[-1]


class HttpSink:
    """Delivers over HTTP. Raises `ConfigurationError` for settings that contradict each other."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        builder: RequestBuilder,
        settings: HttpSettings,
        pool: HttpPool,
    ) -> None:
        check_key(settings.key, is_hash=settings.mode is EndpointMode.HASH)
        self._settings = settings
        self._builder = builder
        opens = OPEN_BASE_S, OPEN_MAX_S, FAILURES_TO_OPEN
        self._endpoints = {Circuit(*opens): endpoint for endpoint in endpoints}
        self._circuits = list(self._endpoints)
        self._pool = pool
        self._turn = 0
        self._pending: collections.deque[_Exchange] = collections.deque()
        self._under_way = collections.Counter[Circuit]()  # requests
        self._gathered: dict[Hashable, _Gathered] = {}  # by their way
        self._gathers_for_s = settings.linger_s
        self._partial = _PartialDeliveries()
        self._ended: list[tuple[_Exchange, Outcome]] = []
        self._report: Report
        pool.start(self._tick, self._report_ended)

    # -- the forwarder's thread -----------------------------------------------------------------

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """A part for each message, or for each batch."""
        most = self._settings.batch_count, self._settings.batch_bytes
        alike = [parcel] if most[0] == 1 else parcel.grouped(self._way).values()
        return [part for each in alike for part in each.sized(*most)]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Send one part."""
        self._report = report  # the forwarder's, for all of them
        self._pool.call_soon(lambda: self._gather(parcel))

    def check(self) -> None:
        """Raise ``RuntimeError`` when the thread of the pool has failed."""
        if self._pool.failure is not None:
            raise RuntimeError("the HTTP thread failed") from self._pool.failure

    def flush(self) -> None:
        """Send what waits for a batch, and what comes."""

        def send_all() -> None:
            self._gathers_for_s = 0.0
            for way in list(self._gathered):
                self._send_gathered(way)

        self._pool.call_soon(send_all)

    def stop(self, timeout_s: float) -> None:
        """Close all connections: the forwarder has waited for what was under way."""
        self._pool.stop()

    # -- batches --------------------------------------------------------------------------------

    def _gather(self, parcel: Parcel) -> None:
        settings, count = self._settings, len(parcel)
        if settings.batch_count == 1:
            self._begin(_Exchange((parcel,)))
            return
        way = self._way(parcel.messages[0], parcel.bodies[0])
        gathered = self._gathered.get(way)
        if gathered is not None and (
            gathered.count + count > settings.batch_count
            or gathered.size + parcel.size > settings.batch_bytes
        ):
            self._send_gathered(way)
            gathered = None
        if gathered is None:
            gathered = self._gathered[way] = _Gathered(time.monotonic())
        gathered.parcels.append(parcel)
        gathered.count += count
        gathered.size += parcel.size
        if gathered.count >= settings.batch_count or not self._gathers_for_s:
            self._send_gathered(way)

    def _way(self, message: Message, body: bytes) -> Hashable:
        """What the messages of a batch have in common: URL and headers, and the place of their
        keys, or the endpoints that have them already, or some would be sent what they have."""
        said = self._builder.said_of(message, body, self._endpoints.values())
        if self._settings.key is not None:
            return said, hash_slot(message, self._settings.key, len(self._circuits))
        return said, self._partial.of((message.topic, message.nsqd, message.id))

    def _send_gathered(self, way: Hashable) -> None:
        self._begin(_Exchange(self._gathered.pop(way).parcels))

    def _tick(self, now: float) -> None:
        for way, gathered in list(self._gathered.items()):
            if now - gathered.since >= self._gathers_for_s:
                self._send_gathered(way)
        self._go_on()

    # -- sending --------------------------------------------------------------------------------

    def _begin(self, exchange: _Exchange) -> None:
        if self._settings.mode is EndpointMode.ALL:
            holders = self._partial.holders(exchange.parcels)
            exchange.lacking = [circuit for circuit in self._circuits if circuit not in holders]
            if not exchange.lacking:  # all have it, from deliveries at the same time
                self._finish(exchange, DELIVERED)
                return
        self._pending.append(exchange)
        self._go_on()

    def _go_on(self) -> None:
        while self._pending and self._under_way.total() < self._settings.concurrency:
            self._send(self._pending.popleft())

    def _send(self, exchange: _Exchange) -> None:
        if exchange.target is None:
            now = time.monotonic()
            chosen = self._choose(exchange, now)
            if chosen is None:
                nowhere = Outcome(Fate.UNREACHABLE, "no endpoint works")
                self._finish(exchange, exchange.last or nowhere)
                return
            if chosen.retry_at:  # no other before this one has arrived
                chosen.failed(now, is_hopeless=True)
            exchange.tried.append(chosen)
            exchange.hops = 0
        circuit = exchange.circuit
        endpoint = exchange.target or self._endpoints[circuit]
        try:
            request = self._builder.build(endpoint, exchange.parcels)
        except ValueError as exc:
            self._refuse(exchange, Outcome(Fate.REFUSED, str(exc), may_split=True))
            return
        self._under_way[circuit] += 1
        exchange.url, exchange.target = request.url, None

        def done(answer: Answer, is_resent: bool) -> None:
            self._under_way[circuit] -= 1
            if is_resent:
                exchange.repeated += 1
            if answer.error:
                self._broke(exchange, answer)
            else:
                self._answered(exchange, endpoint, answer)
            self._go_on()

        self._pool.send(request, done)

    def _choose(self, exchange: _Exchange, now: float) -> Circuit | None:
        """The next endpoint for a request, among those that work and that it has not been to."""
        circuits, mode = self._circuits, self._settings.mode
        if mode is EndpointMode.ALL:
            circuits = exchange.lacking
        elif mode is EndpointMode.ROUND_ROBIN:
            self._turn = (self._turn + 1) % len(circuits)
            circuits = circuits[self._turn :] + circuits[: self._turn]
            circuits.sort(key=self._under_way.__getitem__)  # one that hangs keeps no others waiting
        elif self._settings.key is not None:  # of the mode hash
            place = hash_slot(exchange.parcels[0].messages[0], self._settings.key, len(circuits))
            circuits = circuits[place:] + circuits[:place]
        for circuit in circuits:
            if circuit not in exchange.tried and not circuit.is_open(now):
                return circuit
        return None

    # -- what came back -------------------------------------------------------------------------

    def _broke(self, exchange: _Exchange, broken: Answer) -> None:
        if broken.is_forbidden and exchange.hops:  # a redirect: the endpoint itself works
            exchange.circuit.worked()
            self._refuse(exchange, Outcome(Fate.REFUSED, broken.error))
            return
        exchange.circuit.failed(time.monotonic(), is_hopeless=not broken.was_sent)
        if broken.was_sent:
            exchange.last = Outcome(Fate.FAILED, broken.error)
            exchange.repeated += 1  # now by the next endpoint, or when it comes again
        elif exchange.last is None or exchange.last.fate is Fate.UNREACHABLE:
            exchange.last = Outcome(Fate.UNREACHABLE, broken.error)
        self._pending.appendleft(exchange)  # for the next endpoint

    def _answered(self, exchange: _Exchange, endpoint: Endpoint, answer: Answer) -> None:
        status, how = answer.status, ""
        if status in REDIRECTS and self._settings.redirects is not Redirects.REFUSE:
            if target := self._redirection(exchange, endpoint, answer):
                exchange.hops, exchange.target = exchange.hops + 1, target
                self._pending.appendleft(exchange)
                return
            how = ", which is not followed"
        action = self._settings.policy.get(status, StatusAction.RETRY)
        if action is not StatusAction.RETRY or (status < 500 and status != 429):
            exchange.circuit.worked()
        if action is StatusAction.OK:
            self._settle(exchange, DELIVERED)
            return
        error = f"{describe(status)} from {endpoint}{how}"
        if action in (StatusAction.DROP, StatusAction.DEAD_LETTER):
            fate = Fate.DROPPED if action is StatusAction.DROP else Fate.REFUSED
            self._refuse(exchange, Outcome(fate, error, may_split=status in SPLITTABLE))
        else:
            exchange.circuit.failed(time.monotonic())
            wait_s = retry_after_s(answer.retry_after, time.time())
            exchange.last = Outcome(Fate.FAILED, error, wait_s)
            self._pending.appendleft(exchange)

    def _settle(self, exchange: _Exchange, outcome: Outcome) -> None:
        """An endpoint has the messages, or does not want them. In mode all the others are asked all
        the same; those that failed are not tried again before it comes again."""
        if self._settings.mode is EndpointMode.ALL:
            if exchange.circuit in exchange.lacking:
                exchange.lacking.remove(exchange.circuit)
            if outcome.fate is Fate.REFUSED or (
                outcome.fate is Fate.DROPPED and not exchange.refusal
            ):
                exchange.refusal = outcome
            if outcome is DELIVERED and (exchange.lacking or exchange.refusal):
                self._partial.note(exchange.parcels, exchange.circuit)
            if exchange.lacking:
                self._pending.appendleft(exchange)
                return
            outcome = exchange.refusal or outcome
        self._finish(exchange, outcome)

    def _refuse(self, exchange: _Exchange, outcome: Outcome) -> None:
        if outcome.may_split and len(exchange.parcels) > 1:
            for parcel in exchange.parcels:
                self._begin(_Exchange((parcel,)))
            return
        self._settle(exchange, outcome)

    def _redirection(
        self, exchange: _Exchange, endpoint: Endpoint, answer: Answer
    ) -> Endpoint | None:
        """Where a redirect leads that keeps method and body, and that the user allows."""
        try:
            url = urljoin(exchange.url, answer.location)
            target = Endpoint(url, allows_private=False, is_given=False)
        except (ConfigurationError, ValueError):
            return None
        is_same = target.origin == endpoint.origin
        if (
            exchange.hops >= MAX_REDIRECTS
            or answer.status not in (307, 308)
            or (endpoint.origin[0], target.origin[0]) == ("https", "http")
            or not (is_same or self._settings.redirects is Redirects.FOLLOW)
        ):
            return None
        if is_same:  # what the user gave may be on a private network, what a server says may not
            target.allows_private = endpoint.allows_private
        place = endpoint.origin[1]
        if target.origin[1] in (place, Address(place.host, 443)):
            target.has_secrets = endpoint.has_secrets
        return target

    def _finish(self, exchange: _Exchange, outcome: Outcome) -> None:
        if outcome.fate in (Fate.DELIVERED, Fate.DROPPED):
            self._partial.forget(exchange.parcels)
        self._ended.append((exchange, outcome))

    def _report_ended(self) -> None:
        """Report what ended in this turn together: the FINs share a write, and waking for it."""
        ended, self._ended = self._ended, []
        arrived: list[Parcel] = []
        for exchange, outcome in ended:
            if exchange.repeated:
                outcome = outcome._replace(repeated=exchange.repeated)
            if outcome is DELIVERED:
                arrived += exchange.parcels
            else:
                self._report(exchange.parcels, outcome)
        if arrived:
            self._report(arrived, DELIVERED)
