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

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


def encode_cancellation(key: str) -> bytes:
    """Return the request to forget the entry of a key."""
    return json.dumps({"key": key, "cancel": True}, ensure_ascii=False).encode()


def format_time(ns: int) -> str:
    """Return a time in RFC 3339, UTC, rounded up to a microsecond: Python parses no finer times."""
    moment = _EPOCH + timedelta(microseconds=-(-ns // 1000))
    return moment.isoformat().replace("+00:00", "Z")
