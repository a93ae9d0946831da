"""Deadlines, on a clock that the test turns."""

from __future__ import annotations

from nsqtools.transport.deadline import Deadline


def test_a_deadline_counts_down_to_zero() -> None:
    now = [100.0]
    deadline = Deadline(5, lambda: now[0])
    assert deadline.remaining_s() == 5
    assert not deadline.has_passed
    now[0] = 104.0
    assert deadline.remaining_s() == 1
    now[0] = 105.0
    assert deadline.remaining_s() == 0
    assert deadline.has_passed
    now[0] = 200.0
    assert deadline.remaining_s() == 0
