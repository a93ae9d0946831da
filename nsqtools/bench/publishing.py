"""One publishing process: batches as fast as nsqd confirms them, or at their places on a schedule.

With a rate, each batch is due at a time, and latency counts from there: what had to wait because
the batch before it was slow has waited, and is not left out of the figures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from nsqtools.bench.bench_plan import PublisherJob
from nsqtools.bench.bodies import Bodies, first_word
from nsqtools.bench.counters import Counters
from nsqtools.bench.latency import Latencies
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import NsqError

NAP_S = 0.1
BACKLOG_NAP_S = 0.0002


@dataclass(slots=True)
class PublisherResult:
    """What a publisher did: all it published, and of that what was measured.

    ``ended_at`` is the monotonic time of the last confirmation. ``cpu_s`` is the processor time of
    the measured part, and ``cpu_share`` that over its duration.
    """

    confirmed: int = 0
    checksum: int = 0
    measured: int = 0
    measured_bytes: int = 0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    cpu_share: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def cpu_messages(self) -> int:
        """The messages that ``cpu_s`` was spent on."""
        return self.measured


class PublishingWorker:
    """The work of one `PublisherJob`. Made when it may connect, run when it may begin."""

    def __init__(self, job: PublisherJob, counters: Counters) -> None:
        self._job = job
        self._counters = counters
        self._bodies = Bodies(job.size, seed=job.number)
        self._producer = Producer(job.nsqd_tcp_address, job.options)
        self._word = first_word(job.tag, job.number)
        self._measured_from = 0.0
        self._result = PublisherResult()
        self._error: NsqError | None = None

    def run(self, begin: float) -> PublisherResult:
        """Publish from the monotonic time ``begin`` on; what is measured starts after the warm-up.

        Raises the error of the first publish that was not confirmed.
        """
        self._sleep_until(begin)
        self._measured_from = begin + self._job.warm_up_s
        with self._producer:
            self._publish_between(begin, self._measured_from, None)
            cpu_s = time.process_time()
            ends_at = self._measured_from + self._job.for_s if self._job.for_s else None
            self._publish_between(self._measured_from, ends_at, self._job.count)
        if self._error is not None:
            raise self._error
        result = self._result
        elapsed_s = max(result.ended_at - self._measured_from, 1e-9)
        result.cpu_s = time.process_time() - cpu_s
        result.cpu_share = result.cpu_s / elapsed_s
        return result

    def _publish_between(self, begin: float, ends_at: float | None, count: int | None) -> None:
        job, published = self._job, 0
        while self._error is None and self._counters.may_publish:
            size = job.batch if count is None else min(job.batch, count - published)
            if size <= 0:
                return
            self._wait_for_consumers(ends_at)
            now = time.monotonic()
            due = begin + published / job.rate if job.rate else now
            if ends_at is not None and max(due, now) >= ends_at:
                return
            if self._sleep_until(due):
                self._publish(size, due)
                published += size

    def _publish(self, size: int, due: float) -> None:
        if self._job.is_stamped:
            bodies = self._bodies.stamped(size, int(due * 1e9), self._word)
        else:
            bodies = self._bodies.batch(size)
        settled = partial(self._on_settled, due, self._word)
        self._word += size
        self._counters.publishes(self._job.number, size)
        try:
            self._producer.submit(self._job.topic, bodies, on_settled=settled)
        except NsqError as error:
            self._error = self._error or error

    def _on_settled(self, due: float, word: int, publication: Publication) -> None:
        """On the I/O thread, in the order of publishing."""
        if publication.error is not None:
            self._error = self._error or publication.error
            return
        now = time.monotonic()
        result, count = self._result, len(publication.bodies)
        result.confirmed += count
        result.checksum += count * word + count * (count - 1) // 2
        if due >= self._measured_from:
            result.measured += count
            result.measured_bytes += sum(map(len, publication.bodies))
            began = due if self._job.rate else publication.submitted_at
            result.latencies.add((now - began) * 1000)
            result.ended_at = now

    def _wait_for_consumers(self, ends_at: float | None) -> None:
        """Wait until the consumers are near enough, or publishing has to end."""
        counters, backlog = self._counters, self._job.backlog
        while backlog is not None and counters.published - counters.consumed >= backlog:
            if not counters.may_publish or self._error is not None:
                return
            if ends_at is not None and time.monotonic() >= ends_at:
                return
            time.sleep(BACKLOG_NAP_S)

    def _sleep_until(self, moment: float) -> bool:
        """Sleep; False when publishing was stopped meanwhile."""
        while (left_s := moment - time.monotonic()) > 0:
            if not self._counters.may_publish:
                return False
            time.sleep(min(left_s, NAP_S))
        return True
