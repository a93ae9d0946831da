"""Go's quoting, JSON and durations; what others wrote cannot steer a terminal or begin a line."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.text import (
    escape_json,
    escape_line,
    escape_text,
    format_duration,
    go_duration,
    go_json,
    harmless_traceback,
    parse_duration,
    quote,
)

QUOTED = {b"": b'""', b"plain name": b'"plain name"', b'"\\': rb'"\"\\"'}
QUOTED |= {b"\a\b\f\n\r\t\v": rb'"\a\b\f\n\r\t\v"', b"\x00\x01\x7f": rb'"\x00\x01\x7f"'}
QUOTED |= {b"\xff\xc3": rb'"\xff\xc3"', "é €".encode(): '"é €"'.encode()}
QUOTED |= {"\u2028\u200b".encode(): rb'"\u2028\u200b"', "\U000e0001".encode(): rb'"\U000e0001"'}


def test_quoting_is_gos() -> None:
    assert {data: quote(data) for data in QUOTED} == QUOTED


@given(st.binary())
def test_quoted_text_is_one_line_of_utf8(data: bytes) -> None:
    assert quote(data).decode().isprintable()


def test_json_is_gos() -> None:
    assert go_json({"b": 1, "a": [None, True]}) == b'{"b":1,"a":[null,true]}'
    assert go_json("<&>\u2028é") == '"\\u003c\\u0026\\u003e\\u2028é"'.encode()
    assert go_json("lone \udcff") == b'"lone ?"'


# -- durations ------------------------------------------------------------------------------------

SECONDS = {"250ms": 0.25, "30s": 30, "5m": 300, "1h30m": 5400, "1.5h": 5400, ".5s": 0.5}
SECONDS |= {"1h0.5s": 3600.5, "10us": 1e-5, "10µs": 1e-5, "7ns": 7e-9, "-1s": -1, "+2m": 120}
SECONDS |= {"0": 0, "-0": 0}
SHORT = {0: "0s", 0.25: "250ms", 1.5: "1.5s", 60: "1m", 90: "1m30s", 3600: "1h", 5400: "1h30m"}
SHORT |= {0.000_05: "50us", -1: "-1s"}
AS_GO = {0: "0s", 1: "1ns", 2_155: "2.155µs", 632_134_542: "632.134542ms", 250_000_000: "250ms"}
AS_GO |= {1_000_000_000: "1s", 1_500_000_000: "1.5s", 60_000_000_000: "1m0s"}
AS_GO |= {3_600_000_000_000: "1h0m0s", 90_061_000_000_000: "25h1m1s", -1_500_000: "-1.5ms"}


def test_durations_are_read_and_are_written_shortly_and_as_go_writes_them() -> None:
    assert {text: parse_duration(text) for text in SECONDS} == pytest.approx(SECONDS)
    assert {seconds: format_duration(seconds) for seconds in SHORT} == SHORT
    assert {duration_ns: go_duration(duration_ns) for duration_ns in AS_GO} == AS_GO


NO_DURATIONS = ["", "s", "1", "1.5", "1x", "1 s", "s1", "--1s", "1s\n", "٣s", "1d", "2562048h"]
NO_DURATIONS += ["9" * 400 + "h"]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_what_is_no_duration_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write 250ms, 30s, 5m or 1h30m") as refused:
        parse_duration(text)
    assert ("has no unit" in str(refused.value)) == (text in ("1", "1.5"))


@given(st.integers(min_value=0, max_value=10**9).map(lambda us: us / 1e6))
def test_what_is_written_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


# -- text of others -------------------------------------------------------------------------------


AS_IT_IS = [b"plain\ttext\n", "café 😀".encode(), "👩\u200d👧".encode()]  # joiners join
SHOWN = {text: text for text in AS_IT_IS} | {b"\x1b[31mred": b"\\x1b[31mred", b"\xff": b"\\xff"}
SHOWN |= {b"bell\x07 del\x7f cr\r": b"bell\\x07 del\\x7f cr\\r", b"\xc2\x9b31m": b"\\x9b31m"}
SHOWN |= {b"\x9b31m": b"\\x9b31m", "a\u202eb\u2028c".encode(): b"a\\u202eb\\u2028c"}


def test_control_characters_are_escaped_and_a_line_stays_one_line() -> None:
    assert {text: escape_text(text) for text in SHOWN} == SHOWN
    assert escape_line("a\nb\tc\r\x85d\u2029e\udc80") == r"a\nb\tc\r\x85d\u2029e\udc80"


def test_json_keeps_its_value() -> None:
    value = {"a": "\x7f\x9b\u202e\ud800\U000e0041 é 😀\n\x1b"}
    shown = escape_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(shown) == value
    assert steering(shown) == ["\n", "\n"]
    assert "é 😀" in shown


def test_a_message_in_a_traceback_begins_no_line() -> None:
    assert harmless_traceback("Traceback (most recent call last):\nE: 1\nnsq: forged\x1b\n") == (
        "Traceback (most recent call last):\n  E: 1\n  nsq: forged\\x1b"
    )


@given(st.binary())
def test_no_control_reaches_the_terminal(text: bytes) -> None:
    assert set(steering(escape_text(text).decode())) <= {"\t", "\n"}


@given(st.text(st.characters()))
def test_no_text_breaks_a_line(text: str) -> None:
    shown = escape_line(text)
    assert not steering(shown)
    assert len(shown.splitlines()) <= 1
    shown.encode()


def steering(text: str) -> list[str]:
    """The characters that a terminal may obey, by what Unicode calls them."""
    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    category, direction = unicodedata.category, unicodedata.bidirectional
    return [c for c in text if category(c) in kinds or direction(c) in bidirectional]
