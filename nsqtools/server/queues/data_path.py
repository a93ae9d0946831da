"""The data directory of an nsqd: its lock, and nsqd.dat, which lists topics and channels.

Only one nsqd, of either kind, works in a directory at a time.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.files.locks import try_lock
from nsqtools.protocol.go_text import go_json
from nsqtools.server.daemon_log import NSQ_VERSION


class DataPathLock:
    """An exclusive flock on the directory itself, held until `release`.

    Raises `ConfigurationError` when the directory is missing or in use.
    """

    def __init__(self, data_path: Path) -> None:
        try:
            self._descriptor = os.open(data_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            reason = (exc.strerror or "").lower()
            raise ConfigurationError(
                f"failed to lock data-path: open {data_path}: {reason}",
                hint="--data-path must be a directory that exists.",
            ) from exc
        try:
            reason = "" if try_lock(self._descriptor) else os.strerror(errno.EAGAIN)
        except OSError as exc:
            reason = exc.strerror or str(exc)
        if reason:
            os.close(self._descriptor)
            raise ConfigurationError(
                f"failed to lock data-path: cannot flock directory {data_path} - "
                f"{reason.lower()} (possibly in use by another instance of nsqd)",
                hint="Stop the other nsqd, or give this one its own --data-path.",
            )

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


FILE_NAME = "nsqd.dat"


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic, and its channels as (name, paused)."""

    name: str
    is_paused: bool
    channels: tuple[tuple[str, bool], ...]


def encode_topic(topic: TopicMetadata) -> bytes:
    """Return what the file says of one topic."""
    channels = [{"name": name, "paused": is_paused} for name, is_paused in topic.channels]
    return go_json({"name": topic.name, "paused": topic.is_paused, "channels": channels or None})


def encode_metadata(topics: Iterable[bytes]) -> bytes:
    """Return the content of the file, as nsqd writes it, from what `encode_topic` returned."""
    listed = b",".join(topics)
    topics_json = b"[%b]" % listed if listed else b"null"
    return b'{"topics":%b,"version":%b}' % (topics_json, go_json(NSQ_VERSION))


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


def metadata_of_queues(names: Iterable[str]) -> list[TopicMetadata]:
    """Return what nsqd.dat would list, from names of queues: ``TOPIC`` and ``TOPIC:CHANNEL``."""
    channels: dict[str, list[str]] = {}
    for name in sorted(names):
        topic, _, channel = name.partition(":")
        channels.setdefault(topic, [])
        if channel:
            channels[topic].append(channel)
    return [
        TopicMetadata(topic, False, tuple((name, False) for name in found))
        for topic, found in channels.items()
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
