"""Due times of intervals and cron expressions, and the occurrences to publish after an outage."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ConfigurationError
from nsqtools.schedule.request import (
    CatchUp,
    Cron,
    Interval,
    Recurrence,
    occurrence_to_publish,
    parse_cron,
    parse_interval,
)

S = 1_000_000_000
MINUTE, HOUR, DAY = 60 * S, 3_600 * S, 86_400 * S


def ns(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp()) * S


@pytest.mark.parametrize(
    ("expression", "after", "due"),
    [
        ("0 6 * * 1", "2026-11-28T00:00:00Z", ["2026-11-30T05:00:00Z", "2026-12-07T05:00:00Z"]),
        # 2:30 does not exist on the day that summer time begins
        ("30 2 * * *", "2026-03-28T12:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
        # 2:30 occurs twice on the day that it ends
        ("30 2 * * *", "2026-10-24T12:00:00Z", ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]),
        # a wildcard counts real time
        ("*/30 * * * *", "2026-03-29T00:30:00Z", ["2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"]),
        ("*/30 * * * *", "2026-10-25T00:30:00Z", ["2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"]),
        ("0 0 29 2 *", "2026-11-28T00:00:00Z", ["2028-02-28T23:00:00Z"]),
    ],
)
def test_cron_is_due_by_the_clock_of_its_time_zone(
    expression: str, after: str, due: list[str]
) -> None:
    cron, time_ns = parse_cron(expression, "Europe/Berlin", ns(after)), ns(after)
    for text in due:
        time_ns = cron.next_after(time_ns)
        assert time_ns == ns(text)


RECURRENCES = st.one_of(
    st.builds(Interval, st.integers(0, 2**60), st.integers(S, 400 * DAY)),
    st.builds(
        Cron,
        st.sampled_from(["0 6 * * 1", "30 2 * * *", "*/7 * * * *", "5 4 1,15 * *"]),
        st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"]),
    ),
)


@given(RECURRENCES, st.integers(10**18, 2 * 10**18))
def test_the_next_due_time_is_later_and_the_last_until_itself(
    recurrence: Recurrence, now: int
) -> None:
    due = recurrence.next_after(now)
    assert due > now
    assert recurrence.last_until(due) == due
    assert recurrence.last_until(now) <= now


@pytest.mark.parametrize(
    ("catch_up", "late", "published", "following"),
    [
        ("all", 2 * HOUR + MINUTE, 0, HOUR),
        ("last", 2 * HOUR + MINUTE, 2 * HOUR, 3 * HOUR),
        ("none", 2 * HOUR + MINUTE, None, 3 * HOUR),
        *[(catch_up, 30 * S, 0, HOUR) for catch_up in ("all", "last", "none")],
    ],
)
def test_missed_occurrences_are_published_as_the_entry_asks(
    catch_up: str, late: int, published: int | None, following: int
) -> None:
    hourly = Interval(0, HOUR)
    assert occurrence_to_publish(hourly, 0, late, CatchUp(catch_up)) == (published, following)


@pytest.mark.parametrize(
    ("expression", "timezone", "reason"),
    [
        ("0 6 * *", "UTC", "does not have five fields"),
        ("0 0 6 * * 1", "UTC", "does not have five fields"),
        ("61 6 * * 1", "UTC", "is not valid"),
        ("0 0 30 2 *", "UTC", "is not valid"),
        ("0 6 * * 1", "Europe/Bonn", "does not exist"),
        ("0 6 * * 1", "../etc/passwd", "does not exist"),
    ],
)
def test_a_cron_expression_that_cannot_be_due_is_refused(
    expression: str, timezone: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_cron(expression, timezone, ns("2026-11-28T00:00:00Z"))


@pytest.mark.parametrize("text", ["0s", "999ms", "-1h", "soon"])
def test_an_interval_below_a_second_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_interval(text, 0)
