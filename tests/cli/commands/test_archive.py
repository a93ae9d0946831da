"""``nsq archive``: verify, repair, cat and info, on good files and on damaged ones."""

from __future__ import annotations

import gzip
import resource
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from plugins.archives import text_of, write_archive
from plugins.cli import RunNsq
from plugins.object_store import Bucket

from nsqtools.archive.layout import index_of
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21


def messages(first: int, last: int) -> list[WireMessage]:
    return [
        WireMessage(BEGIN + number * SECOND, 1, b"%016x" % number, b"body %d" % number)
        for number in range(first, last)
    ]


def lines(first: int, last: int) -> bytes:
    return encode_many("clicks", "nsqd:4150", messages(first, last))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # where compact makes its folder


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A finished file of 20 messages in two members, one a second."""
    return write_archive(tmp_path / "clicks.log.gz", messages(0, 10), messages(10, 20))


def test_a_file_that_somebody_appended_to_differs_from_its_index(
    archive: Path, run_nsq: RunNsq
) -> None:
    archive.write_bytes(archive.read_bytes() + gzip.compress(lines(20, 21)))

    assert b"its index ends" in run_nsq(["archive", "verify", str(archive)]).out


def test_repair_finishes_what_a_crash_left(tmp_path: Path, run_nsq: RunNsq) -> None:
    write_archive(tmp_path / "clicks.log.gz", messages(0, 10), is_finished=False)

    run_nsq(["archive", "repair", str(tmp_path)])

    assert text_of(tmp_path / "clicks.log.gz") == lines(0, 10)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_member_that_is_corrupt_costs_only_itself_where_there_is_an_index(
    archive: Path, run_nsq: RunNsq, has_index: bool
) -> None:
    data = bytearray(archive.read_bytes())
    data[40:60] = bytes(20)
    archive.write_bytes(data)
    if not has_index:
        index_of(archive).unlink()

    result = run_nsq(["archive", "cat", str(archive), "--bodies"])

    assert result.status == 6
    assert len(result.out.splitlines()) == (10 if has_index else 0)


def test_repair_leaves_out_lines_that_are_no_messages_once(tmp_path: Path, run_nsq: RunNsq) -> None:
    path = tmp_path / "clicks.log"
    path.write_bytes(lines(0, 5) + b"not a message\n" + lines(5, 10))

    first = run_nsq(["archive", "repair", str(tmp_path)])
    again = run_nsq(["archive", "repair", str(tmp_path)])

    assert first.out == b"%s: repaired, 10 messages\n" % bytes(path)
    assert (again.status, again.out) == (0, b"")
    assert path.read_bytes() == lines(0, 10)
    assert b"not a message\n" in (tmp_path / ".clicks.log.damaged").read_bytes()


def test_bytes_of_a_table_that_changed_are_damage_and_are_said_once_with_what_mends_them(
    archive: Path, run_nsq: RunNsq, tmp_path: Path
) -> None:
    lake, out = tmp_path / "lake", str(tmp_path / "out")
    assert run_nsq(["archive", "convert", str(archive.parent), "-o", str(lake)]).status == 0
    (path,) = lake.rglob("*.parquet")
    ids = pq.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[ids.data_page_offset + ids.total_compressed_size - 10] ^= 1
    path.write_bytes(data)

    dry = run_nsq(["replay", str(lake), "--dry-run"])
    repaired = run_nsq(["archive", "repair", str(lake)])
    compacted = run_nsq(["archive", "compact", str(lake), "-o", out])
    skipped = run_nsq(["archive", "compact", str(lake), "-o", out, "--skip-damaged"])

    assert run_nsq(["archive", "verify", str(lake)]).status == 1
    assert (dry.status, dry.err.count("it is not whole Parquet")) == (6, 1), dry.err
    assert "hint: Restore the file, or make it again from its archive" in repaired.err
    assert compacted.status == 1
    assert f"cannot read {path}: it is not whole Parquet" in compacted.err
    assert "hint: Restore it, or make it again from its archive" in compacted.err
    assert (skipped.status, skipped.err.count("it is not whole Parquet")) == (6, 1), skipped.err


def test_parquet_among_archives_is_compacted_as_what_it_is(
    archive: Path, run_nsq: RunNsq, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    assert run_nsq(["archive", "convert", str(archive), "-o", str(lake)]).status == 0
    for path in (archive, index_of(archive)):
        path.rename(lake / path.name)

    result = run_nsq(["archive", "compact", str(lake), "-o", str(tmp_path / "out")])

    assert result.status == 0, result.err
    assert "40 messages read, 20 duplicates removed, 1 files" in result.err
    out = run_nsq(["archive", "verify", str(tmp_path / "out")])
    assert (out.status, out.err) == (0, "nsq: 1 file, 20 messages, 0 damaged\n")


# archives that somebody else made


def test_an_index_that_claims_more_than_there_is_is_damage(archive: Path, run_nsq: RunNsq) -> None:
    for length in (10**18 - 1, 10**18, 10**30):
        index_of(archive).write_text(f"0 {length} 20 1 2\n")
        result = run_nsq(["archive", "verify", str(archive)])
        assert "a bug" not in result.err
        assert result.status in (0, 1)  # an index that cannot be read is as good as none
        assert b"body 9" in run_nsq(["archive", "cat", str(archive), "--bodies"]).out


def test_a_member_that_unpacks_to_a_gigabyte_takes_bounded_memory(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    path = tmp_path / "bomb.log.gz"
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1 << 10))
    packed += compressor.flush()
    path.write_bytes(packed)
    index_of(path).write_text(f"0 {len(packed)} 1 1 2\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert run_nsq(["archive", "verify", str(path)]).status == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


COMMANDS = [
    ["archive", "verify"],
    ["archive", "cat"],
    ["archive", "info"],
    ["archive", "repair"],
    ["replay", "--topic", "again", "--dry-run"],
    ["spark", "compact", "-o", "new"],
]


def test_files_of_other_programs_are_not_taken_for_bare_bodies(
    archive: Path, run_nsq: RunNsq
) -> None:
    path = archive.parent / "_spark_metadata/0"
    path.parent.mkdir()
    path.write_bytes(b'v1\n{"path": "file:///x"}\n')
    for command in COMMANDS:
        result = run_nsq([*command, str(archive.parent)])
        assert (result.status, result.out) == (2, b""), command
        assert f"cannot read {path} as an archive" in result.err
        assert "nsq spark sql, report and replay" in result.err
        assert path.read_bytes() == b'v1\n{"path": "file:///x"}\n'


def test_parquet_among_archives_that_cannot_be_compacted_is_named(
    archive: Path, bucket: Bucket, run_nsq: RunNsq, tmp_path: Path
) -> None:
    name = "topic=clicks/date=2026-09-21/part-0.zstd.parquet"
    for each in (archive, index_of(archive)):
        bucket.storage.put_file(each.name, each)
    bucket.storage.put(name, b"PAR1\x15\x04\nPAR1")

    result = run_nsq(["archive", "compact", "-o", str(tmp_path / "new"), bucket.url])

    assert (result.status, result.out) == (1, b"")
    assert f"cannot read {bucket.url}/{name}: it is not whole Parquet" in result.err
    assert not list(tmp_path.glob("new/**/*.parquet"))
    assert bucket.storage.read(name) == b"PAR1\x15\x04\nPAR1"


def test_the_log_of_a_table_that_cannot_be_read_is_an_error(archive: Path, run_nsq: RunNsq) -> None:
    (archive.parent / "_delta_log").mkdir()
    (archive.parent / "_delta_log/00000000000000000000.json").write_bytes(b'{"commitInfo": {}}\n')
    for command in COMMANDS:
        result = run_nsq([*command, str(archive.parent)])
        assert (result.status, result.out) == (1, b""), command
        assert f"cannot use the Delta table {archive.parent}" in result.err


def test_what_begins_with_an_underline_is_an_archive_where_it_has_an_index(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    write_archive(tmp_path / "_topic.log.gz", messages(0, 3), topic="_topic")

    assert len(run_nsq(["archive", "cat", str(tmp_path)]).out.splitlines()) == 3
