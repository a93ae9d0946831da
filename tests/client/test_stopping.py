"""The steps of a stop, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass

from nsqtools.client.consumer_io import Stopping


@dataclass(eq=False)
class Connection:
    saw_close_wait: bool = False
    is_drained: bool = False


def test_the_socket_outlives_every_answer_and_is_closed_after_nsqds_end() -> None:
    stopping = Stopping(100.0, drain_timeout_s=30, drain=True)
    connection = Connection()
    assert stopping.next_step(connection, 100) == "wait"
    connection.saw_close_wait = True
    assert stopping.next_step(connection, 101) == "wait"
    connection.is_drained = True
    assert stopping.next_step(connection, 102) == "shutdown"
    assert stopping.next_step(connection, 102.5) == "wait"
    assert stopping.next_step(connection, 103) == "close"


def test_without_close_wait_a_second_is_enough() -> None:
    stopping = Stopping(100.0, drain_timeout_s=30, drain=False)
    connection = Connection(is_drained=True)
    assert stopping.next_step(connection, 100.9) == "wait"
    assert stopping.next_step(connection, 101) == "shutdown"


def test_what_is_not_answered_in_time_is_requeued_once_and_then_closed() -> None:
    stopping = Stopping(100.0, drain_timeout_s=30, drain=True)
    connection = Connection(saw_close_wait=True)
    assert stopping.next_step(connection, 129) == "wait"
    assert stopping.next_step(connection, 130) == "requeue"
    assert stopping.next_step(connection, 130.5) == "wait"
    assert stopping.next_step(connection, 131) == "close"


def test_time_changes_an_answer_at_these_moments_and_then_no_more() -> None:
    stopping = Stopping(100.0, drain_timeout_s=30, drain=True)
    connection = Connection(saw_close_wait=True, is_drained=True)
    assert stopping.next_change(100) == 101  # without CLOSE_WAIT a second is enough
    assert stopping.next_step(connection, 110) == "wait"  # for stragglers
    quiet_at = stopping.next_change(110)
    assert quiet_at is not None
    assert 110 < quiet_at < 111
    assert stopping.next_step(connection, quiet_at) == "shutdown"
    closed_at = stopping.next_change(quiet_at)
    assert closed_at is not None
    assert stopping.next_step(connection, closed_at) == "close"
    assert stopping.next_change(closed_at) == 130
    assert stopping.next_change(130) == 131
    assert stopping.next_change(131) is None
