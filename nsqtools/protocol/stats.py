"""Encode and decode /stats of nsqd, with the keys of its JSON in nsqd's order.

Decoding is tolerant, because the nsqd of a cluster have different versions: a value that is missing
or of another type becomes 0, "" or None. Only a document that is no object is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, TypeGuard, TypeVar

from nsqtools.errors import ProtocolError
from nsqtools.protocol.text import INT64, go_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """End-to-end latency: (quantile, nanoseconds) pairs, None when nothing is tracked."""

    count: int = 0
    percentiles: tuple[tuple[float, float], ...] | None = None

    def encoded(self) -> str:
        """Return the JSON text, at once for the usual value of an nsqd."""
        if self is NO_LATENCY:
            return '{"count":0,"percentiles":null}'
        return go_json(self.document()).decode()

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        pairs = self.percentiles
        percentiles = pairs and [
            {"quantile": go_number(q), "value": go_number(v)} for q, v in pairs
        ]
        return {"count": self.count, "percentiles": percentiles}


NO_LATENCY = LatencyStats()
_BOOL = ("false", "true")
_PIECE_CHARS = 4096  # JSON of ten channels, which takes 30 us


def go_number(value: float) -> float | int:
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
        """Return the JSON object; auth and publishing fields are left out when empty."""
        document = document_of(self)
        document["pub_counts"] = [{"topic": to, "count": count} for to, count in self.pub_counts]
        for name in ("authed", "auth_identity", "auth_identity_url", "pub_counts"):
            if not document[name]:
                del document[name]
        return document


# Not frozen, because nsqd makes 10,000 for a page: a frozen one takes three times as long.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class ChannelStats:
    """One channel. ``clients`` is None when they were not requested."""

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

    def encoded(self, clients: str) -> str:
        """Return the JSON object with the JSON of its ``clients``."""
        return (
            f'{{"channel_name":{_quoted(self.channel_name)},"depth":{self.depth},'
            f'"backend_depth":{self.backend_depth},"in_flight_count":{self.in_flight_count},'
            f'"deferred_count":{self.deferred_count},"message_count":{self.message_count},'
            f'"requeue_count":{self.requeue_count},"timeout_count":{self.timeout_count},'
            f'"client_count":{self.client_count},"clients":{clients},'
            f'"paused":{_BOOL[self.paused]},'
            f'"e2e_processing_latency":{self.e2e_processing_latency.encoded()}}}'
        )


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
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

    def encoded(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces: each client, and up to `_PIECE_CHARS` between them."""
        text = f'{{"topic_name":{_quoted(self.topic_name)},"channels":['
        separator = ""
        for channel in self.channels:
            if len(text) > _PIECE_CHARS:
                yield text.encode()
                text = ""
            if clients := channel.clients:
                # NUL occurs nowhere else: JSON escapes it.
                head, tail = channel.encoded("\0").split("\0")
                yield f"{text}{separator}{head}[".encode()
                yield from _joined((go_json(client.document()),) for client in clients)
                text = f"]{tail}"
            else:
                text += separator + channel.encoded("null" if clients is None else "[]")
            separator = ","
        yield (
            f'{text}],"depth":{self.depth},"backend_depth":{self.backend_depth},'
            f'"message_count":{self.message_count},"message_bytes":{self.message_bytes},'
            f'"paused":{_BOOL[self.paused]},'
            f'"e2e_processing_latency":{self.e2e_processing_latency.encoded()}}}'
        ).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqdStats:
    """The whole of /stats.

    ``topics`` and ``producers`` are None for null, which nsqd sends when nothing matches the
    request. ``memory`` is None where nsqd omits it.
    """

    version: str
    health: str
    start_time: int
    topics: tuple[TopicStats, ...] | None
    memory: dict[str, int] | None
    producers: tuple[ClientStats, ...] | None

    @property
    def is_well(self) -> bool:
        """Whether nsqd can store messages: its health is ``NOK - reason`` after a failed write."""
        return self.health in ("OK", "")

    def encoded(self) -> Iterator[bytes]:
        """Yield the JSON in small pieces, because thousands of topics take a while to encode."""
        document = document_of(self)
        if self.memory is None:
            del document["memory"]
        topics = None if self.topics is None else (topic.encoded() for topic in self.topics)
        return _in_pieces(document, topics=topics, producers=_clients(self.producers))


def document_of(stats: Any) -> dict[str, Any]:
    """Return the values of the fields by name, the latency as its own document."""
    document = {field.name: getattr(stats, field.name) for field in fields(stats)}
    if isinstance(latency := document.get("e2e_processing_latency"), LatencyStats):
        document["e2e_processing_latency"] = latency.document()
    return document


def _clients(clients: Iterable[ClientStats] | None) -> Iterator[Iterable[bytes]] | None:
    return None if clients is None else ((go_json(client.document()),) for client in clients)


def _in_pieces(
    document: dict[str, Any], **lists: Iterable[Iterable[bytes]] | None
) -> Iterator[bytes]:
    """Yield the JSON of an object; ``lists`` are its members that come as pieces of items."""
    tail = go_json(document | {name: items and [] for name, items in lists.items()})
    for name, items in lists.items():
        if items is None:
            continue
        # The mark occurs only once, because quotes inside a text are escaped.
        head, mark, tail = tail.partition(b'"%b":[' % name.encode())
        yield head + mark
        yield from _joined(items)
    yield tail


def _joined(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of the items of a JSON list, with commas between the items."""
    for index, item in enumerate(items):
        pieces = iter(item)
        yield b"," + next(pieces) if index else next(pieces)
        yield from pieces


@lru_cache(1 << 14)
def _quoted(name: str) -> str:
    return go_json(name).decode()


_EMPTY: dict[str, Any] = {"int": 0, "str": "", "bool": False}  # annotations are text


def read_stats(document: Any) -> NsqdStats:
    """Return the statistics in a decoded answer. Raises `ProtocolError` if it is not an object."""
    if not isinstance(document, dict):
        raise ProtocolError("the statistics are not a JSON object")
    return _fill(NsqdStats, document)


_BEGIN = b'{"topic_name":'


class StatsReader:
    """Reads the answers of one nsqd, and decodes only the topics that changed since the last one.

    Most topics do not change between two answers. The last topic of an answer is always decoded.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._pieces: dict[bytes, TopicStats] = {}

    def read(self, body: bytes, decode: Callable[[bytes], Any]) -> NsqdStats:
        """Return the statistics in a body. Raises the errors of ``decode`` and `read_stats`."""
        # The text that begins a topic occurs nowhere else in JSON, because quotes inside a text are
        # escaped. So the body is split there, and pieces of the last body need no decoding.
        head, *pieces = body.split(_BEGIN)
        cached, self._pieces = self._pieces, {}
        if not pieces or not head.endswith(b'"topics":['):
            return read_stats(decode(body))
        *pieces, last = pieces
        changed = [piece for piece in pieces if piece not in cached]
        stats = read_stats(decode(_BEGIN.join((head, *changed, last))))
        topics = stats.topics or ()
        if len(topics) != len(changed) + 1:  # A piece must be exactly one topic.
            return read_stats(decode(body))
        cached |= zip(changed, topics, strict=False)
        self._pieces = {piece: cached[piece] for piece in pieces}
        return replace(stats, topics=(*self._pieces.values(), topics[-1]))


def read_topic(document: dict[str, Any]) -> TopicStats:
    """Return one topic of the statistics."""
    return _fill(TopicStats, document)


def _channel(document: dict[str, Any]) -> ChannelStats:
    clients = document.get("clients")
    if "client_count" not in document and isinstance(clients, list):  # before 1.2.0
        document = {**document, "client_count": len(clients)}
    return _fill(ChannelStats, document)


def _clients_of(documents: Any) -> tuple[ClientStats, ...] | None:
    if documents is None:
        return None
    return tuple(_fill(ClientStats, document) for document in _objects(documents))


def _pub_counts(documents: Any) -> tuple[tuple[str, int], ...]:
    counts = ((item.get("topic"), item.get("count")) for item in _objects(documents))
    return tuple((t, n) for t, n in counts if isinstance(t, str) and isinstance(n, int))


def _latency(document: Any) -> LatencyStats:
    if not isinstance(document, dict):
        return LatencyStats()
    count, percentiles = document.get("count"), document.get("percentiles")
    pairs = ((pair.get("quantile"), pair.get("value")) for pair in _objects(percentiles))
    numbers = tuple((float(q), float(v)) for q, v in pairs if _is_number(q) and _is_number(v))
    return LatencyStats(
        count=count if type(count) is int and count in INT64 else 0,
        percentiles=numbers if isinstance(percentiles, list) else None,
    )


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether the value is a finite number in the range of Go's int64."""
    return isinstance(value, int | float) and INT64.start <= value < INT64.stop


def _memory(document: Any) -> dict[str, int] | None:
    if not isinstance(document, dict):
        return None
    return {k: v for k, v in document.items() if isinstance(v, int) and v in INT64}


def _fill(kind: type[T], document: dict[str, Any]) -> T:
    """Create a ``kind`` from the values in the document."""
    values = {}
    for name, empty in _fields(kind):  # type: ignore[arg-type]
        value = document.get(name)
        if empty is None:
            values[name] = _READERS[name](value)
        else:
            is_usable = type(value) is type(empty) and (type(value) is not int or value in INT64)
            values[name] = value if is_usable else empty
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names of the fields, each with its empty value, None if its type is not plain."""
    return tuple((field.name, _EMPTY.get(str(field.type))) for field in fields(kind))


def _objects(items: Any) -> Iterator[dict[str, Any]]:
    if isinstance(items, list):
        yield from (item for item in items if isinstance(item, dict))


_READERS: dict[str, Callable[[Any], Any]] = {  # of the fields whose values are not plain
    "topics": lambda items: tuple(map(read_topic, _objects(items))),
    "channels": lambda items: tuple(map(_channel, _objects(items))),
    "clients": _clients_of,
    "producers": _clients_of,
    "pub_counts": _pub_counts,
    "memory": _memory,
    "e2e_processing_latency": _latency,
}
