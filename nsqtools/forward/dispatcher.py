"""Hand parcels to the sink and decide what each outcome means for their messages.

The thread of the sink that reports a delivery finishes its messages. Every other outcome goes to
the forwarder's thread, which alone decides:

    delivered     FIN
    unknown       sent again, and counted because the destination may now have it twice
    unreachable   held, touched, and sent again when a destination works; meanwhile the consumers
                  are paused, and the attempt does not count
    busy          REQ; the consumers are paused for a while, and the attempt does not count
    failed        REQ with the delay that the destination asks for; a dead letter after max_attempts
    refused       a dead letter; REQ if dead letters have no destination
    dropped       FIN, counted

A part that is no longer referenced has failed, because nobody can report it. This happens when a
pool of the sink swallows an exception. A slow part is only logged, because it may still arrive. Its
messages are touched, and `client.backlog` drops the copies that nsqd redelivers.

The circuit is open while no destination works. One parcel is sent as a probe; when it arrives, the
others follow.

Traps. Bytes under way are limited, so that the sink does not need to block. Waiting messages are
touched for as long as nsqd allows it. Messages that arrive while the circuit is open are accepted
and wait here: in the client they would time out, which counts as an attempt.

Dead letters go to a topic on the nsqd that delivered the message, or to a file. A message is
finished only after its dead letter is confirmed or on disk; otherwise it is requeued.
"""

from __future__ import annotations

import logging
import math
import queue
import reprlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nsqtools.client.attempts import MAX_RECORDS, Attempts, MessageKey, keys_of
from nsqtools.client.change_log import ChangeLog
from nsqtools.client.dead_letters import DeadLetters
from nsqtools.client.message import Batch, Message, MessageSource, touch_when_due
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.durable import LineFile
from nsqtools.forward.parcel import Circuit, Counters, Fate, Outcome, Parcel, Sink
from nsqtools.protocol.text import counted
from nsqtools.records.envelope import encode_dead_letter

log = logging.getLogger("nsqtools")

# Another consumer of the channel may reach its destination, so held parcels are requeued after a
# minute, the default msg_timeout. One parcel stays as the probe.
MAX_HELD_S = 60.0
# A destination that restarts is back within a second or two. Ten seconds limit both the load of the
# probes and the delay after a long outage.
RETRY_BASE_S, RETRY_MAX_S = 0.1, 10.0
# The delay doubles with each attempt. nsqd refuses delays above 1 h by default (max-req-timeout);
# 15 minutes let an operator see the effect of a fix.
REQUEUE_BASE_S, REQUEUE_MAX_S = 1.0, 900.0
# Half of msg_timeout leaves the operator time to react before nsqd redelivers the first message.
LATE_REPORT_SHARE = 0.5
# A part is checked for lost references after 0.2 s and then after as long as it has waited, at most
# 1 s: thousands of parts may be under way, and each check copies the part.
REPORT_CHECK_S, MAX_REPORT_CHECK_S = 0.2, 1.0
LOST = Outcome(Fate.FAILED, "the sink dropped it without a report", may_split=True)
# A disk that is full or an nsqd that is gone rarely recovers sooner.
DEAD_LETTER_RETRY_S = 30.0


@dataclass(slots=True)
class _PendingReport:
    """The time when a part was submitted (inf for a dead letter) and the state of its report."""

    since: float
    is_reported: bool = False
    is_late: bool = False
    next_check: float = 0.0


class Dispatcher:
    """Deliver parcels to one sink. Methods are for the forwarder's thread unless noted.

    ``on_circuit`` is called with True to pause the consumers and False to resume them.
    ``window_bytes`` limits the bytes under way. ``changed`` is set after each report.
    """

    def __init__(
        self,
        sink: Sink,
        counters: Counters,
        *,
        max_attempts: int,
        dead_letters: DeadLetterBox | None,
        on_circuit: Callable[[bool], None],
        window_bytes: float = math.inf,
        slow_level: int = logging.WARNING,
    ) -> None:
        self.changed = threading.Event()
        self.last_error = ""  # of the last failure, until a delivery
        self.is_open = False
        self.redelivered_count = 0  # messages that this run requeued and received again
        self._requeued_keys: set[MessageKey] = set()
        self._sink = sink
        # looked up as attributes, so that a wrapper of a sink may pass them on
        self._flush_sink: Callable[[], None] | None = getattr(sink, "flush", None)
        self._is_sink_stuck: Callable[[float, float], bool] | None
        self._is_sink_stuck = getattr(sink, "is_stuck", None)
        self._counters = counters
        self._max_attempts = max_attempts
        self._attempts = Attempts(max_attempts)
        self._dead_letters = dead_letters
        self._on_circuit = on_circuit
        self._window_bytes = window_bytes
        self._slow_level = slow_level  # log level for a slow sink
        self._lock = threading.Lock()
        self._under_way: dict[Parcel, _PendingReport] = {}
        self._invalid_report: ConfigurationError | None = None
        self._redelivered: deque[Message] = deque()
        self._under_way_bytes = 0
        self._outcomes: queue.SimpleQueue[tuple[Parcel, Outcome]] = queue.SimpleQueue()
        self._held: deque[Parcel] = deque()
        self._circuit = Circuit(RETRY_BASE_S, RETRY_MAX_S)
        self._is_stuck = False  # every worker of the sink hangs
        self._is_unreachable = False  # why the circuit is open: unreachable, or else busy
        self._warned: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether `send` delivers a parcel without queueing it."""
        return self.is_open or (not self._held and self._under_way_bytes < self._window_bytes)

    @property
    def is_failing(self) -> bool:
        """Whether no delivery has succeeded since the last failure."""
        return self._circuit.is_failing

    @property
    def is_idle(self) -> bool:
        return not self._under_way and not self._held and self._outcomes.empty()

    @property
    def is_silent(self) -> bool:
        """Whether all remaining work is late reports of the sink."""
        with self._lock:
            reports = list(self._under_way.values())
        return all(r.is_late for r in reports) and not self._held and self._outcomes.empty()

    @property
    def held(self) -> int:
        """Number of messages under way or waiting for a destination (any thread)."""
        return sum(map(len, self._parcels()))

    def _parcels(self) -> list[Parcel]:
        with self._lock:
            return [*self._under_way, *self._held]

    def at_work(self) -> dict[Message, float]:
        """Return the messages under way or waiting, by the time of their first try (any thread)."""
        return {m: parcel.began_at for parcel in self._parcels() for m in parcel.messages}

    def redelivered(self, message: Message) -> None:
        """Discount the attempt of a message that nsqd redelivered while it is here (any thread)."""
        self._redelivered.append(message)

    def send(self, parcel: Parcel) -> None:
        """Deliver a parcel in the parts that the sink chooses.

        While the circuit is open or the window is full, it waits for `process_outcomes`.
        """
        if self.is_open or self._under_way_bytes >= self._window_bytes:
            self._held.append(parcel)
        else:
            self._deliver(parcel)

    def _deliver(self, parcel: Parcel) -> None:
        parts = self._sink.parts(parcel)
        if parts != [parcel]:
            self._check_parts(parcel, parts)
        self._track(parts, time.monotonic())
        for part in parts:
            self._sink.submit(part, self._report)

    def _check_parts(self, parcel: Parcel, parts: list[Parcel]) -> None:
        """Raise `ConfigurationError` if the parts omit or repeat a message."""
        messages = [message for part in parts for message in part.messages]
        covered = len(set(messages).intersection(parcel.messages))
        if not len(messages) == covered == len(parcel):
            raise ConfigurationError(
                f"{self._name}.parts returned {counted(len(messages), 'message')}, and only"
                f" {covered} of the {len(parcel)} in the parcel",
                hint="Return parts that contain each message of the parcel once.",
            )

    @property
    def _name(self) -> str:
        return type(self._sink).__name__

    def _deliver_held(self) -> bool:
        """Deliver the first held parcel that nsqd has not taken back, if there is one."""
        while self._held:
            if (parcel := self._held.popleft().unanswered()) is not None:
                self._deliver(parcel)
                return True
        return False

    def count_redelivered(self, batch: Batch) -> None:
        """Count the messages of a batch that this run has requeued before."""
        if self._requeued_keys:
            keys = set(keys_of(batch))
            self.redelivered_count += len(keys & self._requeued_keys)
            self._requeued_keys -= keys

    def refuse(self, parcel: Parcel, error: str) -> None:
        """Make dead letters of messages, or requeue them if dead letters have no destination."""
        if self._dead_letters is None:
            self._requeue(parcel, error, None)
            return
        self._warn("dead letter", f"{parcel.messages[0]!r} is a dead letter: {error}")
        for at in range(len(parcel)):
            # One at a time: a dead letter that nsqd refuses must not fail the others of its MPUB.
            letter = parcel.part(at, at + 1)
            self._track([letter])  # so that it is touched meanwhile
            self._dead_letters.put(letter, error, self._on_dead_letter)

    # -- from any thread ------------------------------------------------------------------------

    def _track(self, parcels: list[Parcel], since: float = math.inf) -> None:
        with self._lock:
            for parcel in parcels:
                self._under_way[parcel] = _PendingReport(since)
                self._under_way_bytes += parcel.size

    def _remove(self, *parcels: Parcel) -> None:
        with self._lock:
            for parcel in parcels:
                if self._under_way.pop(parcel, None) is not None:
                    self._under_way_bytes -= parcel.size

    def _report(self, parcels: Sequence[Parcel], outcome: Outcome) -> None:
        self._check_report(parcels, outcome)
        unreported: list[Parcel] = []
        with self._lock:
            for parcel in dict.fromkeys(parcels):
                pending = self._under_way.get(parcel)
                if pending is not None and not pending.is_reported:
                    pending.is_reported = True
                    unreported.append(parcel)
        if len(unreported) < len(parcels):
            self._warn("again", f"{self._name} reported a part twice, or one that is unknown")
            if not unreported:
                return
        parcels = unreported
        is_delivered = outcome.fate is Fate.DELIVERED
        by_source: dict[MessageSource, list[Parcel]] = {}
        for parcel in parcels:
            by_source.setdefault(parcel.messages._source, []).append(parcel)
        for source, group in by_source.items():
            count, topic = sum(map(len, group)), source.topic
            if outcome.repeated:
                self._counters.add(topic, repeated=outcome.repeated * count)
            if is_delivered:
                # One batch for each connection, so that its FINs leave in one write. nsqd will
                # redeliver the messages that it has taken back meanwhile.
                batch = Batch(source, chain.from_iterable(parcel.messages for parcel in group))
                redelivered = count - batch.finish()
                size = sum(parcel.size for parcel in group)
                self._counters.add(topic, delivered=count, bytes=size, repeated=redelivered)
        if is_delivered:
            self.last_error = ""
            self._remove(*parcels)
        if not is_delivered or self.is_failing:
            for parcel in parcels:
                self._outcomes.put((parcel, outcome))
        self.changed.set()

    def _check_report(self, parcels: object, outcome: object) -> None:
        """Raise `ConfigurationError` for wrong arguments.

        `tick` raises it again, because a thread pool of the sink may swallow it here.
        """
        problem = ""
        if not isinstance(parcels, Collection) or not all(isinstance(p, Parcel) for p in parcels):
            problem = f"{reprlib.repr(parcels)} where a list of parcels belongs"
        elif not isinstance(outcome, Outcome):
            problem = f"{reprlib.repr(outcome)} where an Outcome belongs"
        else:
            fate, error, delay_s = list[Any](outcome)[:3]
            if not isinstance(fate, Fate):
                problem = f"an Outcome whose fate is {reprlib.repr(fate)} and no Fate"
            elif not isinstance(error, str):
                problem = f"an Outcome whose error is {reprlib.repr(error)} and no text"
            elif delay_s is not None and not (isinstance(delay_s, int | float) and delay_s >= 0):
                problem = f"an Outcome whose retry_after_s is {reprlib.repr(delay_s)}"
        if problem:
            hint = 'For example report([parcel], Outcome(Fate.FAILED, "disk full")).'
            self._invalid_report = ConfigurationError(f"{self._name} reported {problem}", hint=hint)
            self.changed.set()
            raise self._invalid_report

    def _on_dead_letter(self, parcel: Parcel, is_kept: bool) -> None:
        topic = parcel.messages.topic
        if is_kept:
            self._counters.add(topic, dead_lettered=len(parcel))
            parcel.messages.finish()
        else:
            self._count_requeued(parcel)
            parcel.messages.requeue(DEAD_LETTER_RETRY_S, backoff=False)
        self._remove(parcel)
        self.changed.set()

    def _count_requeued(self, parcel: Parcel) -> None:
        self._counters.add(parcel.messages.topic, requeued=len(parcel))
        # Beyond the limit of memory, a message counts as not redelivered.
        if len(self._requeued_keys) < MAX_RECORDS:
            self._requeued_keys.update(parcel.keys())

    # -- outcomes -------------------------------------------------------------------------------

    def process_outcomes(self, now: float) -> None:
        """Process the reported outcomes, then deliver held parcels as far as there is room."""
        while self._redelivered:
            message = self._redelivered.popleft()
            self._attempts.discount((message.topic, message.nsqd, message.id))
        while not self._outcomes.empty():
            parcel, outcome = self._outcomes.get()
            if outcome.fate is Fate.DELIVERED:
                self._on_recovery()
                continue
            self.last_error = outcome.error or self.last_error
            unanswered = parcel.unanswered()
            if unanswered is not None:
                self._process(unanswered, outcome, now)
            self._remove(parcel)
        while self._held and not self.is_open and self._under_way_bytes < self._window_bytes:
            self._deliver_held()

    def _process(self, parcel: Parcel, outcome: Outcome, now: float) -> None:
        topic = parcel.messages.topic
        is_split = outcome.may_split and len(parcel) > 1 and outcome.fate is not Fate.UNKNOWN
        if outcome.fate is Fate.DROPPED and not is_split:
            self._counters.add(topic, dropped=len(parcel))
            parcel.messages.finish()
            return
        self._counters.add(topic, failures=1)
        if is_split:
            middle = len(parcel) // 2
            self.send(parcel.part(0, middle))
            self.send(parcel.part(middle, len(parcel)))
            return
        match outcome.fate:
            case Fate.UNKNOWN:
                self._counters.add(topic, repeated=len(parcel))
                # A partly stored batch is sent one by one, or each try would store the messages at
                # its beginning once more.
                size = 1 if outcome.may_split else len(parcel)
                for at in range(0, len(parcel), size):
                    self._hold(parcel.part(at, at + size), outcome.error, now)
            case Fate.UNREACHABLE:
                self._hold(parcel, outcome.error, now)
            case Fate.BUSY:
                self._requeue(parcel, outcome.error, outcome.retry_after_s, counts=False)
                self._open_circuit(outcome.error, now, is_unreachable=False)
            case Fate.FAILED:
                self._failed(parcel, outcome)
            case _:
                self.refuse(parcel, outcome.error)

    def _failed(self, parcel: Parcel, outcome: Outcome) -> None:
        limit = self._max_attempts
        exhausted, remaining = dict[int, list[int]](), list[int]()
        for at, (key, message) in enumerate(zip(parcel.keys(), parcel.messages, strict=True)):
            attempts = self._attempts.effective(key, message.attempts)
            is_exhausted = limit > 0 and attempts >= limit
            (exhausted.setdefault(attempts, []) if is_exhausted else remaining).append(at)
        for attempts, indexes in exhausted.items():
            error = f"{outcome.error}, after {counted(attempts, 'attempt')}"
            self.refuse(parcel.chosen(indexes), error)
        if remaining:
            self._requeue(parcel.chosen(remaining), outcome.error, outcome.retry_after_s)

    def _requeue(
        self, parcel: Parcel, error: str, delay_s: float | None, *, counts: bool = True
    ) -> None:
        self._warn("requeued", f"{parcel.messages[0]!r} is requeued: {error}")
        self._count_requeued(parcel)
        for key, message in zip(parcel.keys(), parcel.messages, strict=True):
            if not counts:
                self._attempts.discount(key)
            default_s = min(REQUEUE_MAX_S, REQUEUE_BASE_S * 2.0 ** min(message.attempts - 1, 20))
            message.requeue(default_s if delay_s is None else delay_s, backoff=False)

    def _warn(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        """Log the first line of a kind at ``level`` and the later ones as INFO."""
        log.log(logging.INFO if kind in self._warned else level, "%s", line)
        self._warned.add(kind)

    # -- while no destination works -------------------------------------------------------------

    def _hold(self, parcel: Parcel, error: str, now: float) -> None:
        self._held.append(parcel)
        self._open_circuit(error, now, is_unreachable=True)

    def _open_circuit(self, error: str, now: float, *, is_unreachable: bool) -> None:
        self._is_unreachable = is_unreachable
        if not self.is_open:
            self.is_open = True
            self._on_circuit(True)
        if not self.is_failing:
            log.warning("cannot deliver: %s; holding messages and trying again", error)
        self._circuit.failed(now)

    def tick(self, now: float) -> None:
        """Touch waiting messages and probe the destination. Raises the error of a broken sink."""
        if self._invalid_report is not None:
            raise self._invalid_report
        self._sink.check()
        self._touch(now)
        self._watch_reports(now)
        self._watch_workers(now)
        if self.is_open and not self._circuit.is_open(now):
            self._probe(now)

    def _probe(self, now: float) -> None:
        """Send one parcel; the others follow when it has arrived."""
        while len(self._held) > 1 and now - self._held[-1].began_at > MAX_HELD_S:
            self._requeue(self._held.pop(), self.last_error, None, counts=False)
        if self._deliver_held():
            self._circuit.failed(now)  # until it arrives
        elif not (self._is_unreachable and self._under_way):
            # The next message is the probe. Parcels under way are one only if the destination was
            # unreachable: a command that runs for hours proves nothing about one that was busy.
            self._close_circuit()

    def _on_recovery(self) -> None:
        """Close the circuit, because a delivery has succeeded."""
        if self.is_failing:
            self._circuit.worked()
            log.warning("delivering again")
        if self.is_open:
            self._close_circuit()

    def _close_circuit(self) -> None:
        """Resume deliveries, and the consumers unless every worker hangs."""
        self.is_open = False
        self._circuit.retry_at = 0.0
        self._on_circuit(self._is_stuck)

    def _touch(self, now: float) -> None:
        for parcel in self._parcels():
            touch_when_due(parcel.messages, now)

    def _watch_workers(self, now: float) -> None:
        """Pause the consumers while every worker hangs; other consumers get the messages."""
        if self._is_sink_stuck is None:
            return
        timeouts_s = [parcel.messages._source.msg_timeout_s for parcel in self._parcels()]
        is_stuck = bool(timeouts_s) and self._is_sink_stuck(now, max(timeouts_s)) is True
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            line = "every worker of %s takes longer than msg_timeout; pausing until one is done"
            if not is_stuck:
                line = "a worker of %s is done; resuming"
            log.log(self._slow_level, line, self._name)
            self._on_circuit(is_stuck or self.is_open)

    def _watch_reports(self, now: float) -> None:
        """Log late reports, and fail the parts that nobody can report any more.

        A part is lost if its weak reference dies once `_under_way` no longer refers to it. A copy
        of it takes its place then.
        """
        late, lost, references = list[Parcel](), list[Parcel](), []
        parcel: Parcel | None
        with self._lock:  # a report would not find the parts that are taken out
            for parcel, pending in list(self._under_way.items()):
                waited_s = now - pending.since
                if pending.is_reported or waited_s < REPORT_CHECK_S or now < pending.next_check:
                    continue
                pending.next_check = now + min(waited_s, MAX_REPORT_CHECK_S)
                copy = parcel.part(0, len(parcel))
                if waited_s > LATE_REPORT_SHARE * copy.messages._source.msg_timeout_s:
                    late += [] if pending.is_late else [copy]
                    pending.is_late = True
                references.append((weakref.ref(parcel), copy, self._under_way.pop(parcel)))
            parcel = None  # the loop variable would keep the last one alive
            for reference, copy, pending in references:
                if (parcel := reference()) is not None:
                    self._under_way[parcel] = pending
                else:
                    self._under_way[copy] = _PendingReport(math.inf, is_reported=True)
                    lost.append(copy)
        for copy in lost:
            self._outcomes.put((copy, LOST))
        for copy in late:
            self._counters.add(copy.messages.topic, unreported=len(copy))
        if late:
            count = counted(sum(map(len, late)), "message")
            share = f"{LATE_REPORT_SHARE:.0%} of msg_timeout"
            line = f"{self._name} has not reported {count} within {share}: {late[0].messages[0]!r}"
            self._warn("unreported", line, self._slow_level)

    # -- ending ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have the sink deliver incomplete batches, because no more messages will arrive."""
        if self._flush_sink is not None:
            self._flush_sink()

    def drain(self, timeout_s: float, on_iteration: Callable[[], None]) -> None:
        """Wait for deliveries under way, requeue the other messages and stop the sink."""
        until = time.monotonic() + timeout_s
        self.flush()
        while not self.is_idle and (now := time.monotonic()) < until:
            self.process_outcomes(now)
            self._requeue_all(self._held)
            self._touch(now)
            on_iteration()
            self.changed.wait(0.05)
            self.changed.clear()
        self._window_bytes = 0.0  # no deliveries from here on
        try:
            self._sink.stop(max(0.1, until - time.monotonic()))
        except Exception:
            log.exception("the stop of %s failed", self._name)
        self.process_outcomes(time.monotonic())
        if self._dead_letters is not None:
            self._dead_letters.close()
        self._requeue_all(self._held)
        self._requeue_all(deque(self._under_way))

    def _requeue_all(self, parcels: deque[Parcel]) -> None:
        while parcels:
            parcel = parcels.popleft()
            count = parcel.messages.requeue(0, backoff=False)
            self._counters.add(parcel.messages.topic, requeued=count)


# -- destinations of dead letters ------------------------------------------------------------------


OnKept = Callable[[Parcel, bool], None]


class DeadLetterTopic:
    """Publish the original bodies to a topic, each on the nsqd that delivered the message."""

    def __init__(self, topic: str, options: ClientOptions) -> None:
        self._letters = DeadLetters(topic, options)

    def put(self, parcel: Parcel, error: str, kept: OnKept) -> None:
        """Publish the messages with their original bodies.

        ``kept`` is called with the result, maybe on another thread.
        """

        def on_published(error: NsqError | None) -> None:
            if error is not None:
                log.warning("dead letters for %s: %s", self._letters.topic, error)
            kept(parcel, error is None)

        messages = parcel.messages
        self._letters.publish(messages.nsqd, [message.body for message in messages], on_published)

    def close(self) -> None:
        """Wait for publishes under way."""
        self._letters.stop()


class DeadLetterFile:
    """Append lines to a file, each synced before its message is finished.

    Raises `OutputError` as `LineFile`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._change_log = ChangeLog()

    def put(self, parcel: Parcel, error: str, kept: OnKept) -> None:
        """Write the messages with their original bodies and the reason."""
        messages, now_ns = parcel.messages, time.time_ns()
        lines = b"".join(
            encode_dead_letter(
                messages.topic, messages.nsqd, message, error=error, failed_at_ns=now_ns
            )
            for message in messages
        )
        try:
            self._file.append(lines)
        except OSError as exc:
            self._change_log.report("", f"cannot write {self._file.path} ({exc.strerror})")
            kept(parcel, False)
        else:
            self._change_log.resolve("")
            kept(parcel, True)

    def close(self) -> None:
        """Do nothing: the file is open only while `put` runs."""


DeadLetterBox = DeadLetterTopic | DeadLetterFile
