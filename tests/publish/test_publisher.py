"""What the outcomes of several nsqd make of a record, and the rate limit."""

from __future__ import annotations

from threading import TIMEOUT_MAX

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools import ClientOptions
from nsqtools.client.outcomes import not_sent, rejected, unknown
from nsqtools.errors import ConnectionLost, ServerError
from nsqtools.publish.publisher import (
    CATCH_UP_S,
    PublishBatch,
    Publisher,
    PublishOptions,
    PublishOutcome,
    RateLimit,
    outcome_of,
)

LOST = ConnectionLost("nsqd:4150: gone")
TOO_LARGE = rejected(ServerError("E_BAD_MESSAGE", "", fatal=True), 1)
DISK_FULL = rejected(ServerError("E_PUB_FAILED", "", fatal=True), 1)


def test_the_worst_outcome_counts_by_nsqd_also_of_one_without_a_port() -> None:
    kinds = PublishOutcome
    assert [outcome_of(each) for each in (None, DISK_FULL)] == [kinds.CONFIRMED, kinds.UNSENT]
    batch = PublishBatch("events", [b"0", b"1"], 6, on_ended=lambda batch: None)
    for nsqd, place, error in (
        ("b", 0, unknown(LOST)),
        ("b", 1, TOO_LARGE),
        ("c", 0, not_sent(LOST)),
        ("c", 1, not_sent(LOST)),
    ):
        batch.errors.setdefault(place, {})[nsqd] = error
    worst = {place: outcome_of(error) for place, error in batch.failures().items()}
    assert worst == {0: kinds.UNSENT, 1: kinds.REJECTED}
    publisher = Publisher(["a", "a:4150", "b:1"], ClientOptions(), PublishOptions())
    assert [*publisher.counts_by_nsqd] == ["a:4150", "b:1"]


def publish_for(limit: RateLimit, seconds: float, step_s: float) -> int:
    """Take all that is allowed, on a clock that advances by what the limit says to wait."""
    now, published = 0.0, 0
    while now < seconds:
        if allowed := limit.allowance(now):
            limit.took(allowed)
            published += allowed
            now += step_s
        else:
            now += max(limit.wait_s(now), 1e-6)
    return published


@pytest.mark.parametrize("rate", [0.5, 10, 1_000, 100_000, 2_000_000])
def test_the_rate_is_exact_at_any_size_and_the_wait_one_that_is_possible(rate: float) -> None:
    published = publish_for(RateLimit(rate, 0.0), 20, step_s=0.0005)
    assert published == pytest.approx(rate * 20, rel=0.01, abs=1)
    limit = RateLimit(1e-300, 0.0)
    limit.took(1)
    assert limit.wait_s(0.0) == TIMEOUT_MAX


@given(
    st.floats(0.1, 1e6), st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 5000)), max_size=50)
)
def test_never_more_than_the_rate_and_catch_up(rate: float, steps: list[tuple[float, int]]) -> None:
    limit, now, published = RateLimit(rate, 0.0), 0.0, 0
    for delay_s, wanted in steps:
        now += delay_s
        taken = min(wanted, limit.allowance(now))
        if taken:
            limit.took(taken)
        published += taken
        assert published <= rate * (now + CATCH_UP_S + 0.02) + 1
