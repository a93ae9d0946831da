"""Files of other programs and damaged files are read completely, or reported."""

import bz2
import gzip
import json
import struct
import sys
import zlib
from pathlib import Path

import pytest
from plugins.archives import numbered
from plugins.cli import RunNsq

from nsqtools.records.envelope import encode_many

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COUNT = 200
TEXT = encode_many("clicks", "nsqd:4150", numbered(0, COUNT))
LINES = TEXT.splitlines(keepends=True)
HALF = COUNT // 2
FIRST, SECOND = b"".join(LINES[:HALF]), b"".join(LINES[HALF:])
SKIPPABLE = b"\x5e\x2a\x4d\x18" + struct.pack("<I", 9) + b"seekable!"


def member(data: bytes, level: int = 6, *, extra: bytes = b"", text: bytes = b"") -> bytes:
    """Make a gzip member with an extra field, or with a name, a comment and a header checksum."""
    flags = 4 * bool(extra) | 26 * bool(text)
    head = b"\x1f\x8b\x08" + bytes([flags]) + b"\0\0\0\0\0\xff"
    head += struct.pack("<H", len(extra)) + extra if extra else b""
    head += text + b"\0" + text + b"\0" if text else b""
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF) if text else b""
    deflate = zlib.compressobj(level, zlib.DEFLATED, -15)
    packed = deflate.compress(data) + deflate.flush()
    return head + packed + struct.pack("<II", zlib.crc32(data), len(data))


def bgzf() -> bytes:
    """Make BGZF blocks, each with its size in an extra field, and empty blocks between them."""
    blocks = []
    for piece in (FIRST[:3000], b"", FIRST[3000:] + SECOND, b""):
        block = member(piece, extra=b"BC\x02\0\0\0")
        blocks.append(block[:16] + struct.pack("<H", len(block) - 1) + block[18:])
    return b"".join(blocks)


def frames(*parts: bytes, **parameters: int) -> bytes:
    options = {zstd.CompressionParameter[name]: value for name, value in parameters.items()}
    return b"".join(zstd.compress(part, options=options) for part in parts)


PACKED = gzip.compress(TEXT)
WHOLE = {
    "CRLF.log": TEXT.replace(b"\n", b"\r\n"),
    "BOM.log": b"\xef\xbb\xbf" + TEXT,
    "no newline at the end.log": TEXT[:-1],
    "all fields.log.gz": member(TEXT, extra=b"ab\x02\0xy", text=b"made by\xff me"),
    "BGZF.log.gz": bgzf(),
    "stored.log.gz": member(TEXT, 0),
    "a member for each line.log.gz": b"".join(map(gzip.compress, LINES)),
    "members end within lines.log.gz": b"".join(
        gzip.compress(TEXT[i : i + 777]) for i in range(0, len(TEXT), 777)
    ),
    "an empty member at the end.log.gz": PACKED + gzip.compress(b""),
    "no checksum.log.zst": frames(TEXT),
    "no size.log.zst": frames(TEXT, content_size_flag=0),
    "checksum.log.zst": frames(TEXT, checksum_flag=1),
    "long window.log.zst": frames(TEXT, window_log=27),
    "skippable first.log.zst": SKIPPABLE + frames(TEXT),
    "skippable between.log.zst": frames(FIRST) + SKIPPABLE + frames(SECOND),
    "skippable at the end.log.zst": frames(TEXT) + SKIPPABLE,
    "an empty frame between.log.zst": frames(FIRST, b"", SECOND),
    "bzip2.log.bz2": bz2.compress(TEXT),
    "plain, named gzip.log.gz": TEXT,
    "gzip, named plain.log": PACKED,
    "zstd, named gzip.log.gz": frames(TEXT),
}


@pytest.mark.parametrize("name", WHOLE)
def test_files_compressed_by_other_programs_are_read_completely(
    tmp_path: Path, run_nsq: RunNsq, name: str
) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    assert run_nsq(["archive", "verify", tmp_path]).status == 0
    assert run_nsq(["archive", "cat", tmp_path, "--json"]).out == TEXT


CUT = {
    "zeros.log.gz": PACKED + bytes(5000),
    "text.log.gz": PACKED + b"plain text\n",
    "half a header.log.gz": PACKED + b"\x1f\x8b\x08",
    "half a member.log.gz": PACKED + PACKED[:200],
    "plain after gzip.log.gz": gzip.compress(FIRST) + SECOND,
    "gzip after plain.log": FIRST + gzip.compress(SECOND),
    "zstd after gzip.log.gz": gzip.compress(FIRST) + frames(SECOND),
}


@pytest.mark.parametrize("name", CUT)
def test_damage_behind_the_messages_is_reported_and_repaired(
    tmp_path: Path, run_nsq: RunNsq, name: str
) -> None:
    (tmp_path / name).write_bytes(CUT[name])
    status, out, err = run_nsq(["archive", "cat", tmp_path, "--json"])
    assert out.startswith(FIRST)
    assert (status == 0) is (name == "zeros.log.gz"), err
    run_nsq(["archive", "repair", tmp_path])
    assert run_nsq(["archive", "verify", tmp_path]).status == 0
    assert run_nsq(["archive", "cat", tmp_path, "--json"]).out.startswith(FIRST)


EMPTY = gzip.compress(b"", mtime=0)


@pytest.mark.parametrize("beginning", [b"", b"\n", EMPTY, EMPTY[:10]])
def test_a_file_without_messages_does_not_affect_other_files(
    tmp_path: Path, run_nsq: RunNsq, beginning: bytes
) -> None:
    (tmp_path / "empty.log.gz").write_bytes(beginning)
    (tmp_path / "good.log").write_bytes(TEXT)
    assert run_nsq(["archive", "cat", tmp_path, "--json"]).out.count(b"clicks") == COUNT
    assert run_nsq(["archive", "info", tmp_path, "--json"]).status == 0


ODD_TOPICS = ["a b", "x" * 65, "../x", "a/b", "a\nb", "..", "topic=y", "ü", "*"]


@pytest.mark.parametrize("store", ["delta", "parquet"])
def test_an_invalid_topic_name_stays_inside_the_table(
    tmp_path: Path, run_nsq: RunNsq, store: str
) -> None:
    lines = [encode_many(topic, "n:1", numbered(n, n + 1)) for n, topic in enumerate(ODD_TOPICS)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.log").write_bytes(b"".join(lines))
    table = tmp_path / "out/table"
    convert = ["archive", "convert", tmp_path / "in", "-o", table, "--store", store]
    assert run_nsq(convert).status == 0
    assert {path for path in tmp_path.rglob("*.parquet") if table not in path.parents} == set()
    rows = map(json.loads, run_nsq(["archive", "cat", table, "--json"]).out.splitlines())
    assert sorted(row["topic"] for row in rows) == sorted(ODD_TOPICS)


DUMPS = {
    "a consumer": b'{"topic":"t","id":"0123456789abcdef","timestamp":17,"attempts":1,"body":"a"}',
    "Kafka Connect": b'{"key":null,"value":{"a":1},"topic":"t","partition":0,"offset":7}',
    "Vector": b'{"host":"h","message":"line","timestamp":"2026-01-02T03:04:05.123456789Z"}',
    "Fluentd": b'2026-01-02T03:04:05+00:00\tapp.web\t{"message":"tab"}',
    "syslog": b"<13>Jan  2 03:04:05 h app: text",
}


def test_lines_of_similar_formats_are_bodies_byte_for_byte(tmp_path: Path, run_nsq: RunNsq) -> None:
    text = b"\n".join(DUMPS.values()) + b"\n"
    (tmp_path / "x.log").write_bytes(text)
    assert run_nsq(["archive", "cat", tmp_path, "--bodies"]).out == text
