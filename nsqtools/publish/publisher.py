"""Publish batches, and count the outcome of every record.

`Producer` does the work: it retries messages that nsqd certainly does not have until
``retry_timeout_s`` after their first failure. It retries messages with an unknown outcome only on
request, because they may arrive twice. If nsqd refuses a batch, only the invalid record is
rejected. This module counts the outcomes. In mode ``all`` it counts them for each nsqd too, and a
record is confirmed when all nsqd have confirmed it.

`Publisher.publish` blocks while the window of a producer is full, so the windows bound memory.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from nsqtools.client.change_log import ChangeLog
from nsqtools.client.connection_settings import PublishMode
from nsqtools.client.options import ClientOptions
from nsqtools.client.outcomes import may_try_again
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication, in_groups
from nsqtools.client.rate_limit import RateLimit
from nsqtools.errors import NsqError, PublishError, PublishRejected, PublishUnknown
from nsqtools.protocol.commands import mpub_size
from nsqtools.protocol.names import parse_address
from nsqtools.protocol.text import format_duration
from nsqtools.records.envelope import MessageLike


class PublishOutcome(enum.IntEnum):
    """The outcome of a record, in order of severity. Of several nsqd the worst outcome counts."""

    CONFIRMED = 0
    UNKNOWN = 1
    UNSENT = 2
    REJECTED = 3


def classify_error(error: PublishError | None) -> PublishOutcome:
    """Return the outcome of a record whose publish ended with ``error``."""
    if error is None:
        return PublishOutcome.CONFIRMED
    if isinstance(error, PublishUnknown):
        return PublishOutcome.UNKNOWN
    is_final = isinstance(error, PublishRejected) and not may_try_again(error, retry_unknown=False)
    return PublishOutcome.REJECTED if is_final else PublishOutcome.UNSENT


@dataclass(slots=True, eq=False)
class PublishBatch:
    """Bodies for one topic, and the callback for the end of their last publish.

    ``pending`` counts the missing answers, one for each record and nsqd. ``errors`` maps the index
    of an unconfirmed body to the error of each nsqd that did not confirm it.
    """

    topic: str
    bodies: Sequence[bytes]
    pending: int
    on_ended: Callable[[PublishBatch], None]
    errors: dict[int, dict[str, PublishError]] = field(default_factory=dict)

    def failures(self) -> dict[int, PublishError]:
        """Return the worst error of each unconfirmed record, by its index."""
        return {
            index: max(errors.values(), key=classify_error) for index, errors in self.errors.items()
        }


@dataclass(slots=True)
class PublishCounts:
    """Records by outcome, as ``--json`` has them."""

    confirmed: Annotated[int, "nsqd has them."] = 0
    rejected: Annotated[int, "Above the size limit, or refused by nsqd."] = 0
    unknown: Annotated[int, "The connection broke before the answer."] = 0
    unsent: Annotated[int, "nsqd does not have them."] = 0
    skipped: Annotated[int, "Empty ones, which NSQ cannot carry."] = 0
    filtered: Annotated[int, "Not selected by --where or --pick."] = 0

    def add(self, outcome: PublishOutcome, count: int = 1) -> None:
        """Count records with this outcome."""
        name = outcome.name.lower()
        setattr(self, name, getattr(self, name) + count)

    @property
    def unconfirmed(self) -> int:
        return self.rejected + self.unknown + self.unsent

    def summary(self, repeated: int = 0) -> str:
        """Return the counts in a line: the four outcomes, and the other counts if not zero."""
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
# How soon a stop is noticed while waiting for an outcome.
POLL_S = 0.1
# How often, and after which wait, an unreachable nsqd is looked for: one that restarts is back
# within a second, and needs no report.
OUTAGE_REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How messages are published. ``defer_s`` delays their delivery. Times are in seconds."""

    mode: PublishMode = PublishMode.ALL
    retry_timeout_s: float = RETRY_TIMEOUT_S
    retry_unknown: bool = False
    defer_s: float | None = None


class Publisher:
    """Publish to one or more nsqd, at most ``rate`` messages a second (0: without a limit).

    ``counts`` counts each record once, with its worst outcome. ``counts_by_nsqd`` counts it once
    for each nsqd, if every record goes to several. ``retried`` counts the records that were sent
    again, and ``repeated`` those among them that nsqd may already have had. ``has_given_up`` is
    True after a record was unsent: nsqd was unreachable for too long, or refuses this client.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        client_options: ClientOptions,
        options: PublishOptions,
        rate: float = 0.0,
    ) -> None:
        self.client_options = client_options
        self.stopped = threading.Event()
        self.counts = PublishCounts()
        # Normalized as in producers, because an address may lack the port or occur twice.
        distinct = list(dict.fromkeys(str(parse_address(address)) for address in addresses))
        goes_to_all = options.mode is PublishMode.ALL and len(distinct) > 1
        self.counts_by_nsqd = {nsqd: PublishCounts() for nsqd in distinct if goes_to_all}
        self.has_given_up = False
        self.last_error: NsqError | None = None
        self._options = options
        self._rate = RateLimit(rate, time.monotonic()) if rate else None
        is_shared = options.mode is PublishMode.ROUND_ROBIN
        self._shares = len(distinct) or 1 if is_shared else 1
        self._producers = [
            Producer(
                nsqd,
                client_options,
                mode="round-robin" if is_shared else "failover",
                retry_timeout_s=options.retry_timeout_s,
                retry_unknown=options.retry_unknown,
            )
            for nsqd in (self.counts_by_nsqd if goes_to_all else [addresses] if addresses else [])
        ]
        self._outcomes: queue.SimpleQueue[tuple[PublishBatch, int, str, Publication]] = (
            queue.SimpleQueue()
        )
        # Publishes whose outcome has not been read from the queue.
        self._pending = 0
        self._outages = ChangeLog()
        self._next_outage_check = time.monotonic() + OUTAGE_REPORT_S

    @property
    def retried(self) -> int:
        return sum(producer.retried for producer in self._producers)

    @property
    def repeated(self) -> int:
        return sum(producer.repeated for producer in self._producers)

    @property
    def is_stopped(self) -> bool:
        return self.stopped.is_set()

    def stop(self) -> None:
        """Stop publishing and retrying. Callable from any thread."""
        self.stopped.set()

    def allowance(self, count: int) -> int:
        """Return how many of ``count`` messages may be published now, 0 after `stop`.

        Waits until the rate allows one.
        """
        while not self.is_stopped:
            if self._rate is None:
                return count
            if allowed := self._rate.allowance(now := time.monotonic()):
                return min(count, allowed)
            self.stopped.wait(self._rate.wait_s(now))
        return 0

    def spend(self, count: int) -> None:
        """Use the allowance of published messages."""
        if self._rate is not None:
            self._rate.spend(count)

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        on_ended: Callable[[PublishBatch], None] = lambda batch: None,
        *,
        defer_s: float | None = None,
        origins: Sequence[MessageLike] = (),
    ) -> None:
        """Send a batch; block while the windows of the producers are full.

        Args:
            on_ended: Called when each body has an outcome, on the thread that calls this method,
                `poll`, `drain` or `finish`.
            defer_s: Overrides the delay of the options.
            origins: The messages that the bodies were taken from, if any. nsqd assigns new ids and
                timestamps; a subclass may keep those of the origins.
        """
        self.poll()
        self.spend(len(bodies))
        defer_s = self._options.defer_s if defer_s is None else defer_s
        batch = PublishBatch(topic, bodies, len(bodies) * len(self._producers), on_ended)
        # NSQ has no deferred MPUB. In mode round-robin each nsqd gets a share of the batch, since
        # with few batches some nsqd would otherwise get none.
        size = max(1, -(-len(bodies) // self._shares)) if defer_s is None else 1
        for producer in self._producers:
            start = 0
            for group in self._groups(bodies, size):
                while not producer._has_room:
                    self._wait()
                self._send(producer, batch, start, group, defer_s)
                start += len(group)

    def _groups(self, bodies: Sequence[bytes], max_count: int) -> Iterable[Sequence[bytes]]:
        """Split a batch into groups that nsqd accepts as one MPUB."""
        limit = self.client_options.publish_max_body_size
        if mpub_size(list(map(len, bodies))) > limit:
            return in_groups(bodies, len, limit, max_count)
        return [bodies[start : start + max_count] for start in range(0, len(bodies), max_count)]

    def _send(
        self,
        producer: Producer,
        batch: PublishBatch,
        start: int,
        bodies: Sequence[bytes],
        defer_s: float | None,
    ) -> None:
        def settled(publication: Publication) -> None:
            self._outcomes.put((batch, start, producer.nsqd, publication))

        producer.submit(batch.topic, bodies, defer_s=defer_s, on_settled=settled, splits=True)
        self._pending += 1

    def count_unsendable(self, outcome: PublishOutcome) -> None:
        """Count a record that was sent to no nsqd."""
        for counts in (self.counts, *self.counts_by_nsqd.values()):
            counts.add(outcome)

    def poll(self) -> None:
        """Handle the outcomes that have arrived, without waiting."""
        if self.is_stopped:
            for producer in self._producers:
                producer._end_retries()
        with suppress(queue.Empty):
            while True:
                self._handle_outcome(*self._outcomes.get_nowait())
        if time.monotonic() >= self._next_outage_check:
            self._report_outages()

    def _report_outages(self) -> None:
        """Log why messages wait, unless the end of the retries will tell it soon."""
        self._next_outage_check = time.monotonic() + OUTAGE_REPORT_S
        retry_timeout_s = self._options.retry_timeout_s
        for producer in self._producers:
            health = producer.health()
            is_late = OUTAGE_REPORT_S <= health.oldest_s < retry_timeout_s - OUTAGE_REPORT_S
            if health.connections:
                self._outages.resolve(producer.nsqd, f"connected to {producer.nsqd} again")
            elif health.error and is_late:
                patience = format_duration(retry_timeout_s)
                self._outages.report(producer.nsqd, f"{health.error}; trying for {patience}")

    def drain(self) -> None:
        """Wait until every record has its outcome."""
        while self._pending:
            self._wait()

    def finish(self) -> None:
        """Wait until every record has its outcome, then close the connections."""
        self.drain()
        self.close()

    def wait_until_consumed(self, on_progress: Callable[[int], None]) -> None:
        """Wait until consumers have finished the messages. Only a temporary nsqd has to wait.

        ``on_progress`` is called with the number of finished messages.
        """

    def close(self) -> None:
        """Close the connections without waiting for outcomes."""
        for producer in self._producers:
            producer.stop(POLL_S)

    # -- outcomes -------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait at most `POLL_S` for an outcome, and handle all that have arrived."""
        with suppress(queue.Empty):
            self._handle_outcome(*self._outcomes.get(timeout=POLL_S))
        self.poll()

    def _handle_outcome(
        self, batch: PublishBatch, start: int, nsqd: str, publication: Publication
    ) -> None:
        self._pending -= 1
        count = len(publication.bodies)
        failed = 0
        if publication.error is not None:
            for index, error in enumerate(publication.errors, start):
                if error is not None:
                    failed += 1
                    batch.errors.setdefault(index, {})[nsqd] = error
                    self._record_failure(nsqd, error)
        if nsqd in self.counts_by_nsqd:
            self.counts_by_nsqd[nsqd].add(PublishOutcome.CONFIRMED, count - failed)
        batch.pending -= count
        if not batch.pending:
            self._count_batch(batch)

    def _count_batch(self, batch: PublishBatch) -> None:
        """Count a batch in which each record has its outcome."""
        self.counts.add(PublishOutcome.CONFIRMED, len(batch.bodies) - len(batch.errors))
        for error in batch.failures().values():
            self.counts.add(classify_error(error))
        batch.on_ended(batch)

    def _record_failure(self, nsqd: str, error: PublishError) -> None:
        self.last_error = error
        if nsqd in self.counts_by_nsqd:
            self.counts_by_nsqd[nsqd].add(classify_error(error))
        # With an unknown outcome, the error of the last attempt decides whether the retry timeout
        # has passed.
        last = error.__cause__ if isinstance(error, PublishUnknown) else error
        if isinstance(last, PublishError):
            self.has_given_up |= classify_error(last) is PublishOutcome.UNSENT
        else:
            self.has_given_up |= self._options.retry_unknown
