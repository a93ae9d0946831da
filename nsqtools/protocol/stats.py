"""/stats of nsqd as values, with the keys of its JSON in nsqd's order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from nsqtools.protocol.go_text import go_json


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """End-to-end latency: (quantile, nanoseconds) pairs, None when nothing is tracked."""

    count: int = 0
    percentiles: tuple[tuple[float, float], ...] | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        percentiles = None
        if self.percentiles is not None:
            percentiles = [
                {"quantile": _number(quantile), "value": _number(value)}
                for quantile, value in self.percentiles
            ]
        return {"count": self.count, "percentiles": percentiles}


def _number(value: float) -> float | int:
    """Return an integral float as the integer that Go writes for it."""
    return int(value) if value.is_integer() else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """One connection. ``pub_counts`` are (topic, messages) pairs."""

    client_id: str
    hostname: str
    version: str
    remote_address: str
    state: int
    ready_count: int
    in_flight_count: int
    message_count: int
    finish_count: int
    requeue_count: int
    connect_ts: int
    sample_rate: int
    deflate: bool
    snappy: bool
    user_agent: str
    authed: bool
    auth_identity: str
    auth_identity_url: str
    pub_counts: tuple[tuple[str, int], ...]
    tls: bool
    tls_cipher_suite: str
    tls_version: str
    tls_negotiated_protocol: str
    tls_negotiated_protocol_is_mutual: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object; what is about auth and publishing is left out when empty."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        document["pub_counts"] = [
            {"topic": topic, "count": count} for topic, count in self.pub_counts
        ]
        for name in ("authed", "auth_identity", "auth_identity_url", "pub_counts"):
            if not document[name]:
                del document[name]
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """One channel. ``clients`` is None when they were not asked for."""

    channel_name: str
    depth: int
    backend_depth: int
    in_flight_count: int
    deferred_count: int
    message_count: int
    requeue_count: int
    timeout_count: int
    client_count: int
    clients: tuple[ClientStats, ...] | None
    paused: bool
    e2e_processing_latency: LatencyStats

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.clients is not None:
            document["clients"] = [client.document() for client in self.clients]
        document["e2e_processing_latency"] = self.e2e_processing_latency.document()
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStats:
    """One topic with its channels."""

    topic_name: str
    channels: tuple[ChannelStats, ...]
    depth: int
    backend_depth: int
    message_count: int
    message_bytes: int
    paused: bool
    e2e_processing_latency: LatencyStats

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        document["channels"] = [channel.document() for channel in self.channels]
        document["e2e_processing_latency"] = self.e2e_processing_latency.document()
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqdStats:
    """The whole of /stats. None stands for null in ``topics`` and ``producers``, which nsqd sends
    when nothing was found, and leaves ``memory`` out."""

    version: str
    health: str
    start_time: int
    topics: tuple[TopicStats, ...] | None
    memory: dict[str, int] | None
    producers: tuple[ClientStats, ...] | None

    def encode(self) -> bytes:
        """Return the JSON."""
        document: dict[str, Any] = {
            "version": self.version,
            "health": self.health,
            "start_time": self.start_time,
            "topics": None if self.topics is None else [topic.document() for topic in self.topics],
        }
        if self.memory is not None:
            document["memory"] = self.memory
        document["producers"] = (
            None if self.producers is None else [client.document() for client in self.producers]
        )
        return go_json(document)
