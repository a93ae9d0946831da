"""Arrow members: the same messages as lines and as columns, and damage never read as messages."""

import random
from io import BytesIO
from pathlib import Path

import pytest
from plugins.archives import numbered

from nsqtools.archive.arrow_member import arrow_schema, encode_batch
from nsqtools.archive.columns import exact_columns, message_schema, read_batches
from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import Head
from nsqtools.archive.members import (
    CorruptError,
    DamagedError,
    Unpacker,
    arrow_members,
    codec_of,
    members_of,
    scan_members,
    unpack_columns,
    unpack_members,
)
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind, encode_many
from nsqtools.records.naming import Codec

ODD = [
    WireMessage(0, 1, b"%016x" % 1, b""),
    WireMessage(-(2**63), 2**16 - 1, b"\xff" * 16, b"\xff\0"),
    WireMessage(2**63 - 1, 0, b'"\\\n' + b"a" * 13, '{"a": "\u2028é"}\n'.encode()),
    WireMessage(1, 3, b"\xc3\xa9" * 8, b"\xed\xa0\x80"),
]
MESSAGES = [*numbered(0, 3000), *ODD]


def member(messages: list[WireMessage], nsqd: str = "n:4150") -> bytes:
    writer = arrow_members()
    chunks = [
        writer.compress(encode_batch("clicks", nsqd, part))
        for part in (messages[:7], messages[7:])
        if part
    ]
    return b"".join(chunks) + writer.flush()


def test_a_member_unpacks_to_lines_in_pieces_of_any_size() -> None:
    expected = encode_many("clicks", "n:4150", MESSAGES)
    data, pos, rng, text = member(MESSAGES), 0, random.Random(1), b""
    unpacker = Unpacker(codec_of(data))
    while not unpacker.is_over:
        size = 0 if unpacker.has_more else rng.randrange(1, 9000)
        piece = unpacker.unpack((data + b"next")[pos : pos + size], 1000)
        assert len(piece) <= 1000
        text, pos = text + piece, pos + size
    assert text == expected
    assert unpacker.unused == (data + b"next")[len(data) : pos]


def test_a_member_made_of_lines_unpacks_to_the_same_lines() -> None:
    text = encode_many("a", "n:1", numbered(0, 9)) + encode_many("b", "n:2", ODD)
    for size in (1, 100, len(text)):
        writer = members_of(Codec.ARROW)()
        for begin in range(0, len(text), size):
            writer.compress(text[begin : begin + size])
        [piece] = unpack_members(BytesIO(data := writer.flush()), Codec.ARROW)
        assert piece == (text, len(data))


def test_a_changed_byte_or_a_truncated_member_is_damage() -> None:
    data, rng = member(MESSAGES[-30:]), random.Random(2)
    size = len(data)
    for pos in [*range(30), *(rng.randrange(size) for _ in range(500))]:
        changed = bytearray(data)
        changed[pos] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptError):
            unpack_columns(bytes(changed))
        with pytest.raises(DamagedError):
            list(unpack_members(BytesIO(changed), Codec.ARROW))
    for end in [0, 1, 23, 24, *(rng.randrange(size) for _ in range(50)), size - 1]:
        with pytest.raises(CorruptError):
            unpack_columns(data[:end])


@pytest.mark.parametrize("kind", [BodyKind.string, BodyKind.binary])
def test_columns_have_the_values_of_the_lines(kind: BodyKind, tmp_path: Path) -> None:
    path = tmp_path / "clicks.log.arrow"
    file = PartFile(path, 0o640, arrow_members, 0.0, Head("f" * 32, 1))
    texts = []
    for number, messages in enumerate((MESSAGES[:1], MESSAGES[1:20], [], MESSAGES[20:])):
        if messages:
            file.append(encode_batch("clicks", f"n:{number}", messages))
            texts.append(encode_many("clicks", f"n:{number}", messages))
        file.flush(file.end_member(len(messages), 0, 0))
    finish_part(path, Directories(tmp_path, tmp_path))

    [archive] = find_archives([path])
    assert [m[:3] for m in scan_members(path)] == [m[:3] for m in archive.members or ()]
    expected, _, problems = exact_columns(b"".join(texts).split(b"\n")[:-1], kind)
    assert not problems
    rows = [
        row
        for batch in read_batches(archive, lambda *problem: pytest.fail(str(problem)), kind=kind)
        for row in batch.to_pylist()
    ]
    for name in message_schema(kind).names:
        assert [row[name] for row in rows] == expected[name].to_pylist(), name


def test_members_that_the_index_lacks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "clicks.log.arrow"
    file = PartFile(path, 0o640, arrow_members, 0.0, Head("f" * 32, 1))
    file.append(encode_batch("clicks", "n:1", MESSAGES[:10]))
    file.flush(file.end_member(10, 0, 0))
    finish_part(path, Directories(tmp_path, tmp_path))
    with path.open("ab") as log:
        log.write(member(MESSAGES[10:]))

    [archive] = find_archives([path])
    batches = read_batches(archive, lambda *problem: pytest.fail(str(problem)))
    assert sum(batch.num_rows for batch in batches) == len(MESSAGES)


def test_a_large_delivery_becomes_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqtools.archive.arrow_member.MAX_BATCH_BYTES", 100)
    batches = unpack_columns(member(numbered(0, 100)))
    assert len(batches) > 8
    assert sum(batch.num_rows for batch in batches) == 100
    assert {batch.schema for batch in batches} == {arrow_schema()}
