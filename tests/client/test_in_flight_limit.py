"""What may be in flight, by measured handling times."""

from __future__ import annotations

import pytest

from nsqtools.client.in_flight_limit import START, HandlingTime, InFlightLimit


def settled(per_message_s: float, workers: int, msg_timeout_s: float, maximum: int = 200) -> int:
    """Adapt until nothing changes."""
    limit = InFlightLimit(maximum)
    for _ in range(20):
        limit.adapted = limit.proposed(per_message_s, workers, msg_timeout_s)
    return limit.current


@pytest.mark.parametrize(
    ("per_message_s", "workers", "msg_timeout_s", "count"),
    [
        (0.000001, 1, 60, 200),  # all of it
        (1, 1, 60, 15),  # the last of 15 waits for a quarter of the timeout
        (0.033, 1, 2, 15),
        (0.1, 1, 2, 5),
        (0.1, 4, 2, 20),
        (100, 1, 60, 1),  # one for each worker, and none that waits
        (100, 8, 60, 8),
    ],
)
def test_what_waits_is_reached_within_a_quarter_of_the_timeout(
    per_message_s: float, workers: int, msg_timeout_s: float, count: int
) -> None:
    assert settled(per_message_s, workers, msg_timeout_s) == pytest.approx(count, rel=0.2)


def test_it_starts_small_and_doubles_up_to_the_maximum() -> None:
    limit = InFlightLimit(10)
    counts = []
    for _ in range(5):
        counts.append(limit.current)
        limit.adapted = limit.proposed(0.000001, 1, 60)
    assert START == 1  # a message that kills its process takes no other with it
    assert counts == [1, 2, 4, 8, 10]


def test_before_a_measurement_many_workers_get_two_each() -> None:
    limit = InFlightLimit(500)
    limit.adapted = limit.proposed(None, 100, 60)
    assert limit.current == 200


def test_every_connection_may_have_a_message_in_flight_unless_handlers_are_too_busy() -> None:
    limit = InFlightLimit(40)
    limit.connections = 30
    limit.is_busy = True
    assert limit.current == 30  # nothing is measured yet
    limit.adapted, limit.is_measured = limit.proposed(1, 1, 8), True
    assert limit.current == 2
    limit.is_busy = False
    assert limit.current == 30
    limit.connections = 100
    assert limit.current == 40
    limit.maximum = 0
    assert limit.current == 0


def test_from_one_for_each_connection_it_doubles_too() -> None:
    limit = InFlightLimit(200)
    limit.connections = 30
    assert limit.proposed(0.000001, 1, 60) == 60


def test_messages_that_time_out_with_handlers_halve_it_once_in_a_timeout() -> None:
    """A pool behind a handler seems to take no time."""
    limit = InFlightLimit(200)
    for _ in range(20):
        limit.adapted = limit.proposed(0.000001, 1, 60)
    limit.is_measured = limit.is_busy = True
    counts = []
    for now in (0, 1, 59, 60, 120):
        limit.timed_out(limit.current, 1, 60, now)
        counts.append(limit.current)
    assert counts == [100, 100, 100, 50, 25]
    limit.timed_out(limit.current // 2, 1, 60, 180)
    assert limit.current == 25  # not the many did that
    limit.timed_out(limit.current, 40, 60, 180)
    assert limit.current == 40  # one for each worker


def test_what_was_halved_grows_by_one_with_as_many_answers() -> None:
    limit = InFlightLimit(200)
    limit.adapted = 20
    limit.timed_out(20, 1, 60, 0)
    for _ in range(10):
        limit.answered(1)
    assert limit.current == 10
    limit.answered(1)
    assert limit.current == 11
    limit.answered(10_000)
    assert limit.current == 20  # what the measured handlers can take


def test_small_changes_are_left_out() -> None:
    limit = InFlightLimit(200)
    limit.adapted = 100
    assert limit.proposed(15 / 110, 1, 60) == 100
    assert limit.proposed(15 / 130, 1, 60) == 130


def test_a_handling_time_rises_fast_and_falls_slowly() -> None:
    handling = HandlingTime()
    assert handling.per_message_s is None
    handling.note(10, 1.0)
    assert handling.per_message_s == pytest.approx(0.1)
    handling.note(1, 1.1)
    assert handling.per_message_s == pytest.approx(0.6)
    handling.note(1, 0.1)
    assert handling.per_message_s == pytest.approx(0.5)
