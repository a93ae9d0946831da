"""Plain lines: bodies as they are or as they are shown, each ended by the delimiter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import Splitter, encode_lines

MESSAGES = [WireMessage(0, 1, b"0" * 16, body) for body in (b"a", b"", b"\x1b\xff")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, b"a\n\n\x1b\xff\n"),
        ({"delimiter": b"\0"}, b"a\0\0\x1b\xff\0"),
        ({"delimiter": b""}, b"a\x1b\xff"),
        ({"escape": True}, b"a\n\n\\x1b\\xff\n"),
        ({"print_topic": True}, b"t | a\nt | \nt | \x1b\xff\n"),
    ],
)
def test_each_body_is_ended_by_the_delimiter(options: dict[str, object], text: bytes) -> None:
    assert encode_lines("t", "h:1", MESSAGES, **options) == text


LIMIT = 1 << 20


def split(chunks: list[bytes], delimiter: bytes = b"\n") -> list[bytes]:
    splitter = Splitter(delimiter, limit=LIMIT)
    return [record for chunk in chunks for record in splitter.feed(chunk)] + splitter.end()


@pytest.mark.parametrize("delimiter", [b"\n", b"\0", b"\r\n", b"--", b"abab"])
@given(data=st.data())
def test_the_cuts_between_chunks_do_not_matter(delimiter: bytes, data: st.DataObject) -> None:
    piece = st.one_of(
        st.just(delimiter), st.sampled_from([b"a", b"\xff", b"-", b"\r", b"\n", b"\0"])
    )
    text = b"".join(data.draw(st.lists(piece, max_size=30)))
    chunks, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        chunks.append(rest[:size])
        rest = rest[size:]

    *records, last = text.split(delimiter)
    assert split(chunks, delimiter) == records + ([last] if last else [])


def test_each_chunk_gives_its_records_at_once() -> None:
    with pytest.raises(ValueError, match="empty"):
        Splitter(b"", limit=LIMIT)
    splitter = Splitter(limit=LIMIT)

    assert splitter.feed(b"a\nb") == [b"a"]
    assert splitter.feed(b"c") == []
    assert splitter.feed(b"d\n") == [b"bcd"]
    assert splitter.end() == []


def test_a_record_over_the_limit_stops_the_input_after_what_was_complete() -> None:
    splitter = Splitter(limit=10)
    assert splitter.feed(b"x" * 10) == []
    assert splitter.feed(b"\n") == [b"x" * 10]

    splitter = Splitter(limit=10)
    assert splitter.feed(b"a\nb\n" + b"x" * 11) == [b"a", b"b"]
    with pytest.raises(NsqError, match="record 3 is longer than 10 bytes"):
        splitter.feed(b"x\n")
    with pytest.raises(NsqError, match="record 3"):
        splitter.end()


def test_a_record_in_many_small_chunks_costs_no_more_than_its_length() -> None:
    splitter = Splitter(b"\r\n", limit=1 << 22)

    for _ in range(100_000):
        splitter.feed(b"0123456789")

    assert len(splitter.end()[0]) == 1_000_000
