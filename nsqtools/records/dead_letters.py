"""Messages that could not be delivered, as they are kept. Pure.

In a topic a dead letter is the raw body, which any consumer can read and any tool publish again.
In a file it is a line of JSON: the envelope of all tools, and why and when delivery failed.

    {"topic": "clicks", .. "body": "..", "error": "HTTP 400 Bad Request", "failed_at": 17..}

``failed_at`` is in nanoseconds since 1970, as ``ts`` is. Whatever reads envelopes reads these lines
as well: ``nsq pub --format jsonl``, ``nsq archive cat``, Spark.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from nsqtools.records.envelope import Envelope, MessageLike, decode, encode_many, quote


class DeadLetter(NamedTuple):
    """A line that was read; ``error`` and ``failed_at_ns`` are None in a plain envelope."""

    message: Envelope
    error: str | None
    failed_at_ns: int | None


def encode_dead_letter(
    topic: str, nsqd: str, message: MessageLike, *, error: str, failed_at_ns: int
) -> bytes:
    """Return the line, ended by a newline."""
    envelope = encode_many(topic, nsqd, [message])
    # half of a surrogate pair, from a text that was not UTF-8, cannot be written
    reason = quote(error.encode("utf-8", "replace").decode())
    return envelope[:-2] + f', "error": {reason}, "failed_at": {failed_at_ns}}}\n'.encode()


def decode_dead_letter(line: bytes) -> DeadLetter:
    """Read one line, with or without its newline. Raises ``ValueError`` that says what is wrong."""
    message = decode(line)
    fields = json.loads(line)
    error, failed_at_ns = fields.get("error"), fields.get("failed_at")
    return DeadLetter(
        message,
        error if isinstance(error, str) else None,
        failed_at_ns if isinstance(failed_at_ns, int) else None,
    )
