"""A sample in Prometheus' metrics: what ``nsq stat --prometheus`` and /metrics of `nsq web` have.

Names begin with ``nsq_``, counters end in ``_total``, units are seconds and bytes. Topics and
channels are metrics of their own, for a sum over both would count nothing that exists; there are no
sums of the cluster, which PromQL makes. Consumers have no metric each: they come and go. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.records.prometheus import Metric

# name, type, help, what, whether of topics too
QUEUE_METRICS: tuple[tuple[str, str, str, Callable[[QueueRow], float], bool], ...] = (
    ("depth", "gauge", "Messages in the queue.", lambda row: row.depth, True),
    ("backend_depth", "gauge", "Messages of the queue on disk.", lambda row: row.disk, True),
    ("messages_total", "counter", "Messages received.", lambda row: row.messages, True),
    ("paused", "gauge", "1 when paused.", lambda row: int(row.paused), True),
    ("in_flight", "gauge", "Messages in flight.", lambda row: row.in_flight, False),
    ("deferred", "gauge", "Messages deferred.", lambda row: row.deferred, False),
    ("requeues_total", "counter", "Messages requeued.", lambda row: row.requeued, False),
    ("timeouts_total", "counter", "Messages timed out.", lambda row: row.timed_out, False),
    ("clients", "gauge", "Connected consumers.", lambda row: row.clients, False),
)


def sample_metrics(sample: Sample, lookupds: Collection[str] = ()) -> list[Metric]:
    """Return every counter of every nsqd; ``nsq_up`` is 0 for those that do not answer.

    ``lookupds`` are the addresses of nsqlookupd, whose failures are theirs.
    """
    failed = {failure.address for failure in sample.failures}
    up = [({"node": report.address}, 1) for report in sample.reports]
    up += [({"node": address}, 0) for address in sorted(failed - set(lookupds))]
    metrics = [Metric("nsq_up", "gauge", "Whether the nsqd answered.", up)]
    if lookupds:
        answered = [({"lookupd": each}, int(each not in failed)) for each in lookupds]
        help_ = "Whether the nsqlookupd answered."
        metrics.append(Metric("nsq_lookupd_up", "gauge", help_, answered))
    for kind in ("topic", "channel"):
        rows = [row for row in sample.rows if bool(row.channel) == (kind == "channel")]
        metrics += [
            Metric(f"nsq_{kind}_{name}", type_, help_, [(_labels(row), read(row)) for row in rows])
            for name, type_, help_, read, is_of_topics in QUEUE_METRICS
            if is_of_topics or kind == "channel"
        ]
    latencies = [
        ({**_labels(row), "quantile": f"{quantile:g}"}, f"{seconds:g}")
        for row in sample.rows
        for quantile, seconds in row.latency
    ]
    if latencies:
        name, help_ = "nsq_e2e_latency_seconds", "Time from publishing to finishing."
        metrics.append(Metric(name, "gauge", help_, latencies))
    return metrics


def node_metrics(sample: Sample) -> list[Metric]:
    """Return what is known of each nsqd besides its queues."""
    info = [
        ({"node": report.address, "version": report.stats.version}, 1) for report in sample.reports
    ]
    started = [({"node": report.address}, report.stats.start_time) for report in sample.reports]
    sizes = [
        ({"topic": topic.topic_name, "node": report.address}, topic.message_bytes)
        for report in sample.reports
        for topic in report.stats.topics or ()
    ]
    return [
        Metric("nsq_node_info", "gauge", "The version of the nsqd.", info),
        Metric("nsq_node_start_time_seconds", "gauge", "When the nsqd started.", started),
        Metric("nsq_topic_message_bytes_total", "counter", "Bytes received.", sizes),
    ]


def _labels(row: QueueRow) -> dict[str, str]:
    channel = {"channel": row.channel} if row.channel else {}
    return {"topic": row.topic, **channel, "node": row.node}
