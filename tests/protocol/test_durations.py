"""Durations in Go's notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.durations import format_duration, go_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("1h0.5s", 3600.5),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("7ns", 7e-9),
        ("-1s", -1),
        ("+2m", 120),
        ("0", 0),
        ("-0", 0),
    ],
)
def test_a_duration_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "1", "1.5", "1x", "1 s", "s1", "--1s", "1s\n", "٣s", "1d"]
)
def test_what_is_no_duration_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write 250ms, 30s, 5m or 1h30m"):
        parse_duration(text)


def test_a_number_alone_is_refused_with_the_units() -> None:
    with pytest.raises(ValueError, match="has no unit"):
        parse_duration("30")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (1.5, "1.5s"),
        (60, "1m"),
        (90, "1m30s"),
        (3600, "1h"),
        (5400, "1h30m"),
        (0.000_05, "50us"),
        (-1, "-1s"),
    ],
)
def test_a_duration_is_written_shortly(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=10**9).map(lambda us: us / 1e6))
def test_what_is_written_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (2_155, "2.155µs"),
        (632_134_542, "632.134542ms"),
        (250_000_000, "250ms"),
        (1_000_000_000, "1s"),
        (1_500_000_000, "1.5s"),
        (60_000_000_000, "1m0s"),
        (3_600_000_000_000, "1h0m0s"),
        (90_061_000_000_000, "25h1m1s"),
        (-1_500_000, "-1.5ms"),
    ],
)
def test_durations_are_written_as_go_writes_them(duration_ns: int, text: str) -> None:
    assert go_duration(duration_ns) == text
