"""``nsq stat``: the queues of a cluster in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import (
    LIMITS,
    ChannelPatterns,
    Count,
    TopicPatterns,
    parse_positive_duration,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress, report_unreachable
from nsqtools.cli.render.output import FormKind, ListingForm, write_json, write_records
from nsqtools.cli.running.runtime import ExitStatus, Session, stop_on_signals
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import format_duration

if TYPE_CHECKING:
    from nsqtools.cluster.queue_rows import QueueRow
    from nsqtools.cluster.sampling import Sample

VIEW = "Rows"

INTERVAL_S = 1.0
TIMED = (FormKind.csv, FormKind.jsonl)
"""The forms in which each row has the time of its sample."""


class StatRows(Enum):
    """The kind of rows."""

    queues = "queues"
    nodes = "nodes"
    clients = "clients"
    memory = "memory"


OPTIONAL = """
e2e_ms messages requeued timed_out memory disk requeue deferred finish egress ingress
user_agent finished client_id ready
gc_total_runs next_gc_bytes heap_released_bytes heap_objects
"""
"""The columns that are dropped on a narrow terminal, in this order."""

CLIENT_COLUMNS = """
topic channel node client_id remote_address user_agent ready in_flight messages finished requeued
"""
MEMORY_COLUMNS = """
node version health
heap_objects heap_in_use_bytes heap_idle_bytes heap_released_bytes next_gc_bytes gc_total_runs
"""
CLOCK = slice(11, 19)  # of RFC 3339: hours, minutes and seconds


def parse_column(text: str) -> str:
    """Check the name of a column. The import is here to keep the help page fast."""
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
        "DURATION",
        "Sample every DURATION, until --count or until interrupted.",
        LIMITS,
        parser=parse_positive_duration,
    ),
    count: Count = None,
    once: bool = opt("", "Take one sample, without waiting and without rates.", LIMITS),
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Show depth, rates, clients and latency of topics and channels.

    Measures for one second; with --interval it continues until --count or an interrupt. Rates are
    messages a second over the measured time. A row without a channel is the topic itself; its depth
    counts the messages that have not reached the channels. An nsqd that does not answer is named
    and left out.

    The exit status is 3 if a named topic or channel does not exist, 6 if an nsqd did not answer.
    nsq check compares with limits.

    Columns:

      depth      messages waiting in the queue, in memory and on disk
      memory     messages in the queue that are in memory
      disk       messages in the queue that are on disk
      in_flight  messages delivered to consumers and not yet answered
      deferred   messages waiting for the end of their delay
      ingress    messages received, a second
      egress     messages sent to consumers, a second
      finish     messages finished, a second
      requeue    messages requeued or timed out, a second
      requeued   messages requeued since the queue was created or nsqd started
      timed_out  messages that timed out, since then
      messages   messages received, since then
      clients    connected consumers
      paused     whether the queue is paused on any nsqd
      e2e_ms     ms from publishing to finishing, nsqd's highest percentile

    Examples:
        nsq stat
        nsq stat -t clicks -c archive --interval 2s
        nsq stat --filter 'depth>0' --sort depth --lookupd-http-address lookup:4161
        nsq stat --once --json | jq '.queues[] | select(.paused)'
        nsq stat --show clients -t 'web*'
    """
    from nsqtools.cluster import stats_documents
    from nsqtools.cluster.sampling import SampleFilter, Sampler, SampleScope

    if once and (interval or count):
        raise ConfigurationError("--once takes one sample: leave out --interval and --count")
    if show is StatRows.memory and (filter or sort != "topic"):
        raise ConfigurationError("--filter and --sort do not work with --show memory")
    columns = columns_of(show)
    form.check(("time", *columns))
    of_queues = columns_of(show if show is StatRows.nodes else StatRows.queues)
    conditions = [stats_documents.parse_condition(text, of_queues) for text in filter or ()]
    is_timed = interval is not None or form.kind in TIMED or "time" in form.columns
    scope = SampleScope(consumers=show is StatRows.clients, memory=show is StatRows.memory)

    def print_sample(sample: Sample, queues: Sequence[QueueRow], *, headed: bool) -> None:
        answer = stats_documents.document(sample, queues)
        records = answer["queues"]
        if show is StatRows.clients:
            records = answer["consumers"] = stats_documents.client_documents(sample, queues)
        elif show is StatRows.memory:
            records = [{**node, **node.get("memory", {})} for node in answer["nodes"]]
        if form.is_document:
            write_json(runtime, answer, indent=None)
            return
        names = columns
        if is_timed:
            is_screen = form.kind is None and runtime.stdout_is_tty
            moment = answer["time"][CLOCK] if is_screen else answer["time"]
            names, records = ["time", *names], [{"time": moment, **record} for record in records]
        write_records(runtime, names, records, form, optional=OPTIONAL.split(), headed=headed)

    reported: set[str] = set()
    status, is_first = ExitStatus.DONE, True
    with cluster.open() as opened, Progress(runtime) as progress:
        sampler = Sampler(opened, SampleFilter(topic or (), channel or ()))
        if not once:
            progress.show(lambda: f"measuring rates for {format_duration(interval or INTERVAL_S)}")
        with stop_on_signals(sampler.stop) as signals:
            rounds = count if interval is not None else count or 1
            samples = sampler.samples(interval or INTERVAL_S, rounds, scope)
            for sample in (sampler.sample(scope),) if once else samples:
                progress.clear()
                rows = sample.rows if show is StatRows.nodes else sample.totals
                chosen = stats_documents.sort_rows(rows, sort, conditions)
                print_sample(sample, chosen, headed=is_first)
                is_first = False
                failures = [f for f in sample.failures if str(f.error) not in reported]
                report_unreachable(failures, runtime)
                reported = {str(failure.error) for failure in sample.failures}
                status = ExitStatus.PARTLY_DONE if reported else status
    return signals.status(otherwise=status)


def columns_of(show: StatRows) -> Sequence[str]:
    """Return the columns of a kind of rows."""
    from nsqtools.cluster.stats_documents import COLUMNS

    if show is StatRows.clients:
        return CLIENT_COLUMNS.split()
    if show is StatRows.memory:
        return MEMORY_COLUMNS.split()
    return [name for name in COLUMNS if show is StatRows.nodes or name != "node"]
