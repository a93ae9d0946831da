"""Consumer: subscribe to a channel of a topic and handle its messages.

    with Consumer("clicks", "archive", nsqd_tcp_addresses=["127.0.0.1:4150"]) as consumer:
        for message in consumer:
            store(message.body)
            message.finish()

The I/O thread of the process does all network traffic: heartbeats are answered however long a
handler takes, unless it runs C code that holds the interpreter's lock. Messages come to the
handlers' threads through a `Backlog`, in batches, one for each read of a socket; handlers that are
slow share a batch, message by message.

A handler never gets a message that has waited for more than half of msg_timeout, or that nsqd has
delivered again since: such a message went back to nsqd or is superseded. How many messages are in
flight follows the rate of their answers; max_in_flight is the upper limit.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

from nsqtools.client.attempts import Attempts
from nsqtools.client.backlog import Backlog, ConsumerStats, QueuedBatches, Worker
from nsqtools.client.connection import max_attempt_s, tls_context
from nsqtools.client.connection_settings import ConnectionSettings, check_can_consume
from nsqtools.client.consumer_io import ConsumerIO, SubscribeCheck
from nsqtools.client.dead_letters import GivingUp, Policy
from nsqtools.client.discovery import Discovery
from nsqtools.client.handling import Handling, OnHandled, StopSignals, check_count, check_is_sync
from nsqtools.client.io_loop import call_at_end_of_child
from nsqtools.client.message import (
    Batch,
    Gathered,
    Message,
    batches_from,
    requeue_undelivered,
    touch_when_due,
)
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import (
    Address,
    check_channel,
    check_topic,
    one_or_several,
    parse_address,
)

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
    """How a consumer is: what `Consumer.health` returns.

    ``connections`` are the addresses of the nsqd connected to, ``in_flight`` counts the unanswered
    messages, ``backoff_level`` is 0 unless handlers failed lately, and ``idle_s`` is the time since
    the last message, in seconds: None before the first. ``overdue`` are the messages that nsqd has
    taken back, by their timeout, while their handlers still have them, the oldest first.
    """

    connections: list[str]
    in_flight: int
    backoff_level: int
    idle_s: float | None
    overdue: list[OverdueMessage] = field(default_factory=list)


class Stopped(NamedTuple):
    """Put in the backlog when a consumer will deliver no more."""

    consumer: ConsumerCore


TARGET_HOLD_S = 0.005  # a thread takes about as many messages at a time as it handles in this time
GATHER_SHARE = 0.25  # of msg_timeout, to gather a batch in
GATHER_LOOK_S = 0.02  # between looks whether more can come
ABORT_S = 2.0  # for nsqd to get back what handlers hold, at the second signal
EXIT_S = 3.0  # for all consumers to stop at the end of the interpreter


class ConsumerCore:
    """What consumers for threads and for asyncio have in common: all but waiting."""

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
        on_giving_up: Callable[[Message], object] | None = None,
        giving_up: Policy = "requeue",
        dead_letter: str = "",
        _backlog: Backlog | None = None,
        _looked_up: Iterable[Address] = (),
    ) -> None:
        """``_backlog`` is one that several consumers share. ``_looked_up`` are nsqd that an
        nsqlookupd has just named, as it named them: the first lookup comes a poll interval later
        then."""
        self.topics = list(dict.fromkeys(map(check_topic, one_or_several(topic))))
        self.channel = check_channel(channel)
        self.options = options or ClientOptions()
        nsqd_tcp_addresses = one_or_several(nsqd_tcp_addresses)
        urls = one_or_several(lookupd_http_addresses)
        if not self.topics:
            raise ConfigurationError("a consumer needs a topic")
        if dead_letter in self.topics:
            raise ConfigurationError(f"dead letters cannot go to {dead_letter}, which is consumed")
        check_can_consume(nsqd_tcp_addresses, urls)
        if self.options.heartbeat_interval_s < 0:
            raise ConfigurationError("nsqd refuses consumers without heartbeats")
        tls_context(self.options)  # raises for files that cannot be used
        self.backlog = _backlog if _backlog is not None else self._new_backlog()
        self._giving_up = GivingUp(self.options, on_giving_up, giving_up, dead_letter)
        discoveries = {
            each: Discovery(urls, each, self.options, address_map, looked_up=_looked_up)
            for each in self.topics
            if urls
        }
        self._io = ConsumerIO(
            self.topics,
            discoveries,
            channel,
            list(map(parse_address, nsqd_tcp_addresses)),
            self.options,
            backlog=self.backlog,
            attempts=Attempts(self._giving_up.max_attempts, keeps=self._giving_up.keeps),
            give_up=self._give_up,
            check_subscribe=self._check_subscribe,
            on_tick=self._touch_when_due,
            on_stopped=self._end_deliveries,
            on_error=on_error or (lambda error: None),
        )
        self._subscribe_check: SubscribeCheck = lambda topic, nsqd: None
        self._auto_touches = False
        # re-entrant: a signal handler may stop what its thread is starting
        self._life = threading.RLock()
        self._process = os.getpid()
        self._is_started = False
        self._is_stopping = False
        self.is_delivered = False  # all that will ever be
        self._drains = True  # until a stop says otherwise
        self._workers: dict[int, Worker] = {}  # by the threads that iterate
        self._gathers: dict[object, int] = {}  # sizes of batches

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
                if self.is_delivered:  # a signal handler has stopped it meanwhile
                    self.begin_stop(drain=self._drains)
                _started.add(self)
                call_at_end_of_child(_stop_all)
        if fail_fast and wait_s:  # of what was started without it, as by ``with``, too
            awaited = self._io.settled if for_all else self._io.decided
            awaited.wait(min(wait_s, max_attempt_s(self.options)))
            if self._io.first_errors and not self._io.subscriptions:
                self.begin_stop()
                self.wait_for_end()
                raise self._io.first_errors[0]
            self._io.log_first_errors()

    def begin_stop(self, *, drain: bool = False) -> None:
        """Start to stop and return at once; safe in a signal handler and in a message handler.

        Without ``drain`` messages that no handler has started on are requeued at once; with it they
        are still delivered. Messages being handled may be answered for drain_timeout.
        """
        with self._life:
            self._drains = drain and (self._drains or not self._is_stopping)
            if not self._is_started and not self._is_stopping:
                self.is_delivered = True
                self.backlog.put(Stopped(self))
            self._is_stopping = True
            if self._is_started:
                self._io.loop.call_soon(lambda: self._io.begin_stop(drain))

    def _stop_signals(self, wanted: bool | None) -> StopSignals:
        stop = partial(self.begin_stop, drain=True)
        return StopSignals(wanted, stop=stop, end=self._abort_and_wait)

    def _abort_and_wait(self) -> None:
        self.abort()
        self.wait_for_end(ABORT_S)

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a stop that has begun; return whether it has come."""
        is_over = self._io.loop.join(timeout_s) if self._is_started else True
        if is_over:
            _started.discard(self)
            self._giving_up.stop()
        return is_over

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"{self!r} belongs to the process that made it, which this one was forked from",
                hint="Make a consumer after the fork.",
            )

    def abort(self) -> None:
        """Stop without waiting for running handlers: what they hold is requeued."""
        self.begin_stop()
        if self._is_started:
            self._io.loop.call_soon(self._io.abort)

    def _end_deliveries(self) -> None:
        """The last batch has been put in the queue (the I/O thread, which alone can know that)."""
        if self.is_delivered:  # it was said before
            return
        if not self._drains:
            for batch in self.backlog.withdraw(self._io.delivery):
                requeue_undelivered(batch)
        self._io.delivery.end_quarantine()
        self.is_delivered = True
        self.backlog.put(Stopped(self))

    # -- messages -------------------------------------------------------------------------------

    def _take(
        self, timeout_s: float | None = None, most: int = sys.maxsize, *, several: bool = False
    ) -> list[Batch] | None:
        """Take a batch or, if small ones wait, ``several``, of at most ``most`` messages."""
        self._check_process()
        if not self._io.waiting:  # a thread that asks for more has answered: send it
            self._io.loop.wake()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            entry = self.backlog.get_some(until, most, several=several)
            if entry is None:
                return None
            if isinstance(entry, Stopped):
                self.backlog.put(entry)  # for the next that asks, on any thread
                self.raise_failure()
                return None
            assert isinstance(entry, list)
            if self._drains:
                return entry
            for batch in entry:
                requeue_undelivered(batch)

    def _give_up(self, batch: Batch) -> None:
        worker = self._workers.get(threading.get_ident()) or Worker()
        before = worker.taken, worker.has_batch
        worker.since = time.monotonic()
        worker.taken, worker.has_batch = batch, True  # `stop` in a callback must not wait for it
        try:
            self._giving_up.give_up(batch)
        finally:
            worker.taken, worker.has_batch = before

    def raise_failure(self) -> None:
        """Raise ``RuntimeError`` if a defect has ended it, and no stop."""
        if self._io.loop.failure is not None:
            raise RuntimeError("the I/O thread failed") from self._io.loop.failure

    def _check_size(self, size: int, within_s: float) -> None:
        """Raise `ConfigurationError` for batches that cannot be."""
        check_count("size", size)
        if not within_s > 0:
            raise ConfigurationError(f"within_s must be > 0, not {within_s!r}")
        most = max(self.options.max_in_flight, self._io.delivery.in_flight_limit.maximum)
        if size > most:
            raise ConfigurationError(
                f"batches of {size} messages need a max_in_flight of as many; it is {most}",
                hint=f"Give options=ClientOptions(max_in_flight={2 * size}).",
            )

    def gather(self, who: object, size: int) -> None:
        """Some loop answers ``size`` messages together from here on; 0: none."""
        self._gathers[who] = size
        if not size:
            del self._gathers[who]
        count = sum(self._gathers.values())
        self._io.loop.call_soon(lambda: self._io.delivery.gather(count))

    def _begin_work(self, worker: Worker) -> Worker:
        worker.thread = threading.get_ident()
        self._workers[worker.thread] = worker
        self.backlog.workers.add(worker)
        return worker

    def _end_work(self, worker: Worker) -> None:
        self.backlog.workers.discard(worker)
        self._workers.pop(worker.thread, None)  # a dropped generator ends on any thread

    def _touch_when_due(self, now: float) -> None:
        """Touch the messages of running handlers, with ``auto_touch`` (on the I/O thread).

        nsqd bounds the total at its max_msg_timeout, 15 minutes unless set.
        """
        if self._auto_touches:
            touch_when_due(self.backlog.at_work(), now)

    def _put_back(self, batches: list[Batch]) -> None:
        """Return to the backlog what was taken and not reached."""
        now = time.monotonic()
        for batch in batches:
            if batch[0].deadline < now:  # they waited for a handler that hung
                self.stats.expired += requeue_undelivered(batch, in_time=False)
        if fresh := [batch for batch in batches if batch[0].deadline >= now]:
            self.backlog.put(QueuedBatches(self._io.delivery, fresh), is_first=True)

    # -- state ----------------------------------------------------------------------------------

    def set_max_in_flight(self, count: int) -> None:
        """Change max_in_flight while running; 0 pauses."""
        if count < 0:
            raise ConfigurationError("max_in_flight must not be negative")
        self._io.loop.call_soon(lambda: self._io.delivery.set_maximum(count))

    def look_up_soon(self) -> None:
        """Ask nsqlookupd in a second or a few, and not only when its interval has passed."""
        self._io.loop.call_soon(self._io.look_up_soon)

    def look_before_subscribing(
        self, look: Callable[[str, Address], Callable[[], None] | None]
    ) -> None:
        """Ask ``look``, with topic and nsqd, at each try to subscribe for the first time.

        What it returns is called when that nsqd has taken the connection, on that thread, before
        SUB. An `NsqError` of it keeps the consumer from this nsqd for a while.
        """
        self._subscribe_check = look

    def _check_subscribe(self, topic: str, nsqd: Address) -> Callable[[], None] | None:
        return self._subscribe_check(topic, nsqd)

    @property
    def is_starved(self) -> bool:
        """Tell whether some connection has 85 % of its RDY in flight: who holds messages back to
        answer them together should answer now."""
        return self._io.rdy.is_starved

    def had_turns(self, since: float) -> bool:
        """Tell whether each nsqd connected to could have sent a message after ``since``, a reading
        of the monotonic clock. Fewer messages in flight than nsqd go around: until then silence
        says nothing of the channel."""
        return self._io.rdy.could_have_delivered_since(since, self._io.now())

    @property
    def has_tried_all(self) -> bool:
        """Tell whether each nsqd that was known at the start was tried once."""
        return self._io.settled.is_set()

    @property
    def connections(self) -> list[str]:
        """The addresses of the nsqd connected to now."""
        return list(dict.fromkeys(each.nsqd for each in list(self._io.subscriptions)))

    def connections_by_topic(self) -> dict[str, list[str]]:
        """The addresses of the nsqd that each topic is consumed from now."""
        by_topic: dict[str, list[str]] = {topic: [] for topic in self.topics}
        for subscription in list(self._io.subscriptions):
            by_topic[subscription.topic].append(subscription.nsqd)
        return by_topic

    def errors(self) -> list[NsqError]:
        """Why nsqd of its topics are not connected now, one for each of those that are known."""
        return [e for dialer in self._io.dialers.values() for e in list(dialer.errors.values())]

    def health(self) -> ConsumerHealth:
        """How the consumer is now: for a probe, or for metrics."""
        io, last = self._io, self._io.received_at
        return ConsumerHealth(
            connections=self.connections,
            in_flight=io.rdy.in_flight,
            backoff_level=io.rdy.level,
            idle_s=None if last is None else max(0.0, io.now() - last),
            overdue=self._overdue(),
        )

    def _overdue(self) -> list[OverdueMessage]:
        now, overdue = self._io.now(), list(self.backlog.overdue.items())
        return [
            OverdueMessage(
                m.topic, m.nsqd, m.id.decode("ascii", "replace"), m.attempts, now - since
            )
            for m, since in sorted(overdue, key=lambda item: item[1])
            if m.topic in self.topics  # others may share the backlog
        ]

    @property
    def stats(self) -> ConsumerStats:
        """Counts since the start."""
        return self._io.stats


class BatchCollector:
    """A batch of messages of several nsqd and reads, from the first to come until there are
    ``size``, no more can come, or the first has waited for ``within_s`` or a part of msg_timeout.

    Who gathers takes ``room`` messages at most, waits ``wait_s`` for them, and tells `add`.
    """

    def __init__(
        self, consumer: ConsumerCore, size: int, within_s: float, first_s: float | None
    ) -> None:
        self.parts: list[Batch] = []
        self.room = size
        self.wait_s = first_s
        self._consumer = consumer
        self._within_s = within_s
        self._until = math.inf
        self._is_full: list[bool] | None = None  # what was asked; empty until there is a reply

    def add(self, more: list[Batch] | None) -> bool:
        """Add what was taken, if anything; return whether to take again."""
        now, consumer = time.monotonic(), self._consumer
        is_full = self._is_full == [True]  # read before the backlog
        if more:
            first, source = more[0][0], more[0].source
            in_time = first.received_at + GATHER_SHARE * source.msg_timeout_s
            self._until = min(self._until, now + self._within_s, in_time)
            self.parts += more
            self.room -= sum(map(len, more))
            self._is_full = None
        elif not self.parts or consumer.is_delivered or (is_full and consumer.backlog.is_empty):
            return False
        elif self._is_full != []:
            self._is_full = self._ask_if_full()
        left_s = self._until - now
        self.wait_s = 0.0 if self._is_full == [True] else min(left_s, GATHER_LOOK_S)
        return self.room > 0 and left_s > 0

    def batch(self) -> Gathered | None:
        """Return what was gathered, of one topic; what is of others comes first in the next."""
        if not self.parts:
            return None
        topic = self.parts[0].topic
        if others := [part for part in self.parts if part.topic != topic]:
            self._consumer._put_back(others)
        return Gathered([part for part in self.parts if part.topic == topic])

    def _ask_if_full(self) -> list[bool]:
        """Ask whether no more can come before an answer, but from nsqd that brought nothing in
        ``within_s``. The list gets the reply, once all that came until then is in the backlog.

        Only the I/O thread can tell: elsewhere a message may be counted that is still on its way to
        the backlog, and a limit may be seen that is about to rise.
        """
        is_full: list[bool] = []
        io = self._consumer._io

        def reply() -> None:
            is_full.append(io.is_full(self._within_s))

        io.loop.call_soon(lambda: io.loop.after_flush(reply))
        return is_full


class Consumer(ConsumerCore):
    """A channel of one or several topics, on all nsqd that have them.

    ``topic`` is a name or a sequence of them. Each message and batch has its own (`Message.topic`);
    max_in_flight, backoff and `stop` are for all topics together.

    Give addresses of nsqd, of nsqlookupd, or both: a sequence of them, or just one.

    ``on_error`` is called with the error of every connection that fails or is lost (on the I/O
    thread; it must not block).

    A message that handlers requeue comes again, however often, unless there is something better to
    do with it after max_attempts deliveries:

    - with ``dead_letter`` it is published to that topic on the same nsqd, and finished when nsqd
      has confirmed that,
    - with ``on_giving_up`` that is called with it, on a handler's thread. If it returns True, it
      has taken the message, which is finished; otherwise the message is requeued with backoff, or
      left to ``dead_letter``.
    - with ``giving_up="finish"`` it is finished, which loses it.

    A message is given up only after a handler of this process has requeued it. Deliveries do not
    count that ended here without that: because they waited too long, because their connection
    broke, or because a handler, or a pool behind it, did not answer in time. One that may kill its
    process is handled alone first, and given up, where it is kept, after max_attempts + 2 deaths.

    Raises `ConfigurationError` for bad names, addresses or options.
    """

    # -- life -----------------------------------------------------------------------------------

    def start(
        self, *, fail_fast: bool = False, wait_s: float = math.inf, for_all: bool = True
    ) -> None:
        """Connect. With ``fail_fast`` wait for the first tries, and raise the first error if none
        of them led to a connection; otherwise failures are logged and tried again. The wait ends
        after ``wait_s`` seconds (0: it is for a later call), or the time that one try may take;
        unless it is ``for_all``, with the first connection.

        A consumer is started once: after a stop this does nothing.
        """
        self._begin(fail_fast=fail_fast, wait_s=wait_s, for_all=for_all)

    def stop(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Stop and wait for it: until everything delivered is answered, and the answers sent.

        Returns whether the consumer has stopped. It has not yet when ``timeout_s`` passed, nor when
        called inside a handler, in on_giving_up or in a loop over messages, which is what would be
        waited for. Messages without an answer are requeued after drain_timeout. May be called
        again.
        """
        self.begin_stop(drain=drain)
        worker = self._workers.get(threading.get_ident())
        if worker is not None and any(not message.is_answered for message in worker.taken):
            return False
        return self.wait_for_end(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop. What is unanswered is requeued at once, unless a stop has begun within the block,
        which waits for handlers: `stop`, `begin_stop`."""
        if kind is not None or not self._is_stopping:
            self.abort()
        self.wait_for_end()

    # -- messages -------------------------------------------------------------------------------

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Wait for the next batch, which starts the consumer. None when ``timeout_s`` passed or it
        has stopped.

        Every message must be answered, on any thread: `Batch.finish` finishes what is left.
        """
        self.start()
        batches = self._take(timeout_s)
        return batches[0] if batches else None

    def batches(
        self, timeout_s: float | None = None, *, size: int | None = None, within_s: float = 1.0
    ) -> Iterator[Batch]:
        """Iterate over batches until the consumer stops, or for ``timeout_s`` none came.

        A batch is what arrived together, or with ``size`` that many messages of a topic, of all
        nsqd: fewer where no more came ``within_s`` seconds after the first, or in a quarter of
        msg_timeout, or some of them were of another topic.

        Every message must be answered: `Batch.finish` finishes what is left of a batch. Raises
        `ConfigurationError` for a ``size`` below 1 or above max_in_flight.
        """
        if size is not None:
            self._check_size(size, within_s)
        return self._batches(timeout_s, size, within_s)

    def _batches(
        self, timeout_s: float | None, size: int | None, within_s: float
    ) -> Iterator[Batch]:
        self.start()
        who = object()  # not the thread, which may do this twice
        self.gather(who, size or 0)
        worker = self._begin_work(Worker(has_batch=True))
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
            self.gather(who, 0)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the consumer stops. Each must be answered.

        Threads that iterate at the same time share the messages: each takes about as many at a time
        as it handles in `TARGET_HOLD_S`. Leaving the loop requeues those that it did not reach.
        """
        thread, now = threading.get_ident(), time.monotonic
        expect_finish = self._io.expect_finish
        self.backlog.iterators.add(thread)
        self.start()
        most = 1
        worker = self._begin_work(Worker())
        try:
            while (batches := self._take(most=most, several=True)) is not None:
                messages = batches[0] if len(batches) == 1 else list(chain(*batches))
                worker.taken = messages
                reached = 0
                began_at = worker.since = now()
                until = began_at + 2 * TARGET_HOLD_S
                count = len(messages)
                expect_finish(count > 1)
                try:
                    for message in messages:
                        if not self._drains or (now() > until and reached):
                            break
                        reached += 1
                        if reached == count:
                            expect_finish(False)
                        if not message.is_answered:
                            worker.current = message
                            yield message
                except GeneratorExit:
                    for batch in batches_from(batches, reached):
                        requeue_undelivered(batch)
                    raise
                worker.current = None
                if reached < count:
                    self._put_back(batches_from(batches, reached))
                took_s = now() - began_at
                most = max(1, min(4 * most, int(reached * TARGET_HOLD_S / max(took_s, 1e-6))))
        finally:
            expect_finish(False)
            self._end_work(worker)
            self.backlog.iterators.discard(thread)

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

        A message that the handler has not answered itself is finished when it returns, requeued
        with backoff when it returns False or raises (the exception is logged), and requeued without
        backoff when it raises `RequeueWithoutBackoff`. Without ``auto_answer`` a message whose
        handler returns is answered later, by the program. With ``auto_touch`` messages are touched
        while their handler runs. ``on_handled`` is for metrics. A handler that hangs costs one
        worker: while it has a message no other gets it (`ConsumerHealth.overdue`).

        On the main thread the first SIGTERM or SIGINT stops the consumer when everything delivered
        is handled, and `run` returns when nsqd has the answers. The second requeues what handlers
        hold, and raises `SystemExit` or `KeyboardInterrupt`. A signal that the program handles
        itself is left to it, unless ``signals`` is True; with False both are.

        Raises `ConfigurationError` with ``signals`` outside the main thread, for ``workers`` below
        1, and for a handler whose work is not done when it returns, but a coroutine, a generator or
        a future: nothing is finished for it then. Without ``auto_answer`` it may be a future.
        """
        check_is_sync(handler)
        check_count("workers", workers)
        handling = Handling(handler, answers=auto_answer, on_handled=on_handled)
        with self._stop_signals(signals) as stop_signals:
            self.start()
            self._auto_touches |= auto_touch
            work = partial(self._work, handling)
            threads = [
                threading.Thread(target=work, name=f"nsq-worker-{n}", daemon=True)
                for n in range(workers - 1)
            ]
            try:
                for thread in threads:
                    thread.start()
            except RuntimeError:  # no more can be had
                self.begin_stop()
                raise
            self._work(handling)
            if not stop_signals.ends_now:
                for thread in threads:
                    thread.join()
                if stop_signals:
                    self.wait_for_end()
        if handling.fatal_error is not None:
            raise handling.fatal_error

    def _work(self, handling: Handling) -> None:
        """Handle messages until the end; what ends one thread, as SystemExit does, ends all."""
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
    """Return a consumer of what the settings lead to, with other ``options`` than theirs."""
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
    )


def start_all(consumers: Sequence[Consumer]) -> None:
    """Start consumers with ``fail_fast``; wait for a connection of each, together."""
    for wait_s in (0.0, math.inf):
        for consumer in consumers:
            consumer.start(fail_fast=True, wait_s=wait_s, for_all=False)


# -- the process ----------------------------------------------------------------------------------

_started: weakref.WeakSet[ConsumerCore] = weakref.WeakSet()


def _stop_all() -> None:
    """At the end of the interpreter: answers are sent, and what has none is requeued."""
    consumers = list(_started)
    for consumer in consumers:
        consumer.abort()
    until = time.monotonic() + EXIT_S
    for consumer in consumers:
        consumer.wait_for_end(max(0.0, until - time.monotonic()))


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_started.clear)  # they are the parent's
