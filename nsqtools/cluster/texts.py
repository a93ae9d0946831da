"""Counts, rates and times as problems, console and tables print them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from nsqtools.protocol.text import counted


def waiting_text(count: int) -> str:
    """Return ``1 waiting``, ``6,629 waiting``."""
    return f"{count:,} waiting"


def messages_text(count: int) -> str:
    """Return ``1 message``, ``6,629 messages``."""
    return counted(count, "message", ",")


def rate_text(per_s: float) -> str:
    """Return messages a second, with a decimal below ten."""
    if 0 < per_s < 0.05:
        return "<0.1"
    return f"{per_s:.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}"


def last_seen_text(count: int, seen_s: float, now_s: float) -> str:
    """Return ``7,130 messages when last seen 17:26:00 UTC``, with the date if that is another."""
    return f"{messages_text(count)} when last seen {clock_text(seen_s, now_s)}"


def clock_text(time_s: float, now_s: float) -> str:
    """Return a time of today as ``17:26:00 UTC``, another one with its date."""
    date, _, clock = format_utc(time_s).partition(" ")
    return clock if clock and date == format_utc(now_s)[:10] else format_utc(time_s)


def format_utc(time_s: float) -> str:
    """Return a date and time in UTC, or a dash for a number that is no time."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "\N{EM DASH}"


def duration_text(value_s: float) -> str:
    """Return a time of a minute or more: ``4m``, ``1h30m``, ``3d4h``."""
    minutes, hours, days = (int(value_s // unit) for unit in (60, 3600, 86400))
    if minutes < 60:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60}m" if hours < 48 else f"{days}d{hours % 24}h"
