"""Consumer: subscribe to a channel of a topic and handle its messages.

    with Consumer("clicks", "archive", nsqd_tcp_addresses=["127.0.0.1:4150"]) as consumer:
        for message in consumer:
            store(message.body)
            message.finish()

The I/O thread of the process does all network traffic. Heartbeats are answered however long a
handler takes, unless it runs C code that holds the interpreter's lock. Messages come to the
handlers' threads through a `Backlog`, in one batch for each read of a socket. Slow handlers share a
batch, message by message.

A handler never gets a message that has waited for more than half of msg_timeout, because it is
requeued, nor one that nsqd has delivered again since. The number of messages in flight adapts to
the rate of answers, up to max_in_flight.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

from nsqtools.client.attempts import Attempts
from nsqtools.client.backlog import Backlog, ConsumerStats, QueuedBatches, Worker
from nsqtools.client.callbacks import ConnectionEvents, weak_callback
from nsqtools.client.connection import max_attempt_s, tls_context
from nsqtools.client.connection_settings import ConnectionSettings, check_can_consume
from nsqtools.client.consumer_io import ConsumerIO, SubscribeCheck
from nsqtools.client.dead_letters import GivingUp, Policy
from nsqtools.client.discovery import Discovery
from nsqtools.client.former_names import former_names
from nsqtools.client.handling import Handling, OnHandled, StopSignals, check_count, check_is_sync
from nsqtools.client.io_loop import call_at_end_of_child
from nsqtools.client.message import (
    Batch,
    Gathered,
    Message,
    requeue_undelivered,
    touch_when_due,
)
from nsqtools.client.options import ClientOptions
from nsqtools.client.rate_limit import RateLimit
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.arguments import (
    NONE,
    NUMBER,
    check_argument,
    check_functions,
    check_texts,
    check_times,
)
from nsqtools.protocol.names import Address, check_channel, check_topic, parse_address

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class OverdueMessage:
    """A message that its handler has had for ``handled_s`` seconds, longer than nsqd waits."""

    topic: str
    nsqd: str
    id: str
    attempts: int
    handled_s: float


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """The state of a consumer, as `Consumer.health` returns it.

    ``connections`` has the addresses of the connected nsqd, ``in_flight`` counts unanswered
    messages, and ``backoff_level`` is 0 unless handlers failed recently. ``idle_s`` is the time
    since the last message in seconds, None before the first. ``overdue`` lists the messages that
    timed out at nsqd while their handlers have them, oldest first.
    """

    connections: list[str]
    in_flight: int
    backoff_level: int
    idle_s: float | None
    overdue: list[OverdueMessage] = field(default_factory=list)


class Stopped(NamedTuple):
    """The entry in the backlog behind the last messages of a consumer."""

    consumer: ConsumerCore


# A thread takes about as many messages at a time as it handles in this time. Other threads get them
# only at the next tick, so it is short; but taking costs about 20 us.
TARGET_HOLD_S = 0.005
# Share of msg_timeout in which a batch is collected. The rest is for handling it.
COLLECT_SHARE = 0.25
# Interval at which a thread that waits for max_rate checks whether the consumer stops.
RATE_CHECK_S = 0.1
# Interval at which a thread that collects a batch asks whether further messages can arrive.
COLLECT_CHECK_S = 0.02
ABORT_S = 2.0  # for nsqd to accept the requeues after the second signal
EXIT_S = 3.0  # for all consumers to stop at the end of the interpreter


@former_names(
    "backlog",
    "gather",
    "had_turns",
    "has_tried_all",
    "is_delivered",
    "look_before_subscribing",
    "look_up_soon",
    "raise_failure",
)
class ConsumerCore:
    """The common part of the consumers for threads and asyncio: everything except waiting."""

    _new_backlog: type[Backlog] = Backlog
    topics: list[str]
    channel: str = ""

    def __init__(
        self,
        topic: str | Sequence[str],
        channel: str,
        *,
        nsqd_tcp_addresses: str | Sequence[str] = (),
        lookupd_http_addresses: str | Sequence[str] = (),
        options: ClientOptions | None = None,
        address_map: Mapping[str, str] | None = None,
        on_error: Callable[[NsqError], None] | None = None,
        on_connected: Callable[[str], object] | None = None,
        on_lost: Callable[[str, NsqError], object] | None = None,
        on_giving_up: Callable[[Message], object] | None = None,
        giving_up: Policy = "requeue",
        dead_letter: str = "",
        max_rate: float = 0.0,
        _backlog: Backlog | None = None,
        _looked_up: Iterable[Address] = (),
        _nsqd_http_addresses: Sequence[str] = (),
        _auto_touch: bool = False,
    ) -> None:
        """``_backlog`` is shared by several consumers. ``_looked_up`` has the unmapped addresses of
        a lookup that was just made: the first lookup of this consumer is a poll interval later.
        ``_nsqd_http_addresses`` are asked whether a topic still exists.
        ``_auto_touch`` is that of `Consumer.run`, for the pools of the backlog."""
        self.topics = list(dict.fromkeys(map(check_topic, check_texts("topic", topic))))
        check_argument("channel", channel, str)
        check_argument("options", options, ClientOptions, NONE)
        check_argument("address_map", address_map, Mapping, NONE)
        check_argument("dead_letter", dead_letter, str)
        check_times(max_rate=max_rate)
        events = ConnectionEvents(on_connected, on_lost, on_error)
        check_functions(on_giving_up=on_giving_up)
        self.channel = check_channel(channel)
        self.options = options or ClientOptions()
        nsqd_tcp_addresses = check_texts("nsqd_tcp_addresses", nsqd_tcp_addresses)
        urls = check_texts("lookupd_http_addresses", lookupd_http_addresses)
        if not self.topics:
            raise ConfigurationError("a consumer needs a topic")
        if dead_letter in self.topics:
            raise ConfigurationError(f"dead letters cannot go to {dead_letter}, which is consumed")
        check_can_consume(nsqd_tcp_addresses, urls)
        if self.options.heartbeat_interval_s < 0:
            raise ConfigurationError("nsqd refuses consumers without heartbeats")
        tls_context(self.options)  # raises for files that cannot be used
        self._backlog = _backlog if _backlog is not None else self._new_backlog()
        self._giving_up = GivingUp(self.options, on_giving_up, giving_up, dead_letter)
        discoveries = {
            topic: Discovery(urls, topic, self.options, address_map, looked_up=_looked_up)
            for topic in self.topics
            if urls
        }
        self._io = ConsumerIO(
            self.topics,
            discoveries,
            channel,
            list(map(parse_address, nsqd_tcp_addresses)),
            self.options,
            backlog=self._backlog,
            attempts=Attempts(self._giving_up.max_attempts, keeps=self._giving_up.keeps),
            give_up=weak_callback(self._give_up),
            check_subscribe=weak_callback(self._check_subscribe),
            on_tick=weak_callback(self._tick),
            on_stopped=weak_callback(self._end_deliveries),
            events=events,
            http_addresses=_nsqd_http_addresses,
        )
        self._subscribe_check: SubscribeCheck = lambda topic, nsqd: None
        self._auto_touches = _auto_touch
        # Re-entrant: a signal handler may stop the consumer while its thread starts it.
        self._life = threading.RLock()
        self._process = os.getpid()
        self._is_started = False
        self._is_stopping = False
        self._is_delivered = False  # no further message will be delivered
        self._drains = True  # until a stop without ``drain``
        self._workers: dict[int, Worker] = {}  # by thread
        self._shared = Worker()  # of all tasks: they share the messages ahead
        self._batch_sizes: dict[object, int] = {}  # by loop
        self._max_in_flight = self.options.max_in_flight
        self._is_paused = False
        self._rate = RateLimit(max_rate, time.monotonic()) if max_rate else None

    def __del__(self) -> None:
        """Stop a consumer that the program has dropped. Unanswered messages are requeued."""
        is_running = getattr(self, "_is_started", False) and not self._is_stopping
        if is_running and os.getpid() == self._process:  # in a forked child it is the parent's
            self._io.loop.call_soon(partial(self._io.begin_stop, False))
            self._io.loop.call_soon(self._io.abort)
            _dropped.add(self._io)
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Consumer of {self._io.loop.name}, {len(self._io.subscriptions)} connections>"

    # -- life -----------------------------------------------------------------------------------

    def _begin(self, *, fail_fast: bool, wait_s: float = math.inf, for_all: bool = True) -> None:
        self._check_process()
        with self._life:
            if self._is_stopping:
                return
            if not self._is_started:
                self._io.start(defer_warnings=fail_fast)
                self._is_started = True
                if self._is_delivered:  # a signal handler has stopped it before its start
                    self.begin_stop(drain=self._drains)
                _started.add(self)
                call_at_end_of_child(_stop_consumers)
        if fail_fast and wait_s:  # also if ``with`` has started the consumer without ``fail_fast``
            event = self._io.tried_all if for_all else self._io.has_result
            event.wait(min(wait_s, max_attempt_s(self.options)))
            if self._io.first_errors and not self._io.subscriptions:
                self.begin_stop()
                self.wait_for_end()
                raise self._io.first_errors[0]
            self._io.log_first_errors()

    def begin_stop(self, *, drain: bool = False) -> None:
        """Begin to stop without waiting. Safe in a signal handler and in a message handler.

        Without ``drain``, messages that no handler has started on are requeued immediately; with it
        they are still delivered. Handlers have drain_timeout to answer their messages.
        """
        with self._life:
            self._drains = drain and (self._drains or not self._is_stopping)
            if not self._is_started and not self._is_stopping:
                self._is_delivered = True
                self._backlog.put(Stopped(self))
            self._is_stopping = True
            if self._is_started:
                self._io.loop.call_soon(lambda: self._io.begin_stop(drain))

    def _stop_signals(self, signals: bool | None) -> StopSignals:
        stop = partial(self.begin_stop, drain=True)
        return StopSignals(signals, stop=stop, end=self._abort_and_wait)

    def _abort_and_wait(self) -> None:
        self.abort()
        self.wait_for_end(ABORT_S)

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a stop that has begun; return whether it has ended."""
        has_ended = self._io.loop.join(timeout_s) if self._is_started else True
        if has_ended:
            _started.discard(self)
            self._giving_up.stop()
        return has_ended

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"{self!r} belongs to the parent process, which made it before the fork",
                hint="Make a consumer after the fork.",
            )

    def abort(self) -> None:
        """Stop without waiting for running handlers: their messages are requeued."""
        self.begin_stop()
        if self._is_started:
            self._io.loop.call_soon(self._io.abort)

    def _end_deliveries(self) -> None:
        """Put the `Stopped` entry behind the last messages (on the I/O thread)."""
        if not self._drains:  # perhaps only since a second stop
            for batch in self._backlog.withdraw(self._io.delivery):
                requeue_undelivered(batch)
        if self._is_delivered:  # it may be called repeatedly
            return
        self._io.delivery.end_quarantine()
        self._is_delivered = True
        self._backlog.put(Stopped(self))

    # -- messages -------------------------------------------------------------------------------

    def _take(
        self, timeout_s: float | None = None, limit: int = sys.maxsize, *, several: bool = False
    ) -> list[Batch] | None:
        """Take one batch, or ``several``, of at most ``limit`` messages together.

        Return None at the end and after ``timeout_s``.
        """
        self._check_process()
        # A thread that asks for messages has answered its last ones: send those answers now.
        if not self._io.waiting:
            self._io.loop.wake()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if self._rate is None:
            return self._take_until(until, limit, several=several)
        while self._waits_for_rate(self._rate):
            if (now := time.monotonic()) >= until:
                return None
            time.sleep(min(self._rate.wait_s(now), RATE_CHECK_S, until - now))
        # At least one: another thread may have spent the allowance meanwhile.
        allowed = self._rate.reserve(limit, time.monotonic()) or 1
        batches = self._take_until(until, allowed, several=several)
        self._rate.spend(sum(map(len, batches or ())) - allowed)
        return batches

    def _waits_for_rate(self, rate: RateLimit) -> bool:
        """Return whether messages have to wait for max_rate. Nothing else waits, as the end."""
        has_messages = self._drains and not (self._is_delivered and self._backlog.is_empty)
        return has_messages and rate.wait_s(time.monotonic()) > 0

    def _take_until(self, until: float, limit: int, *, several: bool) -> list[Batch] | None:
        while True:
            entry = self._backlog.get_batches(until, limit, several=several)
            if entry is None:
                return None
            if isinstance(entry, Stopped):
                self._backlog.put(entry)  # for the other threads
                self._raise_failure()
                return None
            assert isinstance(entry, list)
            if self._drains:
                return entry
            for batch in entry:
                requeue_undelivered(batch)

    def _give_up(self, batch: Batch, reason: str = "") -> None:
        worker = self._workers.get(threading.get_ident()) or Worker()
        previous = worker.taken, worker.has_batch
        worker.since = time.monotonic()
        # `stop` in the callback must not wait for these messages: see there.
        worker.taken, worker.has_batch = batch, True
        try:
            self._giving_up.give_up(batch, reason)
        finally:
            worker.taken, worker.has_batch = previous

    def _raise_failure(self) -> None:
        """Raise ``RuntimeError`` if a defect has ended the consumer."""
        if self._io.loop.failure is not None:
            raise RuntimeError("the I/O thread failed") from self._io.loop.failure

    def _check_size(self, size: int, within_s: float) -> None:
        """Raise `ConfigurationError` for a batch that cannot be collected."""
        check_count("size", size)
        check_argument("within_s", within_s, *NUMBER)
        if not within_s > 0:
            raise ConfigurationError(f"within_s must be > 0, not {within_s!r}")
        maximum = max(self.options.max_in_flight, self._io.delivery.in_flight_limit.maximum)
        if size > maximum:
            raise ConfigurationError(
                f"batches of {size} messages need a max_in_flight of as many; it is {maximum}",
                hint=f"Give options=ClientOptions(max_in_flight={2 * size}).",
            )

    def _gather(self, who: object, size: int) -> None:
        """Announce that the loop ``who`` answers ``size`` messages together from now on.

        So many are allowed in flight immediately; 0 withdraws the announcement.
        """
        self._batch_sizes[who] = size
        if not size:
            del self._batch_sizes[who]
        count = sum(self._batch_sizes.values())
        self._io.loop.call_soon(lambda: self._io.delivery.set_batch_size(count))

    def _begin_work(self, worker: Worker) -> Worker:
        worker.thread = threading.get_ident()
        self._workers[worker.thread] = worker
        self._backlog.workers.add(worker)
        return worker

    def _end_work(self, worker: Worker) -> None:
        self._backlog.workers.discard(worker)
        # Not the current thread: the garbage collector may end a dropped generator on any.
        self._workers.pop(worker.thread, None)

    def _tick(self, now: float) -> None:
        """Touch the messages of handlers, and return those behind slow ones (on the I/O thread).

        nsqd bounds the total time of touches at its max_msg_timeout, 15 minutes unless set.
        """
        if self._auto_touches:
            touch_when_due(self._backlog.at_work(), now)
        for worker in [self._shared, *self._workers.values()]:
            if worker.ahead and now > worker.since + 2 * TARGET_HOLD_S:
                self._io.expect_finish(False)
                # Not first: that takes the lock, for which the I/O thread must not wait.
                self._put_back(worker.take_ahead(), is_first=False)

    def _put_back(self, batches: list[Batch], *, is_first: bool = True) -> None:
        """Return messages to the backlog that were taken but not handed out."""
        now = time.monotonic()
        if self._rate is not None:
            self._rate.spend(-sum(map(len, batches)))
        for batch in batches:
            if batch[0].deadline < now:  # it waited behind a slow handler
                self.stats.expired += requeue_undelivered(batch, in_time=False)
        if fresh := [batch for batch in batches if batch[0].deadline >= now]:
            self._backlog.put(QueuedBatches(self._io.delivery, fresh), is_first=is_first)

    # -- state ----------------------------------------------------------------------------------

    def set_max_in_flight(self, count: int) -> None:
        """Change max_in_flight while running; 0 pauses. A paused consumer has it from `resume` on.

        Raises `ConfigurationError` for a negative count.
        """
        check_argument("count", count, int)
        if count < 0:
            raise ConfigurationError("max_in_flight must not be negative")
        self._max_in_flight = count
        self._limit_in_flight()

    def pause(self) -> None:
        """Let nsqd deliver no further messages until `resume`. Connections stay open.

        Messages that nsqd has delivered are still handed out.
        """
        self._is_paused = True
        self._limit_in_flight()

    def resume(self) -> None:
        """Let nsqd deliver messages again."""
        self._is_paused = False
        self._limit_in_flight()

    def _limit_in_flight(self) -> None:
        count = 0 if self._is_paused else self._max_in_flight
        self._io.loop.call_soon(lambda: self._io.delivery.set_maximum(count))

    def _look_up_soon(self) -> None:
        """Look up nsqd within a few seconds, instead of after lookupd_poll_interval."""
        self._io.loop.call_soon(self._io.look_up_soon)

    def _look_before_subscribing(
        self, look: Callable[[str, Address], Callable[[], None] | None]
    ) -> None:
        """Call ``look`` with topic and nsqd before each attempt to subscribe there for the first
        time.

        The function that it returns, if any, is called on another thread when that nsqd has
        accepted the connection, before SUB. An `NsqError` raised by it postpones the attempt.
        """
        self._subscribe_check = look

    def _check_subscribe(self, topic: str, nsqd: Address) -> Callable[[], None] | None:
        return self._subscribe_check(topic, nsqd)

    @property
    def is_starved(self) -> bool:
        """Return whether a connection has 85 % of its RDY in flight.

        A program that collects messages to answer them together should answer them then.
        """
        return self._io.rdy.is_starved

    def _had_turns(self, since: float) -> bool:
        """Return whether each connected nsqd could have sent a message after the monotonic time
        ``since``.

        With fewer messages in flight than nsqd, RDY rotates. Until each has had a turn, silence
        does not mean that the channel is empty.
        """
        return self._io.rdy.could_have_delivered_since(since, self._io.now())

    @property
    def _has_tried_all(self) -> bool:
        """Return whether each initial nsqd has been tried once."""
        return self._io.tried_all.is_set()

    @property
    def connections(self) -> list[str]:
        """The addresses of the connected nsqd."""
        subscriptions = list(self._io.subscriptions)
        return list(dict.fromkeys(subscription.nsqd for subscription in subscriptions))

    def connections_by_topic(self) -> dict[str, list[str]]:
        """Return the addresses of the connected nsqd for each topic."""
        by_topic: dict[str, list[str]] = {topic: [] for topic in self.topics}
        for subscription in list(self._io.subscriptions):
            by_topic[subscription.topic].append(subscription.nsqd)
        return by_topic

    def errors(self) -> list[NsqError]:
        """Return the last error of each nsqd that is not connected."""
        return [e for dialer in self._io.dialers.values() for e in list(dialer.errors.values())]

    def health(self) -> ConsumerHealth:
        """Return the current state, for a probe or for metrics."""
        io, last = self._io, self._io.received_at
        return ConsumerHealth(
            connections=self.connections,
            in_flight=io.rdy.in_flight,
            backoff_level=io.rdy.level,
            idle_s=max(0.0, io.now() - last) if last else None,
            overdue=self._overdue(),
        )

    def _overdue(self) -> list[OverdueMessage]:
        now, overdue = self._io.now(), list(self._backlog.overdue.items())
        return [
            OverdueMessage(
                m.topic, m.nsqd, m.id.decode("ascii", "replace"), m.attempts, now - since
            )
            for m, since in sorted(overdue, key=lambda item: item[1])
            if m.topic in self.topics  # other consumers may share the backlog
        ]

    @property
    def stats(self) -> ConsumerStats:
        """Counts since the start."""
        return self._io.stats


class BatchCollector:
    """Collects a batch of ``size`` messages from several nsqd and reads.

    A smaller batch is complete when no further messages can arrive before an answer, or when its
    first message has waited for ``within_s`` or `COLLECT_SHARE` of msg_timeout.

    The caller repeatedly takes at most ``room`` messages within ``wait_s`` and passes them to
    `add`.
    """

    def __init__(
        self, consumer: ConsumerCore, size: int, within_s: float, first_s: float | None
    ) -> None:
        self.parts: list[Batch] = []
        self.room = size
        self.wait_s = first_s
        self._consumer = consumer
        self._within_s = within_s
        self._complete_at = math.inf
        # The pending or received reply of `_ask_if_full`; an empty list is pending.
        self._is_full: list[bool] | None = None

    def add(self, batches: list[Batch] | None) -> bool:
        """Add messages, if any; return whether to take again."""
        now, consumer = time.monotonic(), self._consumer
        is_full = self._is_full == [True]  # read before the backlog is checked below
        if batches:
            first, source = batches[0][0], batches[0]._source
            latest = first.received_at + COLLECT_SHARE * source.msg_timeout_s
            self._complete_at = min(self._complete_at, now + self._within_s, latest)
            self.parts += batches
            self.room -= sum(map(len, batches))
            self._is_full = None
        elif not self.parts or consumer._is_delivered or (is_full and consumer._backlog.is_empty):
            return False
        elif self._is_full != []:
            self._is_full = self._ask_if_full()
        left_s = self._complete_at - now
        self.wait_s = 0.0 if self._is_full == [True] else min(left_s, COLLECT_CHECK_S)
        return self.room > 0 and left_s > 0

    def batch(self) -> Gathered | None:
        """Return the collected messages of one topic. Others return to the backlog, in front."""
        if not self.parts:
            return None
        topic = self.parts[0].topic
        if other_topics := [part for part in self.parts if part.topic != topic]:
            self._consumer._put_back(other_topics)
        return Gathered([part for part in self.parts if part.topic == topic])

    def _ask_if_full(self) -> list[bool]:
        """Ask the I/O thread whether no further messages can arrive before an answer.

        Return a list that gets the reply, once all messages received so far are in the backlog.
        Another thread could not decide: it might count a message that is not in the backlog yet, or
        see a limit that is about to rise.
        """
        is_full: list[bool] = []
        io = self._consumer._io

        def reply() -> None:
            is_full.append(io.is_full(self._within_s))

        io.loop.call_soon(lambda: io.loop.after_flush(reply))
        return is_full


class Consumer(ConsumerCore):
    """A channel of one or several topics, on all nsqd that have them.

    ``topic`` is a name or a sequence of names. Each message and batch has its own topic
    (`Message.topic`); max_in_flight, backoff and `stop` apply to all topics together.

    The addresses of nsqd and nsqlookupd are each a sequence or a single text.

    ``on_connected`` is called with the address of an nsqd, ``host:port``, after each subscription
    (for each topic), ``on_lost`` with the address and the error when such a connection ends, except
    by a stop, and ``on_error`` with the error of every failed or lost connection. They run on the
    I/O thread and must not block. What they raise is logged.

    ``max_rate`` limits the messages a second that are handed out, on all threads together; 0 is
    without a limit. The others wait in nsqd, except for a few.

    A message that handlers requeue is delivered again without a limit, unless one of these applies
    after max_attempts deliveries:

    - ``dead_letter``: it is published to that topic on the same nsqd, and finished when nsqd has
      confirmed the publish.
    - ``on_giving_up``: this function is called with it on a handler's thread. If it returns True,
      the message is finished; otherwise it goes to ``dead_letter``, or is requeued with backoff.
    - ``giving_up="finish"``: it is finished, and lost.

    A message is given up only after a handler of this process has requeued it. A delivery does not
    count if it expired in the client, lost its connection, or was not answered in time by a handler
    or its pool. A message that may kill its process is handled alone first. It is given up after
    max_attempts + 2 deaths, if it goes to ``dead_letter`` or ``on_giving_up``.

    Raises `ConfigurationError` for bad names, addresses or options.
    """

    # -- life -----------------------------------------------------------------------------------

    def start(
        self, *, fail_fast: bool = False, wait_s: float = math.inf, for_all: bool = True
    ) -> None:
        """Connect.

        With ``fail_fast``, wait for the first attempts, and raise the first error if none of them
        succeeded; otherwise failures are logged and retried. The wait takes at most ``wait_s``
        seconds (0: a later call waits), and the longest time of one attempt. Without ``for_all`` it
        ends with the first connection.

        A stopped consumer cannot be started again: this does nothing then.
        """
        self._begin(fail_fast=fail_fast, wait_s=wait_s, for_all=for_all)

    def stop(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Stop, and wait until all delivered messages are answered and the answers sent.

        Returns whether the consumer has stopped. It has not after ``timeout_s``, and not if called
        in a handler, in on_giving_up or in a loop over messages, because the wait would be for the
        caller itself. Unanswered messages are requeued after drain_timeout. May be called again.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        self.begin_stop(drain=drain)
        worker = self._workers.get(threading.get_ident())
        if worker is not None and any(not message.is_answered for message in worker.all_messages()):
            return False
        return self.wait_for_end(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop. Unanswered messages are requeued immediately, unless `stop` or `begin_stop` was
        called within the block, which waits for handlers."""
        if kind is not None or not self._is_stopping:
            self.abort()
        self.wait_for_end()

    # -- messages -------------------------------------------------------------------------------

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch, or None after ``timeout_s`` and when the consumer has stopped.

        The first call starts the consumer. Every message must be answered, on any thread;
        `Batch.finish` finishes those that have no answer.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        self.start()
        batches = self._take(timeout_s)
        return batches[0] if batches else None

    def batches(
        self, timeout_s: float | None = None, *, size: int | None = None, within_s: float = 1.0
    ) -> Iterator[Batch]:
        """Iterate over batches until the consumer stops, or until none arrived for ``timeout_s``.

        A batch has the messages of one read, or with ``size`` that many messages of one topic from
        all nsqd. It has fewer if no others arrived within ``within_s`` seconds or a quarter of
        msg_timeout after the first, or if the next one has another topic.

        Every message must be answered; `Batch.finish` finishes those that have no answer. Raises
        `ConfigurationError` for a ``size`` below 1 or above max_in_flight.
        """
        check_argument("timeout_s", timeout_s, *NUMBER, NONE)
        if size is not None:
            self._check_size(size, within_s)
        return self._batches(timeout_s, size, within_s)

    def _batches(
        self, timeout_s: float | None, size: int | None, within_s: float
    ) -> Iterator[Batch]:
        self.start()
        worker = self._begin_work(Worker(has_batch=True))
        self._gather(worker, size or 0)
        try:
            while True:
                if size is None:
                    batch = self.next_batch(timeout_s)
                else:
                    collector = BatchCollector(self, size, within_s, timeout_s)
                    while collector.add(self._take(collector.wait_s, collector.room, several=True)):
                        pass
                    batch = collector.batch()
                if batch is None:
                    return
                worker.since, worker.taken = time.monotonic(), batch
                if batch:
                    yield batch
                worker.taken = ()
        finally:
            self._end_work(worker)
            self._gather(worker, 0)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the consumer stops. Each must be answered.

        Threads that iterate at the same time share the messages. Each takes about as many at a time
        as it handles in 5 ms; if one takes longer, the others get the rest. Leaving the loop
        requeues messages that it has taken but not reached.
        """
        thread, now = threading.get_ident(), time.monotonic
        expect_finish = self._io.expect_finish
        self._backlog.iterators.add(thread)
        self.start()
        share = 1
        worker = self._begin_work(Worker())
        try:
            while (batches := self._take(limit=share, several=True)) is not None:
                reached = 0
                began_at = worker.since = now()
                until = began_at + 2 * TARGET_HOLD_S
                ahead = worker.ahead = deque(chain(*batches))
                expect_finish(len(ahead) > 1)
                try:
                    while ahead and self._drains and (now() <= until or not reached):
                        try:
                            message = ahead.popleft()
                        except IndexError:  # the I/O thread has just returned the last ones
                            break
                        reached += 1
                        if not ahead:
                            expect_finish(False)
                        if message._source.in_flight.get(message.id) is message:  # not answered
                            worker.current = message
                            yield message
                except GeneratorExit:
                    for batch in worker.take_ahead():
                        requeue_undelivered(batch)
                    raise
                worker.current = None
                if ahead:
                    self._put_back(worker.take_ahead())
                took_s = now() - began_at
                share = max(1, min(4 * share, int(reached * TARGET_HOLD_S / max(took_s, 1e-6))))
        finally:
            expect_finish(False)
            self._end_work(worker)
            self._backlog.iterators.discard(thread)

    def run(
        self,
        handler: Callable[[Message], object],
        *,
        workers: int = 1,
        signals: bool | None = None,
        auto_answer: bool = True,
        auto_touch: bool = False,
        on_handled: OnHandled | None = None,
    ) -> None:
        """Call ``handler`` with each message until the consumer stops, on ``workers`` threads.

        Each thread handles its messages in its own copy of the caller's context (contextvars).

        A message that the handler has not answered is finished when the handler returns, requeued
        with backoff when it returns False or raises (the exception is logged), requeued without
        backoff when it raises `RequeueWithoutBackoff`, and given up when it raises `GiveUp`.
        Without ``auto_answer`` the program answers later the messages whose handler returns. With
        ``auto_touch`` messages are touched while their handler runs. ``on_handled`` is for metrics.
        A handler that hangs costs one worker: no other worker gets its message
        (`ConsumerHealth.overdue`).

        On the main thread the first SIGTERM or SIGINT stops the consumer when all delivered
        messages are handled, and `run` returns when nsqd has the answers. The second one requeues
        the messages of running handlers, and raises `SystemExit` or `KeyboardInterrupt`. A signal
        that the program handles itself is left alone, unless ``signals`` is True; with False both
        are.

        Raises `ConfigurationError` with ``signals`` outside the main thread, for ``workers`` below
        1, and for a handler that returns pending work: a coroutine, a generator, or with
        ``auto_answer`` a future. Its message is not finished then.
        """
        check_is_sync(handler)
        check_count("workers", workers)
        handling = Handling(
            handler, answers=auto_answer, on_handled=on_handled, give_up=self._give_up
        )
        with self._stop_signals(signals) as stop_signals:
            self.start()
            self._auto_touches |= auto_touch
            # A context is of one thread at a time, so each gets a copy of the caller's.
            contexts = [contextvars.copy_context() for _ in range(workers)]
            threads = [
                threading.Thread(
                    target=context.run,
                    args=(self._work, handling),
                    name=f"nsq-worker-{n}",
                    daemon=True,
                )
                for n, context in enumerate(contexts[1:])
            ]
            try:
                for thread in threads:
                    thread.start()
            except RuntimeError:  # the system has no more threads
                self.begin_stop()
                raise
            contexts[0].run(self._work, handling)
            if not stop_signals.ends_now:
                for thread in threads:
                    thread.join()
                if stop_signals:
                    self.wait_for_end()
        if handling.fatal_error is not None:
            raise handling.fatal_error

    def _work(self, handling: Handling) -> None:
        """Handle messages until the end. An error that ends this thread ends the consumer."""
        try:
            for message in self:
                handling.handle(message)
                if handling.fatal_error is not None:
                    break
            else:
                return
        except BaseException as exc:
            handling.fatal_error = exc
        self.begin_stop()


def make_consumer(
    connection: ConnectionSettings,
    topic: str | Sequence[str],
    channel: str,
    options: ClientOptions,
    *,
    backlog: Backlog | None = None,
    on_error: Callable[[NsqError], None] | None = None,
    looked_up: Iterable[Address] = (),
) -> Consumer:
    """Return a consumer with the addresses of the settings, and with ``options``."""
    return Consumer(
        topic,
        channel,
        nsqd_tcp_addresses=connection.nsqd_tcp_addresses,
        lookupd_http_addresses=connection.lookupd_http_addresses,
        options=options,
        address_map=connection.address_map,
        on_error=on_error,
        _backlog=backlog,
        _looked_up=looked_up,
        _nsqd_http_addresses=connection.nsqd_http_addresses,
    )


def start_all(consumers: Sequence[Consumer]) -> None:
    """Start consumers with ``fail_fast``, and wait for a connection of each."""
    for wait_s in (0.0, math.inf):  # start all before the first wait
        for consumer in consumers:
            consumer.start(fail_fast=True, wait_s=wait_s, for_all=False)


# -- the process ----------------------------------------------------------------------------------

_started: weakref.WeakSet[ConsumerCore] = weakref.WeakSet()
_dropped: weakref.WeakSet[ConsumerIO] = weakref.WeakSet()  # of consumers that nobody has stopped


def _stop_consumers() -> None:
    """At the end of the interpreter, send all answers, and requeue unanswered messages."""
    consumers = list(_started)
    for consumer in consumers:
        consumer.abort()
    give_up_at = time.monotonic() + EXIT_S
    for consumer in consumers:
        consumer.wait_for_end(max(0.0, give_up_at - time.monotonic()))
    for io in list(_dropped):
        io.loop.join(max(0.0, give_up_at - time.monotonic()))


atexit.register(_stop_consumers)
os.register_at_fork(after_in_child=_started.clear)  # they belong to the parent
os.register_at_fork(after_in_child=_dropped.clear)
