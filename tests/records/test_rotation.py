"""When a file is full or over."""

from __future__ import annotations

from nsqtools.records.naming import Rotation

HOUR = 3600.0
NINE = 1_700_000_000 // 86_400 * 86_400 + 9 * HOUR  # nine o'clock UTC


def test_without_limits_a_file_is_never_done() -> None:
    assert not Rotation().is_full(1 << 60, 1 << 60)
    assert not Rotation().is_over(0, NINE)


def test_sizes_on_disk_and_before_compression_are_limits_of_their_own() -> None:
    assert Rotation(size=100).is_full(100, 5000)
    assert not Rotation(size=100).is_full(99, 5000)
    assert Rotation(uncompressed_size=5000).is_full(99, 5000)
    assert not Rotation(uncompressed_size=5000).is_full(6000, 4999)


def test_an_interval_is_aligned_to_the_clock() -> None:
    hourly = Rotation(interval_s=HOUR)

    assert hourly.is_over(NINE - 1, NINE)
    assert not hourly.is_over(NINE, NINE + HOUR - 1)


def test_days_begin_at_local_midnight() -> None:
    daily = Rotation(interval_s=24 * HOUR)
    midnight_in_kyiv = NINE - 9 * HOUR + 22 * HOUR

    assert daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv, utc_offset_s=2 * HOUR)
    assert not daily.is_over(midnight_in_kyiv - 1, midnight_in_kyiv)


def test_an_age_is_measured_and_not_read_from_a_clock_that_somebody_sets() -> None:
    aged = Rotation(age_s=HOUR)

    assert not aged.is_over(NINE, NINE + 2 * HOUR, age_s=20)
    assert aged.is_over(NINE, NINE - HOUR, age_s=HOUR)
