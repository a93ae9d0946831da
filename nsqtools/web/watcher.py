"""One thread samples the cluster for all pages, clients of the API and the history.

Samples do not include consumers, which are the most expensive part for nsqd; a page that shows
consumers queries them itself. Expensive samples are taken less often (`Watcher.interval_s`), and
the page shows this. A daemon that does not answer is one of the failures of the sample, and does
not delay it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from nsqtools.client.change_log import ChangeLog
from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.history import History, WaitingAges
from nsqtools.cluster.problems import EarlierTotals, RecentTotals
from nsqtools.cluster.sampling import Sample, SampleFilter, Sampler
from nsqtools.errors import is_limit

log = logging.getLogger("nsqtools")

# A console must not compete with nsqd on a shared machine.
MAX_CPU_SHARE = 0.10
# Rates and alerts of a page that is more than half a minute old would mislead.
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
        self.ages = WaitingAges()
        self._past = RecentTotals()
        self._changed = threading.Lock()
        self._stopped = threading.Event()
        self._next_sample = _new_future()  # done with the next sample
        self._thread = threading.Thread(target=self._run, name="nsq-watcher", daemon=True)
        self._cost_s = 0.0
        self._failures = ChangeLog()

    @property
    def is_slowed(self) -> bool:
        """Whether the interval is longer than ``refresh_s``, because samples are expensive."""
        return self.interval_s > self.refresh_s

    @property
    def is_stopped(self) -> bool:
        """Whether sampling has ended."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling and wake all waiters, without waiting for a sample under way."""
        with self._changed:
            self._stopped.set()
            self.sampler.stop()
            self._wake()

    def earlier(self, sample: Sample) -> EarlierTotals | None:
        """Return the totals of about a minute before a sample, if there are any."""
        with self._changed:
            return self._past.before(sample)

    async def newer(self, than: Sample | None, timeout_s: float) -> Sample | None:
        """Return the first sample that is not ``than``; None after ``timeout_s`` or `stop`.

        Samples are compared by identity, because the clock may be set back between them.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    # Taken before `latest` is read, or a sample between the two would be missed.
                    next_sample = self._next_sample
                    if self.latest is not than:
                        return self.latest
                    if self.is_stopped:
                        return None
                    await asyncio.wrap_future(next_sample)
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
                # A lack of descriptors or threads is no bug, and needs no traceback.
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
        self._log_failures(sample)
        with self._changed:
            self._past.add(sample)
            self.ages.add(sample.at_s, sample.rows)
            self.latest = sample
            self._wake()

    def _log_failures(self, sample: Sample) -> None:
        """Log when a daemon begins to fail, or fails in another way, and when it responds again."""
        for failure in sample.failures:
            self._failures.report(failure.address, str(failure.error))
        addresses = [failure.address for failure in sample.failures]
        self._failures.retain(addresses, "{} responds again")

    def _note_cost(self, cost_s: float) -> None:
        """Adapt the interval to the CPU time of the whole process per sample."""
        self._cost_s = cost_s if not self._cost_s else 0.8 * self._cost_s + 0.2 * cost_s
        fair_s = min(self._cost_s / MAX_CPU_SHARE, LONGEST_INTERVAL_S)
        self.interval_s = max(self.refresh_s, fair_s)

    def _wake(self) -> None:
        self._next_sample.set_result(None)
        self._next_sample = _new_future()


def _new_future() -> Future[None]:
    """Return a future that is marked as running, so that no waiter can cancel it for the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
