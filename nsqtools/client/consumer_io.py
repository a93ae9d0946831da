"""All connections of a consumer, on the I/O thread: RDY, backoff, connecting and stopping.

This connects the pure deciders (`rdy`, `backoff`, `stopping`, `reconnect`) with the sockets: events
go to the deciders, their decisions go out through `Subscription`. Everything runs on the I/O
thread unless a method says otherwise.

What one turn costs must not grow with the number of connections: only subscriptions that have
answers are collected, only connections that were written to are flushed.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable

from nsqtools.client.backlog import Backlog
from nsqtools.client.backoff import Backoff, Resume, Wait
from nsqtools.client.connection import LIVENESS_TICK_S, Connection
from nsqtools.client.delivery import Delivery
from nsqtools.client.dialer import Dialer
from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.message import Batch
from nsqtools.client.options import ClientOptions
from nsqtools.client.rdy import PROBE_S, ReadyControl, has_windowed_rdy
from nsqtools.client.stopping import Stopping
from nsqtools.client.subscription import Subscription
from nsqtools.errors import NsqError, ServerError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.commands import Subscribe
from nsqtools.protocol.wording import counted
from nsqtools.transport.stream import READ_SIZE

log = logging.getLogger("nsqtools")

GATHER_S = 0.025  # the longest that an answer waits to be joined with others (see `_gather`)
BACKOFF_RETRY_S = 1.0  # when backoff ends without a connection to test on
WARN_INTERVAL_S = 10.0

READ_BUFFER = memoryview(bytearray(READ_SIZE))  # of the one I/O thread


class ConsumerIO:
    """Owns all connections of one consumer.

    Messages go to the ``backlog``. ``on_giving_up`` is called on a handler's thread with messages
    that were delivered too often. The others are called on the I/O thread and must not block:
    ``on_stopped`` when nothing more will be delivered, ``on_error`` with every lost or failed
    connection.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        addresses: Iterable[Address],
        options: ClientOptions,
        *,
        discovery: Discovery | None,
        backlog: Backlog,
        on_giving_up: Callable[[Batch], None],
        on_stopped: Callable[[], None],
        on_error: Callable[[NsqError], None],
    ) -> None:
        self.topic = topic
        self.loop = LoopMember(f"{topic}/{channel}", self._each_turn, self._at_end)
        self.wake = self.loop.wake
        self.now = self.loop.now
        self.settled = threading.Event()  # every address known at the start was tried once
        self.first_errors: list[NsqError] = []
        self.subscriptions: dict[Subscription, None] = {}
        self._answered: collections.deque[Subscription] = collections.deque()
        self.answered = self._answered.append  # subscriptions with answers to collect
        self._collected_at = 0.0
        self._is_gathering = False
        self._options = options
        self.delivery = Delivery(self.loop, backlog, options, on_giving_up, self._limit_changed)
        self.waiting = self.delivery.waiting
        self.next_wake = 0.0  # see `SubscriptionUser`, and the next one
        self.has_more_in_hand = False
        self.stats = self.delivery.stats
        self.redelivered = self.delivery.redelivered
        self._on_stopped = on_stopped
        self._on_error = on_error
        self._discovery = discovery
        self._expects_lookup = discovery is not None
        self._is_quiet = False
        self._backoff_timer: Timer | None = None
        self._next_late_warning = 0.0
        self._stopping: Stopping | None = None
        self._stop_timer: Timer | None = None
        self._redistributes: Timer | None = None
        self._is_announced = False
        self._dialer = Dialer(
            self.loop, addresses, options, Subscribe(topic, channel), self._connected
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
        """Begin, from any thread. ``quietly``: the caller reports first errors."""
        self._is_quiet = quietly
        self.loop.call_soon(self._begin)
        self.loop.start()

    def _begin(self) -> None:
        self._dialer.begin()
        if self._discovery is not None:
            self._discovery.begin(self.loop, self._listed)
        self.loop.call_each(LIVENESS_TICK_S, self._watch_liveness)
        self._redistribute()
        self._settle()

    # -- connecting -----------------------------------------------------------------------------

    def _listed(self, addresses: Iterable[Address], errors: list[NsqError]) -> None:
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
        # first: who sees the subscription and forks relies on its socket being registered
        connection.attach(self.loop, subscription, READ_BUFFER)
        self.subscriptions[subscription] = None
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
        is_discovered = self._dialer.ended(address, error, was_proven=was_proven, quietly=quietly)
        if is_discovered:
            self.look_up_soon()
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

    def _collect(self, subscription: Subscription, now: float) -> None:
        finished, answers = subscription.collect()
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
            if self.backoff.level:
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
        now = self.loop.now()
        for _ in range(len(self._answered)):
            subscription = self._answered.popleft()
            if subscription in self.subscriptions:
                self._collect(subscription, now)
                collected.append(subscription)
        for subscription, count in self.rdy.take_changes():
            subscription.send_ready(count)
        for subscription in collected:
            subscription.send_answers()
        if collected:
            self._collected_at = now
            if not self._is_gathering:
                self._is_gathering = True
                self.loop.call_later(GATHER_S, self._gather)
        if self._stopping:
            self._advance_stop(self._stopping)

    def _gather(self) -> None:
        """Look once more: who has just woken the loop leaves answers without waking it again."""
        left_s = self._collected_at + GATHER_S - self.loop.now()
        self._is_gathering = left_s > 0
        if self._is_gathering:
            self.loop.call_later(left_s, self._gather)

    def _watch_liveness(self) -> None:
        for subscription in list(self.subscriptions):
            subscription.connection.check_liveness()

    def _redistribute(self) -> None:
        self.rdy.redistribute(self.loop.now())
        interval_s = self._options.rdy_redistribute_interval_s
        if self.rdy.is_scarce:
            interval_s = min(interval_s, PROBE_S)
        if self._redistributes is None or self._redistributes.interval_s != interval_s:
            if self._redistributes is not None:
                self._redistributes.cancel()
            self._redistributes = self.loop.call_each(interval_s, self._redistribute)

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self, drain: bool) -> None:
        """Send CLS everywhere. With ``drain`` what was delivered and still comes is handled,
        otherwise it is requeued at once."""
        if self._stopping:
            self._stopping.drain &= drain  # the more impatient of two stops applies
            return
        now = self.loop.now()
        self._stopping = Stopping(now, self._options.drain_timeout_s, drain)
        self._leave_others()
        if self._backoff_timer is not None:
            self._backoff_timer.cancel()
        for subscription in self.subscriptions:
            self.rdy.close(subscription, now)
            subscription.send_close()

    def look_up_soon(self) -> None:
        """Bring the next round of lookups forward, where there is any."""
        if self._discovery is not None and not self._stopping:
            self._discovery.ask_soon()

    def _leave_others(self) -> None:
        """Look for no more nsqd, and connect to none."""
        self._dialer.stop()
        if self._discovery is not None:
            self._discovery.stop()

    def abort(self) -> None:
        """Requeue everything unanswered and leave without waiting for handlers."""
        if self._stopping:
            self._stopping.expire(self.loop.now())

    def _advance_stop(self, stopping: Stopping) -> None:
        now = self.loop.now()
        for subscription in list(self.subscriptions):
            subscription.connection.flush()  # here, as the next step depends on it
            if subscription not in self.subscriptions:
                continue
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
        elif (at := stopping.next_change(now)) is not None:
            if self._stop_timer is not None:
                self._stop_timer.cancel()
            self._stop_timer = self.loop.call_later(at - now, self.loop.wake)

    def _announce_stop(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._on_stopped()

    def _at_end(self) -> None:
        """It has ended, by a stop or a defect: release everybody who waits."""
        self._leave_others()
        for subscription in list(self.subscriptions):
            self._forget(subscription)
        self._announce_stop()
        self.settled.set()

    def _requeue_rest(self, subscription: Subscription) -> None:
        rest = list(subscription.in_flight.values())
        if rest:
            log.warning(
                "%s: requeued %s not handled in time to stop",
                subscription.nsqd,
                counted(len(rest), "message"),
            )
            Batch(subscription, rest).requeue(0, backoff=False)
