"""nsqd.dat: the topics and channels there are, and which of them are paused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nsqtools.protocol.go_text import go_json
from nsqtools.server.version import NSQ_VERSION

FILE_NAME = "nsqd.dat"


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic, and its channels as (name, paused)."""

    name: str
    is_paused: bool
    channels: tuple[tuple[str, bool], ...]


def encode_metadata(topics: list[TopicMetadata]) -> bytes:
    """Return the content of the file, as nsqd writes it."""
    return go_json(
        {
            "topics": [
                {
                    "name": topic.name,
                    "paused": topic.is_paused,
                    "channels": [
                        {"name": name, "paused": is_paused} for name, is_paused in topic.channels
                    ]
                    or None,
                }
                for topic in topics
            ]
            or None,
            "version": NSQ_VERSION,
        }
    )


def decode_metadata(content: bytes) -> list[TopicMetadata]:
    """Read the content of the file. Raises ``ValueError`` when it is not what nsqd writes."""
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return [
        TopicMetadata(
            _name(topic),
            topic.get("paused") is True,
            tuple(
                (_name(channel), channel.get("paused") is True)
                for channel in _objects(topic, "channels")
            ),
        )
        for topic in _objects(document, "topics")
    ]


def _objects(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = parent.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{key} is not a list of objects")
    return found


def _name(item: dict[str, Any]) -> str:
    name = item.get("name", "")
    if not isinstance(name, str):
        raise ValueError("a name is not a string")
    return name
