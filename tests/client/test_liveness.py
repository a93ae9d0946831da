"""When a connection is given up as dead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqtools.client.liveness import find_dead
from nsqtools.client.options import ClientOptions


@pytest.mark.parametrize(
    ("heartbeat_interval_s", "read_timeout_s", "limit_s"),
    [(1, 60, 3), (10, 60, 21), (30, 60, 60), (30, 300, 61), (60, 60, 61), (1, 1, 2)],
)
def test_silence_beyond_two_heartbeats_is_death(
    heartbeat_interval_s: float, read_timeout_s: float, limit_s: float
) -> None:
    options = ClientOptions(
        heartbeat_interval_s=heartbeat_interval_s, read_timeout_s=read_timeout_s
    )
    assert find_dead("nsqd", limit_s, 0, options) is None
    dead = find_dead("nsqd", limit_s + 0.1, 0, options)
    assert str(dead) == f"nsqd was silent for {limit_s} s"


def test_without_heartbeats_silence_means_nothing() -> None:
    options = ClientOptions(heartbeat_interval_s=-1)
    assert find_dead("nsqd", 100_000, 0, options) is None


def test_a_peer_that_takes_no_bytes_is_dead_after_the_write_timeout() -> None:
    options = replace(ClientOptions(), write_timeout_s=10)
    assert find_dead("nsqd", 0, 10, options) is None
    assert str(find_dead("nsqd", 0, 10.1, options)) == "nsqd took no bytes for 10 s"
