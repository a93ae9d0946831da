"""Sizes, times and spans: accepted forms, and errors for all others."""

import pytest

from nsqtools.records.units import NS, parse_size, parse_span, parse_time, unescape

NOW_NS = 1_700_000_000 * NS


@pytest.mark.parametrize("text", ["", "10", "5 minutes", "d", "1d12", "1h1d", "-1d", "s", "-5s"])
def test_a_span_is_a_duration_that_is_not_negative(text: str) -> None:
    assert parse_span("1h30m") == 5400
    assert (parse_span("1d"), parse_span("1.5d1h")) == (86_400, 133_200)
    with pytest.raises(ValueError, match=r"negative|duration|unit"):
        parse_span(text)


SIZES = {"0": 0, "4096": 4096, "512B": 512, "64KiB": 65_536, "64kib": 65_536, "64K": 64_000}
SIZES |= {"100MB": 10**8, "1.5 MiB": 3 << 19, "2GiB": 2 << 30, "1T": 10**12}
NO_SIZES = ["", "-1", "ten", "1.5.2", "64KiBi", "5iB", "1e3", "\uff11", "9" * 400]


@pytest.mark.parametrize("text", NO_SIZES)
def test_a_size_is_in_bytes_and_an_invalid_one_shows_an_example(text: str) -> None:
    assert {key: parse_size(key) for key in SIZES} == SIZES
    with pytest.raises(ValueError, match="64KiB"):
        parse_size(text)


TIMES = {"1970-01-01T00:00:00Z": 0, "1969-12-31T23:59:59Z": -NS, "now": NOW_NS}
TIMES |= {"2023-11-14T22:13:20Z": NOW_NS, "2023-11-14T23:13:20+01:00": NOW_NS}
TIMES |= {"2023-11-14T22:13:20": NOW_NS, "2023-11-14T22:13:20.000001Z": NOW_NS + 1000}
TIMES |= {"2023-11-14": 1_699_920_000 * NS, "-2h": NOW_NS - 7200 * NS, "+250ms": NOW_NS + NS // 4}
TIMES |= {"-1d12h": NOW_NS - 129_600 * NS}
TIMES |= {"2023-11-14T22:13:20.000001234Z": NOW_NS + 1234}  # as date -Ins prints it
TIMES |= {"2023-11-14T23:13:20,0000019+01:00": NOW_NS + 1900}
TIMES |= {"1969-12-31T23:59:59.999999999": -1}


@pytest.mark.parametrize("text", ["", "yesterday", "2023-13-01", "22:13", "-2 hours"])
def test_a_time_is_in_nanoseconds_since_1970(text: str) -> None:
    assert {key: parse_time(key, now_ns=NOW_NS) for key in TIMES} == TIMES
    with pytest.raises(ValueError, match="write"):
        parse_time(text, now_ns=NOW_NS)


ESCAPES = {"": b"", "abc": b"abc", r"\n\t\r\0\\": b"\n\t\r\0\\", r"\x00\xfF": b"\x00\xff"}
ESCAPES |= {r"\\x41": b"\\x41", "é\\n": "é\n".encode(), "\udcff": b"\xff"}


@pytest.mark.parametrize("text", ["\\", r"\q", r"\x4", r"\xzz", "a\\\n"])
def test_known_escapes_are_replaced_and_others_refused(text: str) -> None:
    assert {escaped: unescape(escaped) for escaped in ESCAPES} == ESCAPES
    with pytest.raises(ValueError, match="unknown escape"):
        unescape(text)
