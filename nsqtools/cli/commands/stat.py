"""``nsq stat``: the queues of a cluster in numbers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import LIMITS, OUTPUT, ChannelPatterns, Count, TopicPatterns
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress, tell_left_out
from nsqtools.cli.render.output import Kind, ListingForm
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, stopping
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import format_duration

if TYPE_CHECKING:
    from nsqtools.cluster.sampling import Sample
    from nsqtools.cluster.stats_documents import Thresholds

VIEW = "Rows"
WATCH = "Thresholds"

INTERVAL_S = 1.0


class StatRows(Enum):
    """What a row is."""

    queues = "queues"
    nodes = "nodes"
    clients = "clients"
    memory = "memory"


def parse_column(text: str) -> str:
    """Read the name of a column. (Imported late: the help page needs no services.)"""
    from nsqtools.cluster.stats_documents import check_column

    return check_column(text)


def stat(
    topic: TopicPatterns = None,
    channel: ChannelPatterns = None,
    show: StatRows = opt(
        "queues|nodes|clients|memory",
        "A row for each queue, queue on an nsqd, consumer, or nsqd's memory.",
        VIEW,
        StatRows.queues,
    ),
    filter: list[str] | None = opt(
        "COLUMN>N", "Only queues that match: depth>0, clients=0, paused=yes.", VIEW
    ),
    sort: str = opt(
        "COLUMN", "Sort by a column, largest numbers first.", VIEW, "topic", parser=parse_column
    ),
    interval: float | None = opt(
        "DURATION", "Sample every DURATION, until --count or until interrupted.", LIMITS
    ),
    count: Count = None,
    once: bool = opt("", "Take one sample, without waiting and without rates.", LIMITS),
    csv: bool = opt("", "The same as -o csv.", OUTPUT),
    prometheus: bool = opt("", "Print Prometheus metrics, once.", OUTPUT),
    max_depth: int | None = opt("N", "Fail when the depth of a queue is above N.", WATCH, min=0),
    max_requeue_rate: float | None = opt(
        "N", "Fail when more than N messages a second are requeued or time out.", WATCH, min=0
    ),
    min_clients: int | None = opt(
        "N", "Fail when a channel has fewer than N consumers.", WATCH, min=1
    ),
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Show depth, rates, clients and latency of topics and channels.

    Measures for a second and ends; with --interval it continues until --count, or until it is
    interrupted. Rates are messages a second over the time that really passed. A row without a
    channel is the topic itself: its depth is what waits there, before it reaches the channels. An
    nsqd that does not answer is named and left out.

    The exit status is 1 when a threshold is exceeded, 3 when a topic or channel was named that is
    not there, 6 when an nsqd did not answer.

    Columns:

      depth      messages that wait in the queue, in memory and on disk
      memory     those of them in memory
      disk       those of them on disk
      in_flight  messages that consumers have and have not finished
      deferred   messages that wait until their delay is over
      ingress    messages received, a second
      egress     messages sent to consumers, a second
      finish     messages finished, a second
      requeue    messages requeued or timed out, a second
      requeued   messages requeued since the queue was created or nsqd started
      timed_out  messages that timed out, since then
      messages   messages received, since then
      clients    consumers that are connected
      paused     whether the queue is paused on any nsqd
      e2e_ms     ms from publishing to finishing, nsqd's highest percentile

    Examples:
        nsq stat
        nsq stat -t clicks -c archive --interval 2s
        nsq stat --filter 'depth>0' --sort depth --lookupd-http-address lookup:4161
        nsq stat --once --json | jq '.queues[] | select(.paused)'
        nsq stat --show clients -t 'web*'
        nsq stat --max-depth 10000 --min-clients 1 --quiet
    """
    from nsqtools.cli.render.stat_output import SamplePrinter
    from nsqtools.cluster.sampling import SampleFilter, Sampler
    from nsqtools.cluster.stats_documents import Thresholds, parse_filter

    if (once or prometheus) and max_requeue_rate is not None:
        raise ConfigurationError(
            "--max-requeue-rate needs two samples, and --once takes one", hint="Drop --once."
        )
    if sum((form.kind is not None, csv, prometheus)) > 1:
        raise ConfigurationError("--json, --output, --csv and --prometheus exclude each other")
    if csv:
        form = form._replace(kind=Kind.csv)
    thresholds = Thresholds(max_depth, max_requeue_rate, min_clients)
    subject = SampleFilter(
        topic or (), channel or (), clients=show is StatRows.clients, memory=show is StatRows.memory
    )
    emit = SamplePrinter(
        runtime,
        show.value,
        form,
        tests=[parse_filter(text) for text in filter or ()],
        sort=sort,
        prometheus=prometheus,
        timed=interval is not None,
    )
    watch = Watch(runtime, thresholds, emit)
    with cluster.open() as opened, Progress(runtime) as progress:
        sampler = Sampler(opened, subject)
        if not (once or prometheus):
            progress.show(lambda: f"measuring rates for {format_duration(interval or INTERVAL_S)}")
        with stopping(sampler.stop) as signals:
            if once or prometheus:
                watch.see(sampler.sample())
            else:
                rounds = count if interval is not None else count or 1
                for sample in sampler.samples(interval or INTERVAL_S, rounds):
                    progress.clear()
                    watch.see(sample)
    return signals.status(otherwise=watch.status)


class Watch:
    """Hands samples on and tells, once each time, what is wrong with the cluster."""

    def __init__(
        self, runtime: Runtime, thresholds: Thresholds, emit: Callable[[Sample], None]
    ) -> None:
        self._runtime = runtime
        self._thresholds = thresholds
        self._emit = emit
        self._told: set[str] = set()
        self.status = ExitStatus.DONE

    def see(self, sample: Sample) -> None:
        """Print a sample, what is above its threshold, and who did not answer."""
        self._emit(sample)
        failed = {str(failure.error) for failure in sample.failures}
        complaints = self._thresholds.complaints(sample.totals)
        for failure in sample.failures:
            if str(failure.error) not in self._told:
                tell_left_out([failure], self._runtime)
        self._told = failed
        for line in complaints:
            self._runtime.complain(line)
        if failed and self.status is ExitStatus.DONE:
            self.status = ExitStatus.PARTLY_DONE
        if complaints:
            self.status = ExitStatus.FAILED
