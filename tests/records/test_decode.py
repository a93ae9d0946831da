"""Bodies for people: three forms, and nothing that a terminal would obey."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.records.lines import BodyForm, body_decoder, escape_controls


@pytest.mark.parametrize(
    ("form", "body", "shown"),
    [
        (BodyForm.utf8, "café".encode(), "café".encode()),
        (BodyForm.utf8, b"a\xffb", b"a\\xffb"),
        (BodyForm.hex, b"\x00\xff", b"00ff"),
        (BodyForm.base64, b"hi", b"aGk="),
    ],
)
def test_the_forms_of_a_body(form: BodyForm, body: bytes, shown: bytes) -> None:
    assert body_decoder(form)(body) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain\ttext\n", b"plain\ttext\n"),
        ("café 😀".encode(), "café 😀".encode()),
        (b"\x1b[31mred", b"\\x1b[31mred"),
        (b"bell\x07 del\x7f cr\r", b"bell\\x07 del\\x7f cr\\x0d"),
        (b"\xc2\x9b31m", b"\\x9b31m"),
        (b"\x9b31m", b"\\x9b31m"),
        (b"\xff", b"\\xff"),
    ],
)
def test_control_characters_are_escaped(text: bytes, shown: bytes) -> None:
    assert escape_controls(text) == shown


@given(st.binary())
def test_no_control_reaches_the_terminal(text: bytes) -> None:
    shown = escape_controls(text).decode()

    assert not [c for c in shown if (c < " " and c not in "\t\n") or "\x7f" <= c <= "\x9f"]
