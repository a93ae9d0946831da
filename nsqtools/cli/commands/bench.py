"""``nsq bench``: the speed and the latency of an nsqd."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqtools.cli.options.bench_measurements import (
    BenchOutput,
    E2eMeasurement,
    Measurement,
    Output,
    PubMeasurement,
    SubMeasurement,
)
from nsqtools.cli.options.html_page import check_page, made_at, save_page
from nsqtools.cli.options.subscribing import look_before
from nsqtools.cli.render.progress import Progress
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchPlan


def pub(*, measurement: PubMeasurement, output: BenchOutput, runtime: Session) -> int:
    """Measure how fast messages are published, each confirmed by nsqd.

    Latency is that of a publish command, from sending a batch to its confirmation; with --rate from
    the time at which it was due. The topic is ephemeral: nsqd keeps what fits in its memory queue
    and discards the rest, so its disk is not measured. Give a --topic to measure that too; the
    messages stay there.

    Examples:
        nsq bench pub
        nsq bench pub --size 100-2KiB --batch 50 --connections 2 --for 30s --snappy
        nsq bench pub --rate 1000 --batch 1 --json
    """
    return measure(runtime, measurement, output)


def sub(*, measurement: SubMeasurement, output: BenchOutput, runtime: Session) -> int:
    """Measure how fast a backlog is consumed, each message finished.

    Fills a topic of its own with --count messages, then drains it, and deletes it through nsqd's
    HTTP API. With --topic the messages stay for the other channels, and only the channel that was
    measured is deleted. Latency is not measured: it would be the time in the backlog.

    Examples:
        nsq bench sub
        nsq bench sub --count 1000000 --connections 2 --max-in-flight 500
        nsq bench sub --tls --tls-ca-file ca.pem --json
    """
    return measure(runtime, measurement, output)


def e2e(*, measurement: E2eMeasurement, output: BenchOutput, runtime: Session) -> int:
    """Measure how long messages take from a publisher through nsqd to a consumer.

    Publishers put the time in each message (with --rate the time at which it was due); consumers
    read it by the same clock. At full speed publishers stay up to 2500 messages ahead, and latency
    is mostly the time in that queue: use a --rate below full speed. Every published message must
    arrive, once: counts and a checksum are checked.

    nsqd holds a message back in its output buffer for up to 25 ms: --consumer-opt
    output_buffer_size=-1 measures without it.

    Examples:
        nsq bench e2e --rate 1000
        nsq bench e2e --rate 20000 --batch 20 --for 1m --connections 2
        nsq bench e2e --embedded --count 100000 --html report.html
    """
    return measure(runtime, measurement, output)


def measure(runtime: Runtime, measurement: Measurement, output: Output) -> int:
    """Measure and print the report; the exit status is 1 when messages are missing."""
    from nsqtools.bench.bench import Bench
    from nsqtools.cli.render.bench_output import how_far, report_page, write_report

    if output.html is not None:
        check_page(output.html)
    with ExitStack() as stack:
        plan = ready(measurement, runtime, stack)
        progress = stack.enter_context(Progress(runtime))
        began = runtime.monotonic()
        bench = Bench(
            plan,
            lambda phase, count: progress.show(
                lambda: how_far(phase, count, runtime.monotonic() - began)
            ),
        )
        with stopping(bench.stop) as signals:
            report = bench.run()
    write_report(runtime, report, output.form)
    if output.html is not None:
        save_page(output.html, report_page(report, made_at()))
    for line in report.limits:
        runtime.tell(f"nsq: {line}")
    if report.interrupted or report.is_intact:
        return signals.status()
    runtime.insist(
        f"nsq: error: {report.published} messages were published and {report.consumed} consumed: "
        f"{report.missing} missing, {report.repeated} repeated"
    )
    return ExitStatus.FAILED


def ready(measurement: Measurement, runtime: Runtime, stack: ExitStack) -> BenchPlan:
    """The plan, with the embedded nsqd running and the topic looked at where that is asked for."""
    from nsqtools.bench.bench_plan import BenchMode

    plan = measurement.plan
    if measurement.embedded:
        from nsqtools.server.embedded import EmbeddedNsqd

        nsqd = stack.enter_context(EmbeddedNsqd())
        plan = replace(
            plan,
            nsqd_tcp_addresses=(nsqd.tcp_address,),
            nsqd_http_addresses=(nsqd.http_address,),
        )
    if plan.topic is not None and plan.mode is not BenchMode.PUB:
        look_at_topic(plan, plan.topic, runtime, create=measurement.create)
    return plan


def look_at_topic(plan: BenchPlan, topic: str, runtime: Runtime, *, create: bool) -> None:
    """See that a channel of ours, deleted afterwards, takes nothing away from a user's topic."""
    connection = ConnectionSettings(plan.nsqd_tcp_addresses, (), plan.nsqd_http_addresses)
    try:
        look_before([topic], "bench#ephemeral", connection, runtime, create=create, force=False)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"topic {topic} has no channel and messages waiting, which would be lost",
            hint=f"Give it a channel first: nsq channel create {topic} CHANNEL.",
        ) from error
