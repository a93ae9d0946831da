"""Backslash escapes in options."""

from __future__ import annotations

import pytest

from nsqtools.records.units import unescape


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", b""),
        ("abc", b"abc"),
        (r"\n\t\r\0\\", b"\n\t\r\0\\"),
        (r"\x00\xfF", b"\x00\xff"),
        (r"\\x41", b"\\x41"),
        ("é\\n", "é\n".encode()),
        ("\udcff", b"\xff"),
    ],
)
def test_known_escapes_are_interpreted(text: str, value: bytes) -> None:
    assert unescape(text) == value


@pytest.mark.parametrize("text", ["\\", r"\q", r"\x4", r"\xzz", "a\\\n"])
def test_other_escapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unknown escape"):
        unescape(text)
