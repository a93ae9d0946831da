"""Plain lines: bodies as they are or as they are shown, each ended by the delimiter."""

from __future__ import annotations

import pytest

from nsqtools.protocol.message import WireMessage
from nsqtools.records.lines import BodyForm, encode_lines

MESSAGES = [WireMessage(0, 1, b"0" * 16, body) for body in (b"a", b"", b"\x1b\xff")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, b"a\n\n\x1b\xff\n"),
        ({"delimiter": b"\0"}, b"a\0\0\x1b\xff\0"),
        ({"delimiter": b""}, b"a\x1b\xff"),
        ({"form": BodyForm.hex}, b"61\n\n1bff\n"),
        ({"form": BodyForm.utf8}, b"a\n\n\x1b\\xff\n"),
        ({"escape": True}, b"a\n\n\\x1b\\xff\n"),
        ({"print_topic": True}, b"t | a\nt | \nt | \x1b\xff\n"),
    ],
)
def test_each_body_is_ended_by_the_delimiter(options: dict[str, object], text: bytes) -> None:
    assert encode_lines("t", "h:1", MESSAGES, **options) == text
