"""Error frames: by the code alone, whatever the text."""

from __future__ import annotations

import pytest

from nsqtools.errors import ServerError, ServerRefused
from nsqtools.protocol.frames import decode_error


@pytest.mark.parametrize("code", ["E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"])
@pytest.mark.parametrize("text", ["", " FIN 0123456789abcdef failed ID not in flight", " x y"])
def test_late_answers_leave_the_connection_open_whatever_their_text(code: str, text: str) -> None:
    error = decode_error((code + text).encode())
    assert not error.fatal
    assert error.code == code
    assert error.text == text.strip()


@pytest.mark.parametrize(
    "data", [b"E_INVALID", b"E_BAD_TOPIC x", b"E_NEW_IN_2.0", b"", b"E_FIN_FAILEDX", b"\xff\xfe"]
)
def test_every_other_code_is_fatal_known_or_not(data: bytes) -> None:
    assert decode_error(data).fatal


@pytest.mark.parametrize(
    "code", ["E_AUTH_FAILED", "E_AUTH_ERROR", "E_AUTH_FIRST", "E_UNAUTHORIZED"]
)
def test_a_refusal_has_its_own_class_and_category(code: str) -> None:
    error = decode_error(code.encode() + b" no")
    assert isinstance(error, ServerRefused)
    assert error.category == "refused"


def test_an_nsqd_that_takes_tls_only_refuses_too() -> None:
    error = decode_error(b"E_INVALID cannot SUB in current state (TLS required)")
    assert error.category == "refused"
    assert "--tls" in error.hint
    assert type(decode_error(b"E_INVALID cannot SUB in current state")) is ServerError


def test_an_error_names_its_peer_and_keeps_the_words_of_nsqd() -> None:
    error = decode_error(b'E_BAD_TOPIC SUB topic name "a b" is not valid', "127.0.0.1:4150")
    assert str(error) == '127.0.0.1:4150: E_BAD_TOPIC SUB topic name "a b" is not valid'
    assert type(error) is ServerError


def test_a_repeated_code_in_the_text_does_not_matter() -> None:
    error = decode_error(b"E_BAD_TOPIC E_BAD_TOPIC MPUB topic name")
    assert error.code == "E_BAD_TOPIC"
