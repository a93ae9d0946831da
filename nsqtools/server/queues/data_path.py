"""The data directory of an nsqd: its lock, and nsqd.dat, which lists topics and channels.

Only one nsqd, of either kind, works in a directory at a time.

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
    """Return a descriptor with an exclusive flock on the directory itself, until it is closed.

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
_MAX_BYTES = 1 << 28  # of a million channels


def read_metadata(path: Path) -> bytes:
    """Return the content of nsqd.dat or a file like it. Raises ``OSError``, ``ValueError``."""
    return read_small(path, _MAX_BYTES)


Queues = dict[str, bool]
"""Whether a queue is paused, by ``TOPIC`` and ``TOPIC:CHANNEL``."""


def encode_topic(name: str, is_paused: bool, channels: Iterable[tuple[str, bool]]) -> bytes:
    """Return what the file says of a topic with its channels, each as (name, is paused)."""
    listed = [{"name": channel, "paused": paused} for channel, paused in channels]
    return go_json({"name": name, "paused": is_paused, "channels": listed or None})


def encode_metadata(topics: Iterable[bytes]) -> bytes:
    """Return the content of the file, as nsqd writes it, from what `encode_topic` returned."""
    listed = b",".join(topics)
    topics_json = b"[%b]" % listed if listed else b"null"
    return b'{"topics":%b,"version":%b}' % (topics_json, go_json(NSQ_VERSION))


def decode_metadata(content: bytes, warn: Callable[[str], None] = lambda text: None) -> Queues:
    """Read the content of the file. Raises ``ValueError`` when it is not what nsqd writes.

    Topics with a name that is invalid are skipped: that of ``a:b`` would be a channel's.
    """
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    found: Queues = {}
    for topic in _objects(document, "topics"):
        name = _name(topic)
        if not is_valid_name(name):
            warn(f"skipping creation of invalid topic {name}")
            continue
        found[name] = topic.get("paused") is True
        for channel in _objects(topic, "channels"):
            found[f"{name}:{_name(channel)}"] = channel.get("paused") is True
    return found


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
