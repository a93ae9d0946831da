"""Compression of archives: each member alone, in any pieces, and damage is never read as text."""

import random
import sys
from io import BytesIO
from pathlib import Path

import pytest
from plugins.archives import text_of

from nsqtools.archive import members
from nsqtools.archive.members import DamagedError, Unpacker, codec_of, members_of, unpack_members
from nsqtools.errors import NsqError
from nsqtools.records.naming import EXTENSIONS, Codec

COMPRESSED = [Codec.GZIP, Codec.ZSTD]


def member(codec: Codec, text: bytes, level: int | None = None) -> bytes:
    compressor, middle = members_of(codec, level)(), len(text) // 2
    return (
        compressor.compress(text[:middle]) + compressor.compress(text[middle:]) + compressor.flush()
    )


def unpacked(codec: Codec, data: bytes) -> tuple[bytes, str]:
    """The readable text, and the problem that ends it."""
    text = b""
    try:
        for piece in unpack_members(BytesIO(data), codec):
            text += piece.text
    except DamagedError as exc:
        return text, str(exc)
    return text, ""


def some_text(size: int, seed: int = 1) -> bytes:
    rng = random.Random(seed)
    return b"".join(b"%d some text\n" % rng.randrange(1000) for _ in range(size // 14))


@pytest.fixture(params=["isal", "zlib"])
def inflate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read and write gzip."""
    name = str(request.param)
    if name == "zlib":
        monkeypatch.setattr(members, "_isal", lambda: None)
    else:
        pytest.importorskip("isal")
    return name


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("limit", [1, 7, 1000, 1 << 20])
def test_a_member_is_unpacked_in_pieces_of_any_size(codec: Codec, limit: int, inflate: str) -> None:
    text = some_text(20_000 if limit > 1 else 500)
    data = member(codec, text)
    rng = random.Random(limit)
    unpacker, result, remaining = Unpacker(codec), b"", data + b"next"
    while not unpacker.is_over:
        size = 0 if unpacker.has_more else rng.randrange(1, 5000)
        piece = unpacker.unpack(remaining[:size], limit)
        assert len(piece) <= limit  # A few compressed bytes may expand to gigabytes.
        result, remaining = result + piece, remaining[size:]

    assert result == text
    assert unpacker.unused + remaining == b"next"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_concatenated_members_are_one_file_for_gzip_and_zstd(codec: Codec, tmp_path: Path) -> None:
    texts = [some_text(5000, seed) for seed in range(3)]
    path = tmp_path / f"x{EXTENSIONS[codec]}"
    path.write_bytes(b"".join(member(codec, text) for text in texts))
    with path.open("rb") as file:
        pieces = list(unpack_members(file, codec))
    assert [piece.text for piece in pieces] == texts
    assert pieces[-1].member_end == path.stat().st_size
    assert text_of(path) == b"".join(texts)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_damage_is_reported_and_the_text_before_it_is_read(codec: Codec, inflate: str) -> None:
    text = some_text(3000)
    data = member(codec, text)
    rng = random.Random(2)
    for _ in range(200):
        changed = bytearray(data)
        at = rng.randrange(10, len(data))  # No checksum covers the gzip header.
        changed[at] ^= 1 << rng.randrange(8)
        result, problem = unpacked(codec, bytes(changed))
        assert result == text or problem
    text = rng.randbytes(600_000)
    data = member(codec, text)
    good = member(codec, b"good\n")
    result, problem = unpacked(codec, good + b"\0\0" + data[: len(data) // 2])  # with padding
    assert result.startswith(b"good\n")
    assert text.startswith(result[5:])
    assert len(result) > 200_000
    assert problem == f"cut off in the member at byte {len(good) + 2}"


def test_the_codec_is_detected_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert codec_of(member(Codec.ZSTD, b"x")) is Codec.ZSTD
    assert codec_of(b"\x50\x2a\x4d\x18") is Codec.ZSTD
    assert codec_of(member(Codec.GZIP, b"x")) is Codec.GZIP
    for plain in (b"", b"{", b"P*M", b"\x1f", b"(\xb5/"):
        assert codec_of(plain) is Codec.NONE
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(NsqError, match=r"backports\.zstd"):
        members_of(Codec.ZSTD)
