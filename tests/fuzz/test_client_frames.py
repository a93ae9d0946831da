"""Random bytes at the client's parsers: frames, nothing yet, or a ProtocolError; never slow."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.examples import examples

from nsqtools.errors import ProtocolError
from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec
from nsqtools.protocol.frames import MESSAGE, FrameBuffer, decode_error, encode_frame


def make(source: None, *fields: Any) -> tuple[Any, ...]:
    return fields


heads = st.builds(
    lambda size, kind: struct.pack(">II", size, kind),
    st.integers(min_value=0, max_value=200) | st.integers(min_value=0, max_value=0xFFFFFFFF),
    st.integers(min_value=0, max_value=4) | st.integers(min_value=0, max_value=0xFFFFFFFF),
)
pieces = st.lists(st.one_of(st.binary(max_size=60), heads), max_size=20)


@settings(max_examples=examples(100))
@given(pieces, st.sampled_from([0, 30, 100]))
def test_the_same_bytes_are_refused_or_not_however_they_are_cut(
    pieces: list[bytes], max_message_frame: int
) -> None:
    """With a `ProtocolError`, and no other."""
    data = b"".join(pieces)
    cuts = (pieces, [data], [data[i : i + 1] for i in range(len(data))])
    assert len({was_refused(each, max_message_frame) for each in cuts}) == 1


def was_refused(pieces: list[bytes], max_message_frame: int) -> bool:
    buffer = FrameBuffer(max_message_frame)
    try:
        for piece in pieces:
            buffer.feed(piece)
            buffer.take(make, None)
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize("make_codec", [SnappyCodec, DeflateCodec])
@settings(max_examples=examples(75))
@given(data=st.binary(max_size=200))
def test_random_bytes_at_a_decoder_are_bytes_or_a_protocol_error(
    make_codec: type[StreamCodec], data: bytes
) -> None:
    try:
        assert isinstance(make_codec().decompress(data), bytes)
    except ProtocolError:
        pass


CHUNK = 65_536  # the most that a chunk of snappy decodes to
snappy_chunks = st.builds(
    lambda kind, length, body: bytes([kind]) + length.to_bytes(3, "little") + body,
    st.sampled_from([0x00, 0x01, 0x02, 0x7F, 0x80, 0xFE, 0xFF]),
    st.integers(0, 40) | st.sampled_from([76_490, 76_494, 76_495, 0xFFFFFF]),
    st.binary(max_size=40),
)
compressed = st.builds(
    lambda data, times: data * times, st.binary(min_size=1, max_size=50), st.integers(1, 20_000)
)


@pytest.mark.parametrize("make_codec", [SnappyCodec, DeflateCodec])
@settings(max_examples=examples(50))
@given(data=compressed, cuts=st.lists(st.integers(1, 5000), max_size=30))
def test_a_decoder_with_a_limit_gives_the_same_bytes_piece_by_piece(
    make_codec: type[StreamCodec], data: bytes, cuts: list[int]
) -> None:
    sent, decoder, limit = make_codec().compress(data), make_codec(), 1000
    received = []
    for cut in [*cuts, len(sent)]:
        piece, sent = sent[:cut], sent[cut:]
        received.append(decoder.decompress(piece, limit))
        while decoder.has_more:
            received.append(decoder.decompress(b"", limit))

    assert b"".join(received) == data
    assert max(map(len, received)) <= max(limit, CHUNK)


@settings(max_examples=examples(75))
@given(chunks=st.lists(snappy_chunks, max_size=10), size=st.integers(1, 30))
def test_chunks_of_any_kind_and_length_cost_no_more_than_their_bytes(
    chunks: list[bytes], size: int
) -> None:
    """A chunk that announces 16 MB is refused at its length, not gathered."""
    stream = b"\xff\x06\x00\x00sNaPpY" + b"".join(chunks)
    decoder = SnappyCodec()
    try:
        for at in range(0, len(stream), size):
            decoder.decompress(stream[at : at + size], 1000)
            while decoder.has_more:
                decoder.decompress(b"", 1000)
    except ProtocolError:
        return
    assert len(decoder._received) <= 76_498


@given(st.binary(max_size=80))
def test_random_error_frames_are_errors(data: bytes) -> None:
    assert str(decode_error(data, "nsqd")).startswith("nsqd:")


def seconds_for(frame_size: int, piece_size: int) -> float:
    frame = encode_frame(MESSAGE, bytes(26) + bytes(frame_size))
    buffer = FrameBuffer()
    began = time.process_time()
    for start in range(0, len(frame), piece_size):
        buffer.feed(frame[start : start + piece_size])
        messages, _ = buffer.take(make, None)
    assert len(messages) == 1
    return time.process_time() - began


@pytest.mark.alone
def test_a_large_frame_in_small_pieces_takes_linear_time() -> None:
    """Joining what is there with every piece would take 256 times as long for 16 times as much."""
    seconds_for(1 << 16, 100)  # warm up
    small = min(seconds_for(1 << 18, 100) for _ in range(3))
    large = min(seconds_for(1 << 22, 100) for _ in range(3))
    assert large < 60 * small


@pytest.mark.alone
def test_many_small_frames_at_once_take_linear_time() -> None:
    stream = encode_frame(0, b"OK") * 50_000
    buffer = FrameBuffer()
    buffer.feed(stream)
    began = time.process_time()
    _, others = buffer.take(make, None)
    assert len(others) == 50_000
    assert time.process_time() - began < 2
