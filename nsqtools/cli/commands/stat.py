"""``nsq stat``: the queues of a cluster in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import LIMITS, OUTPUT, ChannelPatterns, Count, TopicPatterns
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import tell_left_out
from nsqtools.cli.render.output import (
    Cell,
    Form,
    Kind,
    ListingForm,
    write_json,
    write_listing,
    write_text,
)
from nsqtools.cli.running.ends import ExitStatus, stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_documents import (
    COLUMNS,
    Test,
    client_documents,
    document,
    prometheus_text,
    sort_rows,
    time_text,
)
from nsqtools.errors import ConfigurationError

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


Show = Annotated[
    StatRows,
    opt(
        "--show queues|nodes|clients|memory",
        "A row for each queue, queue on an nsqd, consumer, or nsqd's memory.",
        VIEW,
    ),
]

Sort = Annotated[
    str, opt("--sort COLUMN", "Sort by a column, largest numbers first.", VIEW, parser=parse_column)
]


Prometheus = Annotated[bool, opt("--prometheus", "Print Prometheus metrics, once.", OUTPUT)]


def stat(
    topic: TopicPatterns = None,
    channel: ChannelPatterns = None,
    show: Show = StatRows.queues,
    filter: list[str] | None = opt(
        "COLUMN>N", "Only queues that match: depth>0, clients=0, paused=yes.", VIEW
    ),
    sort: Sort = "topic",
    interval: float | None = opt(
        "DURATION", "Sample every DURATION, until --count or until interrupted.", LIMITS
    ),
    count: Count = None,
    once: bool = opt("", "Take one sample, without waiting and without rates.", LIMITS),
    csv: bool = opt("", "The same as -o csv.", OUTPUT),
    prometheus: Prometheus = False,
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
    with cluster.open() as opened:
        sampler = Sampler(opened, subject)
        with stopping(sampler.stop) as signals:
            if once or prometheus:
                watch.see(sampler.sample())
            else:
                rounds = count if interval is not None else count or 1
                for sample in sampler.samples(interval or INTERVAL_S, rounds):
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


OPTIONAL = (
    "e2e_ms",
    "messages",
    "requeued",
    "timed_out",
    "memory",
    "disk",
    "requeue",
    "deferred",
    "finish",
    "egress",
    "ingress",
    "user_agent",
    "requeued",
    "finished",
    "messages",
    "client_id",
    "ready",
    "gc_total_runs",
    "next_gc_bytes",
    "heap_released_bytes",
    "heap_objects",
)
"""The columns that a narrow terminal does without, in this order."""

CLIENT_COLUMNS = (
    "topic",
    "channel",
    "node",
    "client_id",
    "remote_address",
    "user_agent",
    "ready",
    "in_flight",
    "messages",
    "finished",
    "requeued",
)
MEMORY_COLUMNS = (
    "node",
    "version",
    "health",
    "heap_objects",
    "heap_in_use_bytes",
    "heap_idle_bytes",
    "heap_released_bytes",
    "next_gc_bytes",
    "gc_total_runs",
)
TIMED = (Kind.csv, Kind.jsonl)
"""The forms in which every row has the time of its sample."""


class SamplePrinter:
    """Prints samples, one after the other, in one form; ``timed`` rows begin with their time."""

    def __init__(
        self,
        runtime: Runtime,
        view: str,
        form: Form,
        *,
        tests: Sequence[Test],
        sort: str,
        prometheus: bool = False,
        timed: bool = False,
    ) -> None:
        self._runtime = runtime
        self._view = view
        self._form = form
        self._tests = tests
        self._sort = sort
        self._prometheus = prometheus
        self._timed = timed or form.kind in TIMED or "time" in form.columns
        self._is_first = True
        form.check(("time", *columns_of(view)))

    def __call__(self, sample: Sample) -> None:
        """Print a sample."""
        if self._prometheus:
            write_text(self._runtime, prometheus_text(sample))
            return
        rows = sample.rows if self._view == "nodes" else sample.totals
        chosen = (row for row in rows if all(test(row) for test in self._tests))
        queues = sort_rows(chosen, self._sort)
        if self._form.is_document:
            answer = document(sample, queues)
            if self._view == "clients":
                answer["consumers"] = client_documents(sample.reports, queues)
            write_json(self._runtime, answer)
            return
        columns, lines = columns_of(self._view), lines_of(self._view, sample, queues)
        if self._timed:
            moment = time_text(sample.time_ns)
            if self._form.kind is None and self._runtime.stdout_is_tty:
                moment = moment[CLOCK]
            columns, lines = ("time", *columns), [(moment, *line) for line in lines]
        write_listing(
            self._runtime, columns, lines, self._form, headed=self._is_first, optional=OPTIONAL
        )
        self._is_first = False


CLOCK = slice(11, 19)  # of RFC 3339: hours, minutes and seconds


def columns_of(view: str) -> Sequence[str]:
    """The columns of a view."""
    if view == "clients":
        return CLIENT_COLUMNS
    if view == "memory":
        return MEMORY_COLUMNS
    return [name for name in COLUMNS if view == "nodes" or name != "node"]


def lines_of(view: str, sample: Sample, rows: Sequence[QueueRow]) -> list[Sequence[Cell]]:
    """The lines of a view."""
    if view == "clients":
        return _pick(client_documents(sample.reports, rows), CLIENT_COLUMNS)
    if view == "memory":
        return _pick(_memory(sample), MEMORY_COLUMNS)
    return [[_cell(COLUMNS[name](row)) for name in columns_of(view)] for row in rows]


def _memory(sample: Sample) -> list[dict[str, Any]]:
    return [
        {
            "node": report.address,
            "version": report.stats.version,
            "health": report.stats.health,
            **(report.stats.memory or {}),
        }
        for report in sample.reports
    ]


def _pick(documents: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[Sequence[Cell]]:
    return [[_cell(document.get(column)) for column in columns] for document in documents]


def _cell(value: Cell) -> Cell:
    return None if value == "" else value
