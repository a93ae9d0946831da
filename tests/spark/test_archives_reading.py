"""Archives as columns: all bodies, kinds of files and kinds of damage, without Spark."""

import gzip
import logging
import os
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.archives import Writer, numbered, values_of, write_archive

from nsqtools.archive import reader
from nsqtools.archive.form import FileForm, LineKind
from nsqtools.archive.layout import Member, TimeRange, index_of, total_of
from nsqtools.archive.members import members_of
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.archive.place import LocalPlace
from nsqtools.errors import NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.records.naming import Codec
from nsqtools.spark.archives import partitions
from nsqtools.spark.archives.archive_files import ListedFile
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.partitions import (
    ROWS_OF_PARTITION,
    ReadPartition,
    plan_batch,
    ranges_of,
)
from nsqtools.spark.archives.read_settings import BYTES, ReadSettings

BASE_NS = 1_700_000_000_000_000_123

BODIES = [
    b"plain",
    b"",
    b"\xff\x00\x80",
    "\u2028 caf\u00e9 \n\r\t\0 \U0001f600".encode(),
    b'{"a": "\\ud83d\\ude00", "b": "\\u0000"}',
    b'"}\n{"topic": "x"',
    b"\\" * 1000,
    b"x\n" * (1 << 20),
    bytes(range(256)) * 5000,
]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.booleans())),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.integers(1, 30),
)
def test_ranges_have_each_member_of_the_requested_time(
    some: list[tuple[int, int, int, bool]], asked: tuple[int, int], most: int
) -> None:
    members, end = [], 0
    for length, count, time, is_apart in some:
        end += 5 if is_apart else 0
        members.append(Member(end, length, count, time, time + 2 if time else 0))
        end += length
    content = FileForm(LineKind.messages, "clicks", codec=Codec.GZIP)
    fields = {"place": "a", "shown": "a", "key": "a", "content": lambda: content}
    file = cast("ListedFile", SimpleNamespace(**fields, total=total_of(members), entry=None))
    within = TimeRange(*asked)
    # A row has the weight of a byte.
    reading = ReadSettings(("a",), within=within, partition_bytes=ROWS_OF_PARTITION)

    ranges = list(ranges_of(file, members, reading, most))

    planned = [member for file_range, _ in ranges for member in file_range.members]
    assert planned == [member for member in members if within.may_contain(member)]
    for file_range, weight in ranges:
        assert weight == sum(member.length + member.messages for member in file_range.members)
        assert weight <= most or len(file_range.members) == 1


def rows(settings: ReadSettings) -> list[dict[str, Any]]:
    return [
        row
        for partition in plan_batch(settings)
        for batch in read_partition(partition, settings, BYTES.archived_schema().names)
        for row in batch.to_pylist()
    ]


def bodies(path: Path, **settings: Any) -> list[bytes]:
    return [row["body"] for row in rows(ReadSettings((str(path),), **settings))]


@pytest.mark.parametrize("name", [os.fsdecode(b"gr\xf6n.gz"), "a.zst", "a.arrow"])
def test_bodies_of_every_kind_are_read_unchanged_and_the_file_name_as_text(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [WireMessage(BASE_NS, 1, b"%016x" % n, body) for n, body in enumerate(BODIES)]
    path = write_archive(tmp_path / name, messages[:4], messages[4:])
    assert bodies(tmp_path, partition_bytes=100_000) == BODIES
    printable = f"{tmp_path}/{name}".encode(errors="backslashreplace").decode()
    assert {row["file"] for row in rows(ReadSettings((str(tmp_path),)))} == {printable}
    for name_of_size in ("LARGEST_TEXT", "BATCH_TEXT"):  # so that a member is read in pieces
        monkeypatch.setattr(reader, name_of_size, 50)
        assert bodies(tmp_path) == BODIES
    if name.startswith("a."):
        return
    text = gzip.decompress(path.read_bytes())
    index_of(path).unlink()
    zstd = members_of(Codec.ZSTD)()
    for compress in (bytes, gzip.compress, lambda text: zstd.compress(text) + zstd.flush()):
        path.write_bytes(compress(text))
        assert bodies(tmp_path, partition_bytes=100_000) == BODIES, compress


def test_partitions_have_similar_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = write_archive(tmp_path / "a.log.gz", *[numbered(n, n + 10) for n in range(0, 1000, 10)])
    size = large.stat().st_size

    def planned(**settings: Any) -> list[ReadPartition]:
        partitions, again = (
            plan_batch(ReadSettings((str(tmp_path),), **settings)) for _ in range(2)
        )
        assert partitions == again
        return partitions

    double = {"partition_bytes": size * 2, "min_partitions": 1}
    assert len(planned(**double)) == 1
    with monkeypatch.context() as patch:  # Rows that compress well are split by their number.
        patch.setattr(partitions, "ROWS_OF_PARTITION", 200)
        of_rows = planned(**double)
    rows = [
        sum(member.messages for file_range in partition for member in file_range.members)
        for partition in of_rows
    ]
    assert (sum(rows), max(rows) <= 200) == (1000, True)
    for number in range(10):
        write_archive(tmp_path / f"b{number}.log.gz", numbered(number, number + 1))
    assert len(planned()) == 1
    # 11 files of similar weights, two for each partition.
    assert len(planned(min_partitions=4)) == 6
    cut = [sum(r.end - r.begin for r in p) for p in planned(partition_bytes=size // 10)]
    assert max(cut) <= size // 10

    large.unlink()
    index_of(large).unlink()
    for number in range(10, 300):  # spread over all tasks that run at the same time
        write_archive(tmp_path / f"b{number}.log.gz", numbered(number, number + 1))
    monkeypatch.setenv("NSQ_SPARK_SLOTS", "8")
    assert len(wide := planned()) >= 8
    assert max(len(partition) for partition in wide) <= 300 // 8
    monkeypatch.setenv("NSQ_SPARK_SLOTS", "2")
    assert len(planned()) == 3  # of at most 128 files each
    assert len(planned(min_partitions=1)) == 3


def test_topics_prune_files_of_nsq_to_file_and_rows_of_other_files(tmp_path: Path) -> None:
    for topic in ("a", "b"):
        Writer(tmp_path, topic=topic).write(numbered(0, 2))
    mixed = encode_many("b", "n", numbered(5, 6)) + encode_many("a", "n", numbered(6, 7))
    for name in ("mixed.jsonl", "repaired.jsonl"):
        (tmp_path / name).write_bytes(mixed)
    (tmp_path / ".repaired.jsonl.index").write_bytes(b"0 %d 2 0 0\n" % len(mixed))
    settings = ReadSettings((str(tmp_path),), topics=frozenset({"a"}))

    paths = {
        Path(file_range.shown).name
        for partition in plan_batch(settings)
        for file_range in partition
    }

    assert paths == {"a-000001.log.gz", "mixed.jsonl", "repaired.jsonl"}
    assert [row["body"] for row in rows(settings)] == [b"body 0", b"body 1", b"body 6", b"body 6"]


def test_a_copy_is_not_read_twice_and_another_file_of_its_name_is_reported(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(numbered(0, 5))
    writer.finish()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    assert len(bodies(tmp_path)) == 5

    shutil.rmtree(copy)
    copy.mkdir()
    second = Writer(copy, writer=writer.writer)
    second.write(numbered(5, 7))
    second.finish()

    with pytest.raises(NsqError, match="has the same identity and other data"):
        bodies(tmp_path)


def test_bare_bodies_are_read_on_request_or_by_an_index_of_nsqtools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log").write_bytes(b"one;two;;th\xff\nree")
    with gzip.open(tmp_path / "b.log.gz", "wb") as file:
        file.write(b"four;five;")

    messages = rows(ReadSettings((str(tmp_path),), raw=True, delimiter=b";", topic="clicks"))

    assert [row["body"] for row in messages] == [
        b"one",
        b"two",
        b"",
        b"th\xff\nree",
        b"four",
        b"five",
    ]
    assert messages[1]["pos"] == 4
    assert {row["topic"] for row in messages} == {"clicks"}
    assert {row[name] for row in messages for name in ("id", "nsqd", "ts_ns", "attempts")} == {None}
    with pytest.raises(
        NsqError, match=r"cannot read .*a\.log: it does not hold messages as nsq to"
    ):
        bodies(tmp_path)

    (tmp_path / "a.log").write_bytes(b"a;;;b")  # The first of two overlapping delimiters counts.
    assert bodies(tmp_path / "a.log", raw=True, delimiter=b";;") == [b"a", b";b"]
    (indexed := tmp_path / "own").mkdir()
    part = PartFile(indexed / "a.log.gz", 0o640, members_of(Codec.GZIP, 6), 0.0)
    part.append(b"one;t\nwo;")
    part.flush(part.end_member(2, 5, 6))
    finish_part(part.path, Directories(indexed, indexed))
    clicks = frozenset({"clicks"})
    for size in (1 << 26, 6):  # so that a member is read in pieces
        monkeypatch.setattr(reader, "LARGEST_TEXT", size)
        monkeypatch.setattr(reader, "BATCH_TEXT", size)
        assert bodies(indexed, delimiter=b";") == [b"one", b"t\nwo"]
        assert bodies(indexed, delimiter=b";", topics=clicks, topic="clicks") == [b"one", b"t\nwo"]
    with pytest.raises(NsqError, match="the topic of its bodies is unknown"):
        bodies(indexed, topics=clicks)


def test_empty_and_hidden_files_are_skipped_and_keys_read_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").write_bytes(b"")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    (tmp_path / ".a.log.damaged").write_bytes(b"rubbish")

    assert bodies(tmp_path) == []
    identity = '"ts": 5, "id": "iiiiiiiiiiiiiiii", "nsqd": "n", "topic": "t", "z": 1'
    (tmp_path / "a.jsonl").write_text(f'{{"body": "x", "attempts": 1, {identity}}}\n')

    assert bodies(tmp_path) == [b"x"]


@pytest.mark.parametrize("name", ["a.log.gz", "a.log.arrow"])
def test_damage_fails_with_a_position_and_a_hint_or_is_skipped_and_counted(
    tmp_path: Path, name: str
) -> None:
    members = numbered(0, 10), numbered(10, 20), numbered(20, 30)
    damaged = write_archive(tmp_path / "archive" / name, *members)
    begin = int(index_of(damaged).read_bytes().split()[5])  # of the second member
    data = bytearray(damaged.read_bytes())
    data[begin + 60] ^= 0x55
    damaged.write_bytes(data)

    with pytest.raises(NsqError, match=rf"cannot read .*/{name}: corrupt at byte \d+") as caught:
        bodies(damaged)
    assert "`nsq archive repair`" in caught.value.hint

    reports = tmp_path / "reports"
    good = [message.body for message in (*members[0], *members[2])]
    assert bodies(damaged, damage_path=LocalPlace(reports)) == good
    assert bodies(damaged, damage_path=LocalPlace(reports), min_partitions=3) == good
    (damage,) = read_damage(LocalPlace(reports))
    assert (damage.file, damage.pos) == (str(damaged), begin)


def test_damage_of_a_file_whose_name_is_not_utf8_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest-xdist cannot send a captured log with this name.
    caplog.set_level(logging.CRITICAL, "nsqtools")
    archive, reports = tmp_path / "archive", tmp_path / "reports"
    archive.mkdir()
    damaged = archive / os.fsdecode(b"gr\xf6n.log")
    damaged.write_bytes(b"no message\n")

    # A worker of Spark encodes the traceback, and without it the query would never end.
    with pytest.raises(NsqError, match=r"gr\\udcf6n\.log: it does not hold messages") as caught:
        bodies(archive)
    assert "".join(traceback.format_exception(caught.value)).encode()

    assert bodies(archive, damage_path=LocalPlace(reports)) == []
    (damage,) = read_damage(LocalPlace(reports))
    assert damage.file == str(damaged)


def test_an_invalid_line_is_skipped_and_damage_reports_are_limited(tmp_path: Path) -> None:
    archive, reports, many = tmp_path / "archive", tmp_path / "reports", tmp_path / "many"
    archive.mkdir()
    good = encode_many("clicks", "n", numbered(0, 2))
    path = archive / "a.jsonl"
    path.write_bytes(good + b'{"topic": "clicks"}\n' + good + b"torn")

    lines = bodies(archive, damage_path=LocalPlace(reports))

    assert lines == [b"body 0", b"body 1", b"body 0", b"body 1"]
    assert [
        (damage.pos, damage.problem.split(": ", 1)[1])
        for damage in read_damage(LocalPlace(reports))
    ] == [
        (len(good), '"nsqd" is missing'),
        (2 * len(good) + 20, "not JSON: Expecting value at character 0"),
    ]
    path.write_bytes(gzip.compress(good + b"x\n" * 1500))
    bodies(archive, damage_path=LocalPlace(many))
    damages = read_damage(LocalPlace(many))
    assert len(damages) == 1001
    assert ArchiveDamage(str(path), 0, "and 500 more lines") in damages


def test_wrong_counts_with_a_right_sum_do_not_shift_positions(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.log.gz", numbered(0, 10), numbered(10, 20))
    one, two, total = (line.split() for line in index_of(path).read_bytes().splitlines())
    lines = [*one[:2], b"11", *one[3:]], [*two[:2], b"9", *two[3:]], total
    index_of(path).write_bytes(b"".join(b" ".join(line) + b"\n" for line in lines))

    with pytest.raises(NsqError, match="it has 10 lines, and 11 in its index"):
        rows(ReadSettings((str(tmp_path),)))
    index_of(path).write_bytes(b"0 %d 10 1 2\n" % 10**13)  # more than any memory
    with pytest.raises(NsqError, match="bytes are missing at its end"):
        rows(ReadSettings((str(tmp_path),)))


def test_parquet_and_pipes_are_never_read_as_bodies(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "bare.log").write_bytes(b"one\n")
    (archive / "part-0.parquet").write_bytes(b"PAR1\x15\nPAR1")
    os.mkfifo(archive / "pipe")
    (archive / "_spark_metadata").mkdir()
    (archive / "_spark_metadata" / "0").write_bytes(b"v1\n")
    settings = ReadSettings((str(archive),), raw=True)
    reports = tmp_path / "reports"
    reporting = replace(settings, damage_path=LocalPlace(reports))

    with pytest.raises(NsqError, match="_spark_metadata/0"):
        plan_batch(settings)

    assert values_of(plan_batch(reporting), reporting, "body") == [b"one"]
    named = {Path(damage.file).name for damage in read_damage(LocalPlace(reports))}
    assert named == {"0", "part-0.parquet", "pipe"}
