"""Publish batches and account for every record, with the outcomes that a `Producer` gives each.

What nsqd certainly did not take is sent again until ``retry_timeout_s`` after its first failure,
and what is unknown only when asked to, because it may arrive twice then. Of a batch that nsqd
refuses only the record to blame is rejected. All of that `Producer` does; here outcomes are
counted, for each nsqd in mode all, where a record is confirmed when all have confirmed it.

Nothing is accepted while a producer's window is full, so memory stays bounded by the windows.

A rate limit is exact at 10 a second and at 100,000. Each message has its place on a schedule;
nothing is published before its place. Places are handed out in slices of a hundredth of a second,
so that a high rate still publishes batches and a low one publishes single messages on time. Time
lost to a stall is made up for by at most `CATCH_UP_S`: more would be a burst above the rate.
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

from nsqtools.client.connection_settings import PublishMode
from nsqtools.client.options import ClientOptions
from nsqtools.client.outcomes import may_try_again
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication, in_groups
from nsqtools.errors import NsqError, PublishError, PublishRejected, PublishUnknown
from nsqtools.protocol.commands import mpub_size
from nsqtools.protocol.names import parse_address
from nsqtools.records.envelope import MessageLike


class PublishOutcome(enum.IntEnum):
    """What became of a record, the worst last: with several nsqd the worst of theirs counts."""

    CONFIRMED = 0
    UNKNOWN = 1
    UNSENT = 2
    REJECTED = 3


def outcome_of(error: PublishError | None) -> PublishOutcome:
    """What a record counts as that ended so."""
    if error is None:
        return PublishOutcome.CONFIRMED
    if isinstance(error, PublishUnknown):
        return PublishOutcome.UNKNOWN
    is_final = isinstance(error, PublishRejected) and not may_try_again(error, retry_unknown=False)
    return PublishOutcome.REJECTED if is_final else PublishOutcome.UNSENT


@dataclass(slots=True, eq=False)
class PublishBatch:
    """Bodies for one topic, and what to call when all have their outcome.

    ``awaited`` counts the answers still to come, one for each record and nsqd. ``errors`` has, by
    the place of a record among the bodies, why each nsqd that did not confirm it did not.
    """

    topic: str
    bodies: Sequence[bytes]
    awaited: int
    on_ended: Callable[[PublishBatch], None]
    errors: dict[int, dict[str, PublishError]] = field(default_factory=dict)

    def failures(self) -> dict[int, PublishError]:
        """The worst error of each record that was not confirmed everywhere."""
        return {at: max(each.values(), key=outcome_of) for at, each in self.errors.items()}


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


SLICE_S = 0.01
CATCH_UP_S = 0.1


class RateLimit:
    """``rate`` messages a second, by the caller's clock."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._next = now

    def allowance(self, now: float) -> int:
        """Return how many messages may go now: 0 means to wait `wait_s`."""
        self._next = max(self._next, now - CATCH_UP_S)
        if now < self._next:
            return 0
        return max(1, int((now - self._next + SLICE_S) * self._rate))

    def took(self, count: int) -> None:
        """Note that ``count`` messages went."""
        self._next += count / self._rate

    def wait_s(self, now: float) -> float:
        """Return the seconds until something is allowed again, or as many as one can wait."""
        return min(max(0.0, self._next - now), threading.TIMEOUT_MAX)


RETRY_TIMEOUT_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """``defer_s`` delays delivery of whatever is published; the times are seconds."""

    mode: PublishMode = PublishMode.ALL
    retry_timeout_s: float = RETRY_TIMEOUT_S
    retry_unknown: bool = False
    defer_s: float | None = None


class Publisher:
    """Publishes on one or more nsqd, at most ``rate`` messages a second (0: without limit).

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
        rate: float = 0.0,
    ) -> None:
        self.client_options = client_options
        self.stopped = threading.Event()
        self.counts = PublishCounts()
        # as producers call them: the default port may be left out, or a nsqd be given twice
        distinct = list(dict.fromkeys(str(parse_address(each)) for each in addresses))
        is_each = options.mode is PublishMode.ALL and len(distinct) > 1
        self.counts_by_nsqd = {nsqd: PublishCounts() for nsqd in distinct if is_each}
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
            for nsqd in (self.counts_by_nsqd if is_each else [addresses] if addresses else [])
        ]
        self._settled: queue.SimpleQueue[tuple[PublishBatch, int, str, Publication]] = (
            queue.SimpleQueue()
        )
        self._under_way = 0  # publishes whose outcome has not been read from the queue

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
        """Have nothing sent again, and nothing new: from any thread."""
        self.stopped.set()

    def allowance(self, wanted: int) -> int:
        """Return how many of ``wanted`` messages may be published now, 0 after `stop`.

        Waits until the rate allows one.
        """
        while not self.is_stopped:
            if self._rate is None:
                return wanted
            if allowed := self._rate.allowance(now := time.monotonic()):
                return min(wanted, allowed)
            self.stopped.wait(self._rate.wait_s(now))
        return 0

    def took(self, count: int) -> None:
        """Count messages that were published towards the rate."""
        if self._rate is not None:
            self._rate.took(count)

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        on_ended: Callable[[PublishBatch], None] = lambda batch: None,
        *,
        defer_s: float | None = None,
        origins: Sequence[MessageLike] = (),
    ) -> None:
        """Send a batch; block while there is no room for it.

        ``origins`` are the messages that the bodies are from, if any: nsqd gives new ids and times,
        and another publisher may keep those.

        ``on_ended`` is called when each body has its outcome, on the thread that calls this method,
        `drain` or `finish`. ``defer_s`` goes before that of the options.
        """
        self.poll()
        self.took(len(bodies))
        defer_s = self._options.defer_s if defer_s is None else defer_s
        batch = PublishBatch(topic, bodies, len(bodies) * len(self._producers), on_ended)
        # NSQ has no deferred MPUB; and a few batches would leave some of many nsqd without any
        size = max(1, -(-len(bodies) // self._shares)) if defer_s is None else 1
        for producer in self._producers:
            start = 0
            for group in self._groups(bodies, size):
                while not producer.has_room:
                    self._wait()
                self._send(producer, batch, start, group, defer_s)
                start += len(group)

    def _groups(self, bodies: Sequence[bytes], most: int) -> Iterable[Sequence[bytes]]:
        """Cut a batch into what nsqd takes as one MPUB."""
        limit = self.client_options.publish_max_body_size
        if mpub_size(list(map(len, bodies))) > limit:
            return in_groups(bodies, len, limit, most)
        return [bodies[start : start + most] for start in range(0, len(bodies), most)]

    def _send(
        self,
        producer: Producer,
        batch: PublishBatch,
        start: int,
        bodies: Sequence[bytes],
        defer_s: float | None,
    ) -> None:
        def settled(publication: Publication) -> None:
            self._settled.put((batch, start, producer.nsqd, publication))

        producer.submit(batch.topic, bodies, defer_s=defer_s, on_settled=settled, splits=True)
        self._under_way += 1

    def count_unsendable(self, outcome: PublishOutcome) -> None:
        """Count a record that was not even sent, to any nsqd."""
        for counts in (self.counts, *self.counts_by_nsqd.values()):
            counts.add(outcome)

    def poll(self) -> None:
        """Act on the outcomes that are there, without waiting."""
        if self.is_stopped:
            for producer in self._producers:
                producer.end_retries()
        with suppress(queue.Empty):
            while True:
                self._end(*self._settled.get_nowait())

    def drain(self) -> None:
        """Wait until every record has its outcome."""
        while self._under_way:
            self._wait()

    def finish(self) -> None:
        """Wait until every record has its outcome, then close the connections."""
        self.drain()
        self.close()

    def deliver(self, show: Callable[[int], None]) -> None:
        """Wait until consumers have what was published, where that is not nsqd's affair.

        ``show`` is called with how many they have.
        """

    def close(self) -> None:
        """Close the connections, whatever is still under way."""
        for producer in self._producers:
            producer.stop(POLL_S)

    # -- outcomes -------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait a moment for an outcome, and act on what is there."""
        with suppress(queue.Empty):
            self._end(*self._settled.get(timeout=POLL_S))
        self.poll()

    def _end(self, batch: PublishBatch, start: int, nsqd: str, publication: Publication) -> None:
        self._under_way -= 1
        count = len(publication.bodies)
        failed = 0
        if publication.error is not None:
            for place, error in enumerate(publication.errors, start):
                if error is not None:
                    failed += 1
                    batch.errors.setdefault(place, {})[nsqd] = error
                    self._note_failure(nsqd, error)
        if nsqd in self.counts_by_nsqd:
            self.counts_by_nsqd[nsqd].add(PublishOutcome.CONFIRMED, count - failed)
        batch.awaited -= count
        if not batch.awaited:
            self._count(batch)

    def _count(self, batch: PublishBatch) -> None:
        """Count a batch whose records have all their outcomes."""
        self.counts.add(PublishOutcome.CONFIRMED, len(batch.bodies) - len(batch.errors))
        for error in batch.failures().values():
            self.counts.add(outcome_of(error))
        batch.on_ended(batch)

    def _note_failure(self, nsqd: str, error: PublishError) -> None:
        self.last_error = error
        if nsqd in self.counts_by_nsqd:
            self.counts_by_nsqd[nsqd].add(outcome_of(error))
        # of what may be stored, the last attempt tells whether its time was over
        last = error.__cause__ if isinstance(error, PublishUnknown) else error
        if isinstance(last, PublishError):
            self.has_given_up |= outcome_of(last) is PublishOutcome.UNSENT
        else:
            self.has_given_up |= self._options.retry_unknown
