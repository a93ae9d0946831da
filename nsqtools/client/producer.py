"""Producer: publish to nsqd and know what became of every message.

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("clicks", b"...")                # waits for nsqd's confirmation
        producer.publish_many("clicks", [b"...", b"..."])  # MPUB: far faster
        publication = producer.submit("clicks", [b"..."])  # does not wait
        publication.result()

Every publish ends in one of five ways: confirmed, rejected, refused with this client, certainly not
sent (safe to publish again), or unknown (nsqd may have it: publishing again may double it). A
failure that was not looked at is logged.

nsqd closes the connection over a publish that it cannot accept, and the publishes after it would
suffer, so what is known to be refused is not sent.

A producer belongs to its process. After a fork the child's copy starts afresh, with a connection of
its own; what the parent had under way stays with the parent. When the interpreter ends, started
producers wait for what is under way; children of multiprocessing, too, which skip atexit.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nsqtools.client import outcomes
from nsqtools.client.connection import tls_context
from nsqtools.client.connection_settings import DEFAULT_NSQD_TCP_ADDRESS
from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import call_at_end_of_child, wait_until_released
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_io import WINDOW_BYTES, ProducerIO, PublishPolicy
from nsqtools.client.publication import Mode, PendingPublication, Publication, in_groups
from nsqtools.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PublishError,
    PublishInvalid,
    PublishNotSent,
    PublishUnknown,
)
from nsqtools.protocol.commands import MAX_DELAY_S, mpub_size
from nsqtools.protocol.names import check_topic, one_or_several, parse_address, shown_url

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class ProducerHealth:
    """How a producer is: what `Producer.health` returns.

    ``connections`` are the addresses of the nsqd connected to: none before the first publish.
    ``under_way`` counts publishes without an outcome, and ``oldest_s`` is how long the first of
    them has waited, in seconds: 0 without any.
    """

    connections: list[str]
    under_way: int
    oldest_s: float


@functools.lru_cache(maxsize=1024)
def _check_topic(topic: str) -> str:
    try:
        return check_topic(topic)
    except ConfigurationError as exc:
        raise PublishInvalid(str(exc), hint=exc.hint) from None


class ProducerCore:
    """What producers for threads and for asyncio have in common: all but waiting."""

    _window_bytes: float = WINDOW_BYTES  # under way, above which a publish waits for room

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        options: ClientOptions | None = None,
        *,
        lookupd_http_addresses: str | Sequence[str] = (),
        address_map: Mapping[str, str] | None = None,
        mode: Mode = "failover",
        retry_timeout_s: float = 0.0,
        retry_unknown: bool = False,
        linger_s: float = 0.0,
        on_published: Callable[[Publication], None] | None = None,
    ) -> None:
        self.on_published = on_published
        self.options = options or ClientOptions()
        self._lookupds = one_or_several(lookupd_http_addresses)
        if nsqd_tcp_addresses is None:
            nsqd_tcp_addresses = [] if self._lookupds else DEFAULT_NSQD_TCP_ADDRESS
        given = map(parse_address, one_or_several(nsqd_tcp_addresses))
        self._addresses = list(dict.fromkeys(given))
        if not self._addresses and not self._lookupds:
            hint = "Give one of an nsqd or an nsqlookupd."
            raise ConfigurationError("a producer needs an address", hint=hint)
        self._address_map = address_map
        self._policy = PublishPolicy(mode, retry_timeout_s, retry_unknown, linger_s)
        tls_context(self.options)  # raises for files that cannot be used
        self._begin_life()

    def _begin_life(self) -> None:
        discovery = None
        if self._lookupds:
            discovery = Discovery(self._lookupds, None, self.options, self._address_map)
        self.nsqd = ", ".join([*map(str, self._addresses), *map(shown_url, self._lookupds)])
        self._io = ProducerIO(
            self.nsqd,
            self._addresses,
            discovery,
            self.options,
            self._policy,
            self._on_settled,
            self._release_window,
        )
        self._lock = threading.RLock()  # re-entrant: a signal handler may publish
        # The I/O thread never takes it: who waits for that in a signal handler may have interrupted
        # the holder.
        self._unsettled: dict[PendingPublication, None] = {}
        self._entered_bytes = self._left_bytes = 0  # of these, each changed on one side
        self._waiters: list[threading.Lock] = []  # for room
        self._aside: set[PendingPublication] = set()  # unsettled, and not in the window
        self._is_started = False
        self._is_stopped = False

    def __repr__(self) -> str:
        count = self.health().under_way
        state = "stopped" if self._is_stopped else f"{count} publishes under way"
        return f"<Producer to {self.nsqd}, {state}>"

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; publishing does it, too. The connection is made when needed."""
        with self._lock:
            if not self._is_started and not self._is_stopped:
                try:
                    self._io.start()
                except RuntimeError as exc:  # no threads are left, or the interpreter ends
                    raise PublishNotSent(f"{self.nsqd}: {exc}") from exc
                self._is_started = True
                _started.add(self)
                call_at_end_of_child(_stop_all)

    def _flush(self, timeout_s: float | None) -> bool:
        self._io.loop.call_soon(self._io.flush)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return all(
            each._settles_within(give_up_at - time.monotonic())
            for each in list(self._unsettled)
            if each.is_submitted
        )

    def _stop(self, timeout_s: float | None, when: str = "") -> bool:
        with self._lock:
            self._is_stopped = True
        self._make_room()
        _started.discard(self)
        if not self._is_started:
            return True
        self._io.loop.call_soon(self._io.begin_stop)
        is_in_time = self._io.loop.join(timeout_s)
        if not is_in_time and not self._io.loop.is_own_thread:
            self._io.loop.call_soon(self._io.abort)
            self._io.loop.join()
        self._io.failures.log(when or f"{self.nsqd}: the producer was stopped with ")
        return is_in_time

    @property
    def patience_s(self) -> float:
        """How long a publish may take to settle: what leaving a ``with`` waits for."""
        return self._policy.retry_timeout_s + self.options.publish_timeout_s

    def _start_afresh(self) -> None:
        """In a forked child: the thread is the parent's, and so is what it has under way."""
        under_way, was_stopped = self._unsettled, self._is_stopped
        self._begin_life()
        self._is_stopped = was_stopped
        for publication in under_way:
            if not publication.is_settled:
                parents = PublishUnknown("the process that this one was forked from has it")
                publication.settle(parents)

    # -- publishing -----------------------------------------------------------------------------

    def _submit(
        self,
        topic: str,
        bodies: Sequence[ReadableBuffer],
        defer_s: float | None,
        timeout_s: float | None,
        on_settled: Callable[[Publication], None] | None = None,
        splits: bool = False,
    ) -> Publication:
        whole = whole_bodies(bodies)
        lengths = list(map(len, whole))
        check_bodies(lengths, defer_s, self.options)
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s)  # raises here for a text, and a NaN becomes 0
        size, now = sum(lengths), time.monotonic()
        publication = PendingPublication(
            _check_topic(topic), whole, size, now, defer_s, timeout_s, on_settled, splits
        )
        if not self._is_started:
            self.start()
        self._wait_for_room(publication)
        self._send(publication)
        publication.is_submitted = True
        if _is_at_exit and not self._io.loop.is_own_thread:
            publication.result(self.patience_s)  # nothing else would wait for it, nor log it
        return publication

    def _send(self, publication: PendingPublication) -> None:  # `FakeProducer` has its own
        self._io.submit(publication)

    def split(self, bodies: Iterable[ReadableBuffer]) -> Iterator[list[bytes]]:
        """Group bodies into MPUBs that stay within publish_max_body_size."""
        return in_groups(whole_bodies(bodies), len, self.options.publish_max_body_size)

    def checked_parts(self, bodies: Iterable[ReadableBuffer]) -> list[list[bytes]]:
        """Group bodies as `split`, all of them checked. Raises `PublishInvalid`."""
        parts = list(self.split(bodies))
        if len(parts) > 1:  # else `submit` does it
            for part in parts:
                check_bodies(list(map(len, part)), None, self.options)
        return parts

    @property
    def retried(self) -> int:
        """Messages that were sent again so far."""
        return self._io.retried

    @property
    def repeated(self) -> int:
        """Messages that were sent again although nsqd may have had them."""
        return self._io.repeated

    def end_retries(self) -> None:
        """Try nothing again from now on: what fails settles."""
        self._io.loop.call_soon(self._io.end_retries)

    def health(self) -> ProducerHealth:
        """How the producer is now: for a probe, or for metrics."""
        under_way = [each.submitted_at for each in list(self._unsettled) if not each.is_settled]
        return ProducerHealth(
            [str(link.address) for link in self._io.links if link.connection is not None],
            len(under_way),
            time.monotonic() - min(under_way) if under_way else 0.0,
        )

    # -- the window -----------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Tell whether `submit` does not block."""
        return self._is_stopped or (
            len(self._unsettled) - len(self._aside) < self.options.max_outstanding
            and self._entered_bytes - self._left_bytes < self._window_bytes
        )

    def _enter(self, publication: PendingPublication) -> bool:
        """Put it in the window, and return True, if there is room."""
        with self._lock:
            if self._is_stopped:
                raise PublishNotSent(f"{self.nsqd}: the producer has stopped")
            if has_room := self.has_room:
                self._unsettled[publication] = None
                self._entered_bytes += publication.size
            return has_room

    def _wait_for_room(self, publication: PendingPublication) -> None:
        if self._enter(publication):
            return
        timeout_s = publication.timeout_s
        if timeout_s is None:
            timeout_s = self.options.publish_timeout_s
        if self._io.loop.is_own_thread:  # no other thread makes room
            timeout_s = 0
        until = time.monotonic() + timeout_s
        while wait_until_released(self._waiters, lambda: self.has_room, until - time.monotonic()):
            if self._enter(publication):
                return
        raise self._no_room(timeout_s)

    def _no_room(self, waited_s: float) -> PublishNotSent:
        error = PublishNotSent(f"{self.nsqd}: no room for another publish in {waited_s:.3g} s")
        error.__cause__ = DeadlineExceeded(f"{self.nsqd} confirms nothing")
        return error

    def _make_room(self) -> None:
        for _ in range(len(self._waiters)):  # who finds no room comes again, behind the others
            with suppress(IndexError):  # two threads may meet here
                self._waiters.pop(0).release()

    def _release_window(self, publications: Iterable[PendingPublication]) -> None:
        """Make room for others: these wait for an nsqd that may hang."""
        new = (self._unsettled.keys() & publications) - self._aside
        self._aside |= new
        self._left_bytes += sum(each.size for each in new)
        self._make_room()

    def _on_settled(self, settled: list[PendingPublication]) -> None:
        for publication in settled:
            if publication in self._aside:
                self._aside.remove(publication)
            else:
                self._left_bytes += publication.size
            self._unsettled.pop(publication, None)
        self._make_room()
        if self.on_published is not None:
            for publication in settled:
                try:
                    self.on_published(publication)
                except BaseException:  # as `Publication.call_back`
                    log.exception("on_published failed")


class Producer(ProducerCore):
    """Publishes to one or several nsqd. Connections are made when needed and again when lost.

    With several addresses, ``mode`` says which of them gets a publish: with ``"failover"`` the
    first that works, with ``"round-robin"`` all that work, in turn. A publish that one nsqd
    certainly did not take goes to another. One that hangs gets nothing new while another works.

    With ``lookupd_http_addresses`` these are all nsqd that are registered with some nsqlookupd,
    found again and again as `Consumer` does it, and those of ``nsqd_tcp_addresses`` before them.
    Whom the client believes and follows is set by the same options (``allow_announced``,
    ``max_discovered_nsqd``, ``auth_requires_tls``), and ``address_map`` is the same. One that is
    listed no longer is the last resort for five minutes: nsqlookupd may have restarted. A failover
    producer uses the first of a random order, so that many of them spread out.

    While none works, a publish fails at once; with ``retry_timeout_s`` it is tried again for as
    long after its first failure, also while nsqd does not reach its auth server. One whose fate is
    unknown is tried again only with ``retry_unknown``, because its messages may arrive twice then.
    What an attempt may have stored ends as confirmed or unknown, whatever the later ones say.

    As a context manager it waits at its end for what is under way, for ``retry_timeout_s`` and
    publish_timeout at most; a failure that was not looked at is logged then.

    ``linger_s`` joins single messages that are published at the same time, on several threads or
    with `submit`, into one MPUB, which is several times faster. A message waits only while an
    earlier one is unanswered, and for ``linger_s`` seconds at most. Publishes of a topic are
    confirmed in order; with retries, with several nsqd and after a rejection they may be stored in
    another.

    ``on_published`` is called with every publication that has settled, well or not, for metrics; on
    the I/O thread, so it must not block.

    Thread-safe. Raises `ConfigurationError` for a bad address or bad options.
    """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted so far has settled; return whether it has in time.

        Whether it was published, each `Publication` knows.
        """
        self._refuse_own_thread()
        return self._flush(timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for what is outstanding, then close; return whether that was done in time.

        When ``timeout_s`` passed, what is left settles as not sent or unknown. Failures that were
        not looked at are logged. A callback cannot wait: there it begins to stop, and returns
        False.
        """
        return self._stop(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self.patience_s)

    # -- publishing -----------------------------------------------------------------------------

    def publish(self, topic: str, body: ReadableBuffer, *, timeout_s: float | None = None) -> None:
        """Publish one message and wait for the confirmation. Raises `PublishError`.

        ``timeout_s`` is for everything together. When it has passed, the error says whether the
        message may have been published; the default is publish_timeout for each step.
        """
        self._refuse_own_thread()
        self._submit(topic, [body], None, timeout_s).wait()

    def publish_deferred(
        self, topic: str, body: ReadableBuffer, defer_s: float, *, timeout_s: float | None = None
    ) -> None:
        """Publish one message that channels deliver after ``defer_s`` seconds, and wait.

        Raises `PublishError`: `PublishInvalid` for a negative delay, and `PublishRejected` for one
        above nsqd's --max-req-timeout, an hour by default.
        """
        self._refuse_own_thread()
        self._submit(topic, [body], defer_s, timeout_s).wait()

    def _refuse_own_thread(self) -> None:
        if self._io.loop.is_own_thread:
            raise ConfigurationError(
                "a callback cannot wait for a publish: it runs on the thread that publishes",
                hint="Use submit() there.",
            )

    def publish_many(
        self, topic: str, bodies: Sequence[ReadableBuffer], *, timeout_s: float | None = None
    ) -> None:
        """Publish messages in as few MPUB as nsqd's limits allow, and wait. Raises `PublishError`.

        nsqd confirms each MPUB by itself, and several of them are not one transaction: ``outcomes``
        of the error has what became of each message. Its class is true of all of them, so it is
        `PublishUnknown` where some are confirmed. Nothing is sent when nsqd would refuse a message.
        """
        self._refuse_own_thread()
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        parts = self.checked_parts(bodies)
        sent: list[Publication | PublishError] = []
        for part in parts:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            try:
                sent.append(self.submit(topic, part, timeout_s=left_s))
            except PublishError as exc:  # no room, or it was stopped: no better for the rest
                sent += [exc] * (len(parts) - len(sent))
                break
        errors = [each if isinstance(each, PublishError) else each.exception() for each in sent]
        if error := outcomes.combined_error(list(map(len, parts)), errors):
            raise error

    def submit(
        self,
        topic: str,
        bodies: Sequence[ReadableBuffer],
        *,
        defer_s: float | None = None,
        timeout_s: float | None = None,
        on_settled: Callable[[Publication], None] | None = None,
        splits: bool = False,
    ) -> Publication:
        """Send a publish without waiting for its outcome.

        One body goes as PUB, several as one MPUB; with ``defer_s`` it must be one. Blocks while the
        window of outstanding publishes is full, for ``timeout_s`` (by default publish_timeout) at
        most, and raises `PublishNotSent` then. With ``timeout_s`` the publication settles in that
        time. ``on_settled`` is called on the I/O thread and must not block; it may submit, which
        raises `PublishNotSent` at once where it would block.

        With ``splits`` a batch of which nsqd refuses a message is halved until that is alone, and
        the others are published: `Publication.errors` has what became of each.

        Raises ``TypeError`` for a body that is not bytes, and `PublishInvalid` for what nsqd would
        refuse: it closes the connection over a bad publish, and the publishes after it would
        suffer.
        """
        return self._submit(topic, bodies, defer_s, timeout_s, on_settled, splits)


# -- the bodies of a publish ----------------------------------------------------------------------


def whole_bodies(bodies: Iterable[ReadableBuffer]) -> list[bytes]:
    """Return the bodies as bytes, which cannot change while they wait.

    Raises ``TypeError`` for what is not bytes.
    """
    if isinstance(bodies, str | bytes | bytearray | memoryview):
        raise TypeError("bodies must be a list of messages, not one message")
    given = list(bodies)
    if (len(given) == 1 and type(given[0]) is bytes) or set(map(type, given)) <= {bytes}:
        return given  # type: ignore[return-value]
    return [body if type(body) is bytes else _whole(body) for body in given]


def _whole(body: ReadableBuffer) -> bytes:
    if isinstance(body, str):
        raise TypeError("a message body is bytes, not str: encode it, as in body.encode()")
    try:
        return memoryview(body).tobytes()
    except TypeError:
        raise TypeError(f"a message body is bytes, not {type(body).__name__}") from None


def check_bodies(lengths: list[int], defer_s: float | None, options: ClientOptions) -> None:
    """Raise `PublishInvalid` for what nsqd would refuse as one publish."""
    limit = options.publish_max_msg_size
    if len(lengths) == 1 and defer_s is None and 0 < lengths[0] <= limit:
        return  # the usual case, once for each publish
    if not lengths:
        raise PublishInvalid("a publish needs a message")
    if min(lengths) == 0:
        raise PublishInvalid("nsqd refuses empty messages")
    if max(lengths) > limit:
        raise PublishInvalid(
            f"a message of {max(lengths)} bytes is above the limit of {limit}",
            hint="nsqd's limit is its --max-msg-size; ours is publish_max_msg_size.",
        )
    if defer_s is not None:
        if len(lengths) > 1:
            raise PublishInvalid("only single messages can be deferred")
        if not 0 <= defer_s <= MAX_DELAY_S:
            raise PublishInvalid(f"cannot defer for {defer_s} s", hint="Defer for 0 s or more.")
    elif len(lengths) > 1 and mpub_size(lengths) > options.publish_max_body_size:
        raise PublishInvalid(
            f"a batch of {sum(lengths)} bytes is above publish_max_body_size",
            hint="Take fewer messages together, as Producer.split does.",
        )


# -- the process ----------------------------------------------------------------------------------

_started: weakref.WeakSet[ProducerCore] = weakref.WeakSet()
_is_at_exit = False


def _stop_all() -> None:
    """At the end of the interpreter: all of them at the same time.

    Functions that were registered with atexit before this one run after it, and may still publish.
    """
    global _is_at_exit
    _is_at_exit = True
    producers = list(_started)
    for producer in producers:
        producer._io.loop.call_soon(producer._io.begin_stop)
    now = time.monotonic()
    for producer in producers:
        left_s = now + producer.options.publish_timeout_s - time.monotonic()
        producer._stop(max(0.0, left_s), "the program ended with ")


def _start_all_afresh() -> None:
    producers = list(_started)
    _started.clear()
    for producer in producers:
        producer._start_afresh()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_start_all_afresh)
