"""Frames of a stream that is cut nowhere, at every byte, or at random; errors; compression."""

import itertools
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plugins.examples import examples

from nsqtools.errors import ProtocolError, ServerRefused
from nsqtools.protocol import frames
from nsqtools.protocol.codecs import DeflateCodec, SnappyCodec, StreamCodec
from nsqtools.protocol.frames import MESSAGE, RESPONSE, FrameBuffer, WireMessage, encode_frame

Made = tuple[Any, ...]  # the fields from which `FrameBuffer.take` builds a message
Taken = tuple[list[Made], list[tuple[int, bytes]]]


def make(*fields: Any) -> Made:
    return fields


wire_messages = st.builds(
    WireMessage,
    st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1),
    st.integers(min_value=0, max_value=0xFFFF),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=100),
)
message_frames = wire_messages.map(lambda m: (MESSAGE, m.encode()))
other_frames = st.tuples(st.sampled_from([RESPONSE, frames.ERROR]), st.binary(max_size=100))
frame_lists = st.lists(message_frames | other_frames, max_size=20)


def stream_of(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(encode_frame(kind, data) for kind, data in frames)


def expected(frames: list[tuple[int, bytes]]) -> Taken:
    bodies = [data for kind, data in frames if kind == MESSAGE]
    messages = [("conn", *struct.unpack(">qH16s", data[:26]), data[26:]) for data in bodies]
    return messages, [frame for frame in frames if frame[0] != MESSAGE]


def take_all(pieces: list[bytes], max_message_frame: int = 0) -> Taken:
    buffer = FrameBuffer(max_message_frame)
    messages: list[Made] = []
    other_frames: list[tuple[int, bytes]] = []
    for piece in pieces:
        buffer.feed(piece)
        more_messages, more_other_frames = buffer.take(make, "conn")
        messages += more_messages
        other_frames += more_other_frames
    return messages, other_frames


LONG, EMPTY = (MESSAGE, b"h" * 26 + b"x" * 40), (RESPONSE, b"")


@given(frame_lists, st.lists(st.integers(min_value=0, max_value=2000), max_size=30))
@example([LONG, LONG], list(range(200)))
@example([LONG, (RESPONSE, b"y" * 60)], list(range(200)))
@example([LONG, EMPTY], list(range(200)))
def test_frames_do_not_depend_on_cuts_of_the_stream(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    """Each frame is returned as soon as it is complete."""
    stream = stream_of(frames)
    inside = [cut for cut in cuts if cut < len(stream)]
    cut_edges = sorted({0, len(stream), *inside})
    once = [[0, cut, len(stream)] for cut in inside]
    for edges in (cut_edges, [0, len(stream)], range(len(stream) + 1), *once):
        pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
        assert take_all(pieces) == expected(frames)


@given(frame_lists)
def test_next_frame_returns_frames_in_order(frames: list[tuple[int, bytes]]) -> None:
    buffer = FrameBuffer()
    returned = []
    for byte in stream_of(frames):
        buffer.feed(bytes([byte]))
        while (frame := buffer.next_frame()) is not None:
            returned.append(frame)
    assert returned == frames
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("head", "complaint", "hint"),
    [
        (b"HTTP/1.1", "speaks HTTP", "HTTP port"),
        (b"\x00\x00\x00\x0eE_BAD_PROTOCOL", "not an nsqd", "nsqlookupd"),
        (struct.pack(">II", 3, 0), "size 3 is below 4", ""),
        (struct.pack(">II", 10, 3), "unknown frame type 3", ""),
        (struct.pack(">II", 0xFFFFFFFF, MESSAGE), "above the limit", ""),
        (struct.pack(">II", 0x7FFFFFFF, RESPONSE), "above the limit", ""),
        (struct.pack(">II", 29, MESSAGE), "too short", ""),
        (b"\x15\x03\x01\x00\x02\x02\x46\x00", "unknown frame type", ""),
    ],
)
def test_an_invalid_header_is_refused_before_its_data(
    head: bytes, complaint: str, hint: str
) -> None:
    one_by_one = FrameBuffer()
    one_by_one.feed(head)
    with pytest.raises(ProtocolError, match=complaint) as caught:
        one_by_one.next_frame()
    assert hint in caught.value.hint
    with pytest.raises(ProtocolError, match=complaint):
        take_all([head])
    with pytest.raises(ProtocolError, match=complaint):
        take_all([head + bytes(100)])


def test_the_size_limit_applies_only_to_messages() -> None:
    small = WireMessage(1, 1, b"0123456789abcdef", b"x" * 10).encode()
    large = WireMessage(1, 1, b"0123456789abcdef", b"x" * 11).encode()
    reply = b"{" + b" " * 500 + b"}"
    limit = 10 + 30
    frames = [(RESPONSE, reply), (MESSAGE, small)]
    assert take_all([stream_of(frames)], limit) == expected(frames)
    with pytest.raises(ProtocolError, match=r"above the limit of 40 bytes \(max_msg_size\)"):
        take_all([encode_frame(MESSAGE, large)[:40]], limit)


LATE, REFUSED = ("E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"), "refused"
NOT_ALLOWED = ("E_AUTH_FAILED", "E_AUTH_ERROR", "E_AUTH_FIRST", "E_UNAUTHORIZED")
OTHERS = ("E_INVALID", "E_BAD_TOPIC E_BAD_TOPIC x", "E_NEW_IN_2.0", "", "E_FIN_FAILEDX", "\xff\xfe")


@pytest.mark.parametrize(
    ("texts", "is_fatal", "category"),
    [
        ([f"{code}{x}" for code in LATE for x in ("", " FIN 0123 failed", " x")], 0, "failed"),
        ([f"{code} no" for code in NOT_ALLOWED], 1, REFUSED),
        (["E_INVALID cannot SUB in current state (TLS required)"], 1, REFUSED),
        (OTHERS, 1, "failed"),
    ],
)
def test_the_code_of_an_error_decides_whether_it_is_fatal_or_a_refusal(
    texts: list[str], is_fatal: bool, category: str
) -> None:
    for text in texts:
        error = frames.decode_error(text.encode("latin-1"), "127.0.0.1:4150")
        assert (error.fatal, error.category) == (is_fatal, category), text
        assert isinstance(error, ServerRefused) == (category == REFUSED)
        if text.isascii():
            assert str(error) == f"127.0.0.1:4150: {text}".rstrip()
            assert error.code == text.partition(" ")[0]
            assert error.text == text.partition(" ")[2]
    assert ("--tls" in error.hint) == ("TLS required" in text)


# -- random bytes: frames, nothing yet, or a `ProtocolError`, in linear time -------------------


heads = st.builds(
    lambda size, kind: struct.pack(">II", size, kind),
    st.integers(min_value=0, max_value=200) | st.integers(min_value=0, max_value=0xFFFFFFFF),
    st.integers(min_value=0, max_value=4) | st.integers(min_value=0, max_value=0xFFFFFFFF),
)
pieces = st.lists(st.one_of(st.binary(max_size=60), heads), max_size=20)


@settings(max_examples=examples(100))
@given(pieces, st.sampled_from([0, 30, 100]))
def test_a_refusal_does_not_depend_on_cuts_of_the_stream(
    pieces: list[bytes], max_message_frame: int
) -> None:
    """Only a `ProtocolError` is raised."""
    data = b"".join(pieces)
    cuts = (pieces, [data], [data[i : i + 1] for i in range(len(data))])
    assert len({was_refused(pieces, max_message_frame) for pieces in cuts}) == 1


def was_refused(pieces: list[bytes], max_message_frame: int) -> bool:
    buffer = FrameBuffer(max_message_frame)
    try:
        for piece in pieces:
            buffer.feed(piece)
            buffer.take(make, None)
            while buffer.is_damaged:
                buffer.take(make, None)
    except ProtocolError:
        return True
    return False


@given(frame_lists, st.integers(8, 50))
def test_frames_before_damage_are_returned_first(
    frames: list[tuple[int, bytes]], damage: int
) -> None:
    buffer = FrameBuffer()
    buffer.feed(stream_of(frames) + b"\xff" * damage)
    if frames:
        assert buffer.take(make, "conn") == expected(frames)
        assert buffer.is_damaged
    with pytest.raises(ProtocolError, match="unknown frame type"):
        buffer.take(make, "conn")


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
    """Joining the buffer with every piece would take 256 times as long for 16 times the size."""
    # Warm up; both frames fit into the caches, which other programs also use.
    seconds_for(1 << 16, 25)
    small = min(seconds_for(1 << 16, 25) for _ in range(3))
    large = min(seconds_for(1 << 20, 25) for _ in range(3))
    assert large < 60 * small


# -- compression, with bytes recorded from the Go nsqd --------------------------------------------


OK_FRAME = bytes.fromhex("00000006000000004f4b")
SNAPPY_IDENTIFIER = bytes.fromhex("ff060000") + b"sNaPpY"
SNAPPY_OK = SNAPPY_IDENTIFIER + bytes.fromhex("010e000026982bcf") + OK_FRAME
DEFLATE_OK = bytes.fromhex("000a00f5ff") + OK_FRAME + bytes.fromhex("000000ffff000000ffff")

Make = Callable[[], StreamCodec]
both = pytest.mark.parametrize("make", [SnappyCodec, DeflateCodec])


@pytest.mark.parametrize(("make", "wire"), [(SnappyCodec, SNAPPY_OK), (DeflateCodec, DEFLATE_OK)])
def test_the_first_bytes_of_nsqd_are_decoded_with_any_cut(make: Make, wire: bytes) -> None:
    assert make().decompress(wire) == OK_FRAME
    codec = make()
    assert b"".join(codec.decompress(wire[i : i + 1]) for i in range(len(wire))) == OK_FRAME


@both
@settings(max_examples=examples(30))
@given(writes=st.lists(st.binary(max_size=3000), max_size=8))
def test_every_write_can_be_decoded_immediately(make: Make, writes: list[bytes]) -> None:
    sender, receiver = make(), make()
    for data in writes:
        assert receiver.decompress(sender.compress(data)) == data


def test_snappy_writes_one_identifier_skips_padding_and_limits_chunks() -> None:
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
    decoded, text = decode_all(make(), [damaged])
    assert decoded == (b"x" if complaint == "ended" else b"")
    assert complaint in text


def decode_all(codec: StreamCodec, pieces: list[bytes], limit: int = 0) -> tuple[bytes, str]:
    """The decoded bytes of the pieces, and the error at the end."""
    decoded = b""
    try:
        for piece in pieces:
            decoded += codec.decompress(piece, limit)
            while codec.has_more:
                decoded += codec.decompress(b"", limit)
    except ProtocolError as exc:
        return decoded, str(exc)
    return decoded, ""


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


writes_and_cuts = {
    "writes": st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=5),
    "cuts": st.lists(st.integers(0, 20_000), max_size=5),
}


@both
@settings(max_examples=examples(50))
@given(**writes_and_cuts, limit=st.sampled_from([0, 500]), is_ended=st.booleans())
def test_bytes_before_damage_or_the_end_are_decoded_first(
    make: Make, writes: list[bytes], cuts: list[int], limit: int, is_ended: bool
) -> None:
    sender = make()
    sent = b"".join(map(sender.compress, writes))
    sent += b"\x03\x00" if is_ended and make is DeflateCodec else b"\x07\xff\xff\xff" * 20
    decoded, error = decode_all(make(), cut(sent, cuts), limit)
    assert decoded == b"".join(writes)
    assert "stream" in error


@both
@settings(max_examples=examples(50))
@given(**writes_and_cuts, at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_damage_anywhere_decodes_the_same_byte_by_byte(
    make: Make, writes: list[bytes], cuts: list[int], at: int, flip: int
) -> None:
    sender = make()
    sent = bytearray(b"".join(map(sender.compress, writes)))
    sent[at % len(sent)] ^= flip
    pieces = [bytes(sent[i : i + 1]) for i in range(len(sent))]
    assert decode_all(make(), cut(bytes(sent), cuts)) == decode_all(make(), pieces)


@both
@settings(max_examples=examples(75))
@given(data=st.binary(max_size=200))
def test_a_decoder_returns_bytes_or_a_protocol_error(make: Make, data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(make().decompress(data), bytes)


CHUNK = 65_536  # the largest size of a decoded snappy chunk
compressed = st.builds(
    lambda data, times: data * times, st.binary(min_size=1, max_size=50), st.integers(1, 20_000)
)


@both
@given(data=compressed, cuts=st.lists(st.integers(1, 5000), max_size=30))
def test_a_limit_returns_the_same_bytes_in_pieces(make: Make, data: bytes, cuts: list[int]) -> None:
    sent, decoder, limit = make().compress(data), make(), 1000
    received = []
    for cut in [*cuts, len(sent)]:
        piece, sent = sent[:cut], sent[cut:]
        received.append(decoder.decompress(piece, limit))
        while decoder.has_more:
            received.append(decoder.decompress(b"", limit))
    assert b"".join(received) == data
    assert max(map(len, received)) <= max(limit, CHUNK)
