"""The request to publish a message later: a JSON document that nsq-schedule(7) specifies. Pure.

A request is an ordinary message of the topic `SCHEDULE_TOPIC`, so that a client in any language can
make one. `encode_request` is here, below the client, because `nsq pub --at` and `Producer` use it;
only the scheduler reads requests (`nsqtools.schedule.request`).
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta

SCHEDULE_TOPIC = "nsq.schedule"
MAX_KEY_LENGTH = 256

LATEST_NS = 2**63 - 1
"""The largest integer of SQLite, which is a time in the year 2262."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def request_at(topic: str, body: bytes, at: datetime, key: str = "") -> bytes:
    """Return the request to publish ``body`` at a time that has a time zone.

    Raises ``ValueError`` for a request that the scheduler would refuse.
    """
    if at.tzinfo is None:
        raise ValueError("the time has no time zone")
    at_ns = (at - _EPOCH) // timedelta(microseconds=1) * 1000
    if not 0 <= at_ns <= LATEST_NS:
        raise ValueError("the time is not between 1970 and 2262")
    if key:
        check_entry_key(key)
    if not body:
        raise ValueError("the body is empty")
    return encode_request(topic, body, at_ns=at_ns, key=key)


def encode_request(
    topic: str,
    body: bytes,
    *,
    at_ns: int | None = None,
    every: str = "",
    cron: str = "",
    timezone: str = "",
    catch_up: str = "",
    key: str = "",
    envelope: bool = False,
) -> bytes:
    """Return the request to publish ``body`` to ``topic`` at ``at_ns``, in ns since 1970 UTC.

    ``every`` is a duration (``"10m"``) and ``cron`` an expression of five fields in ``timezone``.
    Empty values are left out of the document.
    """
    fields: dict[str, object] = {"topic": topic}
    try:
        fields["body"] = body.decode()
    except UnicodeDecodeError:
        fields["body64"] = base64.b64encode(body).decode()
    if at_ns is not None:
        fields["at"] = format_time(at_ns)
    texts = {"every": every, "cron": cron, "timezone": timezone, "catch_up": catch_up, "key": key}
    fields |= {name: text for name, text in texts.items() if text}
    if envelope:
        fields["envelope"] = True
    return json.dumps(fields, ensure_ascii=False).encode()


def check_entry_key(key: str) -> str:
    """Return the key unchanged. Raises ``ValueError`` if no entry can have it."""
    if not key:
        raise ValueError("key is empty")
    if len(key) > MAX_KEY_LENGTH:
        raise ValueError(f"key has more than {MAX_KEY_LENGTH} characters")
    try:
        key.encode()
    except UnicodeEncodeError:  # a lone surrogate, which SQLite cannot store
        raise ValueError("key is not UTF-8") from None
    return key


def encode_cancellation(key: str) -> bytes:
    """Return the request to forget the entry of a key."""
    return json.dumps({"key": key, "cancel": True}, ensure_ascii=False).encode()


def format_time(ns: int) -> str:
    """Return a time in RFC 3339, UTC, rounded up to a microsecond: Python parses no finer times."""
    moment = _EPOCH + timedelta(microseconds=-(-ns // 1000))
    return moment.isoformat().replace("+00:00", "Z")
