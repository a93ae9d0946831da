"""How many messages may be in flight, by the memory that they take."""

from __future__ import annotations

from nsqtools.archive.topic_archiver import FIRST_COUNT, MEMORY_BYTES, InFlightLimit


def test_a_topic_begins_with_few_and_is_soon_allowed_all() -> None:
    in_flight = InFlightLimit(2500)
    assert in_flight.count == FIRST_COUNT

    assert in_flight.saw(50, 50 * 200)

    assert in_flight.count == 2500


def test_large_messages_are_as_many_as_fit_into_memory() -> None:
    in_flight = InFlightLimit(2500)

    assert in_flight.saw(10, 10 << 22)

    assert in_flight.count == MEMORY_BYTES >> 22


def test_one_is_always_allowed() -> None:
    in_flight = InFlightLimit(2500)
    in_flight.saw(1, 10 * MEMORY_BYTES)

    assert in_flight.count == 1


def test_small_differences_change_nothing() -> None:
    in_flight = InFlightLimit(2500)
    in_flight.saw(100, 100 << 16)
    before = in_flight.count

    assert not in_flight.saw(100, 130 << 16)
    assert in_flight.count == before


def test_a_limit_that_was_given_is_kept() -> None:
    in_flight = InFlightLimit(10)

    assert not in_flight.saw(5, 5)
    assert in_flight.count == 10
