"""When an entry that repeats is due: at an interval, or by a cron expression. Pure.

All times are nanoseconds since 1970, UTC. A cron expression is evaluated in its time zone as
Debian's cron does: a time that daylight saving skips runs after the gap, and a time that occurs
twice runs once, unless the hour or the minute is a wildcard.
"""

from __future__ import annotations

import zoneinfo
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Protocol

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import NS
from nsqtools.records.units import parse_days

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
        try:
            from cronsim import CronSim, CronSimError
        except ImportError:
            raise ConfigurationError(
                "cron expressions need the package cronsim",
                hint="Install it: pip install 'nsqtools[schedule]'.",
            ) from None
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

    Raises `ConfigurationError` for a bad expression or time zone, and without the package cronsim.
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
