"""The backoff machine: every row of its table, and its delays."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.client.rdy import Backoff, BackoffMode


def backoff_at(level: int, mode: BackoffMode, **settings: float) -> Backoff:
    backoff = Backoff(**settings)  # type: ignore[arg-type]
    backoff.level = level
    backoff.mode = mode
    return backoff


@pytest.mark.parametrize(
    ("multiplier_s", "maximum_s", "delays"),
    [
        (1, 120, [2, 4, 8, 16, 32, 64, 120, 120]),
        (1, 3, [2, 3, 3]),
        (1, 1, [1, 1]),  # a cap below the first delay caps it, and disables nothing
        (0.5, 120, [1, 2, 4]),
        (0, 120, [0, 0, 0]),
        (3600, 3600, [3600]),
    ],
)
def test_the_delay_doubles_up_to_the_cap(
    multiplier_s: float, maximum_s: float, delays: list[float]
) -> None:
    backoff = Backoff(multiplier_s, maximum_s)
    for delay_s in delays:
        assert backoff.failure() == delay_s
        backoff.expire()


def test_a_maximum_of_zero_disables_backoff() -> None:
    backoff = Backoff(1, 0)
    assert backoff.failure() is None
    assert backoff.mode is BackoffMode.NORMAL


@pytest.mark.parametrize(
    ("mode", "event", "action", "level", "next_mode"),
    [
        (BackoffMode.NORMAL, "success", None, 0, BackoffMode.NORMAL),
        (BackoffMode.NORMAL, "neutral", None, 0, BackoffMode.NORMAL),
        (BackoffMode.NORMAL, "failure", 2, 1, BackoffMode.WAIT),
        (BackoffMode.WAIT, "success", None, 2, BackoffMode.WAIT),
        (BackoffMode.WAIT, "neutral", None, 2, BackoffMode.WAIT),
        (BackoffMode.WAIT, "failure", None, 2, BackoffMode.WAIT),
        (BackoffMode.TEST, "failure", 8, 3, BackoffMode.WAIT),
        (BackoffMode.TEST, "neutral", 4, 2, BackoffMode.WAIT),
        (BackoffMode.TEST, "success", 2, 1, BackoffMode.WAIT),
    ],
)
def test_every_event_in_every_mode(
    mode: BackoffMode, event: str, action: float | None, level: int, next_mode: BackoffMode
) -> None:
    backoff = backoff_at(0 if mode is BackoffMode.NORMAL else 2, mode)
    assert getattr(backoff, event)() == action
    assert backoff.level == level
    assert backoff.mode is next_mode


def test_at_the_cap_further_failures_do_not_lengthen_the_way_back() -> None:
    for multiplier_s, maximum_s, top in [(1, 120, 7), (0, 120, 1), (1, 1, 1)]:
        backoff = Backoff(multiplier_s, maximum_s)
        for _ in range(50):
            backoff.failure()
            backoff.expire()
        assert backoff.level == top


def test_jitter_is_spread_over_the_whole_delay() -> None:
    backoff = Backoff(1, 120, full_jitter=True, rng=random.Random(1))
    backoff.level = 5
    delays_s = []
    for _ in range(200):
        backoff.mode = BackoffMode.TEST
        delays_s.append(backoff.neutral() or 0.0)

    ceiling_s = backoff.ceiling_s(5)
    assert min(delays_s) >= 0
    assert max(delays_s) <= ceiling_s <= 120
    assert min(delays_s) < ceiling_s / 10
    assert max(delays_s) > ceiling_s * 9 / 10
    assert len(set(delays_s)) == 200


@given(
    st.lists(st.sampled_from(["failure", "success", "neutral", "expire"]), max_size=60),
    st.floats(min_value=0, max_value=3600),
    st.floats(min_value=0, max_value=3600),
)
def test_whatever_happens_the_state_makes_sense(
    events: list[str], multiplier_s: float, maximum_s: float
) -> None:
    backoff = Backoff(multiplier_s, maximum_s)
    levels = [0]
    for event in events:
        if event == "expire" and backoff.mode is not BackoffMode.WAIT:
            continue
        action = getattr(backoff, event)()
        levels.append(backoff.level)
        assert (backoff.level == 0) == (backoff.mode is BackoffMode.NORMAL)
        if action is not None:
            assert 0 <= action <= maximum_s
            assert backoff.mode is (
                BackoffMode.NORMAL if event == "success" and not backoff.level else BackoffMode.WAIT
            )
    assert all(abs(after - before) <= 1 for before, after in pairwise(levels))
