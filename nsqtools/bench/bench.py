"""One measurement, from the topic to its removal.

    pub   publishers alone, into an ephemeral topic: nsqd keeps what fits its memory queue and
          discards the rest, so no disk fills up, and none is measured
    sub   consumers first, with nothing in flight; then the topic is filled; then they drain it
    e2e   consumers, then publishers, which stay a bounded number of messages ahead of them

What is our own is gone afterwards. An ephemeral topic goes with its last channel, so publishers
leave one by entering and leaving it. `sub` needs queues that discard nothing: its topic (or
its channel, in a topic of the user's) is a lasting one and is deleted by nsqd's HTTP API, which is
asked before anything is created.

Traps: consumers of a measurement have a channel of their own, so that no message of anybody else's
is taken from him; a user's topic is never deleted.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsqtools.bench.bench_plan import BACKLOG, BenchMode, BenchPlan, ConsumerJob, Job, PublisherJob
from nsqtools.bench.bench_report import BenchReport, cpu_us_per_message, merged
from nsqtools.bench.bench_topic import delete_own, open_cluster, wait_until_queued
from nsqtools.bench.bodies import MAX_TAG
from nsqtools.bench.counters import Counters
from nsqtools.bench.crew import Crew
from nsqtools.bench.processors import BusyProcessors
from nsqtools.client.consumer import Consumer
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError
from nsqtools.protocol.names import EPHEMERAL

if TYPE_CHECKING:
    from nsqtools.bench.consuming import ConsumerResult
    from nsqtools.bench.publishing import PublisherResult

log = logging.getLogger("nsqtools")

STALLED_S = 5.0
"""After this time without messages, consumers will not get what is missing."""

FILL_BATCH_BYTES = 64 << 10


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
        self._counters = Counters(plan.connections)
        self._interrupted = False
        self._progress = (0, 0.0)  # messages consumed, and when there were more
        token = f"{random.randrange(1 << 32):08x}"
        self._tag = int(token, 16) & MAX_TAG
        lasts = plan.mode is BenchMode.SUB
        self.topic = plan.topic or f"bench_{token}{'' if lasts else EPHEMERAL}"
        self.channel = f"bench_{token}{'' if lasts else EPHEMERAL}"

    def run(self) -> BenchReport:
        """Measure. Raises what keeps workers from their work: `NsqError` with its category."""
        run = {
            BenchMode.PUB: self._run_pub,
            BenchMode.SUB: self._run_sub,
            BenchMode.E2E: self._run_e2e,
        }
        try:
            return run[self._plan.mode]()
        finally:
            self._counters.close()

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
            crew = stack.enter_context(self._crew(self._publishers(plan)))
            with BusyProcessors() as processors:
                begin = crew.begin()
                results: list[PublisherResult] = crew.results()
        ended = max(result.ended_at for result in results)
        return self._report(
            results,
            results,
            None,
            seconds=ended - begin - plan.warm_up_s,
            machine_cpu=processors.share,
        )

    def _run_e2e(self) -> BenchReport:
        plan = self._plan
        self._phase = "subscribing"
        with (
            self._crew(self._consumers(is_stamped=True)) as consumers,
            self._crew(self._publishers(plan, is_stamped=True)) as publishers,
            BusyProcessors() as processors,
        ):
            begin = consumers.begin()
            self._phase = "publishing and consuming"
            publishers.begin(begin)
            published: list[PublisherResult] = publishers.results()
            self._counters.target = sum(result.confirmed for result in published)
            self._phase = "waiting for the last messages"
            consumed: list[ConsumerResult] = consumers.results()
        ended = max(result.ended_at for result in consumed)
        return self._report(
            published,
            consumed,
            consumed,
            seconds=ended - begin - plan.warm_up_s,
            machine_cpu=processors.share,
        )

    def _run_sub(self) -> BenchReport:
        plan = self._plan
        if plan.count is None:
            raise ConfigurationError("a backlog to drain needs a count of messages")
        with ExitStack() as stack:
            cluster = stack.enter_context(
                open_cluster(
                    plan.nsqd_tcp_addresses, plan.nsqd_http_addresses, plan.consumer_options
                )
            )
            channel = self.channel if plan.topic else ""
            stack.callback(delete_own, cluster, self.topic, channel)
            consumers = stack.enter_context(self._crew(self._consumers(is_stamped=False)))
            fill_batch = max(1, min(plan.batch, FILL_BATCH_BYTES // plan.size[1]))
            fill = replace(plan, batch=fill_batch, for_s=None, rate=0.0, warm_up_s=0.0)
            self._phase = "filling the topic"
            with self._crew(self._publishers(fill)) as publishers:
                publishers.begin()
                published: list[PublisherResult] = publishers.results()
            total = sum(result.confirmed for result in published)
            self._phase = "waiting for nsqd to queue the messages"
            wait_until_queued(cluster, self.topic, self.channel, total, self._keep_waiting)
            self._counters.target = total
            self._phase = "consuming"
            with BusyProcessors() as processors:
                consumers.begin()
                consumed: list[ConsumerResult] = consumers.results()
            consumers.end()
        began = min((r.began_at for r in consumed if r.measured), default=0.0)
        ended = max(result.ended_at for result in consumed)
        return self._report(
            published, consumed, consumed, seconds=ended - began, machine_cpu=processors.share
        )

    def _report(
        self,
        published: Sequence[PublisherResult],
        measured: Sequence[PublisherResult] | Sequence[ConsumerResult],
        consumed: Sequence[ConsumerResult] | None,
        *,
        seconds: float,
        machine_cpu: float | None,
    ) -> BenchReport:
        plan = self._plan
        out = sum(result.confirmed for result in published)
        back = None if consumed is None else sum(result.consumed for result in consumed)
        ended_early = plan.mode is BenchMode.SUB and plan.for_s is not None
        is_intact = back is None or back == out or (ended_early and back < out)
        if plan.mode is BenchMode.E2E and consumed is not None:
            sums = [
                sum(r.checksum for r in results) % (1 << 64) for results in (published, consumed)
            ]
            is_intact = is_intact and sums[0] == sums[1]
        messages = sum(result.measured for result in measured)
        return BenchReport(
            plan=plan,
            topic=self.topic,
            seconds=max(0.0, seconds) if messages else 0.0,
            messages=messages,
            bytes=sum(result.measured_bytes for result in measured),
            latencies=None if plan.mode is BenchMode.SUB else merged(measured),
            published=out,
            consumed=back,
            redelivered=sum(result.redelivered for result in consumed or ()),
            is_intact=is_intact,
            cpu_us_per_message=cpu_us_per_message(measured)
            + cpu_us_per_message(_also(plan, published)),
            client_cpu=max(result.cpu_share for result in [*measured, *_also(plan, published)]),
            machine_cpu=machine_cpu,
            interrupted=self._interrupted,
        )

    # -- workers --------------------------------------------------------------------------------

    def _crew(self, jobs: Sequence[Job]) -> AbstractContextManager[Crew]:
        return Crew(jobs, self._counters, self._plan.connections, self._look)

    def _address(self, number: int) -> str:
        return self._plan.nsqd_tcp_addresses[number % len(self._plan.nsqd_tcp_addresses)]

    def _publishers(self, plan: BenchPlan, *, is_stamped: bool = False) -> list[PublisherJob]:
        return [
            PublisherJob(
                number=number,
                nsqd_tcp_address=self._address(number),
                topic=self.topic,
                options=plan.producer_options,
                size=plan.size,
                batch=plan.batch,
                rate=plan.rate / plan.connections,
                count=plan.share(number, plan.count),
                for_s=plan.for_s,
                warm_up_s=plan.warm_up_s,
                tag=self._tag,
                is_stamped=is_stamped,
                backlog=BACKLOG if is_stamped else None,
            )
            for number in range(plan.connections)
        ]

    def _consumers(self, *, is_stamped: bool) -> list[ConsumerJob]:
        plan = self._plan
        return [
            ConsumerJob(
                number=number,
                nsqd_tcp_address=self._address(number),
                topic=self.topic,
                channel=self.channel,
                options=plan.consumer_options,
                for_s=None if is_stamped else plan.for_s,
                warm_up_s=plan.warm_up_s,
                tag=self._tag,
                is_stamped=is_stamped,
                is_shared=plan.topic is not None,
            )
            for number in range(plan.connections)
        ]

    def _look(self) -> None:
        """Tell how far it is, and end what will not go on."""
        counters = self._counters
        consumed, now = counters.consumed, time.monotonic()
        consumes = self._plan.mode is not BenchMode.PUB and self._phase != "filling the topic"
        self._show(self._phase, consumed if consumes else counters.published)
        if consumed != self._progress[0] or not consumes:
            self._progress = (consumed, now)
        elif now - self._progress[1] > STALLED_S and counters.published - consumed > 0:
            if counters.published - consumed >= BACKLOG:
                counters.stop_publishing()
            if not counters.is_target_unknown:
                counters.stop_consuming()

    def _keep_waiting(self) -> bool:
        self._look()
        return not self._interrupted

    # -- topics ---------------------------------------------------------------------------------

    def _let_ephemeral_topic_go(self) -> None:
        """Enter and leave a channel of the topic, which goes with it."""
        options = replace(self._plan.consumer_options, max_in_flight=0)
        for address in self._plan.nsqd_tcp_addresses:
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


def _also(plan: BenchPlan, published: Sequence[Any]) -> Sequence[Any]:
    """Publishers count as clients where they work beside the consumers."""
    return published if plan.mode is BenchMode.E2E else ()
