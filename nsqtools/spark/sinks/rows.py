"""Which rows can be published, and how many of them in one batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from nsqtools.protocol.names import is_valid_name

MAX_DEFER_MS = 3_600_000  # nsqd's default for --max-req-timeout

is_topic = lru_cache(maxsize=1024)(is_valid_name)


def refusal(body: bytes | None, topic: str | None, defer_ms: int | None, most_bytes: int) -> str:
    """Why a row cannot be published; ``""`` when it can. ``most_bytes`` is the limit of a body."""
    if topic is None:
        return "the topic is null"
    if not is_topic(topic):
        return f"{topic!r} is no name for a topic"
    if body is None:
        return "the body is null"
    if not body:
        return "the body is empty, which NSQ cannot carry"
    if len(body) > most_bytes:
        return f"{len(body)} bytes are above the limit of {most_bytes}"
    if defer_ms is not None and not 0 <= defer_ms <= MAX_DEFER_MS:
        return f"a delay of {defer_ms} ms is not within 0 and 1h"
    return ""


def fitting(bodies: Sequence[bytes | None], most_bytes: int) -> int:
    """How many bodies from the first go into one batch: one at least."""
    if sum(map(len, filter(None, bodies))) <= most_bytes:
        return len(bodies)
    size = 0
    for count, body in enumerate(bodies):
        size += len(body or b"")
        if count and size > most_bytes:
            return count
    return len(bodies)
