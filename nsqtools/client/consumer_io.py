"""All connections of a consumer, on the I/O thread: RDY, backoff, connecting and stopping.

This connects the pure deciders (`rdy`, `Stopping`, `connecting`) with the sockets: events go to the
deciders, their decisions go out through `Subscription`. Everything runs on the I/O thread unless a
method says otherwise. Handler threads call the methods of `message.MessageSource`: they only append
to what a subscription has ``_finished`` and ``_answers``, and note it for its consumer. The
consumer collects the answers of a turn, puts RDY changes before them (nsqd would send one message
more between a FIN and the RDY 0 after it), and all of it leaves in one write.

Closing a socket right after CLS and FINs loses them: nsqd may be writing, the close becomes a
reset, and what it had not read is gone (measured: all of 250 FINs, in half of the runs). So each
connection goes through: CLS sent; CLOSE_WAIT seen (or a second passed); every message answered and
every byte sent; our direction shut down; nsqd's end of stream read (or a second passed); closed.

CLOSE_WAIT is not quite the end: nsqd answers CLS on one goroutine while another may just be taking
a message for us, which arrives a moment later (measured: in 3 % of the stops on a busy machine). So
that moment is waited for, and such a message is requeued like the others.

A disconnect does not requeue, it leaves messages in flight until their timeout; so what is not
handled by the deadline is requeued explicitly first.

What one turn costs must not grow with the number of connections: only subscriptions that have
answers are collected, only connections that were written to are flushed.
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

GATHER_S = 0.025  # the longest that an answer waits to be joined with others (see `_gather`)
BACKOFF_RETRY_S = 1.0  # when backoff ends without a connection to test on
WARN_INTERVAL_S = 10.0
MOST_BEYOND_RDY = 4  # times, as what nsqd takes back by its timeout may still be held here
FLUSH_INTERVAL_S = 0.001  # of a handler that answers messages one by one and fast
GRACE_S = 1.0
SAY_AFTER_S = 1.0  # what a stop waits for
STRAGGLERS_S = 0.05
NOT_FINAL = ("touch", "late")  # answers after which a message is still in flight

SubscribeCheck = Callable[[str, Address], Callable[[], None] | None]
"""Called with topic and nsqd before the first SUB there: see `ConsumerCore`."""

Step = Literal["wait", "requeue", "shutdown", "close"]


class QueuedAnswer(NamedTuple):
    """An answer other than the FIN of a handler, on its way to the I/O thread."""

    message_id: bytes
    kind: AnswerKind
    command: bytes


class Subscription:
    """One of a consumer's connections: messages in, answers out.

    ``in_flight`` maps ids of unanswered messages to them. Those ``released`` nsqd has taken back
    while a worker has them: they do not count.
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
        self._most_ready = 250  # the greatest RDY so far, and room for those that never sent one
        # ``in_flight`` would not do: a handler takes a message out before it queues the answer
        self._unanswered = 0
        self._finished: list[bytes] = []
        self._answers: collections.deque[QueuedAnswer] = collections.deque()
        self._outgoing: list[bytes] = []

    # -- from handler threads -------------------------------------------------------------------

    def finish(self, message_id: bytes) -> None:
        """Queue a FIN. Quick ones gather for a moment, unless it is the last."""
        self._finished.append(message_id)
        user = self._user
        user.answered[self] = None
        now = self._now()
        if now >= user.next_wake or not (self.in_flight or user.waiting or user.expects_finish):
            user.next_wake = now + FLUSH_INTERVAL_S
            user.wake()

    def finish_many(self, ids: list[bytes]) -> None:
        """Queue FINs that belong together."""
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

    # -- on the I/O thread: what nsqd sends -----------------------------------------------------

    def on_messages(self, messages: list[Message]) -> None:
        kept = replaced = 0
        if self._orphans:  # an nsqd that was killed may have forgotten the attempts
            messages, kept, replaced = self._place(messages)
        elif len(messages) == 1 and messages[0].attempts == 1:  # as usual with many connections
            self.in_flight[messages[0].id] = messages[0]
        elif max_attempts_of(messages) == 1:
            for message in messages:
                self.in_flight[message.id] = message
        else:
            messages, kept, replaced = self._place(messages)
        self._unanswered += len(messages) + kept
        if self._unanswered > MOST_BEYOND_RDY * self._most_ready:
            beyond = f"{self._unanswered} messages in flight where RDY was {self._most_ready}"
            self.connection.lose(ProtocolError(f"{self.nsqd}: {beyond} at most"))
            return
        self._user.received(self, Batch(self, messages), kept, replaced)

    def _place(self, messages: list[Message]) -> tuple[list[Message], int, int]:
        """Put messages in flight of which some were delivered before. Return those to hand out, the
        number of those that workers have, and how many of all counted as in flight.

        Of one message the latest delivery counts: one read may bring several. A delivery of what a
        worker has is that worker's; any other takes the place of the earlier one.
        """
        latest = {message.id: message for message in messages}
        dropped = [m.id for m in messages if latest[m.id] is not m]
        again = set[bytes]()
        kept = self._user.delivery.redelivered(self, latest.keys(), dropped)
        for message_id, message in kept.items():
            if source_of(message) is self:
                again.add(message_id)
            else:  # of a connection that was lost
                self.in_flight[message_id] = message
            adopt_redelivery(message, latest.pop(message_id))
        for message in latest.values():
            # one by one, as taking an earlier delivery out is what decides against its handler
            if self.in_flight.pop(message.id, None) is not None:
                again.add(message.id)
            self.in_flight[message.id] = message
        self._unanswered -= len(again)
        replaced = len(again) - len(again & self.released)  # those did not count
        self.released -= again
        return list(latest.values()), len(kept), replaced

    def on_response(self, data: bytes) -> None:
        if data == CLOSE_WAIT:
            self.saw_close_wait = True

    def on_server_error(self, error: ServerError) -> None:
        if error.fatal:
            self.connection.lose(error)
            return
        self._user.answer_refused(error)
        if error.code == "E_TOUCH_FAILED":  # max_msg_timeout has passed, which no touch extends
            for word in str(error).encode().split():
                if (message := self.in_flight.get(word)) is not None:
                    message.received_at = self._now() - 2 * self.msg_timeout_s

    def on_lost(self, error: NsqError) -> None:
        self._user.lost(self, error)

    # -- on the I/O thread: what the consumer sends ---------------------------------------------

    def collect(self) -> tuple[list[bytes], list[QueuedAnswer]]:
        """Take the answers since the last time: ids that handlers finished, and the others.

        The commands go out with `send_answers`.
        """
        # other threads append meanwhile; counted first, so that a TOUCH stays before its FIN
        finished = self._finished
        count = len(finished)
        answers: list[QueuedAnswer] = []
        if self._answers:
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
            self._outgoing += [answer.command for answer in answers]
            self._unanswered -= sum(answer.kind not in NOT_FINAL for answer in answers)
        ids = finished[:count]
        if ids:
            del finished[:count]
            self._outgoing.append(commands.encode_finishes(ids))
            self._unanswered -= count
        return ids, answers

    def counts(self, ids: list[bytes]) -> int:
        """Return how many of the messages answered now were not ``released`` before."""
        if not self.released:
            return len(ids)
        late = self.released.intersection(ids)
        self.released -= late
        return len(ids) - len(late)

    def send_answers(self) -> None:
        """Write what was collected."""
        outgoing = self._outgoing
        if outgoing:
            self.connection.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
            outgoing.clear()

    def send_ready(self, count: int) -> None:
        """Write RDY, before the answers of this turn."""
        self._most_ready = max(self._most_ready, count)
        self.connection.write(commands.ready(count))

    @property
    def is_drained(self) -> bool:
        """Tell whether every message is answered and every answer is sent."""
        is_answered = not (self._answers or self._outgoing)
        is_answered &= self._unanswered <= len(self.released)
        return is_answered and not self.connection.has_unsent


class Stopping:
    """One stop under way: what is next for each connection.

    A pure decider: times are readings of the caller's clock.
    """

    def __init__(self, now: float, drain_timeout_s: float, drain: bool) -> None:
        self.drain = drain
        self._close_wait_by = now + GRACE_S
        self.drained_by = now + drain_timeout_s
        self._quiet_at: dict[Subscription, float] = {}
        self._closed_by: dict[Subscription, float] = {}
        self._requeued: set[Subscription] = set()

    def refuses(self, now: float) -> bool:
        """Tell whether messages that still arrive go back at once."""
        return not self.drain or now >= self.drained_by

    def has_drained_input(self, subscription: Subscription, now: float) -> bool:
        """Tell whether no more messages are to be expected from a connection."""
        if subscription.saw_close_wait:
            return now >= self._quiet_at.setdefault(subscription, now + STRAGGLERS_S)
        return now >= self._close_wait_by

    def next_change(self, now: float) -> float | None:
        """Return when time alone will change an answer of `next_step` or `has_drained_input`."""
        ends = (self._close_wait_by, self.drained_by, self.drained_by + GRACE_S)
        times = [*ends, *self._quiet_at.values(), *self._closed_by.values()]
        return min((at for at in times if at > now), default=None)

    def next_step(self, subscription: Subscription, now: float) -> Step:
        """Return what to do with a connection now; each step but "wait" is returned once."""
        if subscription in self._closed_by:
            return "close" if now >= self._closed_by[subscription] else "wait"
        if self.has_drained_input(subscription, now) and subscription.is_drained:
            self._closed_by[subscription] = now + GRACE_S
            return "shutdown"
        if now >= self.drained_by:
            if subscription not in self._requeued:
                self._requeued.add(subscription)
                return "requeue"
            if now >= self.drained_by + GRACE_S:  # not even the requeues get through
                return "close"
        return "wait"


class ConsumerIO:
    """Owns all connections of one consumer: to each nsqd that has one of the ``topics``.

    A connection serves one topic, so each topic has a `Dialer` of its own, and one of the
    ``discoveries`` where its nsqd are looked up. RDY, backoff and a stop are those of all
    connections together.

    Messages go to the ``backlog``; ``giving_up`` gets those that were tried too often, on a
    handler's thread. These are called on the I/O thread and must not block: ``on_stopped`` when
    nothing more will be delivered, more than once, ``on_error`` with every lost or failed
    connection.
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
        on_error: Callable[[NsqError], None],
    ) -> None:
        self.loop = LoopMember(f"{','.join(topics)}/{channel}", self._each_turn, self._at_end)
        self.wake = self.loop.wake
        self.now = self.loop.now
        self.settled = threading.Event()  # every address known at the start was tried once
        self.decided = threading.Event()  # or one of them led to a connection
        self.first_errors: list[NsqError] = []
        self.subscriptions: dict[Subscription, None] = {}
        self.answered: dict[Subscription, None] = {}  # subscriptions with answers to collect
        self.received_at: float | None = None
        self._has_received = False  # in this turn
        self._collected_at = 0.0
        self._is_gathering = False
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
        # Quick FINs of all subscriptions gather until then, or the last of what is ``waiting``
        self.next_wake = 0.0
        self.expects_finish = False  # see `expect_finish`
        self.stats = self.delivery.stats
        self._on_stopped = on_stopped
        self._on_error = on_error
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
        self._schedule_redistribution()
        self._settle()

    # -- connecting -----------------------------------------------------------------------------

    def _listed(self, topic: str, addresses: Iterable[Address], errors: list[NsqError]) -> None:
        """A lookup round has ended; it found ``addresses``, or has nothing but ``errors``."""
        if topic in self._expected:
            self._expected.remove(topic)
            self.first_errors += errors
        self.dialers[topic].listed(addresses)
        self._settle()

    def _connected(self, topic: str, address: Address, result: Connection | NsqError) -> None:
        if isinstance(result, Connection):
            self._subscribed(topic, result)
        else:
            if is_first := not self.settled.is_set():
                self.first_errors.append(result)
            level = logging.INFO if is_first and self._defers_warnings else logging.WARNING
            self._ended(topic, address, result, was_proven=False, level=level)
        self._settle()

    def _subscribed(self, topic: str, connection: Connection) -> None:
        reply, options = connection.reply, self.options
        subscription = Subscription(self, topic, connection)
        for feature in ("snappy", "deflate"):
            if getattr(options, feature) and not getattr(reply, feature):
                log.warning("%s does not offer %s; continuing without", subscription.nsqd, feature)
        # first: who sees the subscription and forks relies on its socket being registered
        connection.attach(self.loop, subscription)
        self.subscriptions[subscription] = None
        self.rdy.add(subscription, reply.max_rdy_count, self.loop.now())
        self._schedule_redistribution()
        self.delivery.connected(subscription)
        log.info("connected to %s (nsqd %s)", subscription.nsqd, reply.version or "before 0.2.19")

    def _settle(self) -> None:
        if not self._expected and not any(each.connecting for each in self.dialers.values()):
            self.settled.set()
        if self.subscriptions or self.settled.is_set():
            self.decided.set()

    def lost(self, subscription: Subscription, error: NsqError) -> None:
        """A connection has ended: its messages come again after their timeout."""
        self._forget(subscription)
        if not self._stopping:
            address, was_proven = subscription.connection.address, subscription.connection.is_proven
            self._ended(subscription.topic, address, error, was_proven=was_proven)

    def _forget(self, subscription: Subscription) -> None:
        subscription.connection.close()
        del self.subscriptions[subscription]
        self.delivery.passed(self.loop.now())
        self.delivery.lost(subscription)
        subscription.in_flight.clear()  # from here on its messages count as answered
        self.rdy.remove(subscription, self.loop.now())
        self.loop.wake()  # the turn may be past the point where RDY changes are sent

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
        try:
            self._on_error(error)
        except BaseException:  # as `Publication.call_back`
            log.exception("on_error failed")

    # -- messages and their answers -------------------------------------------------------------

    def received(self, subscription: Subscription, batch: Batch, kept: int, replaced: int) -> None:
        """New deliveries, and others that are ``kept`` for workers; ``replaced`` were in flight."""
        self.received_at = now = self.loop.now()
        count = len(batch) + kept
        self.stats.received += count
        if not self._has_received:  # the first of this turn
            self._has_received = True
            self.delivery.passed(now)
        if self.rdy.received(subscription, count, now) and not replaced:
            self.delivery.in_flight_limit.is_used = True
        if replaced:
            self.rdy.answered(subscription, replaced, now)
        if self._stopping and self._stopping.refuses(now):
            requeue_undelivered(batch)
            return
        if batch:
            self.delivery.deliver(subscription, batch)

    def _collect(self, subscription: Subscription, now: float) -> int:
        """Note the answers of a connection; return how many messages were finished."""
        finished, answers = subscription.collect()
        for message_id, kind, _ in answers:
            is_final = kind not in NOT_FINAL
            if is_final and subscription.counts([message_id]):
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
                note = self.rdy.failed if kind == "fail" else self.rdy.requeued_without_backoff
                self._back_off(note(now))
        if finished:
            self.delivery.finished(subscription, finished)
            self.rdy.answered(subscription, subscription.counts(finished), now)
            if self.rdy.level:
                self._back_off(self.rdy.succeeded(now))
        return len(finished)

    def answer_refused(self, error: ServerError) -> None:
        """nsqd refused an answer because the message had timed out: harmless, but a symptom."""
        self.stats.late += 1
        self.delivery.timed_out()
        if (now := self.loop.now()) >= self._next_late_warning:
            self._next_late_warning = now + WARN_INTERVAL_S
            log.warning("%s (%d such answers so far)", error, self.stats.late)

    def _limit_changed(self, count: int) -> None:
        if count != self.rdy.max_in_flight:
            self.rdy.set_max_in_flight(count, self.loop.now())
            self._schedule_redistribution()
            self.loop.wake()  # the turn may be past the point where RDY changes are sent

    def is_full(self, idle_s: float) -> bool:
        """Tell whether no more can come before an answer, from nsqd that brought something in
        ``idle_s``; raise the limit where it can be. A stop tells itself when all has come."""
        if self._stopping is not None or not self.rdy.is_full(self.loop.now(), idle_s):
            return False
        return not self.delivery.grow_for_batch()

    def _back_off(self, delay_s: float | None) -> None:
        if delay_s is None or self._stopping:
            return
        if self.rdy.mode is NORMAL:
            log.info("backoff is over")
            return
        log.warning("backing off for %.2f s (level %d)", delay_s, self.rdy.level)
        self.loop.call_later(delay_s, self._test)

    def _test(self) -> None:
        if self._stopping:
            return
        if self.rdy.test(self.loop.now()):
            self._schedule_redistribution()
        else:
            self.loop.call_later(BACKOFF_RETRY_S, self._test)

    # -- every turn, and by the clock -----------------------------------------------------------

    def _each_turn(self) -> None:
        self._has_received = False
        collected = []
        finished = 0
        now = self.loop.now()
        if self.answered:
            self.delivery.passed(now)
        for subscription in list(self.answered):
            del self.answered[subscription]  # before it is collected: others answer meanwhile
            if subscription in self.subscriptions:
                finished += self._collect(subscription, now)
                collected.append(subscription)
        if collected:
            if finished:
                self.delivery.in_flight_limit.answered(finished)
            self.delivery.adapt()
            self._collected_at = now
            if not self._is_gathering:
                self._is_gathering = True
                self.loop.call_later(GATHER_S, self._gather)
        for subscription, count in self.rdy.take_changes():
            subscription.send_ready(count)
        for subscription in collected:
            subscription.send_answers()
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
        self._schedule_redistribution()

    def _schedule_redistribution(self) -> None:
        """Call `_redistribute` from here on as often as is needed now."""
        interval_s = self.options.rdy_redistribute_interval_s
        if self.rdy.rotates:
            interval_s = min(interval_s, PROBE_S)
        if self._redistributes is None or self._redistributes.interval_s != interval_s:
            if self._redistributes is not None:
                self._redistributes.cancel()
            self._redistributes = self.loop.call_every(interval_s, self._redistribute)

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self, drain: bool) -> None:
        """Send CLS everywhere. With ``drain`` what was delivered and still comes is handled,
        otherwise it is requeued at once."""
        if self._stopping:
            self._stopping.drain &= drain  # the more impatient of two stops applies
            return
        now = self.loop.now()
        self._stopping = Stopping(now, self.options.drain_timeout_s, drain)
        self._stop_connecting()
        self.loop.call_later(SAY_AFTER_S, self._log_drain_wait)
        for subscription in self.subscriptions:
            self.rdy.close(subscription, now)
            subscription.connection.write(commands.CLS)  # once: a second one is a fatal error

    def _log_drain_wait(self) -> None:
        count = self.rdy.in_flight
        if self._stopping and count and (left_s := self._stopping.drained_by - self.now()) > 0:
            what = f"{counted(count, 'message')} in flight {'is' if count == 1 else 'are'} answered"
            name = self.loop.name
            log.warning("%s: stops when %s, in %.0f s at the latest", name, what, left_s)

    def look_up_soon(self) -> None:
        """Bring the next rounds of lookups forward, where there are any."""
        for discovery in self._discoveries.values():
            discovery.ask_soon()

    def _stop_connecting(self) -> None:
        """Look for no more nsqd, and connect to none."""
        for dialer in self.dialers.values():
            dialer.stop()
        for discovery in self._discoveries.values():
            discovery.stop()

    def abort(self) -> None:
        """Requeue everything unanswered and leave without waiting for handlers."""
        if self._stopping:
            self._stopping.drained_by = self.loop.now()

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
        if not stopping.drain or all(
            stopping.has_drained_input(s, now) for s in self.subscriptions
        ):
            self._on_stopped()
        if not self.subscriptions:
            self.loop.stop()
        elif (at := stopping.next_change(now)) is not None:
            timer = self._stop_timer
            self._stop_timer = self.loop.call_later(at - now, self.loop.wake, instead_of=timer)

    def _at_end(self) -> None:
        """It has ended, by a stop or a defect: release all threads that wait."""
        self._stop_connecting()
        for subscription in list(self.subscriptions):
            self._forget(subscription)
        self._on_stopped()
        self.settled.set()
        self.decided.set()

    def _requeue_rest(self, subscription: Subscription) -> None:
        rest = list(subscription.in_flight.values())
        if rest:
            what = counted(len(rest), "message")
            log.warning("%s: requeued %s in flight to stop", subscription.nsqd, what)
            Batch(subscription, rest).requeue(0, backoff=False)
