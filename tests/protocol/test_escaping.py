"""What others wrote cannot steer a terminal or begin a line."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.escaping import (
    escape_json,
    escape_line,
    escape_text,
    harmless_traceback,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain\ttext\n", b"plain\ttext\n"),
        ("café 😀".encode(), "café 😀".encode()),
        ("👩\u200d👧".encode(), "👩\u200d👧".encode()),  # joiners join
        (b"\x1b[31mred", b"\\x1b[31mred"),
        (b"bell\x07 del\x7f cr\r", b"bell\\x07 del\\x7f cr\\r"),
        (b"\xc2\x9b31m", b"\\x9b31m"),
        (b"\x9b31m", b"\\x9b31m"),
        (b"\xff", b"\\xff"),
        ("a\u202eb\u2028c".encode(), b"a\\u202eb\\u2028c"),
    ],
)
def test_control_characters_are_escaped(text: bytes, shown: bytes) -> None:
    assert escape_text(text) == shown


def test_a_line_stays_one_line() -> None:
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
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(c) in bidirectional
    ]
