"""One measurement, from the topic to its removal.

    pub   publishers alone, into an ephemeral topic: nsqd keeps what fits its memory queue and
          discards the rest, so no disk fills up, and none is measured
    sub   consumers first, with nothing in flight; then the topic is filled; then they drain it
    e2e   consumers, then publishers, which stay a bounded number of messages ahead of them

What is our own is gone afterwards. An ephemeral topic goes with its last channel, so publishers
leave one by entering and leaving it. `sub` needs queues that discard nothing: its topic (or its
channel, in a topic of the user's) is a lasting one and is deleted by nsqd's HTTP API, which is
asked before anything is created.

Traps: consumers of a measurement have a channel of their own, so that they take no message away
from others; a user's topic is never deleted.
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

# for the workers: where it is missing, the command is to say so, as of all extras
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
from nsqtools.bench.crew import UNKNOWN, Crew, SharedCounts
from nsqtools.client.connection import require_one
from nsqtools.client.consumer import Consumer
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError
from nsqtools.protocol.names import EPHEMERAL

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster

log = logging.getLogger("nsqtools")

STALLED_S = 5.0
"""After this time without messages, consumers will not get what is missing."""

POLL_S = 0.02
FILL_BATCH_BYTES = 64 << 10

Results = Sequence[WorkerResult]


class Bench:
    """Runs a `BenchPlan`: `run` on one thread, `stop` from any: it ends early with what there is.

    ``show`` is called ten times a second with what is going on and how many messages were handled.
    """

    def __init__(
        self, plan: BenchPlan, show: Callable[[str, int], None] = lambda what, count: None
    ):
        self._plan = plan
        self._show = show
        self._phase = ""
        self._counters = SharedCounts(plan.connections)
        self._interrupted = False
        self._progress = ("", 0), 0.0  # phase and messages consumed, and since when
        token = f"{random.randrange(1 << 32):08x}"
        self._tag = int(token, 16) & MAX_TAG
        lasts = plan.mode is BenchMode.SUB
        self.topic = plan.topic or f"bench_{token}{'' if lasts else EPHEMERAL}"
        self.channel = f"bench_{token}{'' if lasts else EPHEMERAL}"

    def run(self) -> BenchReport:
        """Measure. Raises what keeps workers from their work: `NsqError` with its category."""
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

    # -- the three of them ----------------------------------------------------------------------

    def _run_pub(self) -> BenchReport:
        plan = self._plan
        self._phase = "publishing"
        with ExitStack() as stack:
            if plan.topic is None:
                stack.callback(self._let_ephemeral_topic_go)
            crew = stack.enter_context(self._crew(plan, publishes=True))
            before = _processor_ticks()
            begin = crew.begin()
            published = crew.results()
            return self._report(published, None, begin + plan.warm_up_s, before)

    def _run_e2e(self) -> BenchReport:
        plan = self._plan
        self._phase = "subscribing"
        with (
            self._crew(plan, publishes=False) as consumers,
            self._crew(plan, publishes=True) as publishers,
        ):
            before = _processor_ticks()
            begin = consumers.begin()
            self._phase = "publishing and consuming"
            publishers.begin(begin)
            published = publishers.results()
            self._counters.target = sum(result.messages for result in published)
            self._phase = "waiting for the last messages"
            consumed = consumers.results()
            return self._report(published, consumed, begin + plan.warm_up_s, before)

    def _run_sub(self) -> BenchReport:
        plan = self._plan
        with ExitStack() as stack:
            cluster = stack.enter_context(whole_cluster(plan))
            channel = self.channel if plan.topic else ""
            stack.callback(delete_own, cluster, self.topic, channel)
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
            before = _processor_ticks()
            began = consumers.begin()
            return self._report(published, consumers.results(), began, before)

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
        out = sum(result.messages for result in published)
        back = None if consumed is None else sum(result.messages for result in consumed)
        missing = out - back if back is not None else 0
        if plan.mode is BenchMode.SUB and plan.topic is not None:
            missing = max(0, missing)  # others may publish there
        ended_early = plan.mode is BenchMode.SUB and plan.for_s is not None
        is_intact = missing == 0 or (ended_early and missing > 0)
        if is_e2e:
            sums = {sum(r.checksum for r in rs) % (1 << 64) for rs in (published, consumed or ())}
            is_intact = is_intact and len(sums) == 1
        measured = published if consumed is None else consumed
        # Publishers that filled a topic beforehand are not measured.
        clients = [measured, published] if is_e2e else [measured]
        shares = [each.cpu_share for results in clients for each in results if each.measured]
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
            published=out,
            consumed=back,
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
        return Crew(jobs, self._counters, self._look)

    def _look(self) -> None:
        """Tell how far it is, and end what will not go on."""
        counters = self._counters
        consumed, now = sum(counters.consumed), time.monotonic()
        consumes = self._plan.mode is not BenchMode.PUB and self._phase != "filling the topic"
        self._show(self._phase, consumed if consumes else sum(counters.published))
        progress = self._phase, consumed
        if progress != self._progress[0] or not consumes:
            self._progress = progress, now
        elif now - self._progress[1] > STALLED_S and counters.on_the_way > 0:
            if counters.on_the_way >= BACKLOG:
                counters.stop_publishing()
            if counters.target != UNKNOWN:
                counters.stop_consuming()

    # -- topics ---------------------------------------------------------------------------------

    def _wait_until_queued(self, cluster: Cluster, total: int) -> None:
        """nsqd moves messages from the topic to the channel in its own time."""
        before, since = -1, time.monotonic()
        while not self._interrupted and time.monotonic() - since < STALLED_S:
            self._look()
            answers, _ = cluster.ask_nsqds(lambda nsqd: nsqd.stats(self.topic, self.channel))
            queued = sum(
                channel.depth
                for stats in answers.values()
                for topic in stats.topics or ()
                for channel in topic.channels
            )
            if queued >= total:
                return
            if queued != before:
                before, since = queued, time.monotonic()
            time.sleep(POLL_S)

    def _let_ephemeral_topic_go(self) -> None:
        """Enter and leave a channel of the topic, which goes with it."""
        options = replace(self._plan.consumer_options, max_in_flight=0)
        for address in self._plan.connection.nsqd_tcp_addresses:
            consumer = Consumer(
                self.topic, self.channel, nsqd_tcp_addresses=address, options=options
            )
            try:
                consumer.start(fail_fast=True)
                consumer.stop()
            except NsqError as error:
                # an ephemeral topic does not outlive its nsqd
                level = logging.INFO if isinstance(error, ConnectionFailed) else logging.WARNING
                log.log(level, "topic %s may not have been deleted: %s", self.topic, error)


@contextmanager
def whole_cluster(plan: BenchPlan) -> Iterator[Cluster]:
    """nsqd's HTTP API. Raises when a topic or channel could not be deleted afterwards."""
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


def delete_own(cluster: Cluster, topic: str, channel: str) -> None:
    """Delete a topic, or only the channel; warn where that did not work."""
    from nsqtools.cluster.admin import tell_where_named

    _, failures = cluster.ask_nsqds(
        lambda nsqd: nsqd.administer("delete", topic, channel), required=False
    )
    for failure in failures:
        what = f"channel {channel} of topic {topic}" if channel else f"topic {topic}"
        log.warning("%s may not have been deleted: %s", what, failure.error)
    if channel:
        tell_where_named(cluster, [topic], channel)


def _cpu_us_per_message(results: Results) -> float:
    """Processor time of all workers of one kind, over the messages that they spent it on."""
    messages = sum(result.cpu_messages for result in results)
    return 1e6 * sum(result.cpu_s for result in results) / messages if messages else 0.0


def _processor_ticks() -> tuple[int, int] | None:
    """Ticks of all processors since the start of the machine, where the system tells them (Linux):
    those with work, and all."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # waiting for a disk is not work
    return sum(ticks) - idle, sum(ticks)
