"""One measurement, from the topic to its removal.

    pub   publishers alone, into an ephemeral topic: nsqd discards messages beyond its memory
          queue, so that no disk is filled or measured
    sub   consumers subscribe with nothing in flight, the topic is filled, and they drain it
    e2e   consumers, then publishers, which stay a bounded number of messages ahead of them

Topics and channels of a measurement are removed after it. nsqd deletes an ephemeral topic with its
last channel, so `pub` subscribes to a channel and leaves it. `sub` needs queues that discard
nothing: its topic (or its channel, in a topic of the user) is a persistent one, which nsqd's HTTP
API deletes. That API is tried before anything is created.

Traps: a measurement consumes from its own channel, so that it takes no message from other
consumers. A topic of the user is never deleted.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

# The workers need it. Imported here, a missing extra is reported before any worker starts.
import ddsketch  # noqa: F401

from nsqtools.bench.bench_plan import (
    BACKLOG,
    MAX_TAG,
    BenchJob,
    BenchMode,
    BenchPlan,
    BenchReport,
    WorkerResult,
    latency_figures,
    limits,
)
from nsqtools.bench.worker import UNKNOWN, Crew, SharedCounts
from nsqtools.client.connection import require_one
from nsqtools.client.consumer import Consumer
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError
from nsqtools.protocol.names import EPHEMERAL

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

log = logging.getLogger("nsqtools")

STALLED_S = 5.0
"""Silence after which consumers stop waiting for the missing messages.

Consumers finish each batch when it arrives, so that no message waits for a redelivery by nsqd.
"""

DEPTH_POLL_S = 0.02
FILL_BATCH_BYTES = 64 << 10  # far below nsqd's max-body-size of 5 MB

Results = Sequence[WorkerResult]


class Bench:
    """Runs a `BenchPlan`: call `run` on one thread; `stop`, from any thread, ends it early.

    ``show`` is called ten times a second with the phase and the number of messages so far.
    """

    def __init__(
        self, plan: BenchPlan, show: Callable[[str, int], None] = lambda phase, count: None
    ):
        self._plan = plan
        self._show = show
        self._phase = ""
        self._counters = SharedCounts(plan.connections)
        self._interrupted = False
        self._progress = ("", 0), 0.0  # phase, messages consumed, time of this state
        token = f"{random.randrange(1 << 32):08x}"
        self._tag = int(token, 16) & MAX_TAG
        suffix = "" if plan.mode is BenchMode.SUB else EPHEMERAL
        self.topic = plan.topic or f"bench_{token}{suffix}"
        self.channel = f"bench_{token}{suffix}"

    def run(self) -> BenchReport:
        """Measure and return the report. Raises the `NsqError` that stopped a worker."""
        try:
            if self._plan.mode is BenchMode.PUB:
                return self._run_pub()
            return self._run_sub() if self._plan.mode is BenchMode.SUB else self._run_e2e()
        finally:
            os.close(self._counters.fileno)

    def stop(self) -> None:
        """Ask `run` to end early."""
        self._interrupted = True
        self._counters.stop_publishing()
        if self._plan.mode is BenchMode.SUB:
            self._counters.stop_consuming()

    # -- the three modes ------------------------------------------------------------------------

    def _run_pub(self) -> BenchReport:
        plan = self._plan
        self._phase = "publishing"
        with ExitStack() as stack:
            if plan.topic is None:
                stack.callback(self._remove_ephemeral_topic)
            crew = stack.enter_context(self._crew(plan, publishes=True))
            ticks = _processor_ticks()
            begin = crew.begin()
            published = crew.results()
            return self._report(published, None, begin + plan.warm_up_s, ticks)

    def _run_e2e(self) -> BenchReport:
        plan = self._plan
        self._phase = "subscribing"
        with (
            self._crew(plan, publishes=False) as consumers,
            self._crew(plan, publishes=True) as publishers,
        ):
            ticks = _processor_ticks()
            begin = consumers.begin()
            self._phase = "publishing and consuming"
            publishers.begin(begin)
            published = publishers.results()
            self._counters.target = sum(result.messages for result in published)
            self._phase = "waiting for the last messages"
            consumed = consumers.results()
            return self._report(published, consumed, begin + plan.warm_up_s, ticks)

    def _run_sub(self) -> BenchReport:
        plan = self._plan
        with ExitStack() as stack:
            cluster = stack.enter_context(whole_cluster(plan))
            channel = self.channel if plan.topic else ""
            stack.callback(delete_measured, cluster, self.topic, channel)
            consumers = stack.enter_context(self._crew(plan, publishes=False))
            fill_batch = max(1, min(plan.batch, FILL_BATCH_BYTES // plan.size[1]))
            fill = replace(plan, batch=fill_batch, for_s=None, rate=0.0, warm_up_s=0.0)
            self._phase = "filling the topic"
            with self._crew(fill, publishes=True) as publishers:
                publishers.begin()
                published = publishers.results()
            total = sum(result.messages for result in published)
            self._phase = "waiting for nsqd to queue the messages"
            self._wait_until_queued(cluster, total)
            self._counters.target = total
            self._phase = "consuming"
            ticks = _processor_ticks()
            began = consumers.begin()
            return self._report(published, consumers.results(), began, ticks)

    def _report(
        self,
        published: Results,
        consumed: Results | None,
        began: float,
        ticks_before: tuple[int, int] | None,
    ) -> BenchReport:
        after, machine_cpu = _processor_ticks(), None
        if ticks_before is not None and after is not None and after[1] > ticks_before[1]:
            busy, spent = (now - then for now, then in zip(after, ticks_before, strict=True))
            machine_cpu = round(busy / spent, 3)
        plan, is_e2e = self._plan, self._plan.mode is BenchMode.E2E
        sent = sum(result.messages for result in published)
        received = None if consumed is None else sum(result.messages for result in consumed)
        missing = sent - received if received is not None else 0
        if plan.mode is BenchMode.SUB and plan.topic is not None:
            missing = max(0, missing)  # other programs may publish to the user's topic
        ended_early = plan.mode is BenchMode.SUB and plan.for_s is not None
        is_intact = missing == 0 or (ended_early and missing > 0)
        if is_e2e:
            sums = {sum(r.checksum for r in rs) % (1 << 64) for rs in (published, consumed or ())}
            is_intact = is_intact and len(sums) == 1
        measured = published if consumed is None else consumed
        # In `sub` the publishers ran before the measurement: only e2e measures both sides.
        clients = [measured, published] if is_e2e else [measured]
        shares = [result.cpu_share for results in clients for result in results if result.measured]
        client_cpu = max(shares, default=0.0)
        messages = sum(result.measured for result in measured)
        size = sum(result.measured_bytes for result in measured)
        seconds = max(result.ended_at for result in measured) - began if messages else 0.0
        per_s = messages / seconds if seconds > 0 else 0.0
        latency = None
        if plan.mode is not BenchMode.SUB:
            sketches = [result.latencies for result in measured]
            latency = latency_figures(sketches, "message" if is_e2e else "batch")
        return BenchReport(
            mode=plan.mode,
            nsqds=list(plan.connection.nsqd_tcp_addresses),
            topic=self.topic,
            connections=plan.connections,
            size={"min": plan.size[0], "max": plan.size[1]},
            batch=plan.batch,
            window=plan.producer_options.max_outstanding,
            max_in_flight=plan.consumer_options.max_in_flight,
            rate=plan.rate or None,
            warm_up_s=plan.warm_up_s,
            transport=plan.transport,
            seconds=round(max(0.0, seconds), 6),
            messages=messages,
            bytes=size,
            messages_per_s=round(per_s, 1),
            bytes_per_s=round(size / seconds, 1) if seconds > 0 else 0.0,
            latency_ms=latency,
            published=sent,
            consumed=received,
            redelivered=sum(result.redelivered for result in measured),
            missing=max(0, missing),
            repeated=max(0, -missing),
            intact=is_intact,
            cpu_us_per_message=round(sum(map(_cpu_us_per_message, clients)), 3),
            client_cpu=round(client_cpu, 3),
            machine_cpu=machine_cpu,
            limits=limits(client_cpu, machine_cpu, per_s, 0.0 if self._interrupted else plan.rate),
            interrupted=self._interrupted,
        )

    def _crew(self, plan: BenchPlan, *, publishes: bool) -> Crew:
        jobs = [
            BenchJob(plan, number, publishes, self.topic, self.channel, self._tag)
            for number in range(plan.connections)
        ]
        return Crew(jobs, self._counters, self._check_progress)

    def _check_progress(self) -> None:
        """Show the progress, and end a phase that has stalled."""
        counters = self._counters
        consumed, now = sum(counters.consumed), time.monotonic()
        consumes = self._plan.mode is not BenchMode.PUB and self._phase != "filling the topic"
        self._show(self._phase, consumed if consumes else sum(counters.published))
        progress = self._phase, consumed
        if progress != self._progress[0] or not consumes:
            self._progress = progress, now
        elif now - self._progress[1] > STALLED_S and counters.unconsumed > 0:
            # Publishers wait for consumers at this number, so neither side would ever end.
            if counters.unconsumed >= BACKLOG:
                counters.stop_publishing()
            if counters.target != UNKNOWN:
                counters.stop_consuming()

    # -- topics ---------------------------------------------------------------------------------

    def _wait_until_queued(self, cluster: Cluster, total: int) -> None:
        """Wait until nsqd has moved all messages from the topic to the channel."""
        depth, since = -1, time.monotonic()
        while not self._interrupted and time.monotonic() - since < STALLED_S:
            self._check_progress()
            answers, _ = cluster.ask_nsqds(lambda nsqd: nsqd.stats(self.topic, self.channel))
            queued = sum(
                channel.depth
                for stats in answers.values()
                for topic in stats.topics or ()
                for channel in topic.channels
            )
            if queued >= total:
                return
            if queued != depth:
                depth, since = queued, time.monotonic()
            time.sleep(DEPTH_POLL_S)

    def _remove_ephemeral_topic(self) -> None:
        """Subscribe to a channel and leave: nsqd deletes the topic with its last channel."""
        options = replace(self._plan.consumer_options, max_in_flight=0)
        for address in self._plan.connection.nsqd_tcp_addresses:
            consumer = Consumer(
                self.topic, self.channel, nsqd_tcp_addresses=address, options=options
            )
            try:
                consumer.start(fail_fast=True)
                consumer.stop()
            except NsqError as error:
                # If nsqd has died, its ephemeral topic is gone as well: no reason to warn.
                level = logging.INFO if isinstance(error, ConnectionFailed) else logging.WARNING
                log.log(level, "topic %s may not have been deleted: %s", self.topic, error)


@contextmanager
def whole_cluster(plan: BenchPlan) -> Iterator[Cluster]:
    """Open the HTTP APIs of all nsqd of the plan.

    Raises `ConfigurationError` for an nsqd without one: its topic could not be deleted afterwards.
    """
    from nsqtools.cluster.directory import open_cluster

    addresses = plan.connection.nsqd_tcp_addresses
    with open_cluster(plan.connection) as cluster:
        nsqds, failures = cluster.nsqds()
        if failures or len(nsqds) < len(addresses):
            require_one(addresses, plan.consumer_options.dial_timeout_s)
            why = f" ({failures[0].error})" if failures else ""
            refusal = ConfigurationError(
                f"nsqd's HTTP API is needed to delete what is measured on{why}",
                hint="Give --nsqd-http-address, one for each --nsqd-tcp-address.",
            )
            refusal.category = failures[0].error.category if failures else refusal.category
            raise refusal
        yield cluster


def delete_measured(cluster: Cluster, topic: str, channel: str) -> None:
    """Delete a topic, or only ``channel`` if there is one; warn about each nsqd that refused."""
    from nsqtools.cluster.admin import warn_if_still_registered

    _, failures = cluster.ask_nsqds(
        lambda nsqd: nsqd.administer("delete", topic, channel), required=False
    )
    for failure in failures:
        target = f"channel {channel} of topic {topic}" if channel else f"topic {topic}"
        log.warning("%s may not have been deleted: %s", target, failure.error)
    warn_if_still_registered(cluster, [topic], channel)


def _cpu_us_per_message(results: Results) -> float:
    """Processor time of all workers of one kind, divided by their messages."""
    messages = sum(result.cpu_messages for result in results)
    return 1e6 * sum(result.cpu_s for result in results) / messages if messages else 0.0


def _processor_ticks() -> tuple[int, int] | None:
    """Return (busy, all) ticks of all processors since boot, or None on systems without /proc."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # waiting for a disk counts as idle
    return sum(ticks) - idle, sum(ticks)
