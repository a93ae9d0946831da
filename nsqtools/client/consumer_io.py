"""All connections of a consumer, on the I/O thread: RDY, backoff, connecting and stopping.

This module connects the pure deciders (`rdy`, `Stopping`, `connecting`) with the sockets. Events go
to the deciders, and their decisions go out through `Subscription`. Everything runs on the I/O
thread unless a method states otherwise. Handler threads call the methods of
`message.MessageSource`, which only append to the ``_finished`` and ``_answers`` of a subscription
and mark it as answered. In its next turn the consumer collects the answers, puts RDY changes before
them (nsqd would send one more message between a FIN and the RDY 0 behind it), and writes all of it
at once.

To close a socket right after CLS and FINs would lose them: nsqd may be writing, so the close
becomes a reset, and unread commands are lost (measured: all of 250 FINs, in half of the runs). So
each connection goes through these steps: CLS sent; CLOSE_WAIT received (or a second passed); all
messages answered and all bytes sent; our direction shut down; nsqd's end of stream read (or a
second passed); closed.

A message may arrive after CLOSE_WAIT, because nsqd answers CLS on one goroutine while another may
be taking a message for us (measured: in 3 % of the stops on a busy machine). So the stop waits for
`STRAGGLERS_S`, and requeues such a message like the others.

A disconnect does not requeue messages: they would stay in flight until their timeout. So messages
that are unanswered at the deadline of a stop are requeued explicitly first.

The cost of a turn must not grow with the number of connections: only subscriptions with answers are
collected, and only connections with writes are flushed.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from nsqtools.client.attempts import Attempts
from nsqtools.client.backlog import Backlog, Delivery
from nsqtools.client.callbacks import ConnectionEvents
from nsqtools.client.connecting import Dialer
from nsqtools.client.connection import LIVENESS_TICK_S, Connection
from nsqtools.client.discovery import Discovery
from nsqtools.client.in_flight_limit import InFlightLimit
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.message import (
    AnswerKind,
    Batch,
    Message,
    adopt_redelivery,
    max_attempts_of,
    requeue_undelivered,
    source_of,
)
from nsqtools.client.options import ClientOptions
from nsqtools.client.rdy import NORMAL, PROBE_S, ReadyControl
from nsqtools.errors import NsqError, ProtocolError, ServerError
from nsqtools.protocol import commands
from nsqtools.protocol.frames import CLOSE_WAIT
from nsqtools.protocol.names import Address
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

# The longest time for which an answer waits to be joined with others (see `_collect_later`). It is
# the output_buffer_timeout that the client requests, so nsqd's side waits as long.
COLLECT_S = 0.025
# Interval of attempts to end backoff while there is no connection to test on.
BACKOFF_RETRY_S = 1.0
WARN_INTERVAL_S = 10.0
# A connection with more unanswered messages than its highest RDY times this is lost. Messages that
# timed out at nsqd may still be unanswered here, so they may exceed RDY.
MAX_RDY_EXCESS = 4
# A handler that answers messages one by one and fast wakes the I/O thread at most this often. A
# millisecond collects some hundred FINs, and delays none noticeably.
FLUSH_INTERVAL_S = 0.001
# How long a stop waits for each reaction of nsqd. nsqd answers in milliseconds; a second allows for
# a busy machine.
STEP_TIMEOUT_S = 1.0
# A stop that takes longer logs the messages that it waits for.
REPORT_STOP_AFTER_S = 1.0
STRAGGLERS_S = 0.05  # see the module's docstring
NOT_FINAL = ("touch", "late")  # kinds of answers after which a message is still in flight

SubscribeCheck = Callable[[str, Address], Callable[[], None] | None]
"""Called with topic and nsqd before the first SUB there: see `ConsumerCore`."""

StopStep = Literal["wait", "requeue", "shutdown", "close"]


class QueuedAnswer(NamedTuple):
    """An answer other than the FIN of a handler, queued for the I/O thread."""

    message_id: bytes
    kind: AnswerKind
    command: bytes


class Subscription:
    """A connection of a consumer: it receives messages and sends answers.

    ``in_flight`` has the unanswered messages by id. Messages with ids in ``released`` timed out at
    nsqd while a worker has them, and do not count as in flight.
    """

    make_message = Message

    def __init__(self, user: ConsumerIO, topic: str, connection: Connection) -> None:
        self.topic = topic
        self.nsqd = connection.nsqd
        self.connection = connection
        self.msg_timeout_s = connection.reply.msg_timeout / 1000
        self.in_flight: dict[bytes, Message] = {}
        self.released: set[bytes] = set()
        self._orphans = user.delivery.orphans
        self.saw_close_wait = False
        self._user = user
        self.received_at = 0.0
        self._now: Callable[[], float] = user.now
        # The highest RDY so far, with room for messages that arrive before the first RDY.
        self._max_ready = 250
        # Not ``len(in_flight)``: a handler removes a message before it queues the answer.
        self._unanswered = 0
        self._finished: list[bytes] = []
        self._answers: collections.deque[QueuedAnswer] = collections.deque()

    # -- from handler threads -------------------------------------------------------------------

    def finish(self, message_id: bytes) -> None:
        """Queue a FIN. It may wait for `FLUSH_INTERVAL_S`, unless it is the last one."""
        self._finished.append(message_id)
        user = self._user
        user.answered[self] = None
        now = self._now()
        if now >= user.next_wake or not (self.in_flight or user.waiting or user.expects_finish):
            user.next_wake = now + FLUSH_INTERVAL_S
            user.wake()

    def finish_many(self, ids: list[bytes]) -> None:
        """Queue several FINs."""
        self._finished += ids
        self._user.answered[self] = None
        self._user.wake()

    def requeue(self, message: Message, delay_s: float | None, backoff: bool) -> None:
        if delay_s is None:
            options = self._user.options
            delay_s = options.default_requeue_delay_s * message.attempts
            delay_s = min(delay_s, options.max_requeue_delay_s)
        delay_ms = round(min(delay_s, commands.MAX_DELAY_S) * 1000)
        command = commands.requeue(message.id, delay_ms)
        self.answer(message.id, "fail" if backoff else "requeue", command)

    def answer(self, message_id: bytes, kind: AnswerKind, command: bytes) -> None:
        self._answers.append(QueuedAnswer(message_id, kind, command))
        self._user.answered[self] = None
        self._user.wake()

    # -- frames of nsqd, on the I/O thread ------------------------------------------------------

    def on_messages(self, messages: list[Message]) -> None:
        kept = replaced = 0
        # After the loss of a connection even a first attempt may be a redelivery: an nsqd that was
        # killed has lost the count.
        if self._orphans:
            messages, kept, replaced = self._merge_redeliveries(messages)
        elif len(messages) == 1 and messages[0].attempts == 1:  # the usual case
            self.in_flight[messages[0].id] = messages[0]
        elif max_attempts_of(messages) == 1:
            for message in messages:
                self.in_flight[message.id] = message
        else:
            messages, kept, replaced = self._merge_redeliveries(messages)
        self._unanswered += len(messages) + kept
        if self._unanswered > MAX_RDY_EXCESS * self._max_ready:
            excess = f"{self._unanswered} messages in flight, but RDY was at most {self._max_ready}"
            self.connection.lose(ProtocolError(f"{self.nsqd}: {excess}"))
            return
        self._user.received(self, Batch(self, messages), kept, replaced)

    def _merge_redeliveries(self, messages: list[Message]) -> tuple[list[Message], int, int]:
        """Put messages in flight of which some were delivered before.

        A worker keeps a message that it has, for the new delivery. Any other new delivery replaces
        the earlier one. Return the messages to hand out, the number of messages that workers keep,
        and the number of deliveries that counted as in flight before.
        """
        # One read may bring a message several times. The latest delivery counts.
        latest = {message.id: message for message in messages}
        dropped = [m.id for m in messages if latest[m.id] is not m]
        repeated = set[bytes]()
        kept = self._user.delivery.redelivered(self, latest.keys(), dropped)
        for message_id, message in kept.items():
            if source_of(message) is self:
                repeated.add(message_id)
            else:  # of a lost connection
                self.in_flight[message_id] = message
            adopt_redelivery(message, latest.pop(message_id))
        for message in latest.values():
            # `pop` is atomic: it decides between this delivery and an answer to the earlier one.
            if self.in_flight.pop(message.id, None) is not None:
                repeated.add(message.id)
            self.in_flight[message.id] = message
        self._unanswered -= len(repeated)
        replaced = len(repeated) - len(repeated & self.released)  # released ones did not count
        self.released -= repeated
        return list(latest.values()), len(kept), replaced

    def on_response(self, data: bytes) -> None:
        if data == CLOSE_WAIT:
            self.saw_close_wait = True

    def on_server_error(self, error: ServerError) -> None:
        if error.fatal:
            self.connection.lose(error)
            return
        self._user.answer_refused(error)
        if error.code == "E_TOUCH_FAILED":  # nsqd's max_msg_timeout has passed
            # The message counts as timed out from now on, and is not touched again.
            for word in str(error).encode().split():
                if (message := self.in_flight.get(word)) is not None:
                    message.received_at = self._now() - 2 * self.msg_timeout_s

    def on_lost(self, error: NsqError) -> None:
        self._user.lost(self, error)

    # -- commands to nsqd, on the I/O thread ----------------------------------------------------

    def collect(self) -> tuple[list[bytes], list[QueuedAnswer], bytes]:
        """Return the ids that handlers have finished, the other answers, and the commands of all.

        The commands leave after RDY: see `ConsumerIO`.
        """
        # Other threads append meanwhile. FINs are counted before the other answers are taken, so
        # that the TOUCH of a message leaves before its FIN.
        finished = self._finished
        count = len(finished)
        answers: list[QueuedAnswer] = []
        encoded = b""
        if self._answers:
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
            encoded = b"".join([answer.command for answer in answers])
            self._unanswered -= sum(answer.kind not in NOT_FINAL for answer in answers)
        ids = finished[:count]
        if ids:
            del finished[:count]
            self._unanswered -= count
            encoded += commands.encode_finishes(ids)
        return ids, answers, encoded

    def count_in_flight(self, ids: list[bytes]) -> int:
        """Return how many of the answered messages counted as in flight (were not released)."""
        late = self.released.intersection(ids)
        self.released -= late
        return len(ids) - len(late)

    def send_ready(self, count: int) -> None:
        """Write RDY, before the answers of this turn."""
        if count > self._max_ready:
            self._max_ready = count
        self.connection.write(commands.ready(count))

    @property
    def is_drained(self) -> bool:
        """Return whether every message is answered and every answer is sent."""
        is_answered = self._unanswered <= len(self.released) and not self._answers
        return is_answered and not self.connection.has_unsent


class Stopping:
    """Decides the next step of a stop for each connection.

    It does no input or output; times are readings of the caller's clock.
    """

    def __init__(self, now: float, drain_timeout_s: float, drain: bool) -> None:
        self.drain = drain
        self._close_wait_by = now + STEP_TIMEOUT_S
        self.drained_by = now + drain_timeout_s
        self._drained_input_at: dict[Subscription, float] = {}
        self._close_at: dict[Subscription, float] = {}
        self._requeued: set[Subscription] = set()

    def refuses(self, now: float) -> bool:
        """Return whether messages that still arrive are requeued immediately."""
        return not self.drain or now >= self.drained_by

    def has_drained_input(self, subscription: Subscription, now: float) -> bool:
        """Return whether a connection will bring no further messages."""
        if subscription.saw_close_wait:
            return now >= self._drained_input_at.setdefault(subscription, now + STRAGGLERS_S)
        return now >= self._close_wait_by

    def next_change(self, now: float) -> float | None:
        """Return the time at which `next_step` or `has_drained_input` may change by itself."""
        ends = (self._close_wait_by, self.drained_by, self.drained_by + STEP_TIMEOUT_S)
        times = [*ends, *self._drained_input_at.values(), *self._close_at.values()]
        return min((at for at in times if at > now), default=None)

    def next_step(self, subscription: Subscription, now: float) -> StopStep:
        """Return the next step for a connection. Each step except "wait" is returned once."""
        if subscription in self._close_at:
            return "close" if now >= self._close_at[subscription] else "wait"
        if self.has_drained_input(subscription, now) and subscription.is_drained:
            self._close_at[subscription] = now + STEP_TIMEOUT_S
            return "shutdown"
        if now >= self.drained_by:
            if subscription not in self._requeued:
                self._requeued.add(subscription)
                return "requeue"
            if now >= self.drained_by + STEP_TIMEOUT_S:  # nsqd accepts not even the requeues
                return "close"
        return "wait"


class ConsumerIO:
    """Owns all connections of one consumer: to each nsqd that has one of the ``topics``.

    A connection serves one topic, so each topic has its own `Dialer`, and its own discovery among
    ``discoveries`` if its nsqd are looked up. RDY, backoff and a stop apply to all connections.

    Messages go to the ``backlog``. ``give_up`` gets those that failed too often, on a handler's
    thread. The other callbacks run on the I/O thread and must not block: ``check_subscribe`` before
    each first SUB at an nsqd, ``on_tick`` several times in msg_timeout, ``on_stopped`` (perhaps
    repeatedly) when nothing more will be delivered, and the ``events`` of connections. The
    ``http_addresses`` are those of nsqd, if known.
    """

    def __init__(
        self,
        topics: Sequence[str],
        discoveries: Mapping[str, Discovery],
        channel: str,
        addresses: Sequence[Address],
        options: ClientOptions,
        *,
        backlog: Backlog,
        attempts: Attempts,
        give_up: Callable[[Batch], None],
        check_subscribe: SubscribeCheck,
        on_tick: Callable[[float], None],
        on_stopped: Callable[[], None],
        events: ConnectionEvents,
        http_addresses: Sequence[str] = (),
    ) -> None:
        self.loop = LoopMember(f"{','.join(topics)}/{channel}", self._each_turn, self._at_end)
        self.wake = self.loop.wake
        self.now = self.loop.now
        self.tried_all = threading.Event()  # every initial address has been tried once
        self.has_result = threading.Event()  # the same, or one of them led to a connection
        self.first_errors: list[NsqError] = []
        self.subscriptions: dict[Subscription, None] = {}
        self.answered: dict[Subscription, None] = {}  # subscriptions with answers to collect
        self.received_at = 0.0  # when a turn brought messages; 0 before the first one
        self._has_received = False  # in this turn
        self._collected_at = 0.0
        self._collects_later = False  # a call of `_collect_later` is scheduled
        self.options = options
        limit = InFlightLimit(options)
        self.rdy: ReadyControl[Subscription] = ReadyControl(limit.current, options)
        self.delivery = Delivery(
            self.loop,
            backlog,
            attempts,
            limit,
            self.rdy,
            give_up=give_up,
            on_limit=self._limit_changed,
            on_tick=on_tick,
        )
        self.waiting = self.delivery.waiting
        # FINs of fast handlers, on all subscriptions, wake the loop no earlier than this, except
        # for the last one.
        self.next_wake = 0.0
        self.expects_finish = False  # see `expect_finish`
        self.stats = self.delivery.stats
        self._on_stopped = on_stopped
        self._events = events
        self._discoveries = discoveries  # by topic
        self._expected = set(discoveries)  # topics whose first lookup has not ended
        self._defers_warnings = False
        self._next_late_warning = 0.0
        self._stopping: Stopping | None = None
        self._stop_timer: Timer | None = None
        self._redistributes: Timer | None = None
        self.dialers = {
            topic: Dialer(
                self.loop,
                addresses,
                options,
                (topic, channel),
                partial(self._connected, topic),
                partial(check_subscribe, topic),
                http_addresses,
            )
            for topic in topics
        }

    # -- from any thread ------------------------------------------------------------------------

    def start(self, *, defer_warnings: bool = False) -> None:
        """Begin. With ``defer_warnings`` first errors are not logged until `log_first_errors`."""
        self._defers_warnings = defer_warnings
        # It raises if no thread can be started, and may be called again then.
        self.loop.start(self._begin)

    def log_first_errors(self) -> None:
        """Log the errors of the first tries, and from now on each error when it occurs."""
        self._defers_warnings = False
        for error in self.first_errors:
            log.warning("%s; trying again", error)

    def expect_finish(self, expects: bool) -> None:
        """Announce whether the calling handler's thread is about to finish further messages.

        While it is, a FIN waits for the next ones instead of waking the loop: many connections with
        one message each collect FINs as one connection with many messages does.
        """
        self.expects_finish = expects

    # -- starting -------------------------------------------------------------------------------

    def _begin(self) -> None:
        for dialer in self.dialers.values():
            dialer.begin()
        for topic, discovery in self._discoveries.items():
            discovery.begin(self.loop, partial(self._listed, topic))
        self.loop.call_every(LIVENESS_TICK_S, self._watch_liveness)
        self._note_progress()

    # -- connecting -----------------------------------------------------------------------------

    def _listed(self, topic: str, addresses: Iterable[Address], errors: list[NsqError]) -> None:
        """Apply the result of a lookup round: ``addresses``, or only ``errors``."""
        if topic in self._expected:
            self._expected.remove(topic)
            self.first_errors += errors
        self.dialers[topic].listed(addresses)
        self._note_progress()

    def _connected(self, topic: str, address: Address, result: Connection | NsqError) -> None:
        if isinstance(result, Connection):
            self._subscribed(topic, result)
        else:
            if is_first := not self.tried_all.is_set():
                self.first_errors.append(result)
            level = logging.INFO if is_first and self._defers_warnings else logging.WARNING
            self._ended(topic, address, result, was_proven=False, level=level)
        self._note_progress()

    def _subscribed(self, topic: str, connection: Connection) -> None:
        reply, options = connection.reply, self.options
        subscription = Subscription(self, topic, connection)
        for feature in ("snappy", "deflate"):
            if getattr(options, feature) and not getattr(reply, feature):
                log.warning("%s does not offer %s; continuing without", subscription.nsqd, feature)
        # Before it is added: a thread that sees the subscription may fork, and the child closes
        # registered sockets only.
        connection.attach(self.loop, subscription)
        self.subscriptions[subscription] = None
        self.rdy.add(subscription, reply.max_rdy_count, self.loop.now())
        self.delivery.connected(subscription)
        log.info("connected to %s (nsqd %s)", subscription.nsqd, reply.version or "before 0.2.19")
        self._events.connected(subscription.nsqd)

    def _note_progress(self) -> None:
        if not self._expected and not any(dialer.connecting for dialer in self.dialers.values()):
            self.tried_all.set()
        if self.subscriptions or self.tried_all.is_set():
            self.has_result.set()

    def lost(self, subscription: Subscription, error: NsqError) -> None:
        """Handle the loss of a connection, whose messages nsqd will deliver again."""
        self._forget(subscription)
        if not self._stopping:
            self._events.lost(subscription.nsqd, error)
            address, was_proven = subscription.connection.address, subscription.connection.is_proven
            self._ended(subscription.topic, address, error, was_proven=was_proven)

    def _forget(self, subscription: Subscription) -> None:
        subscription.connection.close()
        del self.subscriptions[subscription]
        self.delivery.advance_clock(self.loop.now())
        self.delivery.lost(subscription)
        subscription.in_flight.clear()  # from now on its messages count as answered
        self.rdy.remove(subscription, self.loop.now())
        self.loop.wake()  # this turn may have sent its RDY changes already

    def _ended(
        self,
        topic: str,
        address: Address,
        error: NsqError,
        *,
        was_proven: bool,
        level: int = logging.WARNING,
    ) -> None:
        dialer = self.dialers[topic]
        if dialer.ended(address, error, was_proven=was_proven, level=level):
            self._discoveries[topic].ask_soon()
        self._events.failed(error)

    # -- messages and their answers -------------------------------------------------------------

    def received(self, subscription: Subscription, batch: Batch, kept: int, replaced: int) -> None:
        """Process a batch to hand out, and ``kept`` redeliveries of messages that workers have.

        ``replaced`` of all these were in flight before.
        """
        if not self._has_received:  # the first batch of this turn
            self._has_received = True
            self.received_at = self.loop.now()
            self.delivery.advance_clock(self.received_at)
        now = self.received_at
        count = len(batch) + kept
        self.stats.received += count
        if self.rdy.received(subscription, count, now) and not replaced:
            self.delivery.in_flight_limit.was_used = True
        if replaced:
            self.rdy.answered(subscription, replaced, now)
        if self._stopping and self._stopping.refuses(now):
            requeue_undelivered(batch)
        elif batch:
            self.delivery.deliver(subscription, batch)

    def _record(self, subscription: Subscription, answer: QueuedAnswer, now: float) -> None:
        """Process an answer other than the FIN of a handler."""
        message_id, kind, _ = answer
        is_final = kind not in NOT_FINAL
        if is_final and subscription.count_in_flight([message_id]):
            self.rdy.answered(subscription, 1, now)
        if kind == "undelivered":
            self.delivery.discount(subscription, [message_id])
        elif is_final:
            self.delivery.in_flight_limit.answered(1)
            self.stats.given_up += kind == "give_up"
        if kind in ("late", "requeue", "fail"):
            self.delivery.tried(subscription, message_id, late=kind == "late")
        if kind in ("requeue", "fail"):
            self.stats.requeued += 1
            is_failure = kind == "fail"
            record = self.rdy.failed if is_failure else self.rdy.requeued_without_backoff
            self._back_off(record(now))

    def answer_refused(self, error: ServerError) -> None:
        """Count an answer that nsqd refused because the message had timed out.

        This is harmless by itself, but a symptom of slow handlers.
        """
        self.stats.late += 1
        self.delivery.timed_out()
        if (now := self.loop.now()) >= self._next_late_warning:
            self._next_late_warning = now + WARN_INTERVAL_S
            log.warning("%s (%d such answers so far)", error, self.stats.late)

    def _limit_changed(self, count: int) -> None:
        if count != self.rdy.max_in_flight:
            self.rdy.set_max_in_flight(count, self.loop.now())
            self.loop.wake()  # this turn may have sent its RDY changes already

    def is_full(self, idle_s: float) -> bool:
        """Return whether no further messages can arrive before an answer.

        nsqd without messages for ``idle_s`` do not count. If the limit can be raised for a batch,
        it is, and more can arrive.
        """
        # A stop reports by itself when everything has arrived.
        if self._stopping is not None or not self.rdy.is_full(self.loop.now(), idle_s):
            return False
        return not self.delivery.grow_for_batch()

    def _back_off(self, delay_s: float | None) -> None:
        if delay_s is None or self._stopping:
            return
        if self.rdy.mode is NORMAL:
            log.info("backoff has ended")
            return
        log.warning("backing off for %.2f s (level %d)", delay_s, self.rdy.level)
        self.loop.call_later(delay_s, self._test)

    def _test(self) -> None:
        if self._stopping:
            return
        if not self.rdy.test(self.loop.now()):
            self.loop.call_later(BACKOFF_RETRY_S, self._test)

    # -- each turn, and periodically ------------------------------------------------------------

    def _each_turn(self) -> None:
        self._has_received = False
        now = self.loop.now()
        outgoing = self._collect(now) if self.answered else []
        for subscription, count in self.rdy.take_changes():
            subscription.send_ready(count)
        self._schedule_redistribution()
        for connection, encoded in outgoing:
            connection.write(encoded)
        if self._stopping:
            self._advance_stop(self._stopping)

    def _collect(self, now: float) -> list[tuple[Connection, bytes]]:
        """Process the answers of handlers, and return the commands to send.

        With a message on each of many connections this runs for each message.
        """
        rdy, delivery, answered = self.rdy, self.delivery, self.answered
        delivery.advance_clock(now)
        collected = []
        finished_count = 0
        for subscription in list(answered):
            # Before collecting: a handler that answers meanwhile marks it again.
            del answered[subscription]
            if subscription not in self.subscriptions:
                continue
            finished, answers, encoded = subscription.collect()
            for answer in answers:
                self._record(subscription, answer, now)
            if finished:
                count = len(finished)
                finished_count += count
                if delivery.attempts.records:
                    delivery.forget_attempts(subscription, finished)
                if subscription.released:
                    count = subscription.count_in_flight(finished)
                rdy.answered(subscription, count, now)
                if rdy.level:
                    self._back_off(rdy.succeeded(now))
            if encoded:
                collected.append((subscription.connection, encoded))
        if finished_count:
            self.stats.finished += finished_count
            delivery.in_flight_limit.answered(finished_count)
        delivery.adapt()
        self._collected_at = now
        if not self._collects_later:
            self._collects_later = True
            self.loop.call_later(COLLECT_S, self._collect_later)
        return collected

    def _collect_later(self) -> None:
        """Have a turn `COLLECT_S` after the last answers.

        A handler that has just woken the loop queues further answers without waking it again.
        """
        left_s = self._collected_at + COLLECT_S - self.loop.now()
        self._collects_later = left_s > 0
        if self._collects_later:
            self.loop.call_later(left_s, self._collect_later)

    def _watch_liveness(self) -> None:
        for subscription in list(self.subscriptions):
            subscription.connection.check_liveness()

    def _redistribute(self) -> None:
        self.rdy.redistribute(self.loop.now())

    def _schedule_redistribution(self) -> None:
        """Call `_redistribute` from now on at the interval that RDY needs after this turn."""
        interval_s = self.options.rdy_redistribute_interval_s
        if self.rdy.rotates:
            interval_s = min(interval_s, PROBE_S)
        if self._redistributes is None or self._redistributes.interval_s != interval_s:
            if self._redistributes is not None:
                self._redistributes.cancel()
            self._redistributes = self.loop.call_every(interval_s, self._redistribute)

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self, drain: bool) -> None:
        """Send CLS on all connections.

        With ``drain``, delivered messages are still handled; otherwise those that no handler has
        started on are requeued.
        """
        if self._stopping:
            self._stopping.drain &= drain  # of two stops the more impatient one applies
            return
        now = self.loop.now()
        self._stopping = Stopping(now, self.options.drain_timeout_s, drain)
        self._stop_connecting()
        self.loop.call_later(REPORT_STOP_AFTER_S, self._log_drain_wait)
        self.rdy.close()
        for subscription in self.subscriptions:
            # Only once: a second CLS is a fatal error for nsqd.
            subscription.connection.write(commands.CLS)

    def _log_drain_wait(self) -> None:
        count = self.rdy.in_flight
        if self._stopping and count and (left_s := self._stopping.drained_by - self.now()) > 0:
            messages = counted(count, "unanswered message")
            log.warning(
                "%s: stopping waits %.0f s at most for %s", self.loop.name, left_s, messages
            )

    def look_up_soon(self) -> None:
        """Bring the next lookup rounds forward, if there are any."""
        for discovery in self._discoveries.values():
            discovery.ask_soon()

    def _stop_connecting(self) -> None:
        """Look up no further nsqd, and connect to none."""
        for dialer in self.dialers.values():
            dialer.stop()
        for discovery in self._discoveries.values():
            discovery.stop()

    def abort(self) -> None:
        """Requeue all unanswered messages and stop without waiting for handlers."""
        if self._stopping:
            self._stopping.drained_by = self.loop.now()

    def _advance_stop(self, stopping: Stopping) -> None:
        now = self.loop.now()
        for subscription in list(self.subscriptions):
            subscription.connection.flush()  # now, because the next step depends on it
            if subscription not in self.subscriptions:
                continue
            step = stopping.next_step(subscription, now)
            if step == "requeue":
                self._requeue_unanswered(subscription)
            elif step == "shutdown":
                subscription.connection.shutdown_write()
            elif step == "close":
                self._forget(subscription)
        if not stopping.drain or all(
            stopping.has_drained_input(s, now) for s in self.subscriptions
        ):
            stopping.drain = False  # handlers take no message that arrives from now on
            self._on_stopped()
        if not self.subscriptions:
            self.loop.stop()
        elif (at := stopping.next_change(now)) is not None:
            timer = self._stop_timer
            self._stop_timer = self.loop.call_later(at - now, self.loop.wake, instead_of=timer)

    def _at_end(self) -> None:
        """Release all waiting threads at the end, after a stop or a defect."""
        self._stop_connecting()
        for subscription in list(self.subscriptions):
            self._forget(subscription)
        self._on_stopped()
        self.tried_all.set()
        self.has_result.set()

    def _requeue_unanswered(self, subscription: Subscription) -> None:
        unanswered = list(subscription.in_flight.values())
        if unanswered:
            messages = counted(len(unanswered), "message")
            log.warning("%s: requeued %s in flight to stop", subscription.nsqd, messages)
            Batch(subscription, unanswered).requeue(0, backoff=False)
