"""Answers of HTTP servers, in any pieces: what they mean, and whether the connection is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ProtocolError
from nsqtools.forward.http_wire import Answer, AnswerReader, encode_request, header_value

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok": Answer(200),
    b"HTTP/1.1 204 No Content\r\n\r\n": Answer(204),
    b"HTTP/1.1 503 \r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n": Answer(503, "7"),
    b"HTTP/1.1 307 T\r\nlocation: /x\r\ncontent-length:0\r\n\r\n": Answer(307, location="/x"),
    CHUNKED + b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n": Answer(200),
    CHUNKED + b"0\r\nTrailer: 1\r\n\r\n": Answer(200),
    CHUNKED + b"2  \r\nab\r\n0\r\n\r\n": Answer(200),  # padded, as some servers do
    CHUNKED + b"80000\r\n" + b"x" * 0x80000 + b"\r\n80001\r\n": Answer(200, keeps=False),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 C\r\nContent-Length: 0\r\n\r\n": Answer(201),
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n": Answer(200, keeps=False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n": Answer(200, keeps=False),
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n": Answer(200),
    b"HTTP/1.1 200 OK\r\n\r\n": Answer(200, keeps=False),
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n": Answer(200, keeps=False),
}


@pytest.mark.parametrize("text", ANSWERS, ids=lambda text: repr(text[:60]))
def test_an_answer_means_the_same_in_one_piece_and_byte_by_byte(text: bytes) -> None:
    assert AnswerReader().feed(text) == ANSWERS[text]
    reader = AnswerReader()
    answers = [reader.feed(bytes((byte,))) for byte in text]
    assert [answer for answer in answers if answer is not None] == [ANSWERS[text]]


def test_trailers_without_an_end_end_the_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(CHUNKED + b"0\r\nTrailer: ") is None
    assert reader.feed(b"x" * (64 << 10)) == Answer(200, keeps=False)


def test_one_connection_has_many_answers() -> None:
    reader = AnswerReader()
    for text, answer in ANSWERS.items():
        if answer.keeps:
            assert reader.feed(text) == answer


def test_what_nobody_asked_for_ends_the_connection() -> None:
    text = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    assert AnswerReader().feed(text + text) == Answer(200, keeps=False)


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"",
    ],
)
def test_what_is_not_http_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        AnswerReader().feed(text)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_no_bytes_do_more_than_raise(data: bytes, cut: int) -> None:
    for prefix in (b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        reader = AnswerReader()
        text = prefix + data
        try:
            for piece in (text[:cut], text[cut:]):
                if piece and reader.feed(piece) is not None:
                    break
        except ProtocolError:
            pass


@given(st.binary())
def test_nothing_in_a_value_ends_its_line(value: bytes) -> None:
    request = encode_request(b"POST / HTTP/1.1\r\n", [b"X: %b\r\n" % header_value(value)], b"")
    assert request.count(b"\r\n") == 4
    assert request.replace(b"\r\n", b"").count(b"\n") == 0
