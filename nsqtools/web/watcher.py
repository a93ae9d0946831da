"""One thread that samples the cluster, for all pages, clients of the API and the history.

Samples are taken without consumers, which cost nsqd the most; a page that shows them asks itself.
When a sample costs much CPU time they are taken less often (`Watcher.interval_s`), and the page
says so.

A daemon that does not answer does not hold it up; it is among the failures of the sample.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.history import History
from nsqtools.cluster.problems import EarlierTotals, RecentTotals
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.errors import is_limit

log = logging.getLogger("nsqtools")

MAX_CPU_SHARE = 0.10
LONGEST_INTERVAL_S = 30.0


class Watcher:
    """Samples a cluster every ``refresh_s`` seconds between `start` and `stop`. Thread-safe."""

    def __init__(self, cluster: Cluster, refresh_s: float) -> None:
        self.latest: Sample | None = None
        self.interval_s = refresh_s
        self.refresh_s = refresh_s
        self.history = History(interval_s=refresh_s)
        self.sampler = Sampler(cluster, SampleFilter(), required=False, interval_s=refresh_s)
        self.took_s = 0.0
        self._past = RecentTotals()
        self._changed = threading.Lock()
        self._stopped = threading.Event()
        self._coming = _coming()  # over with the next sample
        self._thread = threading.Thread(target=self._run, name="nsq-watcher", daemon=True)
        self._cost_s = 0.0

    @property
    def is_slowed(self) -> bool:
        """Whether samples are taken less often than was asked for, because they cost too much."""
        return self.interval_s > self.refresh_s

    @property
    def is_stopped(self) -> bool:
        """Whether no sample will come any more."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wake all who wait. Returns at once: a sample may be under way."""
        with self._changed:
            self._stopped.set()
            self.sampler.stop()
            self._wake()

    def earlier(self, sample: Sample) -> EarlierTotals | None:
        """Return the totals of about a minute before a sample, as far as there are any."""
        with self._changed:
            return self._past.before(sample)

    async def newer(self, than: Sample | None, timeout_s: float) -> Sample | None:
        """Return a sample that came after this one, None for none in time and after `stop`.

        Their times do not tell: a clock may be set back.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    coming = self._coming  # before a look at what has come
                    if self.latest is not than:
                        return self.latest
                    if self.is_stopped:
                        return None
                    await asyncio.wrap_future(coming)
        return None

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._stopped.is_set():
            began_s = time.process_time()
            try:
                self._sample()
            except Exception as error:
                if self._stopped.is_set():  # the cluster is closed
                    return
                # descriptors, say, or threads: only a bug is shown with its traceback
                is_bug = not (isinstance(error, OSError) or is_limit(error))
                log.error("a sample failed: %s", error, exc_info=is_bug)
            self._note_cost(time.process_time() - began_s)
            next_s = max(next_s + self.interval_s, time.monotonic())
            self._stopped.wait(max(0.0, next_s - time.monotonic()))

    def _sample(self) -> None:
        began_s = time.monotonic()
        sample = self.sampler.sample()
        self.took_s = time.monotonic() - began_s
        self.history.add(sample)
        with self._changed:
            self._past.add(sample)
            self.latest = sample
            self._wake()

    def _note_cost(self, cost_s: float) -> None:
        """Adapt the interval to what samples cost, which is the CPU time of the whole process."""
        self._cost_s = cost_s if not self._cost_s else 0.8 * self._cost_s + 0.2 * cost_s
        fair_s = min(self._cost_s / MAX_CPU_SHARE, LONGEST_INTERVAL_S)
        self.interval_s = max(self.refresh_s, fair_s)

    def _wake(self) -> None:
        self._coming.set_result(None)
        self._coming = _coming()


def _coming() -> Future[None]:
    """Return what many wait for. It counts as begun: none of them cancels it for the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
