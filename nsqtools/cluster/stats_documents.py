"""Statistics for machines: columns by name, a JSON document per sample, CSV, and Prometheus. Pure.

Names of metrics begin with ``nsq_``, counters end in ``_total``, units are seconds and bytes.
Topics and channels have separate metrics, because their sum has no meaning. PromQL sums over the
cluster. Consumers have no metrics: each new connection would begin new series.
"""

from __future__ import annotations

import csv
import io
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nsqtools.cluster.queue_rows import NodeReport, QueueRow, channel_row, rows_of_topic
from nsqtools.cluster.sampling import Sample
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.stats import ChannelStats, ClientStats, TopicStats
from nsqtools.protocol.text import utc_text
from nsqtools.records.prometheus import Metric, metric_of

LATEST_S = 253_402_300_800  # The year 10000, which a date cannot have.


def moment_text(epoch_s: object) -> str | None:
    """Return seconds since 1970 in RFC 3339; None for a value that is no time."""
    if not isinstance(epoch_s, int) or not 0 <= epoch_s < LATEST_S:
        return None
    return utc_text(epoch_s, "seconds")


def document(sample: Sample, rows: Iterable[QueueRow]) -> dict[str, Any]:
    """Return a sample as JSON. ``rows`` are the rows to show, of each nsqd or of all together."""
    failed = [{"node": address, "error": str(error)} for address, error in sample.failures]
    return {
        "time": utc_text(sample.time_s),
        "queues": [_queue(row) for row in rows],
        "nodes": [_node(report) for report in sample.reports],
        "failed": failed,
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
    node = {"node": report.address, "version": stats.version, "health": stats.health}
    memory = {} if stats.memory is None else {"memory": stats.memory}
    return {**node, "start_time": moment_text(stats.start_time), **memory}


def topic_document(node: str, topic: TopicStats) -> dict[str, Any]:
    """Return a topic on one nsqd as JSON, with its channels and their consumers."""
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
    """Return a channel on one nsqd as JSON, with its consumers."""
    return {"node": node, **_channel(channel_row(node, topic, channel), channel)}


def _channel(row: QueueRow, stats: ChannelStats) -> dict[str, Any]:
    numbers = {name: getattr(row, name) for name in CHANNEL_NUMBERS.split()}
    consumers = [consumer_document(client) for client in stats.clients or ()]
    return {**numbers, "e2e_latency_ms": _latency(row), "consumers": consumers}


CHANNEL_NUMBERS = "depth memory disk in_flight deferred requeued timed_out messages clients paused"


def consumer_document(client: ClientStats) -> dict[str, Any]:
    """Return a consumer as JSON; its counts have the same names as those of queues."""
    return {
        **{name: getattr(client, name) for name in CONSUMER_FACTS.split()},
        **{name: getattr(client, theirs) for name, theirs in CONSUMER_NUMBERS.items()},
        "connect_time": moment_text(client.connect_ts),
    }


CONSUMER_FACTS = (
    "client_id hostname remote_address user_agent version tls snappy deflate sample_rate authed"
    " auth_identity"
)
CONSUMER_NUMBERS = {
    "ready": "ready_count",
    "in_flight": "in_flight_count",
    "messages": "message_count",
    "finished": "finish_count",
    "requeued": "requeue_count",
}


def client_documents(sample: Sample, rows: Iterable[QueueRow]) -> list[dict[str, Any]]:
    """Return the consumers of the channels in ``rows``, in their order."""
    places = {(row.topic, row.channel): number for number, row in enumerate(rows)}
    consumers = [row for node in sample.nodes for row in node.consumers]
    selected = [row for row in consumers if (row.topic, row.channel) in places]
    return [
        {name: getattr(row, name) for name in ("topic", "channel", "node")}
        | consumer_document(row.client)
        for row in sorted(selected, key=lambda row: places[row.topic, row.channel])
    ]


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV; unknown values are empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


Value = str | int | float | bool | None


def _rate(name: str) -> Callable[[QueueRow], float | None]:
    def read(row: QueueRow) -> float | None:
        if row.rates is None or (name == "finish" and not row.channel):
            return None  # A topic passes its messages on, and finishes none.
        value: float = getattr(row.rates, name)
        return value

    return read


def _slowest(row: QueueRow) -> float | None:
    """Return the highest percentile of nsqd in milliseconds."""
    return max(row.latency)[1] * 1000 if row.latency else None


_RATES = ("ingress", "egress", "finish", "requeue")
_NAMES = (
    "topic channel node depth memory disk in_flight deferred ingress egress finish requeue requeued"
    " timed_out messages clients paused e2e_ms"
)
COLUMNS: dict[str, Callable[[QueueRow], Value]] = {
    name: _rate(name) if name in _RATES else operator.attrgetter(name) for name in _NAMES.split()
}
COLUMNS["e2e_ms"] = _slowest
TEXTS = ("topic", "channel", "node")

OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FILTER = re.compile(r"\s*(\w+)\s*(>=|<=|!=|==|=|>|<)\s*(\S+)\s*")


def check_column(name: str, columns: Collection[str] = COLUMNS) -> str:
    """Return the name. Raises `ConfigurationError` for an unknown column."""
    if name not in columns:
        raise ConfigurationError(f"unknown column {name!r}; the columns are {', '.join(columns)}")
    return name


class Condition(NamedTuple):
    """A condition on a column."""

    column: str
    holds: Callable[[Value], bool]


def parse_condition(
    text: str, columns: Collection[str] = COLUMNS, texts: Collection[str] = TEXTS
) -> Condition:
    """Read a condition: ``depth>1000``, ``paused=yes``, ``channel!=archive``.

    ``texts`` are the columns with text. An unknown value meets no condition. Raises
    `ConfigurationError`.
    """
    match = _FILTER.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a condition", hint="Write depth>1000 or paused=yes."
        )
    name, sign, right = match.groups()
    compare, limit = OPERATORS[sign], _limit(check_column(name, columns), right, texts)
    return Condition(name, lambda value: value is not None and bool(compare(value, limit)))


def _limit(name: str, text: str, texts: Collection[str]) -> Any:
    if name in texts:
        return text
    if name == "paused":
        if text not in ("yes", "no", "true", "false"):
            raise ConfigurationError(f"paused is yes or no, not {text!r}")
        return text in ("yes", "true")
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is a number, not {text!r}") from None


def sort_rows(
    rows: Iterable[QueueRow], column: str, conditions: Collection[Condition] = ()
) -> list[QueueRow]:
    """Sort the rows that meet all conditions by a column: texts from A to Z, numbers from the
    largest down, unknown values last."""
    kept = (row for row in rows if all(holds(COLUMNS[name](row)) for name, holds in conditions))
    ordered = sorted(kept, key=lambda row: (row.topic, row.channel, row.node))
    if column in TEXTS:
        return sorted(ordered, key=lambda row: str(COLUMNS[column](row)))

    def size(row: QueueRow) -> float:
        value = COLUMNS[column](row)
        return -float(value) if isinstance(value, int | float) else float("inf")

    return sorted(ordered, key=size)


# Name, help and attribute of a row.
QUEUE_METRICS = (
    ("depth", "Messages in the queue.", "depth"),
    ("backend_depth", "Messages of the queue on disk.", "disk"),
    ("messages_total", "Messages received.", "messages"),
    ("paused", "1 when paused.", "paused"),
)
CHANNEL_METRICS = (
    *QUEUE_METRICS,
    ("in_flight", "Messages in flight.", "in_flight"),
    ("deferred", "Messages deferred.", "deferred"),
    ("requeues_total", "Messages requeued.", "requeued"),
    ("timeouts_total", "Messages timed out.", "timed_out"),
    ("clients", "Connected consumers.", "clients"),
)


def sample_metrics(sample: Sample, lookupds: Collection[str] = ()) -> Iterator[Metric]:
    """Yield every counter of every nsqd; ``nsq_up`` is 0 for an nsqd that does not answer.

    ``lookupds`` are the addresses of nsqlookupd, which have a metric of their own.
    """
    failed = {failure.address for failure in sample.failures}
    up = [({"node": report.address}, 1) for report in sample.reports]
    up += [({"node": address}, 0) for address in sorted(failed - set(lookupds))]
    yield metric_of("nsq_up", "Whether the nsqd answered.", up)
    if lookupds:
        answered = [({"lookupd": address}, int(address not in failed)) for address in lookupds]
        yield metric_of("nsq_lookupd_up", "Whether the nsqlookupd answered.", answered)
    for kind, table in (("topic", QUEUE_METRICS), ("channel", CHANNEL_METRICS)):
        rows = [row for row in sample.rows if bool(row.channel) == (kind == "channel")]
        for name, help_, field in table:
            values = [(_labels(row), int(getattr(row, field))) for row in rows]
            yield metric_of(f"nsq_{kind}_{name}", help_, values)
    latencies = [
        ({**_labels(row), "quantile": f"{quantile:g}"}, f"{seconds:g}")
        for row in sample.rows
        for quantile, seconds in row.latency
    ]
    if latencies:
        help_ = "Time from publishing to finishing."
        yield metric_of("nsq_e2e_latency_seconds", help_, latencies)
    info = [({"node": r.address, "version": r.stats.version}, 1) for r in sample.reports]
    yield metric_of("nsq_node_info", "The version of the nsqd.", info)
    started = [({"node": address}, start_s) for address, start_s in sample.started.items()]
    yield metric_of("nsq_node_start_time_seconds", "When the nsqd started.", started)
    sizes = [
        ({"topic": topic.topic_name, "node": report.address}, topic.message_bytes)
        for report in sample.reports
        for topic in report.stats.topics or ()
    ]
    yield metric_of("nsq_topic_message_bytes_total", "Bytes received.", sizes)


def _labels(row: QueueRow) -> dict[str, str]:
    channel = {"channel": row.channel} if row.channel else {}
    return {"topic": row.topic, **channel, "node": row.node}
