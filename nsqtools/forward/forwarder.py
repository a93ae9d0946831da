"""Forward messages: consume, filter, transform and deliver them, and finish each after delivery.

The thread of `Forwarder.run` takes batches from the backlog of the consumers, filters and
transforms them, and passes parcels to the `Dispatcher`. Only ``pick`` changes a body.

Trap: the consumers never back off. One destination that fails must not slow the others down, and
while none works the consumers are paused.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nsqtools.client.backlog import Backlog
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.consumer import Consumer, Stopped, make_consumer, start_all
from nsqtools.client.message import Batch, Message, touch_when_due
from nsqtools.client.options import THROUGHPUT, ClientOptions
from nsqtools.client.rate_limit import RateLimit
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.forward.dispatcher import DeadLetterBox, DeadLetterFile, Dispatcher
from nsqtools.forward.parcel import Counters, Parcel, Sink
from nsqtools.protocol.arguments import NONE, check_argument, check_texts, check_times
from nsqtools.protocol.names import check_channel, check_topic
from nsqtools.records.filters import Filter
from nsqtools.tail import End, LimitWatch, RunLimits

log = logging.getLogger("nsqtools")


# A fifth of nsqd's shortest msg_timeout (1 s), so that a message is touched well before it is due.
TICK_S = 0.2
# The longest stop of a sink: a command gets 5 s after TERM and 5 s after KILL.
STOP_S = 15.0


class ForwardSettings(NamedTuple):
    """Source and processing of the messages.

    Args:
        user_agent: returns the user agent of the consumer of a topic.
        keep: filter; a message for which it returns False is finished.
        pick: transforms a body; None finishes the message. A ``ValueError`` of ``keep`` or
            ``pick`` refuses it.
        rename: returns the name of a topic at the destination.
        rate: messages per second; 0 is without limit.
        max_attempts: attempts before a message is a dead letter; 0 is without limit.
        window_bytes: limit of the bytes under way.
        batch: number of messages that the sink delivers together.
        trusted: the sink may be slow. This is logged as INFO, and the run does not count as idle.
    """

    topics: ConsumedTopics
    channel: str
    options: ClientOptions
    user_agent: Callable[[str], str] | None = None
    keep: Filter | None = None
    pick: Callable[[bytes], bytes | None] | None = None
    rename: Callable[[str], str] = str
    rate: float = 0.0
    max_attempts: int = 0
    window_bytes: float = math.inf
    batch: int = 1
    trusted: bool = True


class TopicSources:
    """One consumer for each of the `ConsumedTopics`, all with the same backlog.

    Methods are for one thread, except `begin_stop`.
    """

    def __init__(self, settings: ForwardSettings) -> None:
        self.topics = settings.topics
        self.backlog = Backlog()
        self._settings = settings
        self._consumers: dict[str, Consumer] = {}
        self._is_paused = False

    def start(self, *, ends_idle: bool) -> None:
        """Subscribe; ``ends_idle`` is whether silence ends the run.

        Raises the connection error if a named topic cannot be reached or no daemon lists the topics
        of a pattern, and `ConfigurationError` for a named topic that must not be forwarded.
        """
        for topic in self.topics.given:
            self.topics.check(topic)
        start_all([self._begin(topic) for topic in self.topics.given])
        self.topics.start(self._has_connection, ends_idle=ends_idle)

    def begin_stop(self) -> None:
        """Stop consuming, and requeue messages that nobody has taken."""
        self.topics.stopping.set()
        for consumer in list(self._consumers.values()):
            consumer.begin_stop()

    def stop(self, *, is_broken: bool) -> None:
        """Wait until all messages are answered; if the run ``is_broken``, drop the connections."""
        self.begin_stop()
        for consumer in self._consumers.values():
            if is_broken:
                consumer.abort()
            consumer.stop()

    def pause(self, is_paused: bool) -> None:
        """Pause or resume all consumers."""
        self._is_paused = is_paused
        for consumer in self._consumers.values():
            (consumer.pause if is_paused else consumer.resume)()

    def is_connected(self) -> bool:
        """Return whether every topic that some nsqd has is connected."""
        return self.topics.disconnected() <= self.topics.unlisted.topics

    def could_have_delivered_since(self, since: float) -> bool:
        """Return whether every nsqd could have sent a message after ``since``."""
        return all(c._had_turns(since) for c in self._consumers.values())

    def sync_consumers(self) -> None:
        """Start and stop consumers, as topics appear and vanish. Raises the error of discovery."""
        topics = self.topics.current()
        for topic in self._consumers.keys() - topics:
            self._consumers.pop(topic).begin_stop()
        for topic in sorted(topics - self._consumers.keys()):
            self._begin(topic).start()

    def _begin(self, topic: str) -> Consumer:
        settings, options = self._settings, self._settings.options
        if settings.user_agent is not None:
            options = replace(options, user_agent=settings.user_agent(topic))
        consumer = self._consumers[topic] = make_consumer(
            self.topics.connection,
            topic,
            settings.channel,
            options,
            backlog=self.backlog,
            on_error=lambda error: self.topics.suspect(topic),
        )
        if settings.batch > 1:  # so that a whole batch is in flight from the beginning
            consumer._gather(self, settings.batch)
        if self._is_paused:
            consumer.pause()
        log.info("forwarding topic %s, channel %s", topic, settings.channel)
        return consumer

    def _has_connection(self, topic: str) -> bool:
        consumer = self._consumers.get(topic)
        return consumer is not None and bool(consumer.connections)


class Forwarder:
    """Consume messages and deliver them to a sink; `forward_to` returns one.

    Call `run` on one thread, and `stop` on any. ``on_tick`` is called several times a second.
    """

    def __init__(
        self,
        settings: ForwardSettings,
        sink: Sink,
        *,
        dead_letters: DeadLetterBox | None,
        limits: RunLimits,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        # After drain_timeout_s the sink stops and the remaining messages are requeued; the
        # connections must outlive that.
        options = settings.options
        options = replace(options, drain_timeout_s=options.drain_timeout_s + STOP_S)
        if limits.count is not None:
            # Messages in flight beyond the count would only have their attempts raised.
            options = replace(options, max_in_flight=min(options.max_in_flight, limits.count))
        self.counters = Counters()
        self._settings = settings
        self._sink = sink
        self._sources = TopicSources(settings._replace(options=options))
        self.dispatcher = Dispatcher(
            sink,
            self.counters,
            max_attempts=settings.max_attempts,
            dead_letters=dead_letters,
            on_circuit=self._sources.pause,
            window_bytes=settings.window_bytes,
            slow_level=logging.INFO if settings.trusted else logging.WARNING,
        )
        self._sources.backlog.pools.append(self)
        self._limits = limits
        self._watch = LimitWatch(limits, 0.0)
        self._on_tick = on_tick
        self._rate: RateLimit | None = None
        self._ready: deque[Batch] = deque()  # received, waiting for room or the rate limit
        self._next_tick = 0.0
        self._is_late = False  # the time limit ended the run before all deliveries
        self.left = 0  # messages that a run with a limit requeued and did not receive again

    # -- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop consuming; `run` returns after the deliveries under way."""
        self._sources.begin_stop()
        self.dispatcher.changed.set()

    def at_work(self) -> dict[Message, float]:
        """Return the unanswered messages and the time that work on them began, for `Pool`."""
        now = time.monotonic()
        return {m: now for batch in list(self._ready) for m in batch} | self.dispatcher.at_work()

    def redelivered(self, message: Message) -> None:
        """Discount the attempt of a message that nsqd delivered again, for `Pool`."""
        self.dispatcher.redelivered(message)

    @property
    def falls_short(self) -> bool:
        """Whether a count was set and not reached, or not delivered within the time limit."""
        return self._watch.falls_short or self._is_late

    # -- running --------------------------------------------------------------------------------

    def run(self) -> End:
        """Forward until a limit is reached or `stop` is called; return the reason of the end.

        Raises the connection error if a topic cannot be reached at the start, and `NotFoundError`
        at an idle end if no nsqd has a named topic.
        """
        now = time.monotonic()
        self._watch = LimitWatch(self._limits, now)
        self._rate = RateLimit(self._settings.rate, now) if self._settings.rate else None
        is_broken = False
        try:
            self._sources.start(ends_idle=self._limits.idle_s is not None)
            end = self._pump()
        except Exception as exc:
            # After a defect, of the sink for example, waiting for deliveries is useless.
            is_broken = isinstance(exc, ConfigurationError) or not isinstance(exc, NsqError)
            raise
        finally:
            self._end(is_broken)
        if end is not End.STOPPED:
            self.left = self.counters.totals.requeued - self.dispatcher.redelivered_count
        if end is End.IDLE:
            self._settings.topics.unlisted.refuse(self._settings.topics.given)
        return end

    @property
    def _is_busy(self) -> bool:
        return bool(self._ready) or not self.dispatcher.is_idle

    def _pump(self) -> End:
        while True:
            now = time.monotonic()
            self.dispatcher.process_outcomes(now)
            if now >= self._next_tick:
                self._tick(now)
            if self._settings.topics.stopping.is_set():
                return End.STOPPED
            self._send_ready(now)
            end = self._watch.end(now)
            if end is End.COUNT and self._is_busy:
                # The count is reached when its messages are delivered.
                if self._watch.remaining_s(now) <= 0:
                    self._is_late = True
                    return End.TIME
                if not self._ready:
                    self.dispatcher.flush()
                self._wait(now)
            elif end is End.IDLE and (
                self._take(TICK_S)
                or not self._sources.could_have_delivered_since(self._watch.idle_since)
            ):
                pass  # this process was suspended: a message has arrived, or still may
            elif end is not None:
                return end
            elif self._ready or not self.dispatcher.has_room:
                self._wait(now)
            else:
                self._take(min(TICK_S, self._watch.wait_s(now) or TICK_S))

    def _take(self, wait_s: float) -> bool:
        """Wait for a batch; return whether one arrived."""
        entry = self._sources.backlog.get(wait_s)
        if isinstance(entry, Stopped):
            entry.consumer._raise_failure()
        elif isinstance(entry, Batch):
            self._accept(entry, time.monotonic())
            return True
        return False

    def _wait(self, now: float) -> None:
        """Wait for an outcome, or until the rate limit allows the next message."""
        wait_s = TICK_S
        if self._ready and self._rate is not None and self.dispatcher.has_room:
            wait_s = min(wait_s, max(0.001, self._rate.wait_s(now)))
        self.dispatcher.changed.wait(wait_s)
        self.dispatcher.changed.clear()

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        is_waiting = self._settings.trusted or not self.dispatcher.is_silent
        is_active = self._ready or (is_waiting and self._is_busy) or self.dispatcher.is_open
        if is_active or (self._limits.idle_s is not None and not self._sources.is_connected()):
            self._watch.record_activity(now)  # restarts the idle time
        for batch in self._ready:
            touch_when_due(batch, now)
        self.dispatcher.tick(now)
        self._sources.sync_consumers()
        self._on_tick()

    # -- filtering and sending ------------------------------------------------------------------

    def _accept(self, batch: Batch, now: float) -> None:
        self._watch.record_activity(now)
        self.counters.add(batch.topic, received=len(batch))
        self.dispatcher.count_redelivered(batch)
        if self._settings.keep is not None:
            batch = self._apply_filter(batch, self._settings.keep)
        room = self._watch.room_for(len(batch))
        if room < len(batch):
            Batch(batch._source, batch[room:]).requeue(0, backoff=False)
            batch = Batch(batch._source, batch[:room])
        if batch:
            self._ready.append(batch)

    def _apply_filter(self, batch: Batch, keep: Filter) -> Batch:
        kept, filtered = Batch(batch._source, ()), Batch(batch._source, ())
        for message in batch:
            try:
                (kept if keep(message) else filtered).append(message)
            except ValueError as error:
                self._refuse_unjudged(batch, message, f"its body cannot be judged ({error})")
        if filtered:
            self.counters.add(batch.topic, filtered=len(filtered))
            filtered.finish()
        return kept

    def _refuse_unjudged(self, batch: Batch, message: Message, reason: str) -> None:
        """Refuse a message to which the filter or ``pick`` does not apply.

        Finishing it would lose a message that nobody decided to filter out.
        """
        self.counters.add(batch.topic, unjudged=1)
        topic, now = self._settings.rename(batch.topic), time.monotonic()
        parcel = Parcel(Batch(batch._source, [message]), [message.body], topic, now)
        self.dispatcher.refuse(parcel, reason)

    def _send_ready(self, now: float) -> None:
        while self._ready and self.dispatcher.has_room:
            batch = self._ready.popleft()
            if self._rate is not None:
                allowed = self._rate.allowance(now)
                if allowed < len(batch):
                    self._ready.appendleft(Batch(batch._source, batch[allowed:]))
                    batch = Batch(batch._source, batch[:allowed])
                if not batch:
                    return
                self._rate.spend(len(batch))
            parcel = self._parcel(batch, now)
            if parcel is not None:
                self.dispatcher.send(parcel)

    def _parcel(self, batch: Batch, now: float) -> Parcel | None:
        topic = self._settings.rename(batch.topic)
        if self._settings.pick is None:
            return Parcel(batch, [message.body for message in batch], topic, now)
        bodies, kept = [], Batch(batch._source, ())
        for message in batch:
            try:
                body = self._settings.pick(message.body)
            except ValueError as exc:
                reason = f"its body cannot be transformed ({exc})"
                self._refuse_unjudged(batch, message, reason)
                continue
            if body is None:
                self.counters.add(batch.topic, filtered=1)
                message.finish()
            else:
                bodies.append(body)
                kept.append(message)
        return Parcel(kept, bodies, topic, now) if kept else None

    def _end(self, is_broken: bool) -> None:
        """Wait for deliveries under way unless the sink is broken; requeue the other messages."""
        self._sources.begin_stop()
        for batch in self._ready:
            batch.requeue(0, backoff=False)
        self._ready.clear()
        try:
            self._sink.check()
        except Exception:  # `run` raises it already, or a stop came first
            is_broken = True
        drain_s = 0.0 if is_broken else self._settings.options.drain_timeout_s
        self.dispatcher.drain(drain_s, self._on_tick)
        self._sources.stop(is_broken=is_broken)
        self._on_tick()


def forward_to(
    sink: Sink,
    topic: str | Sequence[str],
    channel: str,
    *,
    nsqd_tcp_addresses: str | Sequence[str] = (),
    lookupd_http_addresses: str | Sequence[str] = (),
    options: ClientOptions | Mapping[str, str] | None = None,
    max_attempts: int = 0,
    dead_letter_file: str | Path | None = None,
    exit_idle_s: float | None = None,
) -> Forwarder:
    """Return a `Forwarder` of topics to your own sink; its `run` delivers.

    Args:
        options: a mapping of texts in the syntax of ``nsq -X`` is deprecated. By default, options
            for many messages: ``max_in_flight`` is 2500.
        max_attempts: a message that failed this often goes to ``dead_letter_file``; 0 is without
            limit.
        dead_letter_file: refused messages are appended here; without a file they stay in their
            queue.
        exit_idle_s: `Forwarder.run` returns after this many seconds without messages.

    Raises `ConfigurationError` for invalid arguments and for ``max_attempts`` without a file, and
    `OutputError` if the file cannot be opened.
    """
    for method in ("parts", "submit", "check", "stop"):
        check_argument(f"sink.{method}", getattr(sink, method, None), Callable)
    check_argument("options", options, ClientOptions, Mapping, NONE)
    check_argument("max_attempts", max_attempts, int)
    if exit_idle_s is not None:
        check_times(exit_idle_s=exit_idle_s)
    if isinstance(options, Mapping):
        text = "forward_to takes ClientOptions; nsqtools 0.5 accepts no texts as options"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        options = ClientOptions(**THROUGHPUT).with_options(options)
    if max_attempts and dead_letter_file is None:
        raise ConfigurationError("max_attempts needs a dead_letter_file")
    connection = ConnectionSettings(
        tuple(check_texts("nsqd_tcp_addresses", nsqd_tcp_addresses)),
        tuple(check_texts("lookupd_http_addresses", lookupd_http_addresses)),
    )
    topics = tuple(dict.fromkeys(map(check_topic, check_texts("topic", topic))))
    check_argument("channel", channel, str)
    settings = ForwardSettings(
        ConsumedTopics(topics, connection),
        check_channel(channel),
        options or ClientOptions(**THROUGHPUT),
        max_attempts=max_attempts,
        trusted=False,
    )
    return Forwarder(
        settings,
        sink,
        dead_letters=DeadLetterFile(Path(dead_letter_file)) if dead_letter_file else None,
        limits=RunLimits(None, exit_idle_s, None),
    )
