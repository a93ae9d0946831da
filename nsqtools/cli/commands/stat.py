"""``nsq stat``: the queues of a cluster in numbers."""

from __future__ import annotations

from enum import Enum

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import LIMITS, ChannelPatterns, Count, TopicPatterns
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import Progress, tell_left_out
from nsqtools.cli.render.output import ListingForm
from nsqtools.cli.running.runtime import ExitStatus, Session, stopping
from nsqtools.protocol.text import format_duration

VIEW = "Rows"

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

    The exit status is 3 when a topic or channel was named that is not there, 6 when an nsqd did not
    answer. nsq check compares with bounds.

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
    """
    from nsqtools.cli.render.stat_output import SamplePrinter
    from nsqtools.cluster.sampling import SampleFilter, Sampler
    from nsqtools.cluster.stats_documents import parse_filter

    subject = SampleFilter(
        topic or (), channel or (), clients=show is StatRows.clients, memory=show is StatRows.memory
    )
    emit = SamplePrinter(
        runtime,
        show.value,
        form,
        tests=[parse_filter(text) for text in filter or ()],
        sort=sort,
        timed=interval is not None,
    )
    told: set[str] = set()
    status = ExitStatus.DONE
    with cluster.open() as opened, Progress(runtime) as progress:
        sampler = Sampler(opened, subject)
        if not once:
            progress.show(lambda: f"measuring rates for {format_duration(interval or INTERVAL_S)}")
        with stopping(sampler.stop) as signals:
            rounds = count if interval is not None else count or 1
            samples = sampler.samples(interval or INTERVAL_S, rounds)
            for sample in (sampler.sample(),) if once else samples:
                progress.clear()
                emit(sample)
                new = [each for each in sample.failures if str(each.error) not in told]
                tell_left_out(new, runtime)
                told = {str(each.error) for each in sample.failures}
                status = ExitStatus.PARTLY_DONE if told else status
    return signals.status(otherwise=status)
