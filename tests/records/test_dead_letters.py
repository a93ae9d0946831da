"""Dead letters: an envelope with the reason, which whatever reads envelopes reads as well."""

from __future__ import annotations

import pytest

from nsqtools.protocol.message import WireMessage
from nsqtools.records.dead_letters import decode_dead_letter, encode_dead_letter
from nsqtools.records.envelope import decode, encode_many

MESSAGE = WireMessage(1_700_000_000_000_000_001, 6, b"0f1e2d3c4b5a6978", b"caf\xc3\xa9 \xff")


def test_a_dead_letter_comes_back_as_it_was_and_is_an_envelope() -> None:
    line = encode_dead_letter("t", "n:4150", MESSAGE, error='400 "no"\n', failed_at_ns=5)

    letter = decode_dead_letter(line)
    assert letter.message == decode(line)
    assert letter.message == ("t", "n:4150", MESSAGE.id, MESSAGE.timestamp_ns, 6, MESSAGE.body)
    assert (letter.error, letter.failed_at_ns) == ('400 "no"\n', 5)
    assert line.count(b"\n") == 1
    assert line.endswith(b', "failed_at": 5}\n')


def test_a_plain_envelope_has_no_reason() -> None:
    letter = decode_dead_letter(encode_many("t", "n:4150", [MESSAGE]))
    assert (letter.error, letter.failed_at_ns) == (None, None)


def test_a_reason_that_is_not_utf8_does_not_stop_it() -> None:
    line = encode_dead_letter("t", "n", MESSAGE, error="\udcff", failed_at_ns=5)
    assert decode_dead_letter(line).error == "?"


def test_what_is_no_envelope_is_refused() -> None:
    with pytest.raises(ValueError, match='"topic" is missing'):
        decode_dead_letter(b'{"error": "x"}')
