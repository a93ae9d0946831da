"""Go's quoting, durations and JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.go_text import go_json, quote


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
    ("value", "encoded"),
    [
        ({"b": 1, "a": [None, True]}, b'{"b":1,"a":[null,true]}'),
        ("<&>\u2028é", '"\\u003c\\u0026\\u003e\\u2028é"'.encode()),
        ("lone \udcff", b'"lone ?"'),
    ],
)
def test_json_is_gos(value: object, encoded: bytes) -> None:
    assert go_json(value) == encoded
