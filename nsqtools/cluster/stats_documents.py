"""Statistics for machines: one JSON document a sample, CSV, and Prometheus' text format. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.queue_rows import QueueRow
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_columns import COLUMNS
from nsqtools.records.prometheus import Metric, encode_metrics


def time_text(time_ns: int) -> str:
    """RFC 3339, UTC, in milliseconds."""
    moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def document(sample: Sample, rows: Iterable[QueueRow]) -> dict[str, Any]:
    """The sample as JSON. ``rows`` are the ones to show, of each nsqd or of all together."""
    return {
        "time": time_text(sample.time_ns),
        "queues": [_queue(row) for row in rows],
        "nodes": [_node(report) for report in sample.reports],
        "failed": [
            {"node": failure.address, "error": str(failure.error)} for failure in sample.failures
        ],
    }


def _queue(row: QueueRow) -> dict[str, Any]:
    queue: dict[str, Any] = {name: read(row) for name, read in COLUMNS.items() if name != "e2e_ms"}
    queue["channel"] = row.channel or None
    queue["node"] = row.node or None
    queue["e2e_latency_s"] = {f"{quantile:g}": seconds for quantile, seconds in row.latency}
    return queue


def _node(report: NodeReport) -> dict[str, Any]:
    stats = report.stats
    node: dict[str, Any] = {
        "node": report.address,
        "version": stats.version,
        "health": stats.health,
        "start_time": stats.start_time,
    }
    if stats.memory is not None:
        node["memory"] = stats.memory
    return node


def client_documents(
    reports: Iterable[NodeReport], rows: Iterable[QueueRow]
) -> list[dict[str, Any]]:
    """Return every consumer of the channels among ``rows``, with its channel and nsqd."""
    shown = {(row.topic, row.channel) for row in rows}
    return [
        {
            "topic": topic.topic_name,
            "channel": channel.channel_name,
            "node": report.address,
            **{name: value for name, value in asdict(client).items() if name != "pub_counts"},
        }
        for report in reports
        for topic in report.stats.topics or ()
        for channel in topic.channels
        if (topic.topic_name, channel.channel_name) in shown
        for client in channel.clients or ()
    ]


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV; unknown values are empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# name, type, help, what, whether of topics too
METRICS: tuple[tuple[str, str, str, Callable[[QueueRow], float], bool], ...] = (
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


def prometheus_text(sample: Sample) -> str:
    """Return every counter of every nsqd; ``nsq_up`` is 0 for those that do not answer."""
    up = [({"node": report.address}, 1) for report in sample.reports]
    up += [({"node": failure.address}, 0) for failure in sample.failures]
    metrics = [Metric("nsq_up", "gauge", "Whether the nsqd answered.", up)]
    for kind in ("topic", "channel"):
        rows = [row for row in sample.rows if bool(row.channel) == (kind == "channel")]
        metrics += [
            Metric(f"nsq_{kind}_{name}", type_, help_, [(_labels(row), read(row)) for row in rows])
            for name, type_, help_, read, is_of_topics in METRICS
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
    return encode_metrics(metrics)


def _labels(row: QueueRow) -> dict[str, str]:
    channel = {"channel": row.channel} if row.channel else {}
    return {"topic": row.topic, **channel, "node": row.node}
