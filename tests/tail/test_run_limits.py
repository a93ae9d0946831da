"""When a stream ends by itself."""

from __future__ import annotations

from nsqtools.tail.tail import End, LimitWatch, RunLimits


def test_a_stream_ends_by_count_silence_or_time_whichever_comes_first() -> None:
    watch = LimitWatch(RunLimits(), 0.0)
    assert (watch.room_for(1000), watch.end(1e9), watch.wait_s(1e9)) == (1000, None, None)
    assert not watch.falls_short

    watch = LimitWatch(RunLimits(count=5), 0.0)
    assert (watch.room_for(3), watch.end(0.0), watch.falls_short) == (3, None, True)
    assert (watch.room_for(3), watch.end(0.0), watch.falls_short) == (2, End.COUNT, False)

    watch = LimitWatch(RunLimits(idle_s=5), 100.0)
    assert watch.wait_s(102.0) == 3.0
    watch.saw_message(104.0)  # idle is counted from the last one
    assert (watch.end(108.9), watch.wait_s(108.0), watch.end(109.0)) == (None, 1.0, End.IDLE)

    watch = LimitWatch(RunLimits(idle_s=5, for_s=3), 0.0)
    assert (watch.wait_s(0.0), watch.end(3.0), watch.wait_s(10.0)) == (3.0, End.TIME, 0.0)
