"""Send batches, retry what is safe to retry, and account for every record.

A batch that an nsqd certainly did not take is sent again, after a delay that doubles, until
``retry_timeout_s`` after its first failure. One whose fate is unknown is sent again only when asked
to, because its records may arrive twice then, and ends as confirmed or unknown whatever comes
after. One that nsqd refused is halved until the refused record is alone: the others must not suffer
for it.

While something waits to be sent again nothing new is accepted, so memory stays bounded by the
producers' windows.

Why a `Producer` for each nsqd, and not one with a mode and retries of its own: a Producer settles a
publish as a whole, after which nothing is known of the way there. Here each record has an outcome,
for each nsqd in mode all; what was sent again is counted, and what may have doubled by it; the time
for retries begins with the first failure, not while a record waits its turn; and a stop ends them.
What a failure means is decided in one place for both, `nsqtools.client.outcomes`.
"""

from __future__ import annotations

import enum
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nsqtools.client.options import ClientOptions
from nsqtools.client.outcomes import kept_unknown, may_split, may_try_again
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.client.reconnect import RetryDelays
from nsqtools.client.spread import PublishMode, Targets
from nsqtools.errors import (
    NsqError,
    PublishError,
    PublishNotSent,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
)


class PublishOutcome(enum.IntEnum):
    """What became of a record, the worst last: with several nsqd the worst of theirs counts."""

    CONFIRMED = 0
    UNKNOWN = 1
    UNSENT = 2
    REJECTED = 3


@dataclass(slots=True, eq=False)
class PublishBatch:
    """Bodies for one topic, and what to call when all have their outcome.

    ``awaited`` counts the answers still to come, one for each record and nsqd; ``failures`` holds
    the worst outcome of each record that was not confirmed everywhere, by its place among the
    bodies, ``errors`` the reason, and ``missing`` the places that each nsqd did not confirm.
    """

    topic: str
    bodies: Sequence[bytes]
    awaited: int
    on_ended: Callable[[PublishBatch], None]
    defer_s: float | None = None
    failures: dict[int, PublishOutcome] = field(default_factory=dict)
    errors: dict[int, NsqError | None] = field(default_factory=dict)
    missing: dict[str, set[int]] = field(default_factory=dict)

    def note(self, part: BatchPart, outcome: PublishOutcome, error: NsqError | None = None) -> bool:
        """Note the outcome of a part; return whether it was the last one awaited."""
        if outcome is not PublishOutcome.CONFIRMED:
            self.missing.setdefault(part.address, set()).update(range(part.start, part.stop))
            for index in range(part.start, part.stop):
                if outcome >= self.failures.get(index, outcome):
                    self.failures[index] = outcome
                    self.errors[index] = error
        self.awaited -= len(part)
        return self.awaited == 0


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """What goes to one nsqd in one publish: a batch, or a range of it after nsqd refused more.

    ``give_up_at`` is set when it first failed; ``may_be_stored`` when some attempt may have stored
    it, which none after that can make undone.
    """

    batch: PublishBatch
    start: int
    stop: int
    address: str
    give_up_at: float | None = None
    may_be_stored: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def bodies(self) -> Sequence[bytes]:
        return self.batch.bodies[self.start : self.stop]

    def halves(self) -> tuple[BatchPart, BatchPart]:
        """Return the part as two, to find a record that nsqd refuses."""
        middle = self.start + len(self) // 2
        return replace(self, stop=middle), replace(self, start=middle)


@dataclass(slots=True)
class PublishCounts:
    """Records by outcome; ``skipped`` are empty ones, which NSQ cannot carry, and
    ``filtered`` those that were not selected."""

    confirmed: int = 0
    rejected: int = 0
    unknown: int = 0
    unsent: int = 0
    skipped: int = 0
    filtered: int = 0

    def add(self, outcome: PublishOutcome, count: int = 1) -> None:
        """Count records that ended so."""
        name = outcome.name.lower()
        setattr(self, name, getattr(self, name) + count)

    @property
    def unconfirmed(self) -> int:
        return self.rejected + self.unknown + self.unsent

    def summary(self, repeated: int = 0) -> str:
        """The counts in a line: the four outcomes, and what else happened where it did."""
        line = (
            f"{self.confirmed} confirmed, {self.rejected} rejected, "
            f"{self.unknown} unknown, {self.unsent} unsent"
        )
        if self.skipped:
            line += f", {self.skipped} empty skipped"
        if self.filtered:
            line += f", {self.filtered} not selected"
        return f"{line}, {repeated} repeated" if repeated else line


RETRY_TIMEOUT_S = 60.0
RETRY_BASE_S = 0.1
RETRY_MAX_S = 5.0
POLL_S = 0.1

# of what is not sent again
ENDINGS = {
    PublishRejected: PublishOutcome.REJECTED,
    PublishRefused: PublishOutcome.UNSENT,
    PublishUnknown: PublishOutcome.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """``defer_s`` delays delivery of whatever is published; the times are seconds."""

    mode: PublishMode = PublishMode.ALL
    retry_timeout_s: float = RETRY_TIMEOUT_S
    retry_unknown: bool = False
    defer_s: float | None = None


def each_counted(mode: PublishMode, addresses: Sequence[str]) -> list[str]:
    """The nsqd that have outcomes of their own: those of mode all, when there are several."""
    distinct = list(dict.fromkeys(addresses))
    return distinct if mode is PublishMode.ALL and len(distinct) > 1 else []


class Publisher:
    """Publishes on one or more nsqd. ``is_stopped`` ends retrying.

    ``counts`` has each record once, by its worst outcome. ``counts_by_nsqd`` has it once for each
    nsqd that it was for, where every record goes to several. ``retried`` counts records that were
    sent again, and ``repeated`` those of them that nsqd may have had already. ``has_given_up``
    tells whether some were not sent again, or not at all: nsqd was gone for too long, or refuses.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        client_options: ClientOptions,
        options: PublishOptions,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts = PublishCounts()
        self.counts_by_nsqd = {
            address: PublishCounts() for address in each_counted(options.mode, addresses)
        }
        self.retried = 0
        self.repeated = 0
        self.has_given_up = False
        self.last_error: NsqError | None = None
        self._options = options
        self._is_stopped = is_stopped
        self._producers = {address: Producer(address, client_options) for address in addresses}
        self._targets = Targets(addresses, options.mode)
        self._delays = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._outcomes: queue.SimpleQueue[tuple[BatchPart, PublishError | None]] = (
            queue.SimpleQueue()
        )
        self._retries: list[BatchPart] = []
        self._retry_at = 0.0
        self._under_way = 0  # sends whose outcome has not been read from the queue

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        on_ended: Callable[[PublishBatch], None] = lambda batch: None,
        *,
        defer_s: float | None = None,
    ) -> None:
        """Send a batch; block while an earlier one has to be sent again.

        ``on_ended`` is called when each body has its outcome, on the thread that calls this method,
        `drain` or `finish`. ``defer_s`` goes before that of the options.
        """
        self.poll()
        while self._retries:
            self._wait()
        chosen = self._targets.choose()
        defer_s = self._options.defer_s if defer_s is None else defer_s
        batch = PublishBatch(topic, bodies, len(bodies) * len(chosen), on_ended, defer_s)
        # NSQ has no deferred MPUB
        size = len(bodies) if defer_s is None else 1
        for address in chosen:
            for start in range(0, len(bodies), size):
                self._send(BatchPart(batch, start, start + size, address))

    def count_unsendable(self, outcome: PublishOutcome) -> None:
        """Count a record that was not even sent, to any nsqd."""
        for counts in (self.counts, *self.counts_by_nsqd.values()):
            counts.add(outcome)

    def poll(self) -> None:
        """Act on the outcomes that are there, and send again what is due, without waiting."""
        try:
            while True:
                self._act_on(*self._outcomes.get_nowait())
        except queue.Empty:
            pass
        self._retry()

    def drain(self) -> None:
        """Wait until every record has its outcome."""
        while self._under_way or self._retries:
            self._wait()

    def finish(self) -> None:
        """Wait until every record has its outcome, then close the connections."""
        self.drain()
        self.close()

    def close(self) -> None:
        """Close the connections, whatever is still under way."""
        for producer in self._producers.values():
            producer.stop(POLL_S)

    def _send(self, part: BatchPart) -> None:
        def ended(publication: Publication) -> None:
            self._outcomes.put((part, publication.error))

        try:
            self._producers[part.address].submit(
                part.batch.topic, part.bodies, defer_s=part.batch.defer_s, on_settled=ended
            )
        except PublishNotSent as exc:  # no room in the window for as long as publish_timeout
            self._outcomes.put((part, exc))
        self._under_way += 1

    # -- outcomes -------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for an outcome or for the time of a retry, and act on it."""
        now = time.monotonic()
        if self._retries and not self._under_way:
            timeout_s = min(POLL_S, max(0.0, self._retry_at - now))
        else:
            timeout_s = POLL_S
        try:
            self._act_on(*self._outcomes.get(timeout=timeout_s))
        except queue.Empty:
            pass
        self.poll()

    def _act_on(self, part: BatchPart, error: PublishError | None) -> None:
        self._under_way -= 1
        if error is None:
            self._delays.reset()
            self._end(part, PublishOutcome.CONFIRMED)
            return
        self.last_error = error
        if isinstance(error, PublishUnknown):
            part = replace(part, may_be_stored=True)
        if may_split(error) and len(part) > 1:
            for half in part.halves():
                self._retry_later(half, error)
        elif may_try_again(error, retry_unknown=self._options.retry_unknown):
            self._retry_later(part, error)
        else:
            self._end(part, ENDINGS[type(error)], error)

    def _retry_later(self, part: BatchPart, error: PublishError) -> None:
        now = time.monotonic()
        give_up_at = part.give_up_at or now + self._options.retry_timeout_s
        if now >= give_up_at or self._is_stopped():
            self._end(part, PublishOutcome.UNSENT, error)
            return
        self.retried += len(part)
        if isinstance(error, PublishUnknown):
            self.repeated += len(part)
        if not self._retries:
            self._retry_at = now + self._delays.next_delay_s()
        self._retries.append(replace(part, give_up_at=give_up_at))

    def _retry(self) -> None:
        if not self._retries or (time.monotonic() < self._retry_at and not self._is_stopped()):
            return
        retries, self._retries = self._retries, []
        for part in retries:
            self._send(replace(part, address=self._targets.choose_again(part.address)))

    def _end(
        self, part: BatchPart, outcome: PublishOutcome, error: PublishError | None = None
    ) -> None:
        batch = part.batch
        self.has_given_up |= outcome is PublishOutcome.UNSENT
        if error is not None and part.may_be_stored:
            outcome = PublishOutcome.UNKNOWN
            self.last_error = error = kept_unknown(error)
        if self.counts_by_nsqd:
            self.counts_by_nsqd[part.address].add(outcome, len(part))
        if not batch.note(part, outcome, error):
            return
        self.counts.add(PublishOutcome.CONFIRMED, len(batch.bodies) - len(batch.failures))
        for failure in batch.failures.values():
            self.counts.add(failure)
        batch.on_ended(batch)
