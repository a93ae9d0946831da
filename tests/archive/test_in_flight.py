"""How many messages may be in flight, by the memory that they take."""

from __future__ import annotations

import pytest

from nsqtools.archive.topic_archiver import FIRST_COUNT, MEMORY_BYTES, fitting_in_flight


@pytest.mark.parametrize(
    ("now", "most", "count", "size", "fitting"),
    [
        (FIRST_COUNT, 2500, 50, 50 * 200, 2500),  # begins with few, and is soon allowed all
        (FIRST_COUNT, 2500, 10, 10 << 22, MEMORY_BYTES >> 22),  # large ones: as many as fit
        (FIRST_COUNT, 2500, 1, 10 * MEMORY_BYTES, 1),  # one is always allowed
        (512, 2500, 100, 130 << 16, 512),  # a small difference changes nothing
        (10, 10, 5, 5, 10),  # a limit that was given is kept
    ],
)
def test_what_fits_into_memory_is_in_flight(
    now: int, most: int, count: int, size: int, fitting: int
) -> None:
    assert fitting_in_flight(now, most, MEMORY_BYTES, count, size) == fitting
