"""When a stream ends by itself."""

from __future__ import annotations

from nsqtools.tail.tail import End, LimitWatch, RunLimits


def test_without_limits_it_never_ends_and_waits_for_ever() -> None:
    watch = LimitWatch(RunLimits(), 0.0)

    assert watch.room_for(1000) == 1000
    assert watch.end(1e9) is None
    assert watch.wait_s(1e9) is None
    assert not watch.falls_short


def test_a_count_leaves_no_room_beyond_it() -> None:
    watch = LimitWatch(RunLimits(count=5), 0.0)

    assert watch.room_for(3) == 3
    assert watch.end(0.0) is None
    assert watch.falls_short
    assert watch.room_for(3) == 2
    assert watch.end(0.0) is End.COUNT
    assert not watch.falls_short


def test_idle_is_counted_from_the_last_message() -> None:
    watch = LimitWatch(RunLimits(idle_s=5), 100.0)

    assert watch.wait_s(102.0) == 3.0
    watch.saw_message(104.0)
    assert watch.end(108.9) is None
    assert watch.wait_s(108.0) == 1.0
    assert watch.end(109.0) is End.IDLE


def test_the_earlier_of_two_times_is_waited_for() -> None:
    watch = LimitWatch(RunLimits(idle_s=5, for_s=3), 0.0)

    assert watch.wait_s(0.0) == 3.0
    assert watch.end(3.0) is End.TIME
    assert watch.wait_s(10.0) == 0.0
