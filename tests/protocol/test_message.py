"""The layout of a message."""

from __future__ import annotations

import struct

import pytest

from nsqtools.protocol.message import MIN_MESSAGE_SIZE, WireMessage, decode_message


@pytest.mark.parametrize("body", [b"", b"body", bytes(range(256))])
def test_a_message_reads_back(body: bytes) -> None:
    message = WireMessage(1_700_000_000_000_000_000, 40_000, b"0123456789abcdef", body)
    data = message.encode()
    assert len(data) == MIN_MESSAGE_SIZE + len(body)
    assert decode_message(data) == message


def test_a_message_that_is_too_short_is_an_error() -> None:
    with pytest.raises(struct.error):
        decode_message(bytes(MIN_MESSAGE_SIZE - 1))
