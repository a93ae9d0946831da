"""Documents of nsqlookupd and nsqd without what a user may not see. Pure.

The input comes from daemons that may be wrong: whatever is not shaped as theirs is left out.

`visible_lookup`, `visible_nodes` and `visible_stats` join the documents of several daemons, for the
filter. `visible_answer` limits the answer of one daemon, for `nsq web`, which asks each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nsqtools.authd.users import User
from nsqtools.http.http_api import load_json

Document = dict[str, Any]

NO_HTTP = {"http_port": 0}
"""nsqd does not limit its HTTP port to users, so nodes have none: the filter serves /stats."""

TOPIC_NAME, CHANNEL_NAME = "topic_name", "channel_name"


def visible_names(user: User, names: object, topic: str = "") -> list[str]:
    """Return the topics that a user may see, or the channels of a ``topic``."""
    texts = [name for name in _list(names) if isinstance(name, str)]
    return [name for name in texts if (user.sees(topic, name) if topic else user.sees(name))]


def visible_lookup(user: User, topic: str, documents: Iterable[Document]) -> Document:
    """Join what several nsqlookupd answer to /lookup. The user must see the topic."""
    channels: set[str] = set()
    producers: dict[object, Document] = {}
    for document in documents:
        channels.update(visible_names(user, document.get("channels"), topic))
        producers |= {
            _key_of(node): node | NO_HTTP for node in _documents(document.get("producers"))
        }
    return {"channels": sorted(channels), "producers": list(producers.values())}


def visible_nodes(user: User, documents: Iterable[Document]) -> Document:
    """Join what several nsqlookupd answer to /nodes."""
    nodes: dict[object, Document] = {}
    for document in documents:
        for node in _documents(document.get("producers")):
            entry = nodes.setdefault(_key_of(node), {**node, **NO_HTTP, "topics": {}})
            topics = entry["topics"]
            for topic, is_hidden in _visible_registrations(user, node):
                topics[topic] = topics.get(topic, True) and is_hidden
    for node in nodes.values():
        node["tombstones"], node["topics"] = list(node["topics"].values()), list(node["topics"])
    return {"producers": list(nodes.values())}


def _visible_registrations(user: User, node: Document) -> Iterator[tuple[str, bool]]:
    """Yield the topics of a node that a user may see, and whether each is tombstoned."""
    tombstones = _list(node.get("tombstones"))
    for index, topic in enumerate(_list(node.get("topics"))):
        if isinstance(topic, str) and user.sees(topic):
            yield topic, index < len(tombstones) and tombstones[index] is True


def visible_stats(user: User, documents: Iterable[Document]) -> Document:
    """Add up the /stats of several nsqd in one document."""
    documents = list(documents)
    facts = next(iter(documents), {})
    topics = _joined(_visible_topics(user, documents), TOPIC_NAME)
    for topic in topics:
        topic["channels"] = _joined(topic["channels"], CHANNEL_NAME)
    return {
        "version": facts.get("version", ""),
        "health": facts.get("health", ""),
        "start_time": facts.get("start_time", 0),
        "topics": topics,
        "producers": list(_visible_producers(user, documents)),
    }


UNLIMITED = ("/ping", "/info")
"""Paths whose answers name no topic."""


def visible_answer(
    user: User, path: str, parameters: Mapping[str, str], body: bytearray
) -> bytearray:
    """Return the part of an answer of one daemon that a user may see.

    An answer that cannot be limited becomes an empty object, which no caller takes for an answer.
    """
    if path in UNLIMITED or path.startswith("/config/"):
        return body
    try:
        document = load_json(body)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and "status_code" in document:
        document = document.get("data")
    return bytearray(json.dumps(_limited(user, path, parameters, _as_document(document))).encode())


def _limited(user: User, path: str, parameters: Mapping[str, str], document: Document) -> Document:
    topic = parameters.get("topic", "")
    match path:
        case "/stats" if "topics" in document:
            limited = {"topics": list(_visible_topics(user, [document]))}
            if "producers" in document:
                limited["producers"] = list(_visible_producers(user, [document]))
            return document | limited
        case "/topics":
            return {"topics": visible_names(user, document.get("topics"))}
        case "/channels":
            return {"channels": visible_names(user, document.get("channels"), topic)}
        case "/nodes":
            nodes = _documents(document.get("producers"))
            return {"producers": [_with_visible_topics(user, node) for node in nodes]}
        case "/lookup" | "" if user.sees(topic):
            return document | {"channels": visible_names(user, document.get("channels"), topic)}
    return {}


def _with_visible_topics(user: User, node: Document) -> Document:
    topics = dict(_visible_registrations(user, node))
    return node | {"topics": list(topics), "tombstones": list(topics.values())}


def _visible_topics(user: User, documents: Iterable[Document]) -> Iterator[Document]:
    for document in documents:
        for topic in _documents(document.get("topics")):
            name = topic.get(TOPIC_NAME)
            if isinstance(name, str) and user.sees(name):
                channels = [
                    channel
                    for channel in _documents(topic.get("channels"))
                    if isinstance(channel.get(CHANNEL_NAME), str)
                    and user.sees(name, channel[CHANNEL_NAME])
                ]
                yield {**topic, "channels": channels}


def _visible_producers(user: User, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the publishing clients of nsqd 1.3 with their topics that the user may see."""
    for document in documents:
        for producer in _documents(document.get("producers")):
            counts = [
                count
                for count in _documents(producer.get("pub_counts"))
                if isinstance(count.get("topic"), str) and user.sees(count["topic"])
            ]
            if counts:
                yield {**producer, "pub_counts": counts}


def _joined(entries: Iterable[Document], key: str) -> list[Document]:
    """Join entries of one name: numbers are added up, lists appended, switches or-ed.

    Quantiles of several nsqd cannot be joined, and are left out.
    """
    joined: dict[str, Document] = {}
    for entry in entries:
        if (total := joined.get(entry[key])) is None:
            joined[entry[key]] = dict(entry)
            continue
        for name, value in entry.items():
            total[name] = _sum(total.get(name), value)
    return list(joined.values())


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, bool) and isinstance(right, bool):
        return left or right
    if isinstance(left, int | float | list) and isinstance(right, type(left)):
        return left + right  # type: ignore[operator]
    return left if isinstance(left, str) else None


def _key_of(node: Mapping[str, Any]) -> tuple[str, str]:
    return str(node.get("broadcast_address")), str(node.get("tcp_port"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_document(value: object) -> Document:
    return value if isinstance(value, dict) else {}


def _documents(value: object) -> list[Document]:
    return [item for item in _list(value) if isinstance(item, dict)]
