"""Deliver parcels: hand them to the sink, and decide what follows from each outcome.

What was delivered is finished on the thread of the sink that reports it. Everything else comes back
to the forwarder's thread, which alone decides:

    delivered     FIN
    unknown       sent again, and counted: it may be there twice
    unreachable   held, touched, and sent again when a destination works; nothing more is taken
                  meanwhile, and nothing counts against the messages
    busy          REQ, and as with unreachable nothing more is taken for a while
    failed        REQ, with the delay that the destination asks for; a dead letter when it was tried
                  max_attempts times
    refused       a dead letter; without a place for those REQ: it stays in the queue
    dropped       FIN, counted

A part that nothing refers to any more has failed: it cannot be reported, as when a pool of the sink
swallowed an exception. One that takes long is only logged, as it may yet arrive; its messages are
touched, and what nsqd delivers of them again is not delivered here (`client.backlog`).

The circuit is open while no destination works: one parcel is sent to see whether one does again,
and when it arrives the others follow.

Traps. What is under way may be limited in bytes, so that a sink need not block. What waits is
touched, for as long as nsqd lets it. So is what comes while the circuit is open, which is taken and
waits here: in the client it would expire, and count as tried.

A dead letter is kept in a topic on the nsqd that delivered the message, or in a file. A message is
finished only when its dead letter is confirmed, or on disk. When that fails the message is
requeued, and comes again.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import reprlib
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nsqtools.client.attempts import MAX_REMEMBERED, Attempts, Key, keys_of
from nsqtools.client.dead_letters import DeadLetters
from nsqtools.client.message import Batch, Message, MessageSource, touch_when_due
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.topics import ChangeLog
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.durable import append_whole, sync_folder
from nsqtools.files.opening import locked
from nsqtools.forward.parcel import (
    Circuit,
    Counters,
    Fate,
    BatchingSink,
    Outcome,
    Parcel,
    Sink,
    WorkerSink,
)
from nsqtools.protocol.text import counted
from nsqtools.records.envelope import encode_dead_letter

log = logging.getLogger("nsqtools")

MAX_HELD_S = 60.0  # what waits longer for a destination goes back to its queue, but for one parcel
RETRY_BASE_S, RETRY_MAX_S = 0.1, 10.0
REQUEUE_BASE_S, REQUEUE_MAX_S = 1.0, 900.0
LATE_REPORT_SHARE = 0.5  # of msg_timeout, until a part without a report is logged
REPORT_CHECK_S, MAX_REPORT_CHECK_S = 0.2, 1.0  # between looks for the report of a part, as long as it waits
LOST = Outcome(Fate.FAILED, "the sink dropped it without a report", may_split=True)
DEAD_LETTER_RETRY_S = 30.0  # until a message comes again whose dead letter could not be kept


@dataclass(slots=True)
class _PendingReport:
    """Since when a sink has a part (inf: it is a dead letter), and whether its report has come, or
    is late."""

    since: float
    is_reported: bool = False
    is_late: bool = False
    next_check: float = 0.0


class Dispatcher:
    """Delivers to one sink. Its methods are called on the forwarder's thread.

    ``on_circuit`` is called with whether nothing more is to be taken now, ``window_bytes`` limits
    what is under way, and ``changed`` is set whenever an outcome has come.
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
        self.last_error = ""  # why something was not delivered, and nothing since
        self.is_open = False
        self.redelivered_count = 0  # messages, of those that went back to their queue
        self._requeued_keys: set[Key] = set()
        self._sink = sink
        self._counters = counters
        self._max_attempts = max_attempts
        self._attempts = Attempts(max_attempts)
        self._dead_letters = dead_letters
        self._on_circuit = on_circuit
        self._window_bytes = window_bytes
        self._slow_level = slow_level  # of what is logged of a sink that takes long
        self._lock = threading.Lock()
        self._under_way: dict[Parcel, _PendingReport] = {}
        self._invalid_report: ConfigurationError | None = None
        self._redelivered: deque[Message] = deque()
        self._under_way_bytes = 0
        self._outcomes: queue.SimpleQueue[tuple[Parcel, Outcome]] = queue.SimpleQueue()
        self._held: deque[Parcel] = deque()
        self._circuit = Circuit(RETRY_BASE_S, RETRY_MAX_S)
        self._is_stuck = False  # every worker of the sink hangs
        self._is_unreachable = False  # while the circuit is open: no destination works, or one is busy
        self._warned: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Tell whether `send` takes more."""
        return self.is_open or (not self._held and self._under_way_bytes < self._window_bytes)

    @property
    def is_failing(self) -> bool:
        """Tell whether nothing has arrived since a destination did not work."""
        return self._circuit.is_failing

    @property
    def is_idle(self) -> bool:
        return not self._under_way and not self._held and self._outcomes.empty()

    @property
    def is_silent(self) -> bool:
        """Tell whether nothing is to be done but what the sink has not reported for long."""
        with self._lock:
            waits = list(self._under_way.values())
        return all(wait.is_late for wait in waits) and not self._held and self._outcomes.empty()

    @property
    def held(self) -> int:
        """Messages under way, or waiting for a destination (from any thread)."""
        return sum(map(len, self._parcels()))

    def _parcels(self) -> list[Parcel]:
        with self._lock:
            return [*self._under_way, *self._held]

    def at_work(self) -> dict[Message, float]:
        """Return the messages under way or waiting, and since when (from any thread)."""
        return {m: parcel.began_at for parcel in self._parcels() for m in parcel.messages}

    def redelivered(self, message: Message) -> None:
        """Note that nsqd delivered a message again, which is no attempt (from any thread)."""
        self._redelivered.append(message)

    def send(self, parcel: Parcel) -> None:
        """Deliver a parcel, in the parts that suit the sink, or have it wait until `process_outcomes`: while the
        circuit is open, and where too much is under way."""
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
        """Raise `ConfigurationError` where messages would never be delivered, or be twice."""
        messages = [message for part in parts for message in part.messages]
        covered = len(set(messages).intersection(parcel.messages))
        if not len(messages) == covered == len(parcel):
            raise ConfigurationError(
                f"{self._name}.parts returned {counted(len(messages), 'message')}, of which"
                f" {covered} are different ones of the {len(parcel)} in the parcel",
                hint="Return parts that have each message of the parcel once.",
            )

    @property
    def _name(self) -> str:
        return type(self._sink).__name__

    def _deliver_held(self) -> bool:
        """Deliver the first of what waits that is still ours; return whether there was one."""
        while self._held:
            if (parcel := self._held.popleft().unanswered()) is not None:
                self._deliver(parcel)
                return True
        return False

    def count_redelivered(self, batch: Batch) -> None:
        """Count what comes again."""
        if self._requeued_keys:
            keys = set(keys_of(batch))
            self.redelivered_count += len(keys & self._requeued_keys)
            self._requeued_keys -= keys

    def refuse(self, parcel: Parcel, error: str) -> None:
        """Keep messages that cannot be delivered; where there is no place, in their queue."""
        if self._dead_letters is None:
            self._requeue(parcel, error, None)
            return
        self._warn("dead letter", f"{parcel.messages[0]!r} is a dead letter: {error}")
        for at in range(len(parcel)):  # alone, so that one that cannot be kept stops no other
            letter = parcel.part(at, at + 1)
            self._track([letter])  # touched until it is kept
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
        with self._lock:
            waits = {parcel: self._under_way.get(parcel) for parcel in parcels}
            fresh = [p for p, wait in waits.items() if wait is not None and not wait.is_reported]
            for parcel in fresh:
                self._under_way[parcel].is_reported = True
        if len(fresh) < len(parcels):
            self._warn("again", f"{self._name} reported a part again, or one that it was not given")
            if not fresh:
                return
        parcels = fresh
        is_delivered = outcome.fate is Fate.DELIVERED
        places: dict[MessageSource, list[Parcel]] = {}
        for parcel in parcels:
            places.setdefault(parcel.messages.source, []).append(parcel)
        for source, some in places.items():
            messages, topic = sum(map(len, some)), source.topic
            if outcome.repeated:
                self._counters.add(topic, repeated=outcome.repeated * messages)
            if is_delivered:
                # what nsqd has taken back meanwhile comes again
                together = Batch(source, chain.from_iterable(each.messages for each in some))
                again = messages - together.finish()
                size = sum(each.size for each in some)
                self._counters.add(topic, delivered=messages, bytes=size, repeated=again)
        if is_delivered:
            self.last_error = ""
            self._remove(*parcels)
        if not is_delivered or self.is_failing:
            for parcel in parcels:
                self._outcomes.put((parcel, outcome))
        self.changed.set()

    def _check_report(self, parcels: object, outcome: object) -> None:
        """Raise `ConfigurationError` for wrong arguments: here, and in `tick`, for a pool of the
        sink may swallow it."""
        wrong = ""
        if not isinstance(parcels, Collection) or not all(isinstance(p, Parcel) for p in parcels):
            wrong = f"{reprlib.repr(parcels)} where a list of parcels belongs"
        elif not isinstance(outcome, Outcome):
            wrong = f"{reprlib.repr(outcome)} where an Outcome belongs"
        else:
            fate, error, delay_s = list[Any](outcome)[:3]
            if not isinstance(fate, Fate):
                wrong = f"an Outcome whose fate is {reprlib.repr(fate)} and no Fate"
            elif not isinstance(error, str):
                wrong = f"an Outcome whose error is {reprlib.repr(error)} and no text"
            elif delay_s is not None and not (isinstance(delay_s, int | float) and delay_s >= 0):
                wrong = f"an Outcome whose retry_after_s is {reprlib.repr(delay_s)}"
        if wrong:
            hint = 'For example report([parcel], Outcome(Fate.FAILED, "disk full")).'
            self._invalid_report = ConfigurationError(f"{self._name} reported {wrong}", hint=hint)
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
        if len(self._requeued_keys) < MAX_REMEMBERED:  # else it counts as one that did not come again
            self._requeued_keys.update(parcel.keys())

    # -- outcomes -------------------------------------------------------------------------------

    def process_outcomes(self, now: float) -> None:
        """Act on the outcomes that have come."""
        while self._redelivered:
            message = self._redelivered.popleft()
            self._attempts.discount((message.topic, message.nsqd, message.id))
        while not self._outcomes.empty():
            parcel, outcome = self._outcomes.get()
            if outcome.fate is Fate.DELIVERED:
                self._on_recovery()
                continue
            self.last_error = outcome.error or self.last_error
            rest = parcel.unanswered()
            if rest is not None:
                self._process(rest, outcome, now)
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
                # one by one, or each try stores the first of them once more
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
        over = [
            limit > 0 and self._attempts.effective(key, message.attempts) >= limit
            for key, message in zip(parcel.keys(), parcel.messages, strict=True)
        ]
        if refused := [at for at, is_over in enumerate(over) if is_over]:
            self.refuse(parcel.chosen(refused), f"{outcome.error}, after {limit} attempts")
        if rest := [at for at, is_over in enumerate(over) if not is_over]:
            self._requeue(parcel.chosen(rest), outcome.error, outcome.retry_after_s)

    def _requeue(
        self, parcel: Parcel, error: str, delay_s: float | None, *, counts: bool = True
    ) -> None:
        self._warn("requeued", f"{parcel.messages[0]!r} is requeued: {error}")
        self._count_requeued(parcel)
        for key, message in zip(parcel.keys(), parcel.messages, strict=True):
            if not counts:
                self._attempts.discount(key)
            own_s = min(REQUEUE_MAX_S, REQUEUE_BASE_S * 2.0 ** min(message.attempts - 1, 20))
            message.requeue(own_s if delay_s is None else delay_s, backoff=False)

    def _warn(self, kind: str, line: str, level: int = logging.WARNING) -> None:
        """Log the first of a kind as a warning, and the others in detail only."""
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
        """Touch what waits, and see whether a destination works again. Raises what ended the
        sink."""
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
        # give back what others may be able to deliver, but for one parcel to try with
        while len(self._held) > 1 and now - self._held[-1].began_at > MAX_HELD_S:
            self._requeue(self._held.pop(), self.last_error, None, counts=False)
        if self._deliver_held():
            self._circuit.failed(now)  # until it has arrived
        elif not (self._is_unreachable and self._under_way):  # which may run for hours, if one is busy
            self._close_circuit()  # nothing is left to try with but the next message

    def _on_recovery(self) -> None:
        """Something has arrived."""
        if self.is_failing:
            self._circuit.worked()
            log.warning("delivering again")
        if self.is_open:
            self._close_circuit()

    def _close_circuit(self) -> None:
        """Let messages come and go again."""
        self.is_open = False
        self._circuit.retry_at = 0.0
        self._on_circuit(self._is_stuck)

    def _touch(self, now: float) -> None:
        for parcel in self._parcels():
            touch_when_due(parcel.messages, now)

    def _watch_workers(self, now: float) -> None:
        """Take no more messages while every worker of the sink hangs: others may handle them."""
        if not isinstance(self._sink, WorkerSink):
            return
        timeouts_s = [parcel.messages.source.msg_timeout_s for parcel in self._parcels()]
        is_stuck = bool(timeouts_s) and self._sink.is_stuck(now, max(timeouts_s)) is True
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            state = "taking no more messages until one is done" if is_stuck else "going on"
            line = "each worker of %s takes longer than msg_timeout; %s"
            log.log(self._slow_level, line, self._name, state)
            self._on_circuit(is_stuck or self.is_open)

    def _watch_reports(self, now: float) -> None:
        """Log what the sink does not report, and fail what it cannot report any more."""
        late, lost, references = list[Parcel](), list[Parcel](), []
        parcel: Parcel | None
        with self._lock:  # nothing is reported meanwhile
            for parcel, wait in list(self._under_way.items()):
                waited_s = now - wait.since
                if wait.is_reported or waited_s < REPORT_CHECK_S or now < wait.next_check:
                    continue
                wait.next_check = now + min(waited_s, MAX_REPORT_CHECK_S)
                whole = parcel.part(0, len(parcel))
                if waited_s > LATE_REPORT_SHARE * whole.messages.source.msg_timeout_s:
                    late += [] if wait.is_late else [whole]
                    wait.is_late = True
                references.append((weakref.ref(parcel), whole, self._under_way.pop(parcel)))
            parcel = None  # or we would be what refers to it
            for reference, whole, wait in references:
                if (parcel := reference()) is not None:
                    self._under_way[parcel] = wait
                else:
                    self._under_way[whole] = _PendingReport(math.inf, is_reported=True)
                    lost.append(whole)
        for whole in lost:
            self._outcomes.put((whole, LOST))
        for whole in late:
            self._counters.add(whole.messages.topic, unreported=len(whole))
        if late:
            count = counted(sum(map(len, late)), "message")
            share = f"{LATE_REPORT_SHARE:.0%} of msg_timeout"
            line = f"{self._name} has not reported {count} within {share}: {late[0].messages[0]!r}"
            self._warn("unreported", line, self._slow_level)

    # -- ending ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """No more messages come that those could wait for which the sink gathers."""
        if isinstance(self._sink, BatchingSink):
            self._sink.flush()

    def drain(self, timeout_s: float, on_iteration: Callable[[], None]) -> None:
        """Wait for what is under way; give the rest back. Closes the sink."""
        until = time.monotonic() + timeout_s
        self.flush()
        while not self.is_idle and (now := time.monotonic()) < until:
            self.process_outcomes(now)
            self._give_back(self._held)
            self._touch(now)
            on_iteration()
            self.changed.wait(0.05)
            self.changed.clear()
        self._window_bytes = 0.0  # nothing is delivered from here on
        try:
            self._sink.stop(max(0.1, until - time.monotonic()))
        except Exception:
            log.exception("the stop of %s failed", self._name)
        self.process_outcomes(time.monotonic())
        if self._dead_letters is not None:
            self._dead_letters.close()
        self._give_back(self._held)
        self._give_back(deque(self._under_way))

    def _give_back(self, parcels: deque[Parcel]) -> None:
        while parcels:
            parcel = parcels.popleft()
            count = parcel.messages.requeue(0, backoff=False)
            self._counters.add(parcel.messages.topic, requeued=count)


# -- where dead letters are kept -------------------------------------------------------------------


OnKept = Callable[[Parcel, bool], None]


class DeadLetterTopic:
    """Publishes the raw bodies to a topic, on the nsqd that each came from."""

    def __init__(self, topic: str, options: ClientOptions) -> None:
        self._letters = DeadLetters(topic, options)

    def put(self, parcel: Parcel, error: str, kept: OnKept) -> None:
        """Publish the messages as they came, not as they would have been sent.

        ``kept`` is called with the result, perhaps on another thread.
        """

        def ended(error: NsqError | None) -> None:
            if error is not None:
                log.warning("dead letters for %s: %s", self._letters.topic, error)
            kept(parcel, error is None)

        messages = parcel.messages
        self._letters.publish(messages.nsqd, [message.body for message in messages], ended)

    def close(self) -> None:
        """Wait for what is under way."""
        self._letters.stop()


class DeadLetterFile:
    """Appends lines to a file, each on disk before its message is finished.

    Raises `OutputError` when the file cannot be opened, or is none. It is opened for each put,
    because it may be renamed or removed meanwhile. A line that a crash tore is ended first. Several
    processes may share a file: it is locked while one writes, because what could not be written
    whole is cut off again, and nothing of another's must be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._change_log = ChangeLog()
        try:
            with self._opened() as fd:
                is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError as exc:
            raise OutputError(f"cannot write {path} ({exc.strerror})") from exc
        if not is_file:
            raise OutputError(f"dead letters must be in a regular file, and {path} is not one")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file that has the name now, locked, and its last line ended."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with locked(fd):
                size = os.fstat(fd).st_size
                if not size:
                    sync_folder(self._path.parent)
                elif os.pread(fd, 1, size - 1) != b"\n":
                    os.write(fd, b"\n")
                yield fd
        finally:
            os.close(fd)

    def put(self, parcel: Parcel, error: str, kept: OnKept) -> None:
        """Write the messages as they came, with the reason."""
        messages, now_ns = parcel.messages, time.time_ns()
        lines = b"".join(
            encode_dead_letter(
                messages.topic, messages.nsqd, message, error=error, failed_at_ns=now_ns
            )
            for message in messages
        )
        try:
            with self._opened() as fd:
                append_whole(fd, lines)
        except OSError as exc:
            self._change_log.report("", f"cannot write {self._path} ({exc.strerror})")
            kept(parcel, False)
        else:
            self._change_log.resolve("")
            kept(parcel, True)

    def close(self) -> None:
        """Nothing is open."""


DeadLetterBox = DeadLetterTopic | DeadLetterFile
