"""Statistics for machines: one JSON document a sample, CSV, and Prometheus' text format. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.prometheus_metrics import sample_metrics
from nsqtools.cluster.queue_rows import QueueRow, channel_row, rows_of_topic
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.stats_columns import COLUMNS
from nsqtools.protocol.stats import ChannelStats, ClientStats, TopicStats
from nsqtools.records.prometheus import encode_metrics

LATEST_S = 253_402_300_800  # the year 10000, which no date has


def time_text(time_ns: int) -> str:
    """RFC 3339, UTC, in milliseconds."""
    moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(epoch_s: object) -> str | None:
    """Seconds since 1970, as nsqd has them, in RFC 3339; None for what is not a time."""
    if not isinstance(epoch_s, int) or not 0 <= epoch_s < LATEST_S:
        return None
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    queue: dict[str, Any] = {name: read(row) for name, read in COLUMNS.items()}
    queue["channel"] = row.channel or None
    queue["node"] = row.node or None
    queue["e2e_latency_ms"] = _latency(row)
    return queue


def _latency(row: QueueRow) -> dict[str, float]:
    return {f"{quantile:g}": seconds * 1000 for quantile, seconds in row.latency}


def _node(report: NodeReport) -> dict[str, Any]:
    stats = report.stats
    node: dict[str, Any] = {
        "node": report.address,
        "version": stats.version,
        "health": stats.health,
        "start_time": moment_text(stats.start_time),
    }
    if stats.memory is not None:
        node["memory"] = stats.memory
    return node


def topic_document(node: str, topic: TopicStats) -> dict[str, Any]:
    """A topic on one nsqd as JSON, with its channels and their consumers."""
    own, *channels = rows_of_topic(node, topic)
    return {
        "node": node,
        **{name: getattr(own, name) for name in ("depth", "memory", "disk", "messages", "paused")},
        "e2e_latency_ms": _latency(own),
        "channels": [
            {"channel": row.channel, **_channel(row, stats)}
            for row, stats in zip(channels, topic.channels, strict=True)
        ],
    }


def channel_document(node: str, topic: str, channel: ChannelStats) -> dict[str, Any]:
    """A channel on one nsqd as JSON, with its consumers."""
    return {"node": node, **_channel(channel_row(node, topic, channel), channel)}


def _channel(row: QueueRow, stats: ChannelStats) -> dict[str, Any]:
    numbers = {name: getattr(row, name) for name in CHANNEL_NUMBERS}
    consumers = [consumer_document(client) for client in stats.clients or ()]
    return {**numbers, "e2e_latency_ms": _latency(row), "consumers": consumers}


CHANNEL_NUMBERS = (
    *("depth", "memory", "disk", "in_flight", "deferred", "requeued", "timed_out", "messages"),
    *("clients", "paused"),
)


def consumer_document(client: ClientStats) -> dict[str, Any]:
    """A consumer as JSON; the counts have the names that they have everywhere."""
    return {
        **{name: getattr(client, name) for name in CONSUMER_FACTS},
        **{name: getattr(client, theirs) for name, theirs in CONSUMER_NUMBERS.items()},
        "connect_time": moment_text(client.connect_ts),
    }


CONSUMER_FACTS = (
    *("client_id", "hostname", "remote_address", "user_agent", "version", "tls", "snappy"),
    *("deflate", "sample_rate", "authed", "auth_identity"),
)
CONSUMER_NUMBERS = {
    "ready": "ready_count",
    "in_flight": "in_flight_count",
    "messages": "message_count",
    "finished": "finish_count",
    "requeued": "requeue_count",
}


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
            **consumer_document(client),
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


def prometheus_text(sample: Sample) -> str:
    """Return every counter of every nsqd in Prometheus' text format."""
    return encode_metrics(sample_metrics(sample))
