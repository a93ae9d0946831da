"""One consuming process: every message is finished, its stamp read, its word added to the checksum.

A consumer subscribes with nothing in flight and asks for messages when the measurement begins, so
that all begin together.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from nsqtools.bench.bench_plan import ConsumerJob
from nsqtools.bench.bodies import has_stamp, read_stamps
from nsqtools.bench.counters import Counters
from nsqtools.bench.latency import Latencies
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Batch

LOOK_S = 0.02


@dataclass(slots=True)
class ConsumerResult:
    """What a consumer did: all it consumed, and of that what was measured.

    ``redelivered`` messages had been delivered before. ``began_at`` and ``ended_at`` are monotonic
    times of the first and the last batch that was measured. ``cpu_s`` is the processor time of all
    it did, the warm-up included.
    """

    consumed: int = 0
    checksum: int = 0
    redelivered: int = 0
    foreign: int = 0
    measured: int = 0
    measured_bytes: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    cpu_share: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def cpu_messages(self) -> int:
        """The messages that ``cpu_s`` was spent on."""
        return self.consumed


class ConsumingWorker:
    """The work of one `ConsumerJob`. It is subscribed as soon as it is made.

    Raises the error of the connection when there is none.
    """

    def __init__(self, job: ConsumerJob, counters: Counters) -> None:
        self._job = job
        self._counters = counters
        self._result = ConsumerResult()
        self._consumer = Consumer(
            job.topic,
            job.channel,
            nsqd_tcp_addresses=job.nsqd_tcp_address,
            options=replace(job.options, max_in_flight=0),
        )
        self._consumer.start(fail_fast=True)

    def run(self, begin: float) -> ConsumerResult:
        """Consume until all consumers together have everything, or are asked to stop."""
        job, counters, result = self._job, self._counters, self._result
        time.sleep(max(0.0, begin - time.monotonic()))
        measured_from = begin + job.warm_up_s
        cpu_s = time.process_time()
        self._consumer.set_max_in_flight(job.options.max_in_flight)
        while counters.may_consume and counters.consumed < counters.target:
            if job.for_s is not None and time.monotonic() >= measured_from + job.for_s:
                break
            batch = self._consumer.next_batch(LOOK_S)
            if batch is not None:
                self._take(batch, measured_from)
                batch.finish()
        elapsed_s = max(time.monotonic() - begin, 1e-9)
        result.cpu_s = time.process_time() - cpu_s
        result.cpu_share = result.cpu_s / elapsed_s
        self._consumer.stop()
        return result

    def _take(self, batch: Batch, measured_from: float) -> None:
        now_ns, result = time.monotonic_ns(), self._result
        now = now_ns / 1e9
        result.redelivered += sum([message.attempts > 1 for message in batch])
        bodies = [message.body for message in batch]
        if self._job.is_shared and self._job.is_stamped:
            bodies = [body for body in bodies if has_stamp(body, self._job.tag)]
            result.foreign += len(batch) - len(bodies)
        result.consumed += len(bodies)
        self._counters.consumes(self._job.number, len(bodies))
        measured = len(bodies) if now >= measured_from else 0
        if self._job.is_stamped:
            times_ns, words = read_stamps(bodies)
            result.checksum += sum(words)
            from_ns = int(measured_from * 1e9)
            measured = 0
            for time_ns, count in Counter(times_ns).items():
                if time_ns >= from_ns:
                    result.latencies.add((now_ns - time_ns) / 1e6, count)
                    measured += count
        if measured:
            result.began_at = result.began_at or now
            result.ended_at = now
            result.measured += measured
            if measured == len(bodies):
                result.measured_bytes += sum(map(len, bodies))
            else:
                result.measured_bytes += round(sum(map(len, bodies)) * measured / len(bodies))
