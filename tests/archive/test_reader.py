"""Reading files of an archive: with and without an index, damaged, cut off and in progress."""

import gzip
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from nsqtools.archive import columns, reader
from nsqtools.archive.finding import find_archives, find_inputs
from nsqtools.archive.layout import TimeRange, end_of, index_of, part_of
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import read_messages, read_text, repair, scan_archive
from nsqtools.records.naming import Codec

LINE = b'{"topic": "%s", "nsqd": "n", "id": "%016d", "ts": %d, "attempts": 1, "body": "x"}\n'
PIECES = [LINE % (topic, number, number) for number, topic in enumerate((b"a", b"b", b"c"), 1)]
ENDS_ALIKE = [*PIECES[:2], LINE % (b"a", 3, 3)]


def written(path: Path, pieces: list[bytes], *, indexed: int | None = None) -> Path:
    """Write a file of these members, and an index of the first ``indexed`` of them."""
    path.write_bytes(b"".join(pieces))
    if indexed is not None:
        ends = [sum(map(len, pieces[: number + 1])) for number in range(indexed)]
        lines = [
            b"%d %d 1 %d %d\n" % (end - len(piece), len(piece), number, number)
            for number, (piece, end) in enumerate(zip(pieces, ends, strict=False), 1)
        ]
        index_of(path).write_bytes(b"".join(lines))
    return path


def test_a_file_that_is_named_twice_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = written(folder / "x", PIECES)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    paths = ["logs", "logs/x", "./logs", path, folder, "link", "link/x"]

    assert [archive.shown for archive in find_archives(paths)] == ["logs/x"]
    assert find_inputs([*map(parse_place, map(str, paths[2:6]))]).archives == (
        LocalPlace(folder),
        LocalPlace(path),
    )


def failing(path: str, problem: str) -> None:
    pytest.fail(problem)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("pieces", "indexed", "topics"),
    [
        (ENDS_ALIKE, 3, {"a"}),  # Only the first and the last member are read.
        (PIECES, 3, {"a", "b", "c"}),  # They differ, so everything is read.
        (ENDS_ALIKE, 2, {"a", "b"}),  # The index lacks a member.
    ],
)
def test_a_file_is_scanned_by_a_matching_index(
    tmp_path: Path, is_packed: bool, pieces: list[bytes], indexed: int, topics: set[str]
) -> None:
    pieces = [gzip.compress(piece) for piece in pieces] if is_packed else pieces
    path = written(tmp_path / "x", pieces, indexed=indexed)
    [archive] = find_archives([path])
    scan = scan_archive(archive)
    assert (scan.topics, scan.damage, scan.size) == (topics, "", path.stat().st_size)
    assert sum(member.messages for member in scan.members) == 3
    assert scan.codec is (Codec.GZIP if is_packed else Codec.NONE)
    assert end_of(scan.members) == scan.size


@pytest.mark.parametrize("is_in_progress", [True, False])
def test_bytes_after_the_index_are_read_in_a_finished_file(
    tmp_path: Path, is_in_progress: bool
) -> None:
    path = written(tmp_path / "x", [gzip.compress(piece) for piece in PIECES], indexed=2)
    if is_in_progress:
        path.rename(part_of(path))
    [archive] = find_archives([tmp_path])
    text = b"".join(read_text(archive, lambda *damage: pytest.fail(str(damage))))
    pieces = PIECES[:2] if is_in_progress else PIECES
    assert (archive.is_in_progress, text) == (is_in_progress, b"".join(pieces))
    assert scan_archive(archive).topics == {"a", "b", "c"} - ({"c"} if is_in_progress else set())


def test_a_delimiter_applies_to_bare_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BATCH_TEXT", 5)
    monkeypatch.setattr(reader, "READ_SIZE", 30)  # The first line may be longer.
    (tmp_path / "bare").write_bytes(b"a,,,b")
    bare, archive = find_archives([tmp_path / "bare", written(tmp_path / "x", PIECES)])
    for file, bodies in ((bare, ["a", ",b"]), (archive, ["x"] * 3)):
        read = [message.body.decode() for message in read_messages(file, failing, delimiter=b",,")]
        batches = columns.read_batches(file, failing, delimiter=b",,")
        assert read == [body for batch in batches for body in batch["body"].to_pylist()] == bodies
    assert repair(archive, b",,") == 3


def test_a_range_may_end_beyond_int64() -> None:
    times, far = pyarrow.array([-(2**63), 2**63 - 2]), 10**20
    ranges = (TimeRange(far), TimeRange(None, -far), TimeRange(-far, far))
    assert [len(times.filter(time_range.mask(times))) for time_range in ranges] == [0, 0, 2]


@pytest.mark.parametrize(
    "content", [b"[]", b"[1]", b"5", b'{"messages": "x", "min_ts": 1.5}', b'{"a":' * 100_000]
)
def test_a_damaged_manifest_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "topic=clicks" / "a.parquet"
    path.parent.mkdir()
    rows = {"ts_ns": pyarrow.array([7], pyarrow.int64()), "body": ["a"]}
    parquet.write_table(pyarrow.table(rows), path)
    path.with_name(".a.parquet.manifest").write_bytes(content)

    [archive] = find_archives([tmp_path])

    assert [member[2:] for member in scan_archive(archive).members] == [(1, 7, 7)]


def test_rows_without_a_topic_and_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "topic=__HIVE_DEFAULT_PARTITION__" / "a.parquet"
    path.parent.mkdir()
    rows = {"ts_ns": pyarrow.array([7], pyarrow.int64()), "body": ["a"]}
    parquet.write_table(pyarrow.table(rows), path)
    [archive] = find_archives([tmp_path])
    assert scan_archive(archive).topics == set()
    assert [m.topic for m in read_messages(archive, lambda *damage: None)] == [""]
    cut_off = f"cut off in the line at byte {len(b''.join(PIECES))}"
    for missing, damage in ((20, cut_off), (1, "")):  # The last newline is optional.
        [archive] = find_archives([written(tmp_path / "x", [*PIECES, PIECES[0][:-missing]])])
        assert scan_archive(archive).damage == damage
        assert repair(archive) == len(PIECES) + (not damage)
