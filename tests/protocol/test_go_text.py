"""Go's quoting, durations and JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.go_text import format_duration, go_json, quote


@pytest.mark.parametrize(
    ("data", "quoted"),
    [
        (b"", b'""'),
        (b"plain name", b'"plain name"'),
        (b'"\\', rb'"\"\\"'),
        (b"\a\b\f\n\r\t\v", rb'"\a\b\f\n\r\t\v"'),
        (b"\x00\x01\x7f", rb'"\x00\x01\x7f"'),
        (b"\xff\xc3", rb'"\xff\xc3"'),
        ("é €".encode(), '"é €"'.encode()),
        ("\u2028\u200b".encode(), rb'"\u2028\u200b"'),
        ("\U000e0001".encode(), rb'"\U000e0001"'),
    ],
)
def test_quoting_is_gos(data: bytes, quoted: bytes) -> None:
    assert quote(data) == quoted


@given(st.binary())
def test_quoted_text_is_one_line_of_utf8(data: bytes) -> None:
    assert quote(data).decode().isprintable()


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
    assert format_duration(duration_ns) == text


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ({"b": 1, "a": [None, True]}, b'{"b":1,"a":[null,true]}'),
        ("<&>\u2028é", '"\\u003c\\u0026\\u003e\\u2028é"'.encode()),
        ("lone \udcff", b'"lone ?"'),
    ],
)
def test_json_is_gos(value: object, encoded: bytes) -> None:
    assert go_json(value) == encoded
