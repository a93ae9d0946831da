"""Requests as the scheduler reads them, the entries that they become, and their due times. Pure.

The document is specified in nsq-schedule(7). A request is hostile until it is parsed: types, names,
times and sizes are checked here, and `InvalidRequest` names the first field that is wrong.
"""

from __future__ import annotations

import base64
import binascii
import json
import zoneinfo
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Protocol, TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.schedule_request import LATEST_NS, check_entry_key, format_time
from nsqtools.protocol.text import NS, format_duration
from nsqtools.records.units import parse_days, parse_time

# All times are nanoseconds since 1970, UTC. A cron expression is evaluated in its time zone as
# Debian's cron does: a time that daylight saving skips runs after the gap, and a time that occurs
# twice runs once, unless the hour or the minute is a wildcard.

MISSED_AFTER_NS = 60 * NS
"""An occurrence counts as missed when it is this late. A busy scheduler is late by less than a
second, and no outage that lasts a restart of the process should skip an hourly entry."""

SHORTEST_INTERVAL_NS = NS
"""A shorter interval would be a stream of messages, for which a program of its own is better."""


class CatchUp(Enum):
    """Which of the missed occurrences are published after an outage."""

    all = "all"
    last = "last"
    none = "none"


class Recurrence(Protocol):
    """A sequence of due times."""

    def next_after(self, ns: int) -> int:
        """Return the first due time after ``ns``."""

    def last_until(self, ns: int) -> int:
        """Return the last due time that is not after ``ns``."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Due at ``start_ns`` and every ``interval_ns`` after it, so that delays do not add up."""

    start_ns: int
    interval_ns: int

    def next_after(self, ns: int) -> int:
        return self.last_until(ns) + self.interval_ns

    def last_until(self, ns: int) -> int:
        return self.start_ns + (ns - self.start_ns) // self.interval_ns * self.interval_ns


@dataclass(frozen=True, slots=True)
class Cron:
    """Due by a cron expression of five fields in a time zone."""

    expression: str
    timezone: str

    def next_after(self, ns: int) -> int:
        return self._step(ns, is_reverse=False)

    def last_until(self, ns: int) -> int:
        return self._step(ns + NS, is_reverse=True)

    def _step(self, ns: int, *, is_reverse: bool) -> int:
        from cronsim import CronSim, CronSimError

        start = datetime.fromtimestamp(ns // NS, UTC).astimezone(_zone(self.timezone))
        try:
            due = next(CronSim(self.expression, start, reverse=is_reverse))
        except (CronSimError, StopIteration) as error:
            raise ConfigurationError(
                f"cron expression {self.expression!r} is not valid ({error or 'it is never due'})",
                hint="Write five fields: minute, hour, day of month, month, day of week.",
            ) from None
        return round(due.timestamp()) * NS


def parse_interval(text: str, start_ns: int) -> Interval:
    """Return the interval of a duration such as ``10m``. Raises ``ValueError``."""
    interval_ns = round(parse_days(text.strip()) * NS)
    if interval_ns < SHORTEST_INTERVAL_NS:
        raise ValueError(f"{text!r} is shorter than 1s")
    return Interval(start_ns, interval_ns)


def parse_cron(expression: str, timezone: str, now_ns: int) -> Cron:
    """Return the recurrence of a cron expression, which is due at least once after ``now_ns``.

    Raises `ConfigurationError` for a bad expression or time zone, and ``ImportError`` without the
    package cronsim.
    """
    if len(expression.split()) != 5:
        raise ConfigurationError(
            f"cron expression {expression!r} does not have five fields",
            hint="Write minute, hour, day of month, month, day of week: '0 6 * * 1'.",
        )
    cron = Cron(expression, timezone or "UTC")
    cron.next_after(now_ns)
    return cron


def occurrence_to_publish(
    recurrence: Recurrence, due_ns: int, now_ns: int, catch_up: CatchUp
) -> tuple[int | None, int]:
    """Return the due time to publish now, or None to skip it, and the due time that follows.

    ``due_ns`` is the earliest occurrence that has not been published, and has passed.
    """
    if now_ns - due_ns < MISSED_AFTER_NS or catch_up is CatchUp.all:
        return due_ns, recurrence.next_after(due_ns)
    if catch_up is CatchUp.none:
        return None, recurrence.next_after(now_ns)
    last_ns = max(due_ns, recurrence.last_until(now_ns))
    return last_ns, recurrence.next_after(last_ns)


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigurationError(
            f"time zone {name!r} does not exist", hint="Write an IANA name: Europe/Berlin, or UTC."
        ) from None


# -- requests --------------------------------------------------------------------------------------

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
    without ``at`` begin there. Raises `InvalidRequest`, and ``ImportError`` as `parse_cron`.
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
    if key := _field(fields, "key", str, ""):
        check_entry_key(key)
    if _field(fields, "cancel", bool, False):
        if not key:
            raise InvalidRequest("cancel needs a key")
        return Cancellation(key)
    topic = _field(fields, "topic", str, "")
    check_topic(topic)
    due_ns, recurrence = _due(fields, asked_ns)
    if not 0 <= due_ns <= LATEST_NS:
        raise InvalidRequest("it is not due between 1970 and 2262")
    return Entry(
        key or default_key,
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
    """Return a recurrence for people; "" for an entry that is due once."""
    if isinstance(recurrence, Interval):
        interval = format_duration(recurrence.interval_ns / NS)
        return f"every {interval} from {format_time(recurrence.start_ns)}"
    if isinstance(recurrence, Cron):
        return f"cron {recurrence.expression} {recurrence.timezone}"
    return ""
