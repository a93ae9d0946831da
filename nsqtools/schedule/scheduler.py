"""The scheduler: consumes requests, keeps them, and publishes entries when they are due.

One thread does both, so the store has one writer and an entry does not change while it is being
published. Each round takes the requests that have arrived, then publishes up to `WINDOW` due
entries and waits for their confirmations: however many are due, requests are not kept waiting.

The order that loses nothing: commit requests, then finish them; commit the try, publish, wait for
the confirmation, then commit what follows. A kill between the last two repeats at most one window,
which `ScheduleCounts.repeated` counts after the restart.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch, Message
from nsqtools.client.outcomes import is_stored_in_part, may_try_again
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import (
    OutputError,
    PublishError,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
)
from nsqtools.files.durable import LineFile
from nsqtools.protocol.schedule_request import LATEST_NS
from nsqtools.protocol.text import NS, format_duration
from nsqtools.records.envelope import Envelope, encode_dead_letter
from nsqtools.records.prometheus import Metric
from nsqtools.schedule.request import (
    Cancellation,
    Entry,
    InvalidRequest,
    occurrence_to_publish,
    parse_request,
)
from nsqtools.schedule.store import Advance, Rank, ScheduleStore, StoredEntry

log = logging.getLogger("nsqtools")

WINDOW = 500
"""Entries published at a time. A thousand due in one second take two rounds, each with two commits
of some milliseconds; more would be repeated by a kill."""

LONGEST_WAIT_S = 0.5
"""The clock may be set, and the command may be stopped, so it is looked at this often."""

RETRY_S = 1.0

LATE_S = 30.0
"""Longer than an nsqd takes to restart. After a longer outage missed entries are published at some
thousand a second, so a scheduler that stays late has more to do than it can."""

INVALID_DELAY_S = 600.0  # somebody has to look at the message, and the warning repeats until then
COUNT_EVERY_S = 5.0  # a million entries take 20 ms to count, by an index
FORGET_EVERY_S = 600.0


@dataclass
class ScheduleCounts:
    """Counts of a scheduler since its start, and of its entries."""

    requested: int = 0
    invalid: int = 0
    published: int = 0
    repeated: int = 0
    skipped: int = 0
    refused: int = 0
    waiting: int = 0
    kept_refused: int = 0
    late_s: float = 0.0

    def metrics(self) -> list[Metric]:
        """Return the metrics of ``/metrics``."""
        return [
            Metric(f"nsq_schedule_{name}", help, kind, [({}, getattr(self, field))])
            for field, name, kind, help in _METRICS
        ]


_METRICS = (
    ("requested", "requests_total", "counter", "Requests that were committed."),
    ("invalid", "invalid_requests_total", "counter", "Messages that are no requests."),
    ("published", "published_total", "counter", "Messages published and confirmed."),
    ("repeated", "repeated_total", "counter", "Of these, messages that may have arrived before."),
    ("skipped", "skipped_total", "counter", "Missed occurrences that were not published."),
    ("refused", "refused_total", "counter", "Messages that nsqd refused for good."),
    ("waiting", "entries", "gauge", "Entries that wait."),
    ("kept_refused", "refused_entries", "gauge", "Entries that nsqd refused, kept in the store."),
    ("late_s", "late_seconds", "gauge", "How long the earliest entry has been due."),
)


class Scheduler:
    """Serves the entries of a store until it is stopped. It uses ``store`` on one thread."""

    def __init__(
        self,
        store: ScheduleStore,
        consumer: Consumer,
        producer: Producer,
        clock: CheckedClock,
        *,
        keep_rejected: KeepRejected,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = ScheduleCounts()
        self.problem = ""
        self._store = store
        self._consumer = consumer
        self._producer = producer
        self._clock = clock
        self._keep_rejected = keep_rejected
        self._on_round = on_round
        self._next_due_ns = store.next_due_ns()
        # Topics that nsqd refuses for now, as their disk queues fail, and when to try them again.
        # They must not delay the others.
        self._retry_topic_at_s: dict[str, float] = {}
        self._retry_at_s = self._count_at_s = self._forget_at_s = 0.0  # monotonic
        self._is_stopping = False

    def health(self) -> tuple[bool, str]:
        """Return whether entries are published in time, and the reason if they are not."""
        late_s = self.counts.late_s
        if not self.problem and late_s > LATE_S:
            return False, f"late: the earliest entry has been due for {late_s:,.0f} s"
        return not self.problem, self.problem or "scheduling"

    def stop(self) -> None:
        """End `run` after the round under way. Any thread, and signal handlers, may call it."""
        self._is_stopping = True

    def run(self) -> None:
        """Consume and publish until `stop`."""
        while not self._is_stopping:
            batch = self._consumer.next_batch(self._wait_s())
            try:
                if batch:
                    self._take(batch)
                self._publish_due()
                self._maintain()
            except OutputError as error:
                # The disk is full, for example. Requests and entries stay where they are.
                self._postpone(str(error))
            self._on_round()

    def _wait_s(self) -> float:
        """Return how long to wait for requests: until the next entry is due, or until a retry."""
        if (left_s := self._retry_at_s - time.monotonic()) > 0:
            return min(LONGEST_WAIT_S, left_s)
        if self._next_due_ns is None:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(0.0, (self._next_due_ns - self._clock.now_ns()) / NS))

    # -- requests ------------------------------------------------------------------------------

    def _take(self, batch: Batch) -> None:
        """Commit the requests of a batch, then finish them."""
        try:
            requests, invalid = _parse_batch(batch)
            self._store.apply(requests, self._clock.now_ns())
            for message, error in invalid:
                self.counts.invalid += 1
                if not self._give_up_request(message, error):
                    message.requeue(INVALID_DELAY_S, backoff=False)
        except OutputError:
            batch.requeue(RETRY_S, backoff=False)
            raise
        batch.finish()
        self.counts.requested += len(requests)
        self._next_due_ns = self._store.next_due_ns()

    def _give_up_request(self, message: Message, error: Exception) -> bool:
        if isinstance(error, ImportError):  # the request may be valid, and waits for a package
            log.warning("a request waits: %s; pip install 'nsqtools[schedule]'", error)
            return False
        return self._give_up(Rejected(message.topic, message.body, f"not a request: {error}"))

    def _give_up(self, rejected: Rejected) -> bool:
        """Store a message that is given up, and log it."""
        is_kept = self._keep_rejected(rejected)
        log.warning("%s: %s", rejected.key or "a message", rejected.reason)
        return is_kept

    # -- entries -------------------------------------------------------------------------------

    def _publish_due(self) -> None:
        """Publish the entries that are due, at most a window of them."""
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            return
        now_ns = self._clock.trusted_now_ns()
        if now_ns is None:
            self._postpone("the clock jumped forward")
            return
        postponed = {topic: at for topic, at in self._retry_topic_at_s.items() if at > now_s}
        due = self._store.due_entries(now_ns, WINDOW, postponed)
        advances, occurrences = self._plan(due, now_ns)
        if occurrences:
            self._store.record_tries([occurrence.stored.entry for occurrence in occurrences])
        error_text, refused = "", {}
        for occurrence, publication in [(item, self._submit(item)) for item in occurrences]:
            error = _outcome(publication)
            if error is None:
                self.counts.published += 1
                self.counts.repeated += occurrence.stored.tries > 0
            elif _is_transient(error):
                if _is_refusal_of_topic(error):
                    refused[occurrence.stored.entry.topic] = time.monotonic() + RETRY_S
                error_text = str(error)
                if not (isinstance(error, PublishUnknown) or occurrence.stored.tries):
                    # nsqd does not have it, so this try cannot make the next one a repetition.
                    entry = occurrence.stored.entry
                    advances.append(Advance(entry, entry.due_ns))
                continue
            try:
                advances.append(self._advance(occurrence, error))
            except OutputError as exc:
                # The dead letter cannot be written. What was published is committed nevertheless,
                # or it would be published again in each round.
                error_text = str(exc)
        if advances:
            self._store.advance(advances, self._clock.now_ns())
        due_ns = self._next_due_ns = self._store.next_due_ns()
        if waiting := postponed | refused:
            self._next_due_ns = self._store.next_due_ns(waiting)
        self.counts.late_s = 0.0 if due_ns is None else max(0.0, (now_ns - due_ns) / NS)
        if refused:
            # The publishes behind a refused one were not sent, and follow in the next round. Of
            # several topics, one is logged: they would take turns.
            self._report(self.problem if self._retry_topic_at_s else error_text)
        elif error_text:
            self._postpone(error_text)
        elif not postponed:
            self.problem = ""
        self._retry_topic_at_s = waiting

    def _plan(
        self, entries: Sequence[StoredEntry], now_ns: int
    ) -> tuple[list[Advance], list[Occurrence]]:
        """Return what is skipped of missed occurrences, and the occurrences to publish."""
        skipped, occurrences = [], []
        for stored in entries:
            entry, due_ns, next_ns = stored.entry, stored.entry.due_ns, None
            if entry.recurrence is not None:
                publish_ns, next_ns = occurrence_to_publish(
                    entry.recurrence, due_ns, now_ns, entry.catch_up
                )
                if publish_ns is None:
                    self.counts.skipped += 1
                    skipped.append(Advance(entry, next_ns))
                    continue
                due_ns = publish_ns
                if next_ns > LATEST_NS:
                    next_ns = None
            occurrences.append(Occurrence(stored, due_ns, next_ns))
        return skipped, occurrences

    def _submit(self, occurrence: Occurrence) -> Publication | PublishError:
        entry = occurrence.stored.entry
        try:
            return self._producer.submit(entry.topic, [entry.published_body(occurrence.due_ns)])
        except PublishError as error:
            return error

    def _advance(self, occurrence: Occurrence, error: PublishError | None) -> Advance:
        """Return what follows for an occurrence that was published or refused for good."""
        entry = occurrence.stored.entry
        if error is None:
            return Advance(entry, occurrence.next_ns)
        body = entry.published_body(occurrence.due_ns)
        is_kept = self._give_up(Rejected(entry.topic, body, str(error), entry.key))
        self.counts.refused += 1
        if is_kept:
            return Advance(entry, occurrence.next_ns)
        return Advance(entry, None, str(error))

    # -- the rest ------------------------------------------------------------------------------

    def _maintain(self) -> None:
        """Count the entries, and forget old ended ones, once in a while."""
        now_s = time.monotonic()
        if now_s >= self._count_at_s:
            self._count_at_s = now_s + COUNT_EVERY_S
            self.counts.waiting, self.counts.kept_refused = self._store.counts()
        if now_s >= self._forget_at_s:
            self._forget_at_s = now_s + FORGET_EVERY_S
            self._store.forget_ended(self._clock.now_ns())

    def _postpone(self, problem: str) -> None:
        """Try again a second later."""
        self._retry_at_s = time.monotonic() + RETRY_S
        self._report(problem)

    def _report(self, problem: str) -> None:
        """Report a problem in `health`, and log one that is new."""
        if problem != self.problem:
            log.warning("not published yet: %s", problem)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An entry that is due now, and its due time after this one (None: it ends)."""

    stored: StoredEntry
    due_ns: int
    next_ns: int | None


def _parse_batch(
    batch: Batch,
) -> tuple[list[tuple[Rank, Entry | Cancellation]], list[tuple[Message, Exception]]]:
    """Return the requests of a batch, and the messages that are none with the reason."""
    requests: list[tuple[Rank, Entry | Cancellation]] = []
    invalid: list[tuple[Message, Exception]] = []
    for message in batch:
        # ids repeat between nsqd, so the address is a part of the key
        key = f"{message.nsqd}/{message.id.decode('latin-1')}"
        try:
            request = parse_request(message.body, default_key=key, asked_ns=message.timestamp_ns)
        except (InvalidRequest, ImportError) as error:
            invalid.append((message, error))
        else:
            requests.append((Rank(message.timestamp_ns, message.id), request))
    return requests, invalid


def _outcome(publication: Publication | PublishError) -> PublishError | None:
    """Wait for the outcome of a publish."""
    if isinstance(publication, PublishError):
        return publication
    return publication.exception()


def _is_transient(error: PublishError) -> bool:
    """Tell whether a later try may succeed; a client that is refused may be admitted later."""
    return isinstance(error, PublishRefused) or may_try_again(error, retry_unknown=True)


def _is_refusal_of_topic(error: PublishError) -> bool:
    """Return whether nsqd answered this publish: other topics may be accepted."""
    return isinstance(error, PublishRejected) or is_stored_in_part(error)


# -- the clock ------------------------------------------------------------------------------------

# A jump back needs no care, because an occurrence that was published is not due again. A jump
# forward would publish everything that seems to be due, so after a jump of more than `JUMP_NS`
# nothing is due until it has lasted for `HOLD_NS`: a clock that was set by mistake is usually set
# back sooner. The monotonic clock, which nobody sets, shows the jump. It stands still while a
# machine is suspended, so a resume looks like a jump, and costs the same minute.

JUMP_NS = 60 * NS
HOLD_NS = 60 * NS


class CheckedClock:
    """Wall time that is withheld after a jump. Both clocks are in nanoseconds."""

    def __init__(self, wall_ns: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._offset_ns = wall_ns() - monotonic_ns()  # of the wall clock that is believed
        self._jumped_at_ns: int | None = None  # by the monotonic clock

    def now_ns(self) -> int:
        """Return the wall time."""
        return self._wall_ns()

    def trusted_now_ns(self) -> int | None:
        """Return the wall time, or None while a jump forward has not lasted long enough."""
        now_ns, monotonic_ns = self._wall_ns(), self._monotonic_ns()
        jump_ns = now_ns - monotonic_ns - self._offset_ns
        if jump_ns <= JUMP_NS:
            self._accept(now_ns - monotonic_ns)
            return now_ns
        if self._jumped_at_ns is None:
            self._jumped_at_ns = monotonic_ns
            log.warning(
                "the clock jumped forward by %s: nothing is published for %s, unless it returns",
                format_duration(jump_ns / NS),
                format_duration(HOLD_NS / NS),
            )
        if monotonic_ns - self._jumped_at_ns < HOLD_NS:
            return None
        self._accept(now_ns - monotonic_ns)
        return now_ns

    def _accept(self, offset_ns: int) -> None:
        if self._jumped_at_ns is not None:
            log.warning("the clock is trusted again")
        self._offset_ns, self._jumped_at_ns = offset_ns, None


# -- messages that are given up -------------------------------------------------------------------

# A message that nsqd refuses is published there inside a document, because the topic of dead
# letters would refuse it for the same reason if the body alone was too large for a message.


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that is given up: no request, or refused by nsqd for good."""

    topic: str
    body: bytes
    reason: str
    key: str = ""

    def line(self) -> bytes:
        """Return the dead letter, as `nsq redrive` reads it, ended by a newline."""
        now_ns = time.time_ns()
        # a message that was never published has no id, and each dead letter needs one
        id = hashlib.blake2s(self.key.encode("utf-8", "replace") + self.body).hexdigest()[:16]
        message = Envelope(self.topic, "", id.encode(), now_ns, 1, self.body)
        return encode_dead_letter(self.topic, "", message, error=self.reason, failed_at_ns=now_ns)


KeepRejected = Callable[[Rejected], bool]
"""Store a message that is given up; return True when that is confirmed, False without a place."""


class RejectedTopic:
    """Publishes dead letters to a topic; without a topic it keeps none."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    def keep(self, rejected: Rejected) -> bool:
        """Publish the dead letter; return True when nsqd has confirmed it."""
        if not self._topic:
            return False
        try:
            self._producer.publish(self._topic, rejected.line().rstrip(b"\n"))
        except PublishError:
            return False
        return True


class RejectedFile:
    """Appends dead letters to a file. Raises `OutputError` if that cannot be written."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def keep(self, rejected: Rejected) -> bool:
        """Append the dead letter; return True, as it is on disk then."""
        try:
            self._file.append(rejected.line())
        except OSError as error:
            raise OutputError(f"cannot write {self._file.path} ({error.strerror})") from error
        return True
