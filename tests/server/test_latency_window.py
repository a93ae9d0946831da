"""End-to-end latency: the window that a channel's quantiles are taken over."""

from __future__ import annotations

import pytest

from nsqtools.server.queues import queued_message
from nsqtools.server.queues.queued_message import LatencyWindow, latency_stats

S = 1_000_000_000


def test_samples_are_forgotten_when_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_790_000_000 * S
    monkeypatch.setattr(queued_message.time, "time_ns", lambda: now_ns)
    window = LatencyWindow([0.5], window_s=60)

    def count_after(seconds: int) -> int:
        nonlocal now_ns
        now_ns += seconds * S
        return latency_stats([window]).count

    window.add([now_ns - S, now_ns - 2 * S])

    assert count_after(0) == 2
    assert count_after(31) == 2  # in the older half now
    window.add([now_ns - 3 * S])
    assert count_after(10) == 3
    assert count_after(21) == 1  # the older half is dropped
    assert count_after(61) == 0
