"""Deliver parcels: hand them to the sink, and decide what follows from each outcome.

What was delivered is finished on the thread of the sink that reports it. Everything else comes back
to the forwarder's thread, which alone decides:

    delivered     FIN
    unknown       sent again, and counted: it may be there twice
    unreachable   held, touched, and sent again when a destination works; nothing more is taken
                  meanwhile, and nothing counts against the messages
    failed        REQ, with the delay that the destination asks for; a dead letter when it was tried
                  max_attempts times
    refused       a dead letter; without a place for those REQ: it stays in the queue
    dropped       FIN, counted

The circuit is open while no destination works: one parcel is sent to see whether one does again,
and when it arrives the others follow.

Traps. What is under way is limited in bytes as well, so that a sink never has to block. A message
that waits is touched, for as long as nsqd lets it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from nsqtools.client.message import Batch
from nsqtools.client.reconnect import RetryDelays
from nsqtools.forward.dead_letter_box import DeadLetterBox
from nsqtools.forward.parcel import Fate, Outcome, Parcel, Sink
from nsqtools.forward.totals import Counters

log = logging.getLogger("nsqtools")

WINDOW_BYTES = 3 << 20  # below the producer's, which would block
TOUCH_SHARE = 0.5  # of msg_timeout
HOLD_S = 60.0  # what waits longer for a destination goes back to its queue, but for one parcel
RETRY_BASE_S, RETRY_MAX_S = 0.1, 10.0
REQUEUE_BASE_S, REQUEUE_MAX_S = 1.0, 900.0
UNKEPT_S = 30.0  # until a message comes again whose dead letter could not be kept


class Courier:
    """Delivers to one sink. Its methods are called on the forwarder's thread.

    ``on_circuit`` is called with whether the circuit is open now. ``changed`` is set whenever an
    outcome has come.
    """

    def __init__(
        self,
        sink: Sink,
        counters: Counters,
        *,
        max_attempts: int,
        dead_letters: DeadLetterBox | None,
        on_circuit: Callable[[bool], None],
    ) -> None:
        self.changed = threading.Event()
        self.last_error = ""
        self.is_open = False
        self.is_failing = False  # until something has arrived again
        self._sink = sink
        self._counters = counters
        self._max_attempts = max_attempts
        self._dead_letters = dead_letters
        self._on_circuit = on_circuit
        self._lock = threading.Lock()
        self._under_way: dict[Parcel, None] = {}
        self._under_way_bytes = 0
        self._outcomes: queue.SimpleQueue[tuple[Parcel, Outcome]] = queue.SimpleQueue()
        self._held: deque[Parcel] = deque()
        self._retry_at = 0.0
        self._delays = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._warned: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Tell whether more may be sent."""
        return self._under_way_bytes < WINDOW_BYTES and not self.is_open

    @property
    def is_idle(self) -> bool:
        return not self._under_way and not self._held and self._outcomes.empty()

    @property
    def held(self) -> int:
        """Messages under way, or waiting for a destination (from any thread)."""
        with self._lock:
            return sum(map(len, [*self._under_way, *self._held]))

    def send(self, parcel: Parcel) -> None:
        """Deliver a parcel, in the parts that suit the sink."""
        parts = self._sink.parts(parcel)
        self._add(parts)
        for part in parts:
            self._sink.submit(part, self._report)

    def refuse(self, parcel: Parcel, error: str) -> None:
        """Keep messages that cannot be delivered; where there is no place, in their queue."""
        if self._dead_letters is None:
            self._requeue(parcel, error, None)
            return
        self._warn("dead letter", f"{parcel.messages[0]!r} is a dead letter: {error}")
        for at in range(len(parcel)):  # alone, so that one that cannot be kept stops no other
            letter = parcel.part(at, at + 1)
            self._add([letter])  # touched until it is kept
            self._dead_letters.put(letter, error, self._kept)

    # -- from any thread ------------------------------------------------------------------------

    def _add(self, parcels: list[Parcel]) -> None:
        with self._lock:
            for parcel in parcels:
                self._under_way[parcel] = None
                self._under_way_bytes += parcel.size

    def _settle(self, parcel: Parcel) -> None:
        with self._lock:
            if self._under_way.pop(parcel, self) is None:
                self._under_way_bytes -= parcel.size

    def _report(self, parcel: Parcel, outcome: Outcome) -> None:
        if outcome.repeated:
            self._counters.add(parcel.messages.topic, repeated=outcome.repeated)
        if outcome.fate is Fate.DELIVERED:
            parcel.messages.finish()
            self._counters.add(parcel.messages.topic, delivered=len(parcel), bytes=parcel.size)
            self._settle(parcel)
            if self.is_failing:
                self._outcomes.put((parcel, outcome))
        else:
            self._outcomes.put((parcel, outcome))
        self.changed.set()

    def _kept(self, parcel: Parcel, is_kept: bool) -> None:
        topic = parcel.messages.topic
        if is_kept:
            self._counters.add(topic, dead_lettered=len(parcel))
            parcel.messages.finish()
        else:
            self._counters.add(topic, requeued=len(parcel))
            parcel.messages.requeue(UNKEPT_S, backoff=False)
        self._settle(parcel)
        self.changed.set()

    # -- outcomes -------------------------------------------------------------------------------

    def act(self, now: float) -> None:
        """Act on the outcomes that have come."""
        while not self._outcomes.empty():
            parcel, outcome = self._outcomes.get()
            if outcome.fate is Fate.DELIVERED:
                self._recovered()
                continue
            self.last_error = outcome.error or self.last_error
            rest = parcel.unanswered()
            if rest is not None:
                self._act_on(rest, outcome, now)
            self._settle(parcel)

    def _act_on(self, parcel: Parcel, outcome: Outcome, now: float) -> None:
        topic = parcel.messages.topic
        is_split = outcome.may_split and len(parcel) > 1
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
                self._hold(parcel, outcome.error, now)
            case Fate.UNREACHABLE:
                self._hold(parcel, outcome.error, now)
            case Fate.FAILED:
                self._failed(parcel, outcome)
            case _:
                self.refuse(parcel, outcome.error)

    def _failed(self, parcel: Parcel, outcome: Outcome) -> None:
        limit = self._max_attempts
        over = [limit > 0 and message.attempts >= limit for message in parcel.messages]
        if refused := [at for at, is_over in enumerate(over) if is_over]:
            self.refuse(parcel.chosen(refused), f"{outcome.error}, after {limit} attempts")
        if rest := [at for at, is_over in enumerate(over) if not is_over]:
            self._requeue(parcel.chosen(rest), outcome.error, outcome.retry_after_s)

    def _requeue(self, parcel: Parcel, error: str, delay_s: float | None) -> None:
        self._warn("requeued", f"{parcel.messages[0]!r} is requeued: {error}")
        self._counters.add(parcel.messages.topic, requeued=len(parcel))
        for message in parcel.messages:
            own_s = min(REQUEUE_MAX_S, REQUEUE_BASE_S * 2.0 ** min(message.attempts - 1, 20))
            message.requeue(own_s if delay_s is None else delay_s, backoff=False)

    def _warn(self, kind: str, line: str) -> None:
        """Log the first of a kind as a warning, and the others in detail only."""
        log.log(logging.INFO if kind in self._warned else logging.WARNING, "%s", line)
        self._warned.add(kind)

    # -- while no destination works -------------------------------------------------------------

    def _hold(self, parcel: Parcel, error: str, now: float) -> None:
        self._held.append(parcel)
        if not self.is_open:
            self.is_open = True
            self._on_circuit(True)
        if not self.is_failing:
            self.is_failing = True
            log.warning("cannot deliver: %s; holding messages and trying again", error)
        if self._retry_at <= now:
            self._retry_at = now + self._delays.next_delay_s()

    def tick(self, now: float) -> None:
        """Touch what waits, and see whether a destination works again. Raises what ended the
        sink."""
        self._sink.check()
        self._touch(now)
        if self.is_open and now >= self._retry_at:
            self._probe(now)

    def _probe(self, now: float) -> None:
        """Send one parcel; the others follow when it has arrived."""
        # give back what others may be able to deliver, but for one parcel to try with
        while len(self._held) > 1 and now - self._held[-1].began_at > HOLD_S:
            self._requeue(self._held.pop(), self.last_error, None)
        while self._held:
            parcel = self._held.popleft().unanswered()
            if parcel is not None:
                self._retry_at = now + self._delays.next_delay_s()
                self.send(parcel)
                return
        if not self._under_way:
            self._close_circuit()  # nothing is left to try with but the next message

    def _recovered(self) -> None:
        """Something has arrived."""
        if self.is_failing:
            self.is_failing = False
            self._delays.reset()
            log.warning("delivering again")
        if self.is_open:
            self._close_circuit()

    def _close_circuit(self) -> None:
        """Let messages come and go again."""
        self.is_open = False
        self._retry_at = 0.0
        held, self._held = self._held, deque()
        self._on_circuit(False)
        for parcel in held:
            rest = parcel.unanswered()
            if rest is not None:
                self.send(rest)

    def _touch(self, now: float) -> None:
        with self._lock:
            waiting = [*self._under_way, *self._held]
        for parcel in waiting:
            touch_when_due(parcel.messages, now)

    # -- ending ---------------------------------------------------------------------------------

    def drain(self, timeout_s: float, on_turn: Callable[[], None]) -> None:
        """Wait for what is under way; give the rest back. Closes the sink."""
        until = time.monotonic() + timeout_s
        while not self.is_idle and (now := time.monotonic()) < until:
            self.act(now)
            self._give_back(self._held)
            self._touch(now)
            on_turn()
            self.changed.wait(0.05)
            self.changed.clear()
        self._sink.stop(max(0.1, until - time.monotonic()))
        if self._dead_letters is not None:
            self._dead_letters.close()
        self.act(time.monotonic())
        self._give_back(self._held)
        self._give_back(deque(self._under_way))

    def _give_back(self, parcels: deque[Parcel]) -> None:
        while parcels:
            parcel = parcels.popleft()
            count = parcel.messages.requeue(0, backoff=False)
            self._counters.add(parcel.messages.topic, requeued=count)


def touch_when_due(messages: Batch, now: float) -> None:
    """Restart the timeout of messages, before it has passed."""
    first = messages[0]
    if first.deadline - now < (1 - TOUCH_SHARE) * (first.deadline - first.received_at):
        for message in messages:
            message.touch()
