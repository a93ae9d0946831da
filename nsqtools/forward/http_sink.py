"""Deliver messages to HTTP endpoints: form batches, choose endpoints, interpret responses.

A failed request is tried at the next endpoint before its messages are requeued. Each endpoint has
its own circuit. After a few consecutive failures it gets no requests for a time that doubles, and
the other endpoints take its share; then one request probes it. The forwarder holds its messages
only while all circuits are open.

All code except the methods of `Sink` runs on the thread of the pool. A batch has the messages of
all topics and nsqd that arrive within ``linger_s`` and have the same URL and headers, and with mode
``hash`` the same endpoint.
"""

from __future__ import annotations

import collections
import email.utils
import enum
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import responses
from itertools import chain
from typing import NamedTuple
from urllib.parse import urljoin

from nsqtools.client.attempts import MessageKey
from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError
from nsqtools.forward import EndpointMode, Redirects
from nsqtools.forward.http_pool import HttpPool, HttpReply
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
from nsqtools.transport.stream import TLSOptions

log = logging.getLogger(__name__)

# Single errors occur at healthy endpoints, for example while a server restarts its workers.
FAILURES_TO_OPEN = 5
# A probe every 5 s is no load for an endpoint, and its recovery is noticed soon enough.
OPEN_BASE_S, OPEN_MAX_S = 0.5, 5.0
MAX_REDIRECTS = 3
# Messages whose partial deliveries are remembered, 4 times the default max_in_flight. The oldest
# are forgotten, and may arrive twice at an endpoint.
MAX_PARTIAL = 10_000


class StatusAction(enum.Enum):
    """What to do with the messages after a status."""

    OK = "ok"
    RETRY = "retry"
    DROP = "drop"
    DEAD_LETTER = "dead-letter"


DEFAULTS = {
    "2xx": StatusAction.OK,
    "3xx": StatusAction.DEAD_LETTER,
    "4xx": StatusAction.DEAD_LETTER,
    "5xx": StatusAction.RETRY,
    # These are temporary, or an operator fixes them without changing the messages.
    **dict.fromkeys(("401", "403", "404", "408", "425", "429"), StatusAction.RETRY),
}
_RULE = re.compile(r"\s*([2-5](?:[0-9]{2}|(?i:xx)))\s*=\s*(ok|retry|drop|dead-letter)\s*")
SPLITTABLE = (400, 413, 422)  # one message of a batch may be the cause
REDIRECTS = (301, 302, 303, 307, 308)


def parse_policy(rules: Iterable[str] = ()) -> dict[int, StatusAction]:
    """Parse rules such as ``4xx=drop`` and ``404=retry``; return the action of every status.

    Raises `ConfigurationError`.
    """
    custom: dict[str, StatusAction] = {}
    for rule in rules:
        if (match := _RULE.fullmatch(rule)) is None:
            raise ConfigurationError(
                f"--on-status {rule!r} is not STATUS=ACTION",
                hint="For example 4xx=drop or 404=retry; actions are ok, retry, drop, dead-letter.",
            )
        custom[match[1].lower()] = StatusAction(match[2])
    return {
        status: next(
            actions[name]
            for actions in (custom, DEFAULTS)
            for name in (str(status), f"{status // 100}xx")
            if name in actions
        )
        for status in range(200, 600)
    }


def status_text(status: int) -> str:
    """Return the status with its reason phrase: ``HTTP 404 Not Found``."""
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
    """Settings of a sink.

    ``key`` is the encoder for mode ``hash``, ``batch_count`` and ``batch_bytes`` limit a batch, and
    ``linger_s`` is the longest wait of a message for its batch to fill.
    """

    mode: EndpointMode = EndpointMode.ROUND_ROBIN
    key: Callable[..., bytes] | None = None
    concurrency: int = 100
    policy: Mapping[int, StatusAction] = parse_policy()
    redirects: Redirects = Redirects.REFUSE
    batch_count: int = 1
    batch_bytes: int = 1 << 20
    linger_s: float = 0.0


class _PartialDeliveries:
    """Endpoints that have accepted a message which others have not (mode ``all``).

    They are kept by message and not by request, because redelivered messages are in other batches
    and refused batches are split. `of` may be called on any thread.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[MessageKey, frozenset[Hashable]] = OrderedDict()

    def of(self, key: MessageKey) -> frozenset[Hashable]:
        """Return the endpoints that have accepted a message."""
        return self._holders.get(key, frozenset())

    def holders(self, parcels: Sequence[Parcel]) -> frozenset[Hashable]:
        """Return the endpoints that have accepted all of the messages."""
        return frozenset.intersection(*map(self.of, _keys(parcels)))

    def note(self, parcels: Sequence[Parcel], endpoint: Hashable) -> None:
        """Remember that an endpoint has accepted the messages."""
        for key in _keys(parcels):
            self._holders[key] = self._holders.get(key, frozenset()) | {endpoint}
        while len(self._holders) > MAX_PARTIAL:
            self._holders.popitem(last=False)

    def forget(self, parcels: Sequence[Parcel]) -> None:
        """Forget messages that are settled at every endpoint."""
        if self._holders:
            for key in _keys(parcels):
                self._holders.pop(key, None)


def _keys(parcels: Iterable[Parcel]) -> Iterator[MessageKey]:
    return chain.from_iterable(parcel.keys() for parcel in parcels)


@dataclass(slots=True)
class _OpenBatch:
    """A batch that is not full yet."""

    since: float
    parcels: list[Parcel] = field(default_factory=list)
    count: int = 0  # messages
    size: int = 0  # bytes


@dataclass(slots=True, eq=False)
class _Exchange:
    """The parcels of one request, and the endpoints that it was sent to."""

    parcels: Sequence[Parcel]
    tried: list[Circuit] = field(default_factory=list)
    lacking: list[Circuit] = field(default_factory=list)  # endpoints still to accept it (mode all)
    refusal: Outcome | None = None  # of one endpoint (mode all)
    last: Outcome | None = None
    url: str = ""  # of the last request
    target: Endpoint | None = None  # of a redirect
    hops: int = 0
    repeated: int = 0

    @property
    def circuit(self) -> Circuit:
        """The circuit of the last endpoint."""
        return self.tried[-1]


class HttpSink:
    """Deliver over HTTP. Raises `ConfigurationError` if settings contradict each other."""

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
        self._endpoints = {
            Circuit(OPEN_BASE_S, OPEN_MAX_S, FAILURES_TO_OPEN): endpoint for endpoint in endpoints
        }
        self._circuits = list(self._endpoints)
        self._pool = pool
        self._rotation = 0
        self._pending: collections.deque[_Exchange] = collections.deque()
        self._under_way = collections.Counter[Circuit]()  # requests
        self._open_batches: dict[Hashable, _OpenBatch] = {}
        self._linger_s = settings.linger_s
        self._partial = _PartialDeliveries()
        self._finished: list[tuple[_Exchange, Outcome]] = []
        self._report: Report
        pool.start(self._tick, self._report_finished)

    # -- the forwarder's thread -----------------------------------------------------------------

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Return a part for each message or batch."""
        max_count, max_bytes = self._settings.batch_count, self._settings.batch_bytes
        groups = [parcel] if max_count == 1 else parcel.grouped(self._batch_key).values()
        return [part for group in groups for part in group.sized(max_count, max_bytes)]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Send one part."""
        self._report = report  # the same function for all parts

        def send() -> None:
            self._gather(parcel)
            self._send_pending()

        self._pool.call_soon(send)

    def check(self) -> None:
        """Raise ``RuntimeError`` when the thread of the pool has failed."""
        if self._pool.failure is not None:
            raise RuntimeError("the HTTP thread failed") from self._pool.failure

    def flush(self) -> None:
        """Send incomplete batches, and later messages without waiting."""

        def send_all() -> None:
            self._linger_s = 0.0
            for key in list(self._open_batches):
                self._send_batch(key)
            self._send_pending()

        self._pool.call_soon(send_all)

    def stop(self, timeout_s: float) -> None:
        """Close all connections. The forwarder has waited for the requests under way."""
        self._pool.stop()

    # -- batches --------------------------------------------------------------------------------

    def _gather(self, parcel: Parcel) -> None:
        settings, count = self._settings, len(parcel)
        if settings.batch_count == 1:
            self._begin(_Exchange((parcel,)))
            return
        key = self._batch_key(parcel.messages[0], parcel.bodies[0])
        batch = self._open_batches.get(key)
        if batch is not None and (
            batch.count + count > settings.batch_count
            or batch.size + parcel.size > settings.batch_bytes
        ):
            self._send_batch(key)
            batch = None
        if batch is None:
            batch = self._open_batches[key] = _OpenBatch(time.monotonic())
        batch.parcels.append(parcel)
        batch.count += count
        batch.size += parcel.size
        if batch.count >= settings.batch_count or not self._linger_s:
            self._send_batch(key)

    def _batch_key(self, message: Message, body: bytes) -> Hashable:
        """Return the properties that all messages of a batch share.

        These are URL and headers, and the hash slot (mode hash) or the endpoints that have accepted
        the message already, which must not get it again.
        """
        request_key = self._builder.request_key(message, body, self._endpoints.values())
        if self._settings.key is not None:
            return request_key, hash_slot(message, self._settings.key, len(self._circuits))
        return request_key, self._partial.of((message.topic, message.nsqd, message.id))

    def _send_batch(self, key: Hashable) -> None:
        self._begin(_Exchange(self._open_batches.pop(key).parcels))

    def _tick(self, now: float) -> None:
        for key, batch in list(self._open_batches.items()):
            if now - batch.since >= self._linger_s:
                self._send_batch(key)
        self._send_pending()

    # -- sending --------------------------------------------------------------------------------

    def _begin(self, exchange: _Exchange) -> None:
        """Queue a request for `_send_pending`."""
        if self._settings.mode is EndpointMode.ALL:
            holders = self._partial.holders(exchange.parcels)
            exchange.lacking = [circuit for circuit in self._circuits if circuit not in holders]
            if not exchange.lacking:  # concurrent deliveries have reached every endpoint
                self._finish(exchange, DELIVERED)
                return
        self._pending.append(exchange)

    def _send_pending(self) -> None:
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
            if chosen.retry_at:  # this request is the probe; no other until it succeeds
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

        def done(answer: HttpReply, is_resent: bool) -> None:
            self._under_way[circuit] -= 1
            if is_resent:
                exchange.repeated += 1
            if answer.error:
                self._broke(exchange, answer)
            else:
                self._answered(exchange, endpoint, answer)
            self._send_pending()

        self._pool.send(request, done)

    def _choose(self, exchange: _Exchange, now: float) -> Circuit | None:
        """Return the next working endpoint that the request has not tried, if there is one."""
        circuits, mode = self._circuits, self._settings.mode
        if mode is EndpointMode.ALL:
            circuits = exchange.lacking
        elif mode is EndpointMode.ROUND_ROBIN:
            self._rotation = (self._rotation + 1) % len(circuits)
            circuits = circuits[self._rotation :] + circuits[: self._rotation]
            circuits.sort(key=self._under_way.__getitem__)  # a slow endpoint gets fewer requests
        elif self._settings.key is not None:  # mode hash
            slot = hash_slot(exchange.parcels[0].messages[0], self._settings.key, len(circuits))
            circuits = circuits[slot:] + circuits[:slot]
        for circuit in circuits:
            if circuit not in exchange.tried and not circuit.is_open(now):
                return circuit
        return None

    # -- responses ------------------------------------------------------------------------------

    def _broke(self, exchange: _Exchange, broken: HttpReply) -> None:
        if broken.is_forbidden and exchange.hops:  # only the target of its redirect is forbidden
            exchange.circuit.worked()
            self._refuse(exchange, Outcome(Fate.REFUSED, broken.error))
            return
        exchange.circuit.failed(time.monotonic(), is_hopeless=not broken.was_sent)
        if broken.was_sent:
            exchange.last = Outcome(Fate.FAILED, broken.error)
            exchange.repeated += 1  # by the next endpoint, or after a redelivery
        elif exchange.last is None or exchange.last.fate is Fate.UNREACHABLE:
            exchange.last = Outcome(Fate.UNREACHABLE, broken.error)
        self._pending.appendleft(exchange)  # for the next endpoint

    def _answered(self, exchange: _Exchange, endpoint: Endpoint, answer: HttpReply) -> None:
        status, suffix = answer.status, ""
        if status in REDIRECTS and self._settings.redirects is not Redirects.REFUSE:
            if target := self._redirection(exchange, endpoint, answer):
                exchange.hops, exchange.target = exchange.hops + 1, target
                self._pending.appendleft(exchange)
                return
            suffix = ", which is not followed"
        action = self._settings.policy.get(status, StatusAction.RETRY)
        if action is not StatusAction.RETRY or (status < 500 and status != 429):
            exchange.circuit.worked()
        if action is StatusAction.OK:
            self._settle(exchange, DELIVERED)
            return
        error = f"{status_text(status)} from {endpoint}{suffix}"
        if action in (StatusAction.DROP, StatusAction.DEAD_LETTER):
            fate = Fate.DROPPED if action is StatusAction.DROP else Fate.REFUSED
            self._refuse(exchange, Outcome(fate, error, may_split=status in SPLITTABLE))
        else:
            exchange.circuit.failed(time.monotonic())
            wait_s = retry_after_s(answer.retry_after, time.time())
            exchange.last = Outcome(Fate.FAILED, error, wait_s)
            self._pending.appendleft(exchange)

    def _settle(self, exchange: _Exchange, outcome: Outcome) -> None:
        """Process the final decision of an endpoint.

        In mode all, the request continues to the endpoints that have not decided. Endpoints that
        failed are tried again only after a redelivery.
        """
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
        self, exchange: _Exchange, endpoint: Endpoint, answer: HttpReply
    ) -> Endpoint | None:
        """Return the target of a redirect that keeps method and body and that the user allows."""
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
        if is_same:  # only URLs of the user may be on a private network
            target.allows_private = endpoint.allows_private
        place = endpoint.origin[1]
        if target.origin[1] in (place, Address(place.host, 443)):
            target.has_secrets = endpoint.has_secrets
        return target

    def _finish(self, exchange: _Exchange, outcome: Outcome) -> None:
        if outcome.fate in (Fate.DELIVERED, Fate.DROPPED):
            self._partial.forget(exchange.parcels)
        self._finished.append((exchange, outcome))

    def _report_finished(self) -> None:
        """Report the deliveries of this loop iteration together: their FINs share a write."""
        finished, self._finished = self._finished, []
        delivered: list[Parcel] = []
        for exchange, outcome in finished:
            if exchange.repeated:
                outcome = outcome._replace(repeated=exchange.repeated)
            if outcome is DELIVERED:
                delivered += exchange.parcels
            else:
                self._report(exchange.parcels, outcome)
        if delivered:
            self._report(delivered, DELIVERED)


def open_pool(
    connect_timeout_s: float, request_timeout_s: float, tls: TLSOptions | None
) -> HttpPool:
    """Return a pool of the fastest engine that is installed.

    Raises `ConfigurationError` for files of ``tls`` that cannot be used.
    """
    engine: type[HttpPool]
    try:
        from nsqtools.forward.curl_pool import CurlPool as engine
    except ImportError as exc:
        from nsqtools.forward.httpcore_pool import HttpcorePool as engine

        log.info("libcurl sends faster: pip install 'nsqtools[http]' (%s)", exc)
    log.info("sending with %s", engine.engine)
    return engine(connect_timeout_s, request_timeout_s, tls)
