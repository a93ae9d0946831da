"""Producer: publish to nsqd, with an outcome for every message.

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("clicks", b"...")                # waits for nsqd's confirmation
        producer.publish_many("clicks", [b"...", b"..."])  # MPUB: far faster
        publication = producer.submit("clicks", [b"..."])  # does not wait
        publication.result()

Every publish ends as confirmed, rejected (nsqd refused the messages), refused (nsqd does not accept
this client), not sent (safe to publish again), or unknown (nsqd may have it, and publishing again
may duplicate it). A failure that the program never reads is logged.

nsqd closes the connection after a publish that it cannot accept, which affects the publishes behind
it. So messages that nsqd would certainly refuse are not sent.

A producer belongs to its process. After a fork, the child's copy starts again with its own
connections; outstanding publishes remain with the parent. At the end of the interpreter, started
producers wait for their outstanding publishes. This includes children of multiprocessing, which
skip atexit.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nsqtools.client import outcomes
from nsqtools.client.callbacks import ConnectionEvents, call_guarded, weak_callback
from nsqtools.client.connection import tls_context
from nsqtools.client.connection_settings import DEFAULT_NSQD_TCP_ADDRESS
from nsqtools.client.direct_publish import Attempt, DirectPath
from nsqtools.client.discovery import Discovery
from nsqtools.client.former_names import former_names
from nsqtools.client.io_loop import call_at_end_of_child, wait_until_released
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_io import PUBLISH_WINDOW_BYTES, ProducerIO, PublishPolicy
from nsqtools.client.publication import Mode, PendingPublication, Publication, in_groups
from nsqtools.client.rate_limit import RateLimit
from nsqtools.errors import (
    ConfigurationError,
    DeadlineExceeded,
    NsqError,
    PublishError,
    PublishInvalid,
    PublishNotSent,
    PublishUnknown,
)
from nsqtools.protocol.arguments import (
    NONE,
    NUMBER,
    check_argument,
    check_functions,
    check_texts,
    check_times,
)
from nsqtools.protocol.commands import MAX_DELAY_S, mpub_size
from nsqtools.protocol.names import check_topic, parse_address, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from _typeshed import ReadableBuffer

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class ProducerHealth:
    """The state of a producer, as `Producer.health` returns it.

    ``connections`` has the addresses of the connected nsqd: none before the first publish.
    ``under_way`` counts publishes without an outcome, and ``oldest_s`` is the age of the oldest of
    them in seconds, or 0. ``error`` is the reason why nothing can be sent.
    """

    connections: list[str]
    under_way: int
    oldest_s: float
    error: NsqError | None = None


@functools.lru_cache(maxsize=1024)
def _check_topic(topic: str) -> str:
    try:
        return check_topic(topic)
    except ConfigurationError as exc:
        raise PublishInvalid(str(exc), hint=exc.hint) from None


@former_names("checked_parts", "end_retries", "has_room", "patience_s", "split")
class ProducerCore:
    """The common part of the producers for threads and asyncio: everything except waiting."""

    # Outstanding bytes above which a publish waits for room.
    _window_bytes: float = PUBLISH_WINDOW_BYTES

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
        on_connected: Callable[[str], object] | None = None,
        on_lost: Callable[[str, NsqError], object] | None = None,
        max_rate: float = 0.0,
    ) -> None:
        check_times(max_rate=max_rate)
        self._rate = RateLimit(max_rate, time.monotonic()) if max_rate else None
        check_argument("options", options, ClientOptions, NONE)
        check_argument("address_map", address_map, Mapping, NONE)
        check_functions(on_published=on_published)
        self._events = ConnectionEvents(on_connected, on_lost)
        self.on_published = on_published
        self.options = options or ClientOptions()
        self._lookupds = check_texts("lookupd_http_addresses", lookupd_http_addresses)
        if nsqd_tcp_addresses is None:
            nsqd_tcp_addresses = [] if self._lookupds else DEFAULT_NSQD_TCP_ADDRESS
        texts = check_texts("nsqd_tcp_addresses", nsqd_tcp_addresses)
        self._addresses = list(dict.fromkeys(map(parse_address, texts)))
        if not self._addresses and not self._lookupds:
            hint = "Give the address of an nsqd or an nsqlookupd."
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
            weak_callback(self._on_settled),
            weak_callback(self._release_window),
            self._events,
        )
        # Re-entrant, because a signal handler may publish. The I/O thread never takes it: a signal
        # handler that waits for the I/O thread may have interrupted the lock's owner.
        self._lock = threading.RLock()
        self._unsettled: dict[PendingPublication, None] = {}
        # The bytes in the window are the difference. Publishing threads change one counter under
        # the lock, the I/O thread changes the other, so neither needs the other's lock.
        self._entered_bytes = self._left_bytes = 0
        self._waiters: list[threading.Lock] = []  # for room in the window
        # Unsettled publications that no longer count in the window: see `_release_window`.
        self._outside_window: set[PendingPublication] = set()
        self._is_started = False
        self._is_stopped = False
        self._process = os.getpid()

    def __del__(self) -> None:
        """Stop a producer that the program has dropped. What was submitted is published."""
        is_running = getattr(self, "_is_started", False) and not self._is_stopped
        if is_running and os.getpid() == self._process:
            self._io.loop.call_soon(self._io.begin_stop)
            _dropped.add(self._io)
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        count = self.health().under_way
        state = "stopped" if self._is_stopped else f"{count} publishes outstanding"
        return f"<Producer to {self.nsqd}, {state}>"

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start. Publishing does this implicitly, and connections are made when needed."""
        with self._lock:
            if not self._is_started and not self._is_stopped:
                try:
                    self._io.start()
                except RuntimeError as exc:  # no more threads, or the interpreter is ending
                    raise PublishNotSent(f"{self.nsqd}: {exc}") from exc
                self._is_started = True
                _started.add(self)
                call_at_end_of_child(_stop_producers)

    def _flush(self, timeout_s: float | None) -> bool:
        self._io.loop.call_soon(self._io.flush)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return all(
            publication._settles_within(give_up_at - time.monotonic())
            for publication in list(self._unsettled)
            if publication.is_submitted
        )

    def _stop(self, timeout_s: float | None, log_prefix: str = "") -> bool:
        with self._lock:
            self._is_stopped = True
        self._make_room()
        _started.discard(self)
        if not self._is_started:
            return True
        self._io.loop.call_soon(self._io.begin_stop)
        return _end(
            self._io, timeout_s, log_prefix or f"{self.nsqd}: the producer was stopped with "
        )

    @property
    def _patience_s(self) -> float:
        """The longest time in which a publish settles, and the limit of leaving a ``with``."""
        return self._policy.retry_timeout_s + self.options.publish_timeout_s

    def _restart_in_child(self) -> None:
        """Start again in a forked child: the thread and its publishes belong to the parent."""
        unsettled, was_stopped = self._unsettled, self._is_stopped
        self._begin_life()
        self._is_stopped = was_stopped
        for publication in unsettled:
            if not publication.is_settled:
                publication.settle(PublishUnknown("the parent process publishes it"))

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
        if on_settled is not None:
            check_functions(on_settled=on_settled)
        publication = self._make_publication(topic, copy_bodies(bodies), defer_s, timeout_s)
        publication.splits = splits
        if on_settled is not None:
            publication.add_done_callback(on_settled)
        self._submit_publication(publication)
        if _is_at_exit and not self._io.loop.is_own_thread:
            # `_stop_producers` has run, so nothing else would wait for this publish or log its
            # failure.
            publication.result(self._patience_s)
        return publication

    def _make_publication(
        self,
        topic: str,
        bodies: list[bytes],
        defer_s: float | None,
        timeout_s: float | None,
    ) -> PendingPublication:
        """Check a publish. Raises `PublishInvalid` and ``TypeError``."""
        lengths = list(map(len, bodies))
        check_bodies(lengths, defer_s, self.options)
        if timeout_s is not None:
            check_argument("timeout_s", timeout_s, *NUMBER)
            timeout_s = max(0.0, timeout_s)  # NaN becomes 0
        if not isinstance(topic, str):
            raise PublishInvalid(f"topic must be str, not {type(topic).__name__}")
        return PendingPublication(
            _check_topic(topic), bodies, sum(lengths), time.monotonic(), defer_s, timeout_s
        )

    def _submit_publication(self, publication: PendingPublication) -> None:
        if not self._is_started:
            self.start()
        self._wait_for_room(publication)
        self._send(publication)
        publication.is_submitted = True

    def _send(self, publication: PendingPublication) -> None:  # overridden by `FakeProducer`
        self._io.submit(publication)

    def _split(self, bodies: Iterable[ReadableBuffer]) -> Iterator[list[bytes]]:
        """Group bodies into MPUBs that stay within publish_max_body_size."""
        return in_groups(copy_bodies(bodies), len, self.options.publish_max_body_size)

    def _checked_parts(self, bodies: Iterable[ReadableBuffer]) -> list[list[bytes]]:
        """Group bodies like `_split`, and check all of them. Raises `PublishInvalid`."""
        parts = list(self._split(bodies))
        if len(parts) > 1:  # a single part is checked by `submit`
            for part in parts:
                check_bodies(list(map(len, part)), None, self.options)
        return parts

    @property
    def retried(self) -> int:
        """The number of messages that were sent again."""
        return self._io.retried

    @property
    def repeated(self) -> int:
        """The number of messages that were sent again although nsqd may have had them."""
        return self._io.repeated

    def _end_retries(self) -> None:
        """Retry nothing from now on: a failed publish settles immediately."""
        self._io.loop.call_soon(self._io.end_retries)

    def health(self) -> ProducerHealth:
        """Return the current state, for a probe or for metrics."""
        unsettled = [item for item in list(self._unsettled) if not item.is_settled]
        oldest_at = min((item.submitted_at for item in unsettled), default=None)
        return ProducerHealth(
            [str(link.address) for link in self._io.links if link.connection is not None],
            len(unsettled),
            0.0 if oldest_at is None else time.monotonic() - oldest_at,
            self._io.links.last_error(),
        )

    # -- the window -----------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        """Return whether `submit` would not block."""
        return self._is_stopped or (
            len(self._unsettled) - len(self._outside_window) < self.options.max_outstanding
            and self._entered_bytes - self._left_bytes < self._window_bytes
        )

    def _enter(self, publication: PendingPublication) -> bool:
        """Put it in the window if there is room, and return whether there was."""
        with self._lock:
            if self._is_stopped:
                raise PublishNotSent(f"{self.nsqd}: the producer has stopped")
            if has_room := self._has_room:
                self._unsettled[publication] = None
                publication.window_bytes = publication.size
                self._entered_bytes += publication.size
            return has_room

    def _wait_for_room(self, publication: PendingPublication) -> None:
        if self._enter(publication):
            return
        timeout_s = publication.timeout_s
        if timeout_s is None:
            timeout_s = self.options.publish_timeout_s
        if self._io.loop.is_own_thread:  # only this thread could make room
            timeout_s = 0
        until = time.monotonic() + timeout_s
        try:
            while wait_until_released(
                self._waiters, lambda: self._has_room, until - time.monotonic()
            ):
                if self._enter(publication):
                    return
            raise self._no_room(timeout_s)
        finally:
            self._make_room()  # a thread that was released and gives up must not keep the room

    def _rate_delay_s(self, count: int, timeout_s: float | None) -> float:
        """Return the seconds until max_rate allows ``count`` messages. Raises `PublishNotSent`."""
        assert self._rate is not None
        limit_s = self.options.publish_timeout_s if timeout_s is None else timeout_s
        if self._io.loop.is_own_thread:  # a callback must not wait
            limit_s = 0.0
        delay_s = self._rate.schedule(count, time.monotonic(), limit_s)
        if delay_s is None:
            raise PublishNotSent(f"{self.nsqd}: max_rate allows no message within {limit_s:.3g} s")
        return delay_s

    def _no_room(self, waited_s: float) -> PublishNotSent:
        error = PublishNotSent(f"{self.nsqd}: no room for another publish in {waited_s:.3g} s")
        error.__cause__ = DeadlineExceeded(f"{self.nsqd} confirms nothing")
        return error

    def _make_room(self) -> None:
        # Only those that may enter: waking all of 100 threads for each answer doubles the cost of a
        # publish. One more, because a signal handler that waits itself may have interrupted one.
        if self._waiters and self._has_room:
            unsettled = len(self._unsettled) - len(self._outside_window)
            room = self.options.max_outstanding - unsettled + 1
            for _ in range(len(self._waiters) if self._is_stopped else max(1, room)):
                with suppress(IndexError):  # there are fewer, or another thread makes room, too
                    self._waiters.pop(0).release()

    def _release_window(self, publications: Iterable[PendingPublication]) -> None:
        """Take publications out of the window that wait for an nsqd that may hang."""
        released = (self._unsettled.keys() & publications) - self._outside_window
        self._outside_window |= released
        self._left_bytes += sum(publication.window_bytes for publication in released)
        self._make_room()

    def _on_settled(self, settled: list[PendingPublication]) -> None:
        for publication in settled:
            if publication in self._outside_window:
                self._outside_window.remove(publication)
            else:
                self._left_bytes += publication.window_bytes
            self._unsettled.pop(publication, None)
        self._make_room()
        if self.on_published is not None:
            for publication in settled:
                call_guarded("on_published", self.on_published, publication)


class Producer(ProducerCore):
    """Publishes to one or several nsqd, with connections that are made when needed.

    ``mode`` selects among several addresses: ``"failover"`` uses the first that works,
    ``"round-robin"`` all that work, in turn. A publish that one nsqd certainly did not accept goes
    to another one. An nsqd that hangs gets nothing new while another works.

    ``lookupd_http_addresses`` adds all nsqd that are registered with an nsqlookupd; they are looked
    up periodically, like those of a `Consumer`, and used after those of ``nsqd_tcp_addresses``.
    ``address_map`` and the options ``allow_announced``, ``max_discovered_nsqd`` and
    ``auth_requires_tls`` limit which of them the client uses. An nsqd that is no longer listed is
    used for at most five minutes, and only if no other works: nsqlookupd may have restarted. A
    failover producer uses the first of a random order, so that a fleet spreads over all nsqd.

    While no nsqd works, a publish fails immediately. With ``retry_timeout_s`` it is retried for
    that long after its first failure, including while nsqd does not reach its auth server. A
    publish with an unknown outcome is retried only with ``retry_unknown``, because its messages may
    be stored twice. If any attempt may have stored messages, the publish ends as confirmed or
    unknown.

    Leaving the ``with`` block waits for outstanding publishes, for at most ``retry_timeout_s`` plus
    publish_timeout. Failures that the program has not read are logged then.

    ``linger_s`` joins single messages that are published at the same time, on several threads or
    with `submit`, into one MPUB, which is several times faster. A message waits only while an
    earlier one is unanswered, and at most ``linger_s`` seconds. nsqd gets the publishes of
    a topic in the order of their submission, also those that are retried, except with several nsqd
    and when a batch is split.

    ``max_rate`` limits the messages a second, on all threads together; 0 is without a limit. A
    publish waits for its time; one that would wait longer than its timeout is not sent.

    ``on_published`` is called with every settled publication, for metrics, ``on_connected`` with
    the address of each connected nsqd, ``host:port``, and ``on_lost`` with the address and the
    error when such a connection ends, except by a stop. They run on the I/O thread and must not
    block. What they raise is logged.

    Thread-safe. Raises `ConfigurationError` for a bad address or bad options.
    """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted so far has settled; return whether it has in time.

        Settled does not mean confirmed: see `Publication.error`.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        self._refuse_own_thread()
        return self._flush(timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Wait for outstanding publishes, then close; return whether all settled in time.

        After ``timeout_s`` the remaining ones settle as not sent or unknown. Failures that the
        program has not read are logged. In a callback this begins to stop and returns False,
        because a callback cannot wait for its own thread.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        return self._stop(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._patience_s)

    # -- publishing -----------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        body: ReadableBuffer,
        *,
        timeout_s: float | None = None,
        defer_s: float | None = None,
        at: datetime | None = None,
        key: str = "",
    ) -> None:
        """Publish one message and wait for the confirmation. Raises `PublishError`.

        Channels deliver it after ``defer_s`` seconds. `PublishInvalid` refuses a negative delay,
        and `PublishRejected` one above nsqd's --max-req-timeout, an hour by default.

        ``timeout_s`` limits the whole call; after it, the class of the error shows whether the
        message may have been published. By default each step may take publish_timeout.

        With ``at``, which needs a time zone, nsqd gets and confirms a request to ``nsq schedule
        serve``, which publishes the message when it is due: see nsq-schedule(7). The request
        replaces an earlier one with the same ``key``.
        """
        self._refuse_own_thread()
        if at is not None or key:
            topic, body = schedule_request(topic, body, at, key, defer_s)
        if self._rate is not None:
            timeout_s = self._wait_for_rate(1, timeout_s)
        copy = body if type(body) is bytes else _copy_body(body)
        publication = self._make_publication(topic, [copy], defer_s, timeout_s)
        publication.is_awaited = True
        if (direct := self._io.direct) is None or not self._publish_directly(publication, direct):
            self._submit_publication(publication)
            publication.wait()

    def publish_deferred(
        self, topic: str, body: ReadableBuffer, defer_s: float, *, timeout_s: float | None = None
    ) -> None:
        """Publish with ``defer_s``: see `publish`."""
        self.publish(topic, body, defer_s=defer_s, timeout_s=timeout_s)

    def _wait_for_rate(self, count: int, timeout_s: float | None) -> float | None:
        """Wait until max_rate allows ``count`` messages; return the rest of ``timeout_s``."""
        delay_s = self._rate_delay_s(count, timeout_s)
        time.sleep(delay_s)
        return None if timeout_s is None else timeout_s - delay_s

    def _publish_directly(self, publication: PendingPublication, direct: DirectPath) -> bool:
        """Publish on this thread if no other publish is under way; return whether it has."""
        # Publishes that this thread has submitted before are in `_unsettled`, so none is overtaken.
        # A callback for published messages runs on the I/O thread.
        if self._unsettled or self._is_stopped or self.on_published is not None:
            return False
        self._unsettled[publication] = None
        attempt: Attempt = "not begun"
        try:
            attempt = direct.publish(publication)
        finally:  # a signal handler may raise, as it does for ^C
            if attempt != "unanswered":
                self._unsettled.pop(publication, None)
        if self._waiters:
            self._make_room()
        if attempt == "unanswered":
            self._io.loop.call_soon(self._io.reclaim)
            publication.wait()
        return attempt != "not begun"

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

        Several MPUB are not one transaction: ``outcomes`` of the error has the result of each
        message. The class of the error holds for all of them, so it is `PublishUnknown` if some are
        confirmed. Nothing is sent if nsqd would certainly refuse one of the messages.
        """
        self._refuse_own_thread()
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        parts = self._checked_parts(bodies)
        submitted: list[Publication] = []
        refusal: PublishError | None = None
        for part in parts:
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            try:
                submitted.append(self.submit(topic, part, timeout_s=left_s))
            except PublishError as exc:  # no room, or stopped: the next part would fail as well
                refusal = exc
                break
        errors = [publication.exception() for publication in submitted]
        errors += [refusal] * (len(parts) - len(errors))
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
        """Submit a publish without waiting for its outcome.

        One body is sent as PUB, several as one MPUB; ``defer_s`` allows only one. Blocks while the
        window of outstanding publishes is full, for at most ``timeout_s`` (default:
        publish_timeout), and raises `PublishNotSent` then. With ``timeout_s`` the publication
        settles within that time. ``on_settled`` runs on the I/O thread and must not block; it may
        submit, which raises `PublishNotSent` where it would block.

        With ``splits`` a batch that contains a refused message is halved until that message is
        alone, and the others are published: see `Publication.errors`.

        Raises ``TypeError`` for a body that is not bytes, and `PublishInvalid` for messages that
        nsqd would certainly refuse.
        """
        if self._rate is not None:
            timeout_s = self._wait_for_rate(len(bodies), timeout_s)
        return self._submit(topic, bodies, defer_s, timeout_s, on_settled, splits)


# -- the bodies of a publish ----------------------------------------------------------------------


def copy_bodies(bodies: Iterable[ReadableBuffer]) -> list[bytes]:
    """Return the bodies as bytes, which cannot change while they wait.

    Raises ``TypeError`` for a body that is not bytes.
    """
    if isinstance(bodies, (str, bytes, bytearray, memoryview)):
        raise TypeError("bodies must be a list of messages, not one message")
    copies = list(bodies)
    if (len(copies) == 1 and type(copies[0]) is bytes) or set(map(type, copies)) <= {bytes}:
        return copies  # type: ignore[return-value]
    return [body if type(body) is bytes else _copy_body(body) for body in copies]


def _copy_body(body: ReadableBuffer) -> bytes:
    if isinstance(body, str):
        raise TypeError("a message body is bytes, not str: encode it, as in body.encode()")
    try:
        return memoryview(body).tobytes()
    except TypeError:
        raise TypeError(f"a message body is bytes, not {type(body).__name__}") from None


def schedule_request(
    topic: str, body: ReadableBuffer, at: datetime | None, key: str, defer_s: float | None
) -> tuple[str, bytes]:
    """Return the topic and the body of a request to publish ``body`` ``at`` a time.

    Raises `PublishInvalid` for a request that the scheduler would refuse.
    """
    from datetime import datetime

    from nsqtools.protocol.schedule_request import SCHEDULE_TOPIC, request_at

    check_argument("at", at, datetime, NONE)
    check_argument("key", key, str)
    if at is None:
        raise PublishInvalid("key is for a message with at")
    if defer_s is not None:
        raise PublishInvalid("at and defer_s exclude each other")
    try:
        return SCHEDULE_TOPIC, request_at(_check_topic(topic), _copy_body(body), at, key)
    except ValueError as exc:
        raise PublishInvalid(f"cannot schedule the message: {exc}") from None


def check_bodies(lengths: list[int], defer_s: float | None, options: ClientOptions) -> None:
    """Raise `PublishInvalid` for messages that nsqd would refuse as one publish."""
    limit = options.publish_max_msg_size
    if len(lengths) == 1 and defer_s is None and 0 < lengths[0] <= limit:
        return  # the usual case
    if not lengths:
        raise PublishInvalid("a publish needs a message")
    if min(lengths) == 0:
        raise PublishInvalid("nsqd refuses empty messages")
    if max(lengths) > limit:
        raise PublishInvalid(
            f"a message of {max(lengths)} bytes is above the limit of {limit}",
            hint="nsqd's limit is its --max-msg-size; the client's is publish_max_msg_size.",
        )
    if defer_s is not None:
        check_argument("defer_s", defer_s, *NUMBER)
        if len(lengths) > 1:
            raise PublishInvalid("only single messages can be deferred")
        if not 0 <= defer_s <= MAX_DELAY_S:
            raise PublishInvalid(f"cannot defer for {defer_s} s", hint="Defer for 0 s or more.")
    elif len(lengths) > 1 and mpub_size(lengths) > options.publish_max_body_size:
        raise PublishInvalid(
            f"a batch of {sum(lengths)} bytes is above publish_max_body_size",
            hint="Publish fewer messages at a time. nsqd's limit is its --max-body-size; the "
            "client's is publish_max_body_size.",
        )


# -- the process ----------------------------------------------------------------------------------

_started: weakref.WeakSet[ProducerCore] = weakref.WeakSet()
_dropped: weakref.WeakSet[ProducerIO] = weakref.WeakSet()  # of producers that nobody has stopped
_is_at_exit = False


def _end(io: ProducerIO, timeout_s: float | None, log_prefix: str) -> bool:
    """Wait for the end of a stop that has begun; return whether everything has settled in time."""
    is_in_time = io.loop.join(timeout_s)
    if not is_in_time and not io.loop.is_own_thread:
        io.loop.call_soon(io.abort)
        io.loop.join()
    io.failures.log_unseen(log_prefix)
    return is_in_time


def _stop_producers() -> None:
    """Stop all producers at the end of the interpreter, at the same time.

    Functions that were registered with atexit before this one run after it and may still publish.
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
    for io in list(_dropped):
        left_s = now + io.options.publish_timeout_s - time.monotonic()
        _end(io, max(0.0, left_s), "the program ended with ")


def _restart_all_in_child() -> None:
    producers = list(_started)
    _started.clear()
    _dropped.clear()
    for producer in producers:
        producer._restart_in_child()


atexit.register(_stop_producers)
os.register_at_fork(after_in_child=_restart_all_in_child)
