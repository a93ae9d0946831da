"""The HTTP API of nsqlookupd, as far as clients need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.errors import HTTPError, ProtocolError
from nsqtools.http.http_api import HTTPAPI
from nsqtools.protocol.addresses import Address, lookup_url


class ProducerNode(NamedTuple):
    """An nsqd as nsqlookupd names it. ``http`` is None where it offers no HTTP."""

    tcp: Address
    http: Address | None


@dataclass(frozen=True, slots=True)
class KnownNode:
    """An nsqd in the list /nodes. ``tombstoned`` are those of its topics that are hidden there."""

    node: ProducerNode
    hostname: str
    version: str
    topics: frozenset[str]
    tombstoned: frozenset[str]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one nsqlookupd knows of a topic: its channels, and the nsqd that have it.

    ``is_known`` is False where the answer was TOPIC_NOT_FOUND, which is an answer, not a failure.
    """

    is_known: bool
    channels: frozenset[str]
    nodes: frozenset[ProducerNode]

    @property
    def nsqd(self) -> frozenset[Address]:
        """Where to connect to."""
        return frozenset(node.tcp for node in self.nodes)


class NsqlookupdHTTPClient(HTTPAPI):
    """One nsqlookupd."""

    def lookup(self, topic: str) -> Lookup:
        """Ask for a topic. Raises what `HTTPAPI.get` raises."""
        try:
            answer = self.get_url(lookup_url(self.url, topic))
        except HTTPError as exc:
            if exc.status == 404 and exc.code in ("TOPIC_NOT_FOUND", ""):
                return Lookup(False, frozenset(), frozenset())
            raise
        return decode_lookup(answer, self.url)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return _names(self._answer("/topics"), "topics", self.url)

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels; none for an unknown topic."""
        return _names(self._answer("/channels", topic=topic), "channels", self.url)

    def nodes(self) -> list[KnownNode]:
        """Return every nsqd that is registered and was heard of lately."""
        answer = self._answer("/nodes")
        producers = answer.get("producers") if isinstance(answer, dict) else None
        if not isinstance(producers, list):
            raise _unlike_nsqlookupd(self.url)
        known = (_known_node(producer) for producer in producers)
        return [node for node in known if node is not None]

    def administer(self, action: str, topic: str, channel: str = "") -> None:
        """Create or delete the registration of a topic, or of one channel of it."""
        if channel:
            self.post(f"/channel/{action}", topic=topic, channel=channel)
        else:
            self.post(f"/topic/{action}", topic=topic)

    def tombstone(self, topic: str, node: str) -> None:
        """Hide the nsqd ``node`` (its broadcast ``host:http_port``) for a topic, for a while."""
        self.post("/topic/tombstone", topic=topic, node=node)

    def _answer(self, path: str, **parameters: str) -> Any:
        try:
            return self.get(path, **parameters)
        except HTTPError as exc:
            if exc.status == 404:  # no nsqlookupd says so to these paths
                raise _unlike_nsqlookupd(self.url) from exc
            raise


def decode_lookup(answer: Any, url: str) -> Lookup:
    """Read the answer to /lookup. Raises `ProtocolError` when it has another shape."""
    channels = _names(answer, "channels", url)
    producers = answer.get("producers")
    if not isinstance(producers, list):
        raise _unlike_nsqlookupd(url)
    nodes = (_node(producer) for producer in producers)
    return Lookup(True, frozenset(channels), frozenset(node for node in nodes if node is not None))


def _node(producer: Any) -> ProducerNode | None:
    """Return where a producer listens: its broadcast address, or the best there is instead."""
    if not isinstance(producer, dict):
        return None
    remote_host = str(producer.get("remote_address") or "").rpartition(":")[0].strip("[]")
    host = producer.get("broadcast_address") or producer.get("hostname") or remote_host
    if not isinstance(host, str) or not host:
        return None
    tcp, http = (_listener(host, producer.get(key)) for key in ("tcp_port", "http_port"))
    return None if tcp is None else ProducerNode(tcp, http)


def _known_node(producer: Any) -> KnownNode | None:
    node = _node(producer)
    if node is None:
        return None
    topics = [topic for topic in producer.get("topics") or () if isinstance(topic, str)]
    hidden = producer.get("tombstones") or ()
    return KnownNode(
        node,
        str(producer.get("hostname") or ""),
        str(producer.get("version") or ""),
        frozenset(topics),
        frozenset(topic for topic, is_hidden in zip(topics, hidden, strict=False) if is_hidden),
    )


def _listener(host: str, port: Any) -> Address | None:
    return Address(host, port) if type(port) is int and 0 < port < 65536 else None


def _names(answer: Any, key: str, url: str) -> list[str]:
    names = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(names, list):
        raise _unlike_nsqlookupd(url)
    return [name for name in names if isinstance(name, str)]


def _unlike_nsqlookupd(url: str) -> ProtocolError:
    return ProtocolError(
        f"{url} does not answer like nsqlookupd",
        hint="nsqlookupd's HTTP port is usually 4161; 4151 is nsqd's.",
    )
