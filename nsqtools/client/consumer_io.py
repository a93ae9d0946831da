"""All connections of a consumer, on the I/O thread: RDY, backoff, connecting and stopping.

This connects the pure deciders (`rdy`, `backoff`, `stopping`, `reconnect`) with the sockets: events
go to the deciders, their decisions go out through `Subscription`. Everything runs on the loop's
thread unless a method says otherwise; connecting and lookups block, so they run on threads of their
own and return their results with ``call_soon``.

What one turn costs must not grow with the number of connections: only subscriptions that have
answers are collected, only connections that were written to are flushed.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nsqtools.client.backlog import Backlog
from nsqtools.client.backoff import Backoff, Resume, Wait
from nsqtools.client.connection import LIVENESS_TICK_S, Connection
from nsqtools.client.delivery import Delivery
from nsqtools.client.dialer import Dialer
from nsqtools.client.io_loop import IOLoop, Timer
from nsqtools.client.message import Batch
from nsqtools.client.options import ClientOptions
from nsqtools.client.rdy import ReadyControl, has_windowed_rdy
from nsqtools.client.stopping import Stopping
from nsqtools.client.subscription import Subscription
from nsqtools.errors import NsqError, ServerError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.commands import Subscribe
from nsqtools.transport.stream import READ_SIZE

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")

GATHER_S = 0.025  # the longest a single answer waits to be joined with others (see `_each_turn`)
BACKOFF_RETRY_S = 1.0  # when backoff ends without a connection to test on
WARN_INTERVAL_S = 10.0


class ConsumerIO:
    """Owns the loop and all connections of one consumer.

    Messages go to the ``backlog``. ``on_giving_up`` is called on a handler's thread with messages
    that were delivered too often. The others are called on the I/O thread and must not block:
    ``on_stopped`` when nothing more will be delivered, ``on_error`` with every lost or failed
    connection, ``on_lost_discovered`` to ask for a lookup soon.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        addresses: Iterable[Address],
        options: ClientOptions,
        tls: ssl.SSLContext | None,
        *,
        expects_lookup: bool,
        backlog: Backlog,
        on_giving_up: Callable[[Batch], None],
        on_stopped: Callable[[], None],
        on_error: Callable[[NsqError], None],
        on_lost_discovered: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.loop = IOLoop(f"nsq-{topic}-{channel}", self._each_turn, self._at_end)
        self.wake = self.loop.wake
        self.now = self.loop.now
        self.settled = threading.Event()  # every address known at the start was tried once
        self.first_errors: list[NsqError] = []
        self.subscriptions: dict[Subscription, None] = {}
        self._read_buffer = memoryview(bytearray(READ_SIZE))
        self._answered: collections.deque[Subscription] = collections.deque()
        self.answered = self._answered.append  # subscriptions with answers to collect
        self._gathers_until = 0.0
        self._options = options
        self.delivery = Delivery(self.loop, backlog, options, on_giving_up, self._limit_changed)
        self.stats = self.delivery.stats
        self.redelivered = self.delivery.redelivered
        self._on_stopped = on_stopped
        self._on_error = on_error
        self._on_lost_discovered = on_lost_discovered
        self._expects_lookup = expects_lookup
        self._is_quiet = False
        self._backoff_timer: Timer | None = None
        self._next_late_warning = 0.0
        self._stopping: Stopping | None = None
        self._is_announced = False
        self._dialer = Dialer(
            self.loop, addresses, options, tls, Subscribe(topic, channel), self._connected
        )
        self.rdy: ReadyControl[Subscription] = ReadyControl(
            self.delivery.limit,
            idle_timeout_s=options.low_rdy_idle_timeout_s,
            hold_timeout_s=options.low_rdy_timeout_s,
        )
        self.backoff = Backoff(
            options.backoff_multiplier_s,
            options.max_backoff_duration_s,
            full_jitter=options.backoff_strategy == "full_jitter",
        )

    def start(self, *, quietly: bool) -> None:
        """Start the thread (from any thread). ``quietly``: the caller reports first errors."""
        self._is_quiet = quietly
        self.loop.call_soon(self._begin)
        self.loop.start()

    def _begin(self) -> None:
        self._dialer.begin()
        self._watch_liveness()
        self._redistribute()
        self._settle()

    # -- connecting -----------------------------------------------------------------------------

    def listed(self, addresses: Iterable[Address], errors: list[NsqError]) -> None:
        """A lookup round has ended; it found ``addresses``, or has nothing but ``errors``."""
        if self._expects_lookup:
            self._expects_lookup = False
            self.first_errors += errors
        self._dialer.listed(addresses)
        self._settle()

    def _connected(self, address: Address, result: Connection | NsqError) -> None:
        if isinstance(result, Connection):
            self._subscribed(result)
        else:
            if is_first := not self.settled.is_set():
                self.first_errors.append(result)
            self._ended(address, result, quietly=is_first and self._is_quiet)
        self._settle()

    def _subscribed(self, connection: Connection) -> None:
        reply, options, now = connection.reply, self._options, self.loop.now()
        subscription = Subscription(self, connection)
        for feature in ("snappy", "deflate"):
            if getattr(options, feature) and not getattr(reply, feature):
                log.warning("%s does not offer %s; continuing without", subscription.nsqd, feature)
        self.subscriptions[subscription] = None
        connection.attach(self.loop, subscription, self._read_buffer)
        resend = options.rdy_resend == "always" or (
            options.rdy_resend == "auto" and not has_windowed_rdy(reply.version)
        )
        self.rdy.add(subscription, reply.max_rdy_count, now, resend=resend)
        self.delivery.connected(subscription)
        log.info("connected to %s (nsqd %s)", subscription.nsqd, reply.version or "before 0.2.19")

    def _settle(self) -> None:
        if not self._expects_lookup and not self._dialer.is_connecting:
            self.settled.set()

    def lost(self, subscription: Subscription, error: NsqError) -> None:
        """A connection has ended: its messages come again after their timeout."""
        self._forget(subscription)
        if not self._stopping:
            connection = subscription.connection
            self._ended(connection.address, error, was_proven=connection.is_proven)

    def _forget(self, subscription: Subscription) -> None:
        subscription.connection.close()
        del self.subscriptions[subscription]
        self.delivery.lost(subscription)
        subscription.in_flight.clear()  # from here on its messages count as answered
        self.rdy.remove(subscription, self.loop.now())
        self.loop.wake()  # the turn may be past the point where RDY changes are sent

    def _ended(
        self, address: Address, error: NsqError, *, was_proven: bool = False, quietly: bool = False
    ) -> None:
        if self._dialer.ended(address, error, was_proven=was_proven, quietly=quietly):
            self._on_lost_discovered()
        try:
            self._on_error(error)
        except Exception:
            log.exception("on_error failed")

    # -- messages and their answers -------------------------------------------------------------

    def owns(self, batch: Batch) -> bool:
        """Tell whether a batch was delivered here (from any thread)."""
        return batch.source in self.subscriptions

    def received(self, subscription: Subscription, batch: Batch, replaced: int) -> None:
        """New deliveries, ``replaced`` of them of messages that are in flight."""
        now = self.loop.now()
        self.stats.received += len(batch)
        self.rdy.received(subscription, len(batch), now)
        if replaced:
            self.rdy.answered(subscription, replaced, now)
        if self._stopping and self._stopping.refuses(now):
            batch.requeue(0, backoff=False)
            return
        self.delivery.deliver(subscription, batch)

    def _collect(self, subscription: Subscription) -> None:
        finished, answers = subscription.collect()
        now = self.loop.now()
        for answer in answers:
            if answer.is_final:
                self.rdy.answered(subscription, 1, now)
            if answer.failure is not None:
                self.delivery.note_seen(subscription, [answer.message_id])
                self.stats.requeued += 1
                backoff = self.backoff
                self._apply(backoff.failure() if answer.failure else backoff.neutral())
        if finished:
            self.delivery.finished(subscription, finished)
            self.rdy.answered(subscription, len(finished), now)
            self._apply(self.backoff.success())

    def answer_refused(self, error: ServerError) -> None:
        """nsqd refused an answer because the message had timed out: harmless, but a symptom."""
        self.stats.late += 1
        if (now := self.loop.now()) >= self._next_late_warning:
            self._next_late_warning = now + WARN_INTERVAL_S
            log.warning("%s (%d such answers so far)", error, self.stats.late)

    def requeue_delay_s(self, attempts: int) -> float:
        """Return the delay of a requeue that names none (from any thread)."""
        options = self._options
        return min(options.default_requeue_delay_s * attempts, options.max_requeue_delay_s)

    def _limit_changed(self, count: int) -> None:
        if count != self.rdy.max_in_flight:
            self.rdy.set_max_in_flight(count, self.loop.now())
            self.loop.wake()  # the turn may be past the point where RDY changes are sent

    def _apply(self, action: Wait | Resume | None) -> None:
        if action is None or self._stopping:
            return
        if isinstance(action, Resume):
            log.info("backoff is over")
            self.rdy.resume(self.loop.now())
            return
        log.warning("backing off for %.2f s (level %d)", action.delay_s, self.backoff.level)
        self.rdy.hold(self.loop.now())
        self._backoff_timer = self.loop.call_later(action.delay_s, self._test)

    def _test(self) -> None:
        if self.rdy.test(self.loop.now()):
            self.backoff.expire()
        else:
            self._backoff_timer = self.loop.call_later(BACKOFF_RETRY_S, self._test)

    # -- every turn, and by the clock -----------------------------------------------------------

    def _each_turn(self) -> None:
        collected = []
        for _ in range(len(self._answered)):
            subscription = self._answered.popleft()
            if subscription in self.subscriptions:
                self._collect(subscription)
                collected.append(subscription)
        for subscription, count in self.rdy.take_changes():
            subscription.send_ready(count)
        for subscription in collected:
            subscription.send_answers()
        # A handler that has just woken the loop leaves answers without waking it again.
        now = self.loop.now()
        if collected:
            self._gathers_until = now + 2 * GATHER_S
        gathers = self._stopping or now < self._gathers_until
        self.loop.max_sleep_s = GATHER_S if gathers else None
        if self._stopping:
            self._advance_stop(self._stopping)

    def _watch_liveness(self) -> None:
        for subscription in list(self.subscriptions):
            subscription.connection.check_liveness()
        self.loop.call_later(LIVENESS_TICK_S, self._watch_liveness)

    def _redistribute(self) -> None:
        self.rdy.redistribute(self.loop.now())
        self.loop.call_later(self._options.rdy_redistribute_interval_s, self._redistribute)

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self, drain: bool) -> None:
        """Send CLS everywhere. With ``drain`` what was delivered and still comes is handled,
        otherwise it is requeued at once."""
        if self._stopping:
            self._stopping.drain &= drain  # the more impatient of two stops applies
            return
        now = self.loop.now()
        self._stopping = Stopping(now, self._options.drain_timeout_s, drain)
        self._dialer.stop()
        if self._backoff_timer is not None:
            self._backoff_timer.cancel()
        for subscription in self.subscriptions:
            self.rdy.close(subscription, now)
            subscription.send_close()

    def abort(self) -> None:
        """Requeue everything unanswered and leave without waiting for handlers."""
        if self._stopping:
            self._stopping.expire(self.loop.now())

    def _advance_stop(self, stopping: Stopping) -> None:
        now = self.loop.now()
        for subscription in list(self.subscriptions):
            step = stopping.next_step(subscription, now)
            if step == "requeue":
                self._requeue_rest(subscription)
            elif step == "shutdown":
                subscription.connection.shutdown_write()
            elif step == "close":
                self._forget(subscription)
        if not stopping.drain or all(stopping.is_quiet(s, now) for s in self.subscriptions):
            self._announce_stop()
        if not self.subscriptions:
            self.loop.stop()

    def _announce_stop(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._on_stopped()

    def _at_end(self) -> None:
        """The loop has ended, by a stop or a defect: release everybody who waits."""
        self._dialer.stop()
        for subscription in list(self.subscriptions):
            self._forget(subscription)
        self._announce_stop()
        self.settled.set()

    def _requeue_rest(self, subscription: Subscription) -> None:
        rest = list(subscription.in_flight.values())
        if rest:
            log.warning(
                "%s: %d messages were not handled in time to stop; they are requeued",
                subscription.nsqd,
                len(rest),
            )
            Batch(subscription, rest).requeue(0, backoff=False)
