"""The rate limit, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.publish.publisher import CATCH_UP_S, RateLimit


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
def test_the_rate_is_exact_at_any_size(rate: float) -> None:
    published = publish_for(RateLimit(rate, 0.0), 20, step_s=0.0005)

    assert published == pytest.approx(rate * 20, rel=0.01, abs=1)


@given(
    st.floats(0.1, 1e6), st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 5000)), max_size=50)
)
def test_never_more_than_the_rate_and_a_catch_up(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    limit, now, published = RateLimit(rate, 0.0), 0.0, 0
    for delay_s, wanted in steps:
        now += delay_s
        taken = min(wanted, limit.allowance(now))
        if taken:
            limit.took(taken)
        published += taken
        assert published <= rate * (now + CATCH_UP_S + 0.02) + 1
