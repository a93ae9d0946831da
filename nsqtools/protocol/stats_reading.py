"""/stats of nsqd, read: from JSON to the values of `stats`. Pure.

Tolerant, because the nsqd of a cluster are of several ages: what is missing or of another type is
taken as 0, "", or not there. Only what is no object at all counts as no answer of nsqd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

from nsqtools.errors import ProtocolError
from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats

T = TypeVar("T")

_EMPTY: dict[str, Any] = {"int": 0, "str": "", "bool": False}  # annotations are text


def read_stats(document: Any) -> NsqdStats:
    """Return the statistics in a decoded answer. Raises `ProtocolError` for what is no object."""
    if not isinstance(document, dict):
        raise ProtocolError("the statistics are no JSON object")
    producers = document.get("producers")
    return _fill(
        NsqdStats,
        document,
        topics=tuple(_topic(topic) for topic in _objects(document.get("topics"))),
        memory=_memory(document.get("memory")),
        producers=None if producers is None else tuple(map(_client, _objects(producers))),
    )


def _topic(document: dict[str, Any]) -> TopicStats:
    return _fill(
        TopicStats,
        document,
        channels=tuple(_channel(channel) for channel in _objects(document.get("channels"))),
        e2e_processing_latency=_latency(document.get("e2e_processing_latency")),
    )


def _channel(document: dict[str, Any]) -> ChannelStats:
    clients = document.get("clients")
    if "client_count" not in document and isinstance(clients, list):  # before 1.2.1
        document = {**document, "client_count": len(clients)}
    return _fill(
        ChannelStats,
        document,
        clients=None if clients is None else tuple(map(_client, _objects(clients))),
        e2e_processing_latency=_latency(document.get("e2e_processing_latency")),
    )


def _client(document: dict[str, Any]) -> ClientStats:
    counts = (
        (count.get("topic"), count.get("count")) for count in _objects(document.get("pub_counts"))
    )
    return _fill(
        ClientStats,
        document,
        pub_counts=tuple(
            (topic, count)
            for topic, count in counts
            if isinstance(topic, str) and isinstance(count, int)
        ),
    )


def _latency(document: Any) -> LatencyStats:
    if not isinstance(document, dict):
        return LatencyStats()
    count, percentiles = document.get("count"), document.get("percentiles")
    if not isinstance(percentiles, list):
        return LatencyStats(count=count if isinstance(count, int) else 0)
    pairs = ((pair.get("quantile"), pair.get("value")) for pair in _objects(percentiles))
    return LatencyStats(
        count=count if isinstance(count, int) else 0,
        percentiles=tuple(
            (float(quantile), float(value))
            for quantile, value in pairs
            if isinstance(quantile, int | float) and isinstance(value, int | float)
        ),
    )


def _memory(document: Any) -> dict[str, int] | None:
    if not isinstance(document, dict):
        return None
    return {name: value for name, value in document.items() if isinstance(value, int)}


def _fill(kind: type[T], document: dict[str, Any], **read: Any) -> T:
    """Make a ``kind`` of the plain values in the document, and of those ``read`` already."""
    values = dict(read)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in read:
            empty = _EMPTY[str(field.type)]
            value = document.get(field.name)
            values[field.name] = value if type(value) is type(empty) else empty
    return kind(**values)


def _objects(items: Any) -> Iterator[dict[str, Any]]:
    if isinstance(items, list):
        yield from (item for item in items if isinstance(item, dict))
