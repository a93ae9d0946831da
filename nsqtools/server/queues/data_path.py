"""The data directory of an nsqd: its lock, and the format of nsqd.dat, the list of topics.

The lock is that of the Go nsqd, so only one nsqd of either kind uses a directory at a time.
`nsqd_queues.TopicList` reads and writes the file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import read_small, try_lock
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import go_json
from nsqtools.server.daemon_log import NSQ_VERSION


def lock_data_path(data_path: Path) -> int:
    """Lock the directory with flock until the descriptor that is returned is closed.

    Raises `ConfigurationError` when the directory is missing or in use.
    """
    try:
        descriptor = os.open(data_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        reason = (exc.strerror or "").lower()
        raise ConfigurationError(
            f"failed to lock data-path: open {data_path}: {reason}",
            hint="--data-path must be a directory that exists.",
        ) from exc
    try:
        reason = "" if try_lock(descriptor) else os.strerror(errno.EAGAIN)
    except OSError as exc:
        reason = exc.strerror or str(exc)
    if reason:
        os.close(descriptor)
        raise ConfigurationError(
            f"failed to lock data-path: cannot flock directory {data_path} - "
            f"{reason.lower()} (possibly in use by another instance of nsqd)",
            hint="Stop the other nsqd, or give this one its own --data-path.",
        )
    return descriptor


FILE_NAME = "nsqd.dat"
_MAX_BYTES = 1 << 28  # enough for a million channels


def read_metadata(path: Path) -> bytes:
    """Return the content of nsqd.dat or a file like it. Raises ``OSError``, ``ValueError``."""
    return read_small(path, _MAX_BYTES)


Queues = dict[str, bool]
"""Whether a queue is paused, by ``TOPIC`` and ``TOPIC:CHANNEL``."""


def encode_topic(name: str, is_paused: bool, channels: Iterable[tuple[str, bool]]) -> bytes:
    """Return the entry of a topic with its channels, each as (name, is paused)."""
    entries = [{"name": channel, "paused": paused} for channel, paused in channels]
    return go_json({"name": name, "paused": is_paused, "channels": entries or None})


def encode_metadata(topics: Iterable[bytes]) -> bytes:
    """Return the content of the file, as nsqd writes it, for results of `encode_topic`."""
    entries = b",".join(topics)
    topics_json = b"[%b]" % entries if entries else b"null"
    return b'{"topics":%b,"version":%b}' % (topics_json, go_json(NSQ_VERSION))


def decode_metadata(content: bytes, warn: Callable[[str], None] = lambda text: None) -> Queues:
    """Read the content of the file. Raises ``ValueError`` for content that nsqd does not write.

    Topics with an invalid name are skipped: a topic named ``a:b`` would be taken for a channel.
    """
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    queues: Queues = {}
    for topic in _objects(document, "topics"):
        name = _name(topic)
        if not is_valid_name(name):
            warn(f"skipping creation of invalid topic {name}")
            continue
        queues[name] = topic.get("paused") is True
        for channel in _objects(topic, "channels"):
            queues[f"{name}:{_name(channel)}"] = channel.get("paused") is True
    return queues


def _objects(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = parent.get(key) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{key} is not a list of objects")
    return items


def _name(item: dict[str, Any]) -> str:
    name = item.get("name", "")
    if not isinstance(name, str):
        raise ValueError("a name is not a string")
    return name
