"""Compression of archives: each member by itself, in any pieces, damage never taken for text."""

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
    one, middle = members_of(codec, level)(), len(text) // 2
    return one.compress(text[:middle]) + one.compress(text[middle:]) + one.flush()


def unpacked(codec: Codec, data: bytes) -> tuple[bytes, str]:
    """What can be read, and what is wrong after it."""
    found = b""
    try:
        for piece in unpack_members(BytesIO(data), codec):
            found += piece.text
    except DamagedError as exc:
        return found, str(exc)
    return found, ""


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
def test_a_member_is_unpacked_whatever_the_pieces(codec: Codec, limit: int, inflate: str) -> None:
    text = some_text(20_000 if limit > 1 else 500)
    data = member(codec, text)
    rng = random.Random(limit)
    one, found, rest = Unpacker(codec), b"", data + b"next"
    while not one.is_over:
        size = 0 if one.has_more else rng.randrange(1, 5000)
        piece = one.unpack(rest[:size], limit)
        assert len(piece) <= limit  # few bytes may be gigabytes
        found, rest = found + piece, rest[size:]

    assert found == text
    assert one.unused + rest == b"next"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_members_follow_each_other_as_the_tools_expect(codec: Codec, tmp_path: Path) -> None:
    texts = [some_text(5000, seed) for seed in range(3)]
    path = tmp_path / f"x{EXTENSIONS[codec]}"
    path.write_bytes(b"".join(member(codec, text) for text in texts))
    with path.open("rb") as file:
        pieces = list(unpack_members(file, codec))
    assert [piece.text for piece in pieces] == texts
    assert pieces[-1].member_end == path.stat().st_size
    assert text_of(path) == b"".join(texts)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_damage_is_noticed_and_what_is_right_is_read(codec: Codec, inflate: str) -> None:
    text = some_text(3000)
    data = member(codec, text)
    rng = random.Random(2)
    for _ in range(200):
        changed = bytearray(data)
        at = rng.randrange(10, len(data))  # a header of gzip says things that nobody checks
        changed[at] ^= 1 << rng.randrange(8)
        found, problem = unpacked(codec, bytes(changed))
        assert found == text or problem
    text = rng.randbytes(600_000)
    data = member(codec, text)
    good = member(codec, b"good\n")
    found, problem = unpacked(codec, good + b"\0\0" + data[: len(data) // 2])  # with padding
    assert found.startswith(b"good\n")
    assert text.startswith(found[5:])
    assert len(found) > 200_000
    assert problem == f"cut off in the member at byte {len(good) + 2}"


def test_bytes_tell_the_codec_and_an_error_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec_of(member(Codec.ZSTD, b"x")) is Codec.ZSTD
    assert codec_of(b"\x50\x2a\x4d\x18") is Codec.ZSTD
    assert codec_of(member(Codec.GZIP, b"x")) is Codec.GZIP
    for plain in (b"", b"{", b"P*M", b"\x1f", b"(\xb5/"):
        assert codec_of(plain) is Codec.NONE
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(NsqError, match=r"backports\.zstd"):
        members_of(Codec.ZSTD)
