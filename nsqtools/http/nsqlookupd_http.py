"""The HTTP API of nsqlookupd, as far as clients need it.

A program that reaches nsqlookupd's TCP port can announce what it likes, so nothing in an answer is
believed to be well-formed: a node without a usable address is reported once and left out, and the
others are used.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.errors import HTTPError, ProtocolError
from nsqtools.http.http_api import HTTPAPI
from nsqtools.protocol.names import Address, announced_host, is_allowed, is_valid_name, lookup_url

log = logging.getLogger("nsqtools")

MAX_NODES = 1000


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
    remote_address: str = ""


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
    """One nsqlookupd.

    Of more nsqd than ``max_nodes`` that it announces some are drawn at random: all that reach its
    TCP port can announce any number, and must not keep the others out. With ``allow_announced``
    (patterns of TCP addresses) those elsewhere are left out.
    """

    def __init__(
        self,
        url: str,
        *,
        max_nodes: int = MAX_NODES,
        allow_announced: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(url, **options)
        self._max_nodes = max_nodes
        self._allowed = allow_announced

    def lookup(self, topic: str) -> Lookup:
        """Ask for a topic. Raises what `HTTPAPI.get` raises."""
        try:
            answer = self.get_url(lookup_url(self.url, topic))
        except HTTPError as exc:
            if exc.status == 404 and exc.code in ("TOPIC_NOT_FOUND", ""):
                return Lookup(False, frozenset(), frozenset())
            raise
        return decode_lookup(answer, self.url, self._max_nodes, self._allowed)

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
        some = _some(producers, self.url, self._max_nodes, self._allowed)
        known = (_known_node(producer, self.url) for producer in some)
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


def decode_lookup(
    answer: Any, url: str, max_nodes: int = MAX_NODES, allowed: tuple[str, ...] = ()
) -> Lookup:
    """Read the answer to /lookup. Raises `ProtocolError` when it has another shape."""
    channels = _names(answer, "channels", url)
    producers = answer.get("producers")
    if not isinstance(producers, list):
        raise _unlike_nsqlookupd(url)
    some = _some(producers, url, max_nodes, allowed)
    nodes = (_node(producer, url) for producer in some)
    return Lookup(True, frozenset(channels), frozenset(node for node in nodes if node is not None))


def _some(producers: list[Any], url: str, max_nodes: int, allowed: tuple[str, ...]) -> list[Any]:
    if allowed:  # first, or what is not allowed would be drawn
        producers = _allowed(producers, url, allowed)
    if len(producers) <= max_nodes:
        return producers
    log.warning(
        "%s announces %d nsqd; %d of them, drawn at random, are believed (max_discovered_nsqd)",
        url,
        len(producers),
        max_nodes,
    )
    return random.sample(producers, max_nodes)


def _allowed(producers: list[Any], url: str, patterns: tuple[str, ...]) -> list[Any]:
    kept = []
    for producer in producers:
        tcp = _listener(announced_host(_name(producer)), producer, "tcp_port")
        if tcp is None or is_allowed(tcp, patterns):  # no address is reported as such
            kept.append(producer)
        else:
            _report(url, f"{tcp}, which allow_announced does not allow")
    return kept


def _node(producer: Any, url: str) -> ProducerNode | None:
    name = _name(producer)
    host = announced_host(name)
    tcp, http = (_listener(host, producer, key) for key in ("tcp_port", "http_port"))
    if tcp is None:
        port = producer.get("tcp_port") if isinstance(producer, dict) else None
        _report(url, f"{name!r:.80}, port {port!r:.20}, which is not an address")
        return None
    return ProducerNode(tcp, http)


def _name(producer: Any) -> Any:
    """Return where a producer says that it is: its broadcast address, or the best there is."""
    if not isinstance(producer, dict):
        return producer
    remote_host = str(producer.get("remote_address") or "").rpartition(":")[0]
    return producer.get("broadcast_address") or producer.get("hostname") or remote_host


_reported: dict[str, set[str]] = {}
MAX_REPORTS = 100
"""Lines about what one nsqlookupd announces: a hostile announcer could fill a disk."""


def _report(url: str, problem: str) -> None:
    """Name a node that is left out, once."""
    reported = _reported.setdefault(url, set())
    if problem in reported or len(reported) == MAX_REPORTS:
        return
    reported.add(problem)
    log.warning("%s announces an nsqd at %s; left out", url, problem)
    if len(reported) == MAX_REPORTS:
        log.warning("%s announces more nsqd that are left out; they are no longer named", url)


def _known_node(producer: Any, url: str) -> KnownNode | None:
    node = _node(producer, url)
    if node is None:
        return None
    topics, hidden = (
        each if isinstance(each := producer.get(key), list) else []
        for key in ("topics", "tombstones")
    )
    pairs = zip(topics, [*hidden, *[False] * len(topics)], strict=False)
    named = [(topic, is_hidden) for topic, is_hidden in pairs if _is_name(topic)]
    return KnownNode(
        node,
        str(producer.get("hostname") or ""),
        str(producer.get("version") or ""),
        frozenset(topic for topic, _ in named),
        frozenset(topic for topic, is_hidden in named if is_hidden),
        str(producer.get("remote_address") or ""),
    )


def _listener(host: str, producer: Any, key: str) -> Address | None:
    port = producer.get(key) if isinstance(producer, dict) else None
    return Address(host, port) if host and type(port) is int and 0 < port < 65536 else None


def _names(answer: Any, key: str, url: str) -> list[str]:
    names = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(names, list):
        raise _unlike_nsqlookupd(url)
    return list(filter(_is_name, names))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and is_valid_name(name)


def _unlike_nsqlookupd(url: str) -> ProtocolError:
    return ProtocolError(
        f"{url} does not answer like nsqlookupd",
        hint="nsqlookupd's HTTP port is usually 4161; 4151 is nsqd's.",
    )
