"""Send batches, retry what is safe to retry, and account for every record.

A batch that an nsqd certainly did not take is sent again, after a delay that doubles, until
``retry_timeout_s`` after its first failure. One whose fate is unknown is sent again only when asked
to, because its records may arrive twice then. One that nsqd refused is halved until the refused
record is alone: the others must not suffer for it.

While something waits to be sent again nothing new is accepted, so memory stays bounded by the
producers' windows.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.client.reconnect import RetryDelays
from nsqtools.client.spread import PublishMode, Targets
from nsqtools.errors import (
    NsqError,
    PublishError,
    PublishNotSent,
    PublishRejected,
    PublishUnknown,
    RefusedError,
)
from nsqtools.publish.batch import Batch, Counts, Outcome, Part

RETRY_TIMEOUT_S = 60.0
RETRY_BASE_S = 0.1
RETRY_MAX_S = 5.0
POLL_S = 0.1

# What splitting a batch can cure: one message or the whole is too large for this nsqd.
SPLITTABLE = ("E_BAD_MESSAGE", "E_BAD_BODY")
# nsqd refuses every publish while it stops or while the topic is being deleted.
EXITING = "exiting"


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """``defer_s`` delays delivery of whatever is published; the times are seconds."""

    mode: PublishMode = PublishMode.ALL
    retry_timeout_s: float = RETRY_TIMEOUT_S
    retry_unknown: bool = False
    defer_s: float | None = None


class Publisher:
    """Publishes on one or more nsqd. ``is_stopped`` ends retrying.

    ``retried`` counts records that were sent again, and ``repeated`` those of them that nsqd may
    have had already.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        client_options: ClientOptions,
        options: PublishOptions,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts = Counts()
        self.retried = 0
        self.repeated = 0
        self.last_error: NsqError | None = None
        self._options = options
        self._is_stopped = is_stopped
        self._producers = {address: Producer(address, client_options) for address in addresses}
        self._targets = Targets(addresses, options.mode)
        self._delays = RetryDelays(RETRY_BASE_S, RETRY_MAX_S)
        self._settled: queue.SimpleQueue[tuple[Part, PublishError | None]] = queue.SimpleQueue()
        self._retries: list[Part] = []
        self._retry_at = 0.0
        self._under_way = 0  # sends whose outcome has not been read from the queue

    @property
    def has_given_up(self) -> bool:
        """Tell whether records were left unsent: nsqd was gone for too long."""
        return self.counts.unsent > 0

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        on_ended: Callable[[Batch], None] = lambda batch: None,
        *,
        defer_s: float | None = None,
    ) -> None:
        """Send a batch; block while an earlier one has to be sent again.

        ``on_ended`` is called when each body has its outcome, on the thread that calls this method,
        `settle` or `finish`. ``defer_s`` goes before that of the options.
        """
        self.poll()
        while self._retries:
            self._wait()
        chosen = self._targets.choose()
        defer_s = self._options.defer_s if defer_s is None else defer_s
        batch = Batch(topic, bodies, len(bodies) * len(chosen), on_ended, defer_s)
        # there is no deferred MPUB
        size = len(bodies) if defer_s is None else 1
        for address in chosen:
            for start in range(0, len(bodies), size):
                self._send(Part(batch, start, start + size, address))

    def poll(self) -> None:
        """Act on the outcomes that are there, without waiting."""
        try:
            while True:
                self._act_on(*self._settled.get_nowait())
        except queue.Empty:
            pass

    def settle(self) -> None:
        """Wait until every record has its outcome."""
        while self._under_way or self._retries:
            self._wait()

    def finish(self) -> None:
        """Wait until every record has its outcome, then close the connections."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Close the connections, whatever is still under way."""
        for producer in self._producers.values():
            producer.stop(POLL_S)

    def _send(self, part: Part) -> None:
        def settled(publication: Publication) -> None:
            self._settled.put((part, publication.error))

        try:
            self._producers[part.address].submit(
                part.batch.topic, part.bodies, defer_s=part.batch.defer_s, on_settled=settled
            )
        except PublishNotSent as exc:  # no room in the window for as long as publish_timeout
            self._settled.put((part, exc))
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
            self._act_on(*self._settled.get(timeout=timeout_s))
        except queue.Empty:
            pass
        self.poll()
        self._retry()

    def _act_on(self, part: Part, error: PublishError | None) -> None:
        self._under_way -= 1
        if error is None:
            self._delays.reset()
            self._end(part, Outcome.CONFIRMED)
            return
        self.last_error = error
        if isinstance(error, PublishRejected) and EXITING not in error.cause.text:
            self._on_rejected(part, error)
        elif isinstance(error, PublishUnknown) and not self._options.retry_unknown:
            self._end(part, Outcome.UNKNOWN, error)
        elif isinstance(error.__cause__, RefusedError):  # it would be refused again
            self._end(part, Outcome.UNSENT, error)
        else:
            self._retry_later(part, error)

    def _on_rejected(self, part: Part, error: PublishRejected) -> None:
        if len(part) == 1 or error.cause.code not in SPLITTABLE:
            self._end(part, Outcome.REJECTED, error)
            return
        for half in part.halves():
            self._retry_later(half, error)

    def _retry_later(self, part: Part, error: PublishError) -> None:
        now = time.monotonic()
        give_up_at = part.give_up_at or now + self._options.retry_timeout_s
        if now >= give_up_at or self._is_stopped():
            self._end(part, Outcome.UNSENT, error)
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

    def _end(self, part: Part, outcome: Outcome, error: PublishError | None = None) -> None:
        batch = part.batch
        if not batch.settle(part, outcome, error):
            return
        self.counts.add(Outcome.CONFIRMED, len(batch.bodies) - len(batch.failures))
        for failure in batch.failures.values():
            self.counts.add(failure)
        batch.on_ended(batch)
