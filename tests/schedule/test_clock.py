"""Jumps of the wall clock, with both clocks controlled by the test."""

import pytest

from nsqtools.schedule.scheduler import CheckedClock

S = 1_000_000_000


class Clocks:
    """A wall clock and a monotonic clock, in seconds since the start of the test."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_800_000_000.0, 100.0
        self.checked = CheckedClock(
            lambda: round(self.wall_s * S), lambda: round(self.monotonic_s * S)
        )

    def pass_time(self, seconds: float, jump_s: float = 0.0) -> bool:
        """Let time pass, and the wall clock jump; return whether the wall time is trusted."""
        self.monotonic_s += seconds
        self.wall_s += seconds + jump_s
        return self.checked.trusted_now_ns() is not None


def test_a_jump_forward_is_trusted_when_it_has_lasted_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks = Clocks()
    assert clocks.pass_time(5)
    assert not clocks.pass_time(1, jump_s=3600)
    assert not clocks.pass_time(59)
    assert clocks.pass_time(1)
    assert clocks.checked.trusted_now_ns() == clocks.checked.now_ns()
    assert "the clock jumped forward by 1h" in caplog.text


def test_a_jump_that_is_reverted_is_never_trusted() -> None:
    clocks = Clocks()
    assert not clocks.pass_time(1, jump_s=3600)
    assert clocks.pass_time(30, jump_s=-3600)
    assert not clocks.pass_time(1, jump_s=3600)
    assert not clocks.pass_time(59)


def test_slow_corrections_and_jumps_back_are_followed() -> None:
    clocks = Clocks()
    for _ in range(100):
        assert clocks.pass_time(600, jump_s=30)  # in total far more than a jump
    assert clocks.pass_time(1, jump_s=-7200)
    assert not clocks.pass_time(1, jump_s=7200)  # measured from the corrected time
