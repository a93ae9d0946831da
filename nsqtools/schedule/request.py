"""Requests as the scheduler reads them, and the entries that they become. Pure.

The document is specified in nsq-schedule(7). A request is hostile until it is parsed: types, names,
times and sizes are checked here, and `InvalidRequest` names the first field that is wrong.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.schedule_request import LATEST_NS, MAX_KEY_LENGTH, format_time
from nsqtools.records.units import parse_time
from nsqtools.schedule.recurrence import (
    CatchUp,
    Cron,
    Interval,
    Recurrence,
    parse_cron,
    parse_interval,
)

FIELDS = {
    "topic", "body", "body64", "at", "every", "cron", "timezone", "catch_up", "key", "envelope",
    "cancel",
}  # fmt: skip

Value = TypeVar("Value")


class InvalidRequest(ValueError):
    """The message is not a request; the text names the field and the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message to publish at ``due_ns``, once or again by ``recurrence``."""

    key: str
    due_ns: int
    topic: str
    body: bytes
    recurrence: Recurrence | None = None
    catch_up: CatchUp = CatchUp.last
    has_envelope: bool = False

    def published_body(self, due_ns: int) -> bytes:
        """Return the body that is published for the occurrence at ``due_ns``."""
        if not self.has_envelope:
            return self.body
        return json.dumps(
            {"key": self.key, "due": format_time(due_ns), **body_fields(self.body)},
            ensure_ascii=False,
        ).encode()


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The entry of ``key`` is to be forgotten."""

    key: str


def parse_request(text: bytes, *, default_key: str, asked_ns: int) -> Entry | Cancellation:
    """Return what a message of the topic of requests asks for.

    ``asked_ns`` is the time at which nsqd received the message; intervals and cron expressions
    without ``at`` begin there. Raises `InvalidRequest`.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise InvalidRequest("it is not a JSON object")
        return _parse_fields(fields, default_key, asked_ns)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequest(str(error)) from None


def _parse_fields(fields: dict[str, Any], default_key: str, asked_ns: int) -> Entry | Cancellation:
    # A misspelled field would otherwise be a message at the wrong time.
    if unknown := sorted(set(fields) - FIELDS):
        raise InvalidRequest(f"field {unknown[0]!r} is not known")
    key = _field(fields, "key", str, "") or default_key
    key.encode()  # a lone surrogate, which SQLite cannot store, raises ValueError
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidRequest(f"key has more than {MAX_KEY_LENGTH} characters")
    if _field(fields, "cancel", bool, False):
        if "key" not in fields:
            raise InvalidRequest("cancel needs a key")
        return Cancellation(key)
    topic = _field(fields, "topic", str, "")
    check_topic(topic)
    due_ns, recurrence = _due(fields, asked_ns)
    if not 0 <= due_ns <= LATEST_NS:
        raise InvalidRequest("it is not due between 1970 and 2262")
    return Entry(
        key,
        due_ns,
        topic,
        _body(fields),
        recurrence,
        CatchUp(_field(fields, "catch_up", str, CatchUp.last.value)),
        _field(fields, "envelope", bool, False),
    )


def _due(fields: dict[str, Any], asked_ns: int) -> tuple[int, Recurrence | None]:
    every, cron = _field(fields, "every", str, ""), _field(fields, "cron", str, "")
    timezone = _field(fields, "timezone", str, "")
    if every and cron:
        raise InvalidRequest("every and cron exclude each other")
    if timezone and not cron:
        raise InvalidRequest("timezone is for cron")
    at_ns = None
    if at := _field(fields, "at", str, ""):
        at_ns = parse_time(at, now_ns=asked_ns)
    if every:
        interval = parse_interval(every, asked_ns if at_ns is None else at_ns)
        return interval.next_after(asked_ns) if at_ns is None else at_ns, interval
    if cron:
        try:
            recurrence = parse_cron(cron, timezone, asked_ns)
        except ConfigurationError as error:
            raise InvalidRequest(str(error)) from None
        return recurrence.next_after(asked_ns if at_ns is None else at_ns - 1), recurrence
    if at_ns is None:
        raise InvalidRequest("it has none of at, every and cron")
    return at_ns, None


def _body(fields: dict[str, Any]) -> bytes:
    text, encoded = _field(fields, "body", str, ""), _field(fields, "body64", str, "")
    if bool(text) == bool(encoded):
        raise InvalidRequest("it needs one of body and body64, which is not empty")
    if text:
        return text.encode()  # a lone surrogate raises ValueError
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise InvalidRequest("body64 is not base64") from None


def _field(fields: dict[str, Any], name: str, kind: type[Value], default: Value) -> Value:
    value = fields.get(name, default)
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is not a {'text' if kind is str else kind.__name__}")
    return value


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body as a field of JSON: ``body``, or ``body64`` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body64": base64.b64encode(body).decode()}


def recurrence_text(recurrence: Recurrence | None) -> str:
    """Return a recurrence as people and the store write it; "" for an entry that is due once."""
    if isinstance(recurrence, Interval):
        return f"every {recurrence.interval_ns}ns from {recurrence.start_ns}"
    if isinstance(recurrence, Cron):
        return f"cron {recurrence.expression} {recurrence.timezone}"
    return ""
