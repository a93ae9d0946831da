"""Stream compression, with bytes that the Go nsqd was seen to send."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.examples import examples

from nsqtools.errors import ProtocolError
from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec

OK_FRAME = bytes.fromhex("00000006000000004f4b")
SNAPPY_IDENTIFIER = bytes.fromhex("ff060000") + b"sNaPpY"
SNAPPY_OK = SNAPPY_IDENTIFIER + bytes.fromhex("010e000026982bcf") + OK_FRAME
DEFLATE_OK = bytes.fromhex("000a00f5ff") + OK_FRAME + bytes.fromhex("000000ffff000000ffff")

Make = Callable[[], StreamCodec]
both = pytest.mark.parametrize("make", [SnappyCodec, DeflateCodec])


@pytest.mark.parametrize(("make", "wire"), [(SnappyCodec, SNAPPY_OK), (DeflateCodec, DEFLATE_OK)])
def test_what_nsqd_sends_first_decodes_however_it_is_cut(make: Make, wire: bytes) -> None:
    assert make().decompress(wire) == OK_FRAME
    codec = make()
    assert b"".join(codec.decompress(wire[i : i + 1]) for i in range(len(wire))) == OK_FRAME


@both
@settings(max_examples=examples(30))
@given(writes=st.lists(st.binary(max_size=3000), max_size=8))
def test_every_write_can_be_decoded_at_once(make: Make, writes: list[bytes]) -> None:
    sender, receiver = make(), make()
    for data in writes:
        assert receiver.decompress(sender.compress(data)) == data


def test_snappy_writes_one_identifier_skips_padding_and_refuses_a_chunk_from_its_head() -> None:
    codec = SnappyCodec()
    assert codec.compress(OK_FRAME) == SNAPPY_OK
    assert SNAPPY_IDENTIFIER not in codec.compress(b"more")
    padding = b"\xfe\x03\x00\x00\x00\x00\x00"
    codec = SnappyCodec()
    assert codec.decompress(SNAPPY_OK + padding + SNAPPY_OK) == OK_FRAME * 2
    for kind in (b"\x00", b"\x01", b"\xfe"):
        with pytest.raises(ProtocolError, match="a chunk of 76495 bytes"):
            SnappyCodec().decompress(SNAPPY_IDENTIFIER + kind + (76_495).to_bytes(3, "little"))


def ended() -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(b"x") + compressor.flush()


@pytest.mark.parametrize(
    ("make", "damaged", "complaint"),
    [
        (SnappyCodec, SNAPPY_OK[:14] + b"\0\0\0\0" + OK_FRAME, "snappy"),  # a wrong checksum
        (SnappyCodec, b"\x02\x01\x00\x00x", "snappy"),  # a chunk that must not be skipped
        (DeflateCodec, b"\xff\xff\xff\xff", "damaged deflate stream"),
        (DeflateCodec, ended(), "ended"),
    ],
)
def test_a_damaged_stream_is_a_protocol_error(make: Make, damaged: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        make().decompress(damaged)


@both
@settings(max_examples=examples(75))
@given(data=st.binary(max_size=200))
def test_random_bytes_at_a_decoder_are_bytes_or_a_protocol_error(make: Make, data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(make().decompress(data), bytes)


CHUNK = 65_536  # the most that a chunk of snappy decodes to
compressed = st.builds(
    lambda data, times: data * times, st.binary(min_size=1, max_size=50), st.integers(1, 20_000)
)


@both
@given(data=compressed, cuts=st.lists(st.integers(1, 5000), max_size=30))
def test_a_limit_gives_the_same_bytes_by_pieces(make: Make, data: bytes, cuts: list[int]) -> None:
    sent, decoder, limit = make().compress(data), make(), 1000
    received = []
    for cut in [*cuts, len(sent)]:
        piece, sent = sent[:cut], sent[cut:]
        received.append(decoder.decompress(piece, limit))
        while decoder.has_more:
            received.append(decoder.decompress(b"", limit))
    assert b"".join(received) == data
    assert max(map(len, received)) <= max(limit, CHUNK)
