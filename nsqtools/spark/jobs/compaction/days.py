"""Days in UTC, as `date`, of times in nanoseconds since 1970."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

NS = 1_000_000_000
DAY_NS = 86_400 * NS
_EPOCH = date(1970, 1, 1).toordinal()


def day_of(timestamp_ns: int) -> date:
    """Return the day of a time. Every 64-bit number is one: from 1677 to 2262."""
    return date.fromordinal(_EPOCH + timestamp_ns // DAY_NS)


def begin_ns(day: date) -> int:
    """Return the first nanosecond of a day."""
    return (day.toordinal() - _EPOCH) * DAY_NS


def end_ns(day: date) -> int:
    """Return the first nanosecond behind a day."""
    return begin_ns(day) + DAY_NS


def closes_at(day: date, grace_s: float) -> datetime:
    """Return when a day is over and its messages had so long to arrive."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return midnight + timedelta(seconds=grace_s)


def parse_day(text: str) -> date:
    """Read ``2026-11-21``. Raises ``ValueError``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day; write 2026-11-21") from None
