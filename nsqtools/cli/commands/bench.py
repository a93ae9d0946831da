"""``nsq bench``: the speed and the latency of an nsqd."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context

from nsqtools.cli.options.connection import (
    AddressFlags,
    ClientFlags,
    MaxInFlight,
    client_connection,
    client_opt,
    effective_options,
)
from nsqtools.cli.options.params import LIMITS
from nsqtools.cli.parsing.binding import OptionSet, Provided, opt, subset
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.render.output import Cell, Form, ListingForm, write_json, write_listing
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.cli.running.consuming import Create
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, stop_on_signals
from nsqtools.client.connection_settings import DEFAULT_NSQD_TCP_ADDRESS, texts_of
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.commands import mpub_size
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.text import counted
from nsqtools.records.units import parse_size

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchPlan, BenchReport

# Bodies of 200 bytes make 40 MB. Larger bodies must not fill the disk of nsqd.
BACKLOG_TO_DRAIN = 200_000
MAX_BACKLOG_BYTES = 1 << 30

LOAD = "Load"

FOR_S = 5.0
WINDOW = 16

MessageLimit = Annotated[int | None, opt("--count -n N", "Measure N messages.", LIMITS, min=1)]

COLUMNS = (
    "mode connections size_min size_max messages seconds messages_per_s bytes_per_s published "
    "consumed client_cpu cpu_us_per_message min_ms mean_ms p50_ms p90_ms p99_ms p99.9_ms max_ms"
)
BENCH_ADDRESSES = ("nsqd_tcp_address", "nsqd_http_address", "profile", "no_profile")


def parse_sizes(text: str) -> tuple[int, int]:
    """Parse ``200``, ``1KiB`` or ``100-2000``. Raises ``ValueError``."""
    first, dash, last = text.partition("-")
    low, high = parse_size(first), parse_size(last if dash else first)
    if low > high:
        raise ValueError(f"{text!r} is not a range: its end is below its start")
    return low, high


class BenchPublishing(OptionSet):
    """The load of the publishers, and its duration."""

    panel = LOAD
    batch: int | None = opt(
        "N",
        "Messages in one publish command.",
        min=1,
        show_default="100, or as many as nsqd accepts; 1 in e2e",
    )
    window: int = opt(
        "N", "Unanswered publish commands allowed on a connection.", default=WINDOW, min=1
    )
    rate: float = opt(
        "N", "Publish N messages a second in total; 0 for full speed.", default=0.0, min=0
    )
    count: MessageLimit = None
    warm_up: float = opt(
        "DURATION", "Run for DURATION before the measurement begins.", LIMITS, "500ms"
    )


class Load(OptionSet):
    """Common options of the three measurements.

    nsqd are given by TCP address, because nsqlookupd is not part of the measurement.
    """

    panel = LOAD

    context: Context
    topic: str | None = opt(
        "-t TOPIC", "Publish to this topic; by default to a new one, which is deleted afterwards."
    )
    # For a tuple typer would require two words.
    size: Any = opt(
        "BYTES",
        "Size of a message, or a range to draw it from (100-2KiB).",
        default="200",
        parser=parse_sizes,
    )
    connections: int | None = opt(
        "N", "Connections each way, each in its own process.", min=1, show_default="1 for each nsqd"
    )
    for_: float | None = opt(
        "DURATION", "Measure for DURATION; 5s without --count and --for.", LIMITS
    )
    addresses: Annotated[dict[str, Any], Provided(subset(AddressFlags, *BENCH_ADDRESSES))]
    max_in_flight: MaxInFlight = None
    consumer_opt: list[str] | None = client_opt("consumer")
    producer_opt: list[str] | None = client_opt("producer")
    flags: ClientFlags
    form: ListingForm
    runtime: Session

    def plan(self, mode: str, publishing: BenchPublishing, batch: int) -> BenchPlan:
        """Return the plan of a measurement. Raises `ConfigurationError` if it is impossible."""
        from nsqtools.bench.bench_plan import BenchMode, BenchPlan
        from nsqtools.client.options import THROUGHPUT, ClientOptions

        connection = client_connection(self.context, "consumer_opt")
        # Only the HTTP address of an nsqd on this machine was given.
        if not connection.nsqd_tcp_addresses:
            connection = replace(connection, nsqd_tcp_addresses=(DEFAULT_NSQD_TCP_ADDRESS,))
        producer = ClientOptions(max_outstanding=publishing.window)
        producer = producer.with_options(texts_of(effective_options(self.context, "producer_opt")))
        largest = (producer.publish_max_body_size - mpub_size(())) // mpub_size((self.size[1],))
        return BenchPlan(
            mode=BenchMode(mode),
            connection=connection,
            producer_options=producer,
            consumer_options=connection.client_options(**THROUGHPUT),
            topic=None if self.topic is None else check_topic(self.topic),
            size=self.size,
            batch=publishing.batch or max(1, min(batch, largest)),
            connections=self.connections or len(connection.nsqd_tcp_addresses),
            rate=publishing.rate,
            count=publishing.count,
            for_s=FOR_S if publishing.count is None and self.for_ is None else self.for_,
            warm_up_s=publishing.warm_up,
        )

    def measure(
        self, mode: str, publishing: BenchPublishing, batch: int, *, create: bool = True
    ) -> int:
        """Measure and print the report; return the exit status, 1 if messages are missing."""
        from nsqtools.bench.bench import Bench

        plan, form, runtime = self.plan(mode, publishing, batch), self.form, self.runtime
        form.check([name for name in COLUMNS.split() if mode != "sub" or not name.endswith("_ms")])
        if plan.topic is not None and mode != "pub":
            check_topic_is_safe(plan, plan.topic, runtime, create=create)
        with Progress(runtime) as progress:
            began = runtime.monotonic()

            def show(phase: str, count: int) -> None:
                elapsed_s = runtime.monotonic() - began
                progress.show(
                    lambda: f"{phase}: {counted(count, 'message', ',')} after {elapsed_s:.1f} s"
                )

            bench = Bench(plan, show)
            with stop_on_signals(bench.stop) as signals:
                report = bench.run()
        columns = columns_of_report(report)
        if form.is_document:
            write_json(runtime, report._asdict())
        elif runtime.stdout_is_tty and form == Form():
            write_listing(runtime, ("figure", "value"), columns.items())
        else:
            write_listing(runtime, list(columns), [list(columns.values())], form)
        for line in report.limits:
            runtime.info(f"nsq: {line}")
        if report.interrupted or report.intact:
            return signals.status()
        runtime.print_error(
            f"nsq: error: {counted(report.published, 'message')} published and {report.consumed} "
            f"consumed: {report.missing} missing, {report.repeated} repeated"
        )
        return ExitStatus.FAILED


def pub(publishing: BenchPublishing, *, load: Load) -> int:
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
    return load.measure("pub", publishing, 100)


def sub(
    count: int | None = opt(
        "--count -n N",
        "Measure N messages.",
        LIMITS,
        min=1,
        show_default="200000, or as many as fit in 1 GiB",
    ),
    create: Create = False,
    *,
    load: Load,
) -> int:
    """Measure how fast a backlog is consumed, each message finished.

    Fills a new topic with --count messages, drains it, and deletes it through nsqd's HTTP API. With
    --topic the messages stay for the other channels, and only the measured channel is deleted.
    nsqlookupd still lists what was deleted from these nsqd. Latency is not measured, because it
    would be the time in the backlog.

    Examples:
        nsq bench sub
        nsq bench sub --count 1000000 --connections 2 --max-in-flight 500
        nsq bench sub --tls --tls-ca-file ca.pem --json
    """
    if count is None:
        count = max(1, min(BACKLOG_TO_DRAIN, MAX_BACKLOG_BYTES // max(1, load.size[1])))
    fill = BenchPublishing(batch=None, window=WINDOW, rate=0.0, warm_up=0.0, count=count)
    return load.measure("sub", fill, 100, create=create)


def e2e(publishing: BenchPublishing, create: Create = False, *, load: Load) -> int:
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
        nsq bench e2e --count 100000 --json
    """
    return load.measure("e2e", publishing, 1, create=create)


def check_topic_is_safe(plan: BenchPlan, topic: str, runtime: Runtime, *, create: bool) -> None:
    """Check that our channel, which is deleted afterwards, takes no messages of a user."""
    channel = "bench#ephemeral"
    try:
        watch = ChannelWatch([topic], channel, plan.connection, runtime, force=False)
        watch.check_topics(create=create)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"topic {topic} has no channel and messages waiting, which would be lost",
            hint=f"Give it a channel first: nsq channel create {topic} CHANNEL.",
        ) from error


def columns_of_report(report: BenchReport) -> dict[str, Cell]:
    """Return the figures as columns of one row."""
    figures: dict[str, Any] = report._asdict()
    figures |= {f"size_{name}": value for name, value in figures["size"].items()}
    figures |= {f"{name}_ms": value for name, value in (figures["latency_ms"] or {}).items()}
    values = {name: figures[name] for name in COLUMNS.split() if name in figures}
    return {
        name: f"{value:.3f}" if isinstance(value, float) else value
        for name, value in values.items()
    }
