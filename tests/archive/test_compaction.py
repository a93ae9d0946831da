"""Archives and tables are compacted into few files with each message once, despite any failure."""

import gzip
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from plugins.archives import BEGIN_NS, Row, Writer, content, flush, killing, write_archive
from plugins.cli import RunNsq
from plugins.object_store import Bucket

from nsqtools.archive import compaction_jobs, compaction_plan, finding, reader
from nsqtools.archive.catalog import DAY_NS
from nsqtools.archive.columns import exact_columns, message_schema
from nsqtools.archive.compaction import Compaction
from nsqtools.archive.compaction_jobs import RunJobs, in_parallel
from nsqtools.archive.compaction_notes import delete_archive
from nsqtools.archive.compaction_plan import Selection
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.finding import find_archives, find_inputs, table_files
from nsqtools.archive.layout import Head, index_of
from nsqtools.archive.lease import NumberedObjects
from nsqtools.archive.members import members_of
from nsqtools.archive.parquet import manifest_of
from nsqtools.archive.part_file import Directories, PartFile, finish_part
from nsqtools.archive.place import LocalPlace, Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import repair
from nsqtools.archive.replacements import NOTES, Staged, replace_files
from nsqtools.archive.slices import (
    Job,
    JobResult,
    Settings,
    deduplicate,
    fit_to_schema,
    run_job,
)
from nsqtools.archive.table import convert
from nsqtools.archive.table_writer import TablePlan
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind, encode_many
from nsqtools.records.naming import Codec

SECOND = 10**9
DAY, NEXT_DAY = date(2026, 9, 21), date(2026, 9, 22)


def message(number: int, attempts: int = 1) -> WireMessage:
    """Two messages have the same time; the next two follow 10 minutes later."""
    at = BEGIN_NS + number // 2 * 600 * SECOND
    body = b"body %d \xff" % number if number % 7 == 0 else b"body %d" % number
    return WireMessage(at, attempts, b"%016x" % number, body)


def expected(numbers: Sequence[int], *topics: str) -> list[Row]:
    return sorted(
        (topic, str(datetime.fromtimestamp(ts // SECOND, UTC).date()), id.decode(), ts, body)
        for topic in topics
        for ts, _, id, body in map(message, set(numbers))
    )


def compact(
    place: Path | Place,
    output: Path | Place | None,
    *,
    delta: bool = False,
    selection: Selection | None = None,
    run: RunJobs | None = None,
    **settings: Any,
) -> Compaction:
    options = Settings(**{"target_bytes": 1 << 20, **settings})
    source, target = (at and parse_place(str(at)) for at in (place, output))
    inputs, chosen = find_inputs([source]), selection or Selection()
    compaction = Compaction(inputs, target, chosen, options, is_delta=delta)
    with compaction.locked():
        compaction.plan()
        compaction.run(run or in_parallel(options.parallel))
    return compaction


def done(compaction: Compaction) -> tuple[int, int]:
    """The numbers of messages read and of duplicates."""
    results = [result for partition in compaction.work for result in partition.results]
    return sum(result.read for result in results), sum(result.duplicates for result in results)


@pytest.mark.parametrize("delta", [False, True])
def test_each_message_is_compacted_once_whenever_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    monkeypatch.setattr(compaction_plan, "SLICE_ROWS", 20)  # so that there are many slices
    monkeypatch.setattr(compaction_plan, "MIN_FILE_BYTES", 1000)
    monkeypatch.setattr(compaction_jobs, "MAX_THREADS", 1 if delta else 4)
    chance = random.Random(1 + delta)
    archive, output = tmp_path / "archive", tmp_path / "output"
    sent: list[int] = []
    for run in range(3):  # The later runs have late messages and duplicates.
        for _ in range(3):
            numbers = [chance.randrange(400) for _ in range(150)]
            sent += numbers
            members = [numbers[at : at + 40] for at in range(0, len(numbers), 40)]
            for topic in ("clicks", "2026"):
                path = archive / f"{topic}.{run}.{chance.random()}.gz"
                delivered = [
                    [message(n, chance.randrange(1, 4)) for n in numbers] for numbers in members
                ]
                write_archive(path, *delivered, topic=topic)

        target = chance.choice([2000, 1 << 20]) if run else 2000
        compaction = compact(archive, output, delta=delta, target_bytes=target, parallel=2)

        assert run or len(compaction.jobs) > len(compaction.partitions)
        assert content(output) == expected(sent, "clicks", "2026")
    assert done(compact(archive, output, delta=delta)) == (0, 0)


STEPS = """
from nsqtools.archive import compaction_jobs, slices
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.place_url import parse_place

around(slices.ParquetWriter, "add", "close")
around(slices, "publish_file")
around(DeltaCatalog, "commit")
around(LocalPlace, "put", "move", "delete")
"""


FORMS = {"parquet": (3, 7), "delta": (5, 9), "in a table": (3, 6), "in a folder": (7, 11, 15)}


def land(archive: Path, output: Path | Place) -> None:
    plan = TablePlan(str(output), False, "h")
    drafts = archive if archive.is_dir() else archive.parent
    assert all(not problem for *_, problem, _ in convert(find_archives([archive]), plan, drafts))


@pytest.mark.parametrize(
    ("form", "steps"),
    [*FORMS.items(), *(pytest.param(f, range(60), marks=pytest.mark.slow) for f in FORMS)],
)
def test_a_compaction_killed_at_any_step_loses_and_repeats_nothing(
    tmp_path: Path, form: str, steps: Sequence[int]
) -> None:
    archive, output = tmp_path / "archive", tmp_path / "output"
    is_within = form.startswith("in a")
    for part in range(2):
        # Landing removes no duplicates.
        numbers = range(150 * part, 350 if part else 150 + 50 * (form != "in a folder"))
        path = write_archive(archive / f"clicks.{part}.gz", [message(n) for n in numbers])
        if form == "in a table":
            compact(archive, output, delta=True)
        elif form == "in a folder":
            land(path, output)
    places = [output] if is_within else [archive, "-o", output, "--format", form]
    command = ["archive", "compact", "--processes", "1", *places]
    everything = expected(range(350), "clicks")

    with killing(STEPS) as killed_at:
        for step in steps:
            if not killed_at(step, *command):
                break
            rows = content(output) if output.exists() else []
            assert max(Counter(rows).values(), default=1) == 1  # A reader sees no message twice.
            assert set(rows) <= set(everything)
            assert not is_within or len(rows) == len(everything)

        assert not killed_at(10_000, *command)
    assert content(output) == everything
    assert not list((output / "_compaction").rglob("*.parquet"))
    if form == "in a folder":
        land(archive, output)  # as after a kill of an archiver before it recorded the landing
        assert content(output) == everything
    if is_within:  # Each day had several files.
        assert len(table_files([LocalPlace(output)])[LocalPlace(output)]) == len(
            {day for _, day, *_ in everything}
        )
        assert done(compact(output, None)) == (0, 0)


def test_bare_bodies_are_compacted_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    none = "__HIVE_DEFAULT_PARTITION__"
    rows = [(none, none, None, None, body) for body in (b"\xff", b"one", b"one", b"two")]
    for delta in (False, True):
        output, path = tmp_path / f"out-{delta}", tmp_path / "a" / "bare.log"
        path.write_bytes(b"one\ntwo\none\n\xff\n")
        compact(tmp_path / "a", output, delta=delta)
        assert sorted(content(output), key=str) == sorted(rows, key=str)
        content_before = path.read_bytes()
        for new_content, grown, count in (
            (content_before, 0, 4),
            (content_before + b"more\n", 1, 4),
            (b"other\n" * 5, 0, 9),
        ):
            for note in (output / "_compaction").rglob("*.json"):
                note.unlink()  # as if the run had been killed before it wrote the note
            path.write_bytes(new_content)
            assert len(compact(tmp_path / "a", output, delta=delta).grown) == grown
            assert len(content(output)) == count


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_file_without_an_index_is_identified_by_its_content(
    tmp_path: Path, run_nsq: RunNsq, is_bare: bool
) -> None:
    path = tmp_path / "a" / "x.log"
    path.parent.mkdir()
    path.touch()
    assert done(compact(tmp_path / "a", tmp_path / "out")) == (0, 0)
    for number in (1, 2, 300):  # The second body is as long as the first.
        lines = encode_many("clicks", "n:4150", [message(number * 2)])
        path.write_bytes(b"body %d\n" % number if is_bare else lines)
        for touched in (0, 1):
            os.utime(path, (touched, touched))
            compaction = compact(tmp_path / "a", tmp_path / "out")
            assert done(compaction) == (1 - touched, 0)
    assert len(content(tmp_path / "out")) == 3
    with path.open("ab") as file:
        file.write(b"more\n" if is_bare else lines)
    result = run_nsq(["archive", "compact", str(path.parent), "-o", str(tmp_path / "out")])
    read, start = (0, f"nsq: {path}: left out, as it has changed") if is_bare else (2, "")
    assert f"nsq: {read} messages read, {read} duplicates" in result.err
    assert result.err.startswith(start)
    assert result.status == (6 if is_bare else 0)


def one_of_each(path: Path, topics: str) -> None:
    """Write an archive with one member for each topic, which has one message."""
    path.parent.mkdir()
    file = PartFile(path, 0o640, members_of(Codec.GZIP, 6), now_s=0.0)
    for number, topic in enumerate(topics):
        flush(file, topic, "n:1", [[message(number)]])
    finish_part(path, Directories(path.parent, path.parent))


def changed_byte(path: Path) -> None:
    one_of_each(path, "aaa")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def index_that_promises_more(path: Path) -> None:
    one_of_each(path, "aaa")
    first, second, *remaining = index_of(path).read_bytes().splitlines(keepends=True)
    index_of(path).write_bytes(
        b"".join([first, second.replace(b" 1 ", b" 9%017d " % 0), *remaining])
    )


@pytest.mark.parametrize(
    ("make", "said", "left"),
    [
        (changed_byte, "", [0, 2]),
        (index_that_promises_more, "and 900000000000000001 in its index", [0, 1, 2]),
        (lambda path: one_of_each(path, "aba"), "it has topics that its first and last", [0, 2]),
        (lambda path: one_of_each(path, "aa/"), "it has messages of invalid topics: '/'", [0, 1]),
        (lambda path: one_of_each(path, "//"), "it has messages of invalid topics: '/'", []),
    ],
)
def test_damage_is_an_error_or_skipped_and_reported(
    tmp_path: Path, make: Callable[[Path], None], said: str, left: list[int]
) -> None:
    path = tmp_path / "in" / "x.gz"
    make(path)
    with pytest.raises(NsqError, match=f"cannot read {path}.*{said}"):
        compact(path.parent, tmp_path / "out")
    assert content(tmp_path / "out") == []
    compaction = compact(path.parent, tmp_path / "out", skips_damaged=True)
    assert content(tmp_path / "out") == expected(left, "a")
    assert {path for job in compaction.work[0].results for path, _ in job.damages} == {str(path)}
    assert compaction.deletable()[0] == []


def test_one_file_of_a_table_and_the_logged_files_of_a_folder_are_compacted(
    tmp_path: Path,
) -> None:
    write_archive(tmp_path / "archive" / "x.log", [message(0), message(1)], topic="t")
    compact(tmp_path / "archive", output := tmp_path / "output")
    [file] = output.rglob("*.parquet")

    assert done(compact(file, tmp_path / "again")) == (2, 0)
    # The topic is in the names of its folders.
    assert content(tmp_path / "again") == content(output)
    failed = file.with_name("of-a-batch-that-failed.parquet")
    failed.write_bytes(file.read_bytes())
    (log := output / "_spark_metadata").mkdir()
    (log / "0").write_text(f'v1\n{{"path": "file:{file}"}}\n')
    for place in (output, *file.parents[:2]):
        assert [archive.path for archive in find_archives([place])] == [file]
        assert table_files([LocalPlace(place)]) == {
            LocalPlace(output): [str(file.relative_to(output))]
        }
    failed.unlink()
    shutil.rmtree(log)
    file.with_name("y.md").write_text("a note")
    assert [archive.path for archive in find_archives([file.parent])] == [file]
    assert done(compact(file.parent, tmp_path / "beside")) == (2, 0)
    write_archive(file.with_name("x.gz"), [message(2)])
    file.with_name("y.md").unlink()
    assert done(compact(file.parent, tmp_path / "both")) == (3, 0)


def test_a_folder_in_a_table_has_only_logged_files(tmp_path: Path) -> None:
    ones = {name: ["a"] for name in ("topic", "nsqd", "id", "body")}
    rows = pyarrow.table({"ts_ns": [BEGIN_NS], "attempts": [1], **ones})
    table = tmp_path / "env=prod" / "table"
    for _ in range(2):
        write_deltalake(table, rows, partition_by=["topic"], mode="overwrite")
    (current,) = DeltaCatalog(str(table)).files()
    (removed,) = {*(table / "topic=a").iterdir()} - {table / current.path}

    place = LocalPlace(table)
    assert table_files([place, place / "topic=a"]) == {place: [current.path]}
    assert [archive.name for archive in find_archives([table / "topic=a"])] == [current.path]
    assert done(compact(table / "topic=a", tmp_path / "out")) == (1, 0)
    with pytest.raises(ConfigurationError, match="is not a current file of the Delta table"):
        find_archives([removed])
    (table / ".nsq-log").mkdir()
    write_archive(table / ".nsq-log" / "a.gz", [message(1)])
    assert len(find_archives([table / ".nsq-log"])) == 1

    # A log in progress next to Parquet is not read either: its rows are added later.
    parquet = tmp_path / "parquet"
    (parquet / ".nsq-log").mkdir(parents=True)
    pq.write_table(rows, parquet / "a.parquet")
    (parquet / ".nsq-log" / ".a.log.part").touch()
    assert [archive.name for archive in find_archives([parquet])] == ["a.parquet"]
    assert find_inputs([LocalPlace(parquet)]).parquet == (LocalPlace(parquet),)


TEXT, DICTIONARY = pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@pytest.mark.parametrize(
    ("other", "last_ns", "kind"),
    [("b", BEGIN_NS, TEXT), ("b", None, DICTIONARY), ("a", BEGIN_NS, TEXT)],
)
def test_a_file_with_several_topics_is_split_by_topic(
    tmp_path: Path, other: str, last_ns: int | None, kind: pyarrow.DataType
) -> None:
    (tmp_path / "in").mkdir()
    kinds = {"ts_ns": pyarrow.int64(), "attempts": pyarrow.int32(), "topic": kind}
    names = ["page", "topic", "ts_ns", "nsqd", "id", "attempts", "body"]
    keys = [("a", BEGIN_NS), (other, BEGIN_NS), ("a", BEGIN_NS + 1), (None, last_ns)]
    page = {"path": "/", "status": 200}  # A struct is two columns of Parquet.
    rows = [(page, *key, "n:1", f"{n:016x}", 1, str(n)) for n, key in enumerate(keys)]
    columns = zip(names, zip(*rows, strict=True), strict=True)
    table = pyarrow.table(
        {name: pyarrow.array(values, kinds.get(name)) for name, values in columns}
    )
    pq.write_table(table, tmp_path / "in" / "x.parquet")

    compaction = compact(tmp_path / "in", tmp_path / "out", skips_damaged=last_ns is None)

    none = "__HIVE_DEFAULT_PARTITION__"
    bodies = [(topic, body) for topic, _, _, _, body in content(tmp_path / "out")]
    assert bodies == sorted([(none, b"3"), ("a", b"0"), ("a", b"2"), (other, b"1")])
    assert done(compaction) == (4, 0)


def test_a_repeated_job_makes_the_same_file(tmp_path: Path) -> None:
    one_of_each(tmp_path / "archive" / "x.gz", "acbb")
    compact(tmp_path / "archive", tmp_path / "output")
    assert [topic for topic, *_ in content(tmp_path / "output")] == ["a", "b", "b", "c"]
    write_archive(tmp_path / "a" / "clicks.gz", [message(0)])

    def twice(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        assert run_job(jobs[0]) == run_job(jobs[0])  # as a Spark task whose result was lost
        yield from in_parallel(1)(jobs)

    compact(tmp_path / "a", tmp_path / "out", run=twice)
    assert content(tmp_path / "out") == expected([0], "clicks")
    # A wrong clock: the days between have no messages.
    wrong = WireMessage(1, 1, b"%016d" % 0, b"x")
    write_archive(tmp_path / "in" / "x.log", [wrong, message(1)], [message(2)])
    compaction = compact(tmp_path / "in", tmp_path / "of-two-days")
    assert ([len(partition.files) for partition in compaction.partitions], done(compaction)) == (
        [1, 1],
        (3, 0),
    )


@pytest.mark.parametrize("index", [b"", b"0 %d 2 0 0\n"])
def test_messages_of_another_program_get_their_days(tmp_path: Path, index: bytes) -> None:
    path = tmp_path / "archive" / "x.jsonl"
    path.parent.mkdir()
    first, second = encode_many("clicks", "n:1", [message(0), message(600)]).splitlines(True)
    path.write_bytes(first + second.replace(b'": ', b'":').replace(b', "', b',"'))
    if index:  # of a file without known times
        index_of(path).write_bytes(index % path.stat().st_size)
    compact(tmp_path / "archive", tmp_path / "output")
    assert content(tmp_path / "output") == expected([0, 600], "clicks")
    text = path.read_bytes()[:-1]  # The last newline is optional.
    path.write_bytes(gzip.compress(text[:-9]) + gzip.compress(text[-9:]))  # pzstd cuts inside lines
    compact(tmp_path / "archive", tmp_path / "again")
    assert content(tmp_path / "again") == expected([0, 600], "clicks")


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTD, Codec.XZ, Codec.BZIP2])
def test_files_that_were_padded_and_joined_are_compacted(tmp_path: Path, codec: Codec) -> None:
    """Tapes and disks pad a file with zeros, and the format of xz permits them between streams."""
    members = []
    for number in range(2):
        compressor = members_of(codec)()
        text = encode_many("clicks", "n:1", [message(number)])
        members.append(compressor.compress(text) + compressor.flush() + bytes(8))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.log").write_bytes(b"".join(members))

    assert done(compact(tmp_path / "in", tmp_path / "out")) == (2, 0)
    assert content(tmp_path / "out") == expected(range(2), "clicks")


def test_rows_without_a_time_are_damage(tmp_path: Path) -> None:
    archive, output = tmp_path / "archive", tmp_path / "output"
    lines = [encode_many(name, "a:4150", [message(n)]) for n, name in enumerate(("t", "t t", "t"))]
    archive.mkdir()
    (archive / "x.log").write_bytes(b"".join(lines))
    for _ in range(2):
        compact(archive, output, skips_damaged=True)
    assert content(output) == expected([0, 2], "t")
    times = pyarrow.array([BEGIN_NS, None, BEGIN_NS + DAY_NS], pyarrow.int64())
    ones = {name: ["a", "b", "c"] for name in ("nsqd", "id", "body")}
    rows = pyarrow.table({"topic": ["t"] * 3, "ts_ns": times, "attempts": [1] * 3, **ones})
    write_deltalake(tmp_path / "in", rows, partition_by=["topic"])
    with pytest.raises(NsqError, match="with and without a time"):  # as each day has
        compact(tmp_path / "in", tmp_path / "out")


def test_rows_are_deduplicated_and_fit_to_a_schema() -> None:
    rows = pyarrow.table(
        {
            "ts_ns": pyarrow.array([1, 1, 1, 1, 2, 2, 2, 2], pyarrow.int64()),
            "nsqd": ["a", "a", None, None, "a", "a", "a", "b"],
            "id": ["x", "x", "x", "x", None, None, "y", "y"],
            "attempts": [2, 1, 1, None, 1, 1, 1, 1],
            "body": list("abcdefgh"),
        }
    )

    # The row with the fewest attempts.
    assert deduplicate(rows)["body"].to_pylist() == list("bdefgh")
    batch = pyarrow.record_batch({"n": pyarrow.array([float("nan"), 1], pyarrow.float32())})
    for kind, errors in (("double", 0), ("int64", 1)):
        schema = pyarrow.schema([("n", kind), ("_error", "string")])
        assert fit_to_schema(batch, schema, BodyKind.json)["_error"].null_count == 2 - errors
    two = pyarrow.record_batch({"body": [b"\xff", None], "body_bytes": [None, b"\xfe"]})
    assert fit_to_schema(two, two.schema, BodyKind.string)["body_bytes"].to_pylist() == [
        b"\xff",
        b"\xfe",
    ]


def test_only_completely_compacted_archives_are_deleted(tmp_path: Path) -> None:
    archive, output = tmp_path / "a", tmp_path / "out"
    path = write_archive(archive / "clicks.gz", [message(0), message(400)])
    (archive / "bare.log").write_bytes(b"it may be anything\n")

    first = compact(archive, output, selection=Selection(first=DAY, last=DAY))
    assert first.deletable() == ([], {})  # The file also has messages of another day.

    second = compact(archive, output)
    [source], kept = second.deletable()
    assert source.shown == str(path)
    assert "may not be an archive" in kept[str(archive / "bare.log")]

    (file,) = output.glob(f"topic=clicks/date={DAY}/*.parquet")
    file.rename(tmp_path / "elsewhere")
    assert "is missing" in second.deletable()[1][str(path)]
    (tmp_path / "elsewhere").rename(file)
    path.touch()
    assert not delete_archive(source)  # The file has changed.
    third = compact(archive, output)
    assert [delete_archive(source) for source in third.deletable()[0]] == [True]
    assert [path.name for path in archive.iterdir()] == ["bare.log"]


@pytest.mark.parametrize("how", ["open", "growing", "none", "no total", "finished"])
def test_only_finished_files_are_deleted_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A writer that still appends to a deleted file would lose its messages."""
    path = write_archive(tmp_path / "a/clicks.gz", [message(0)])
    path.chmod(0o640)
    index = index_of(path).read_bytes()
    if how == "growing":
        path.write_bytes(
            path.read_bytes() + gzip.compress(encode_many("clicks", "n", [message(1)]))
        )
    elif how == "none":
        index_of(path).unlink()
    elif how == "no total":  # an index of an early version
        index_of(path).write_bytes(index.partition(b"total")[0])
    with path.open("ab") if how == "open" else nullcontext():
        [archive] = find_archives([path])
        if how == "open":
            with pytest.raises(OutputError, match="another program has it open for writing"):
                repair(archive)
        compaction = compact(tmp_path / "a", tmp_path / "out")
        chosen, kept = compaction.deletable()
        is_kept = how in ("open", "growing", "none")
        assert (list(kept), len(chosen)) == ([str(path)] * is_kept, 1 - is_kept)

    if how == "finished":
        with path.open("ab"):
            assert not delete_archive(chosen[0])  # A writer has opened it in the meantime.
    monkeypatch.setattr(reader, "has_writer", lambda path: None)  # as on network file systems
    chosen, _ = compact(tmp_path / "a", tmp_path / "out").deletable()
    assert bool(chosen) == (how in ("open", "finished"))
    if how in ("growing", "none"):
        with pytest.raises(OutputError, match="no index or manifest shows that it is finished"):
            repair(*find_archives([path]))


@pytest.mark.parametrize("is_gone", [False, True])
def test_archives_of_machines_cloned_from_one_image_are_compacted(
    tmp_path: Path, is_gone: bool
) -> None:
    for number, host in enumerate(("one", "two")):
        (tmp_path / "a" / host).mkdir(parents=True)
        writer = Writer(tmp_path / "a" / host, writer="f" * 32)
        writer.write([message(number)])
        writer.finish()
        if is_gone or number:
            compaction = compact(tmp_path / "a", tmp_path / "out")
            assert all(map(delete_archive, compaction.deletable()[0]))
    assert content(tmp_path / "out") == expected([0, 1], "clicks")
    assert find_archives([tmp_path / "a"]) == []
    members = [[message(number)] for number in range(3)]
    for name, count in (("a", 1), ("b", 3), ("c", 2)):  # The copy with the most messages counts.
        write_archive(tmp_path / "in" / f"{name}.gz", *members[:count], head=Head("a" * 32, 1))
    assert done(compact(tmp_path / "in", tmp_path / "of-copies")) == (3, 0)


def test_open_days_and_other_topics_are_skipped(tmp_path: Path) -> None:
    for topic in ("clicks", "orders"):
        write_archive(tmp_path / "a" / f"{topic}.gz", [message(0)], [message(200)], topic=topic)
    inputs, chosen = find_inputs([LocalPlace(tmp_path / "a")]), Selection(frozenset(["clicks"]))
    at = (message(200).timestamp_ns // DAY_NS + 1) * DAY_NS / SECOND + 3599
    compaction = Compaction(inputs, LocalPlace(tmp_path / "out"), chosen, Settings(), now_s=at)
    compaction.plan()

    states = {partition.key.day: partition.state for partition in compaction.partitions}
    assert states == {DAY: "new", NEXT_DAY: "open"}
    with compaction.locked(), pytest.raises(OutputError, match="another run writes to"):
        compact(tmp_path / "a", tmp_path / "out")


def test_the_plan_for_one_topic_lists_one_folder_and_opens_the_table_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listing and each opening takes time in proportion to all files."""
    archive, table, accessed = tmp_path / "a", tmp_path / "table", list[str]()
    for topic in ("a", "b"):
        write_archive(archive / f"topic={topic}" / "x.gz", [message(0)], topic=topic)
    compact(archive, table, delta=True)
    walk, opened = finding.walk, DeltaTable.__init__

    def listed(root: Path) -> Any:
        accessed.append(root.name)
        return walk(root)

    def opening(self: DeltaTable, *args: Any, **kwargs: Any) -> None:
        accessed.append("table")
        opened(self, *args, **kwargs)

    monkeypatch.setattr(finding, "walk", listed)
    monkeypatch.setattr(DeltaTable, "__init__", opening)
    for place, output, expected_names in (
        (archive, tmp_path / "out", ["topic=b"]),
        (table, None, ["table"]),
    ):
        target = output and LocalPlace(output)
        chosen = Selection(frozenset(["b"]))
        compaction = Compaction(find_inputs([LocalPlace(place)]), target, chosen, Settings())
        accessed.clear()
        compaction.plan()
        assert accessed == expected_names
        assert [partition.key.topic for partition in compaction.partitions] == ["b"]


TEXTS = pyarrow.array(["x", None])
TIMES_NS = pyarrow.array([BEGIN_NS, None])
OF_OTHERS = {
    "large": (TEXTS.cast(pyarrow.large_string()), pyarrow.string()),
    "category": (TEXTS.dictionary_encode(), pyarrow.string()),
    "raw": (TEXTS.cast(pyarrow.large_binary()), pyarrow.binary()),
    "at": (TIMES_NS.cast(pyarrow.timestamp("ns")), pyarrow.timestamp("us", "UTC")),
    "nested": (
        pyarrow.array([{"a": "x"}, None], pyarrow.struct([("a", pyarrow.large_string())])),
        pyarrow.struct([("a", pyarrow.string())]),
    ),
}
"""Columns as other programs write them, and their types in a Delta table."""


@pytest.mark.parametrize("command", ["compact", "erase"])
@pytest.mark.parametrize("delta", [False, True])
def test_columns_of_other_programs_keep_their_values(
    tmp_path: Path, run_nsq: RunNsq, delta: bool, command: str
) -> None:
    """Polars and pandas write large strings and categories, and Spark times of 96 bits."""
    table, folder = tmp_path / "t", tmp_path / "t" / "topic=clicks" / f"date={DAY}"
    folder.mkdir(parents=True)
    files = []
    for n in range(2):
        columns: dict[str, Any] = {
            "nsqd": pyarrow.array(["n:1", "n:1"]).dictionary_encode(),
            "id": pyarrow.array([f"{n}-0", f"{n}-1"], pyarrow.large_string()),
            "ts_ns": [BEGIN_NS, BEGIN_NS],
            "body": pyarrow.array([f"{n}", "7"], pyarrow.large_string()),
            **{name: values for name, (values, _) in OF_OTHERS.items()},
        }
        path = folder / f"{n}.parquet"
        pq.write_table(pyarrow.table(columns), path, use_deprecated_int96_timestamps=True)
        partition = {"topic": "clicks", "date": str(DAY)}
        name = str(path.relative_to(table))
        files.append(TableFile(name, path.stat().st_size, 2, BEGIN_NS, BEGIN_NS, partition))
        (folder / f".{path.name}.manifest").write_bytes(manifest_of(files[n], path))
    if delta:
        extras = [pyarrow.field(name, kind) for name, (_, kind) in OF_OTHERS.items()]
        day = pyarrow.field("date", pyarrow.date32())
        catalog = DeltaCatalog(str(table))
        catalog.create(pyarrow.schema([*message_schema(), day, *extras]), ["topic", "date"])
        catalog.commit(files, app_id="others", number=1)

    options = ["--open-days"] if command == "compact" else ["--where", ". == 1", "--yes"]
    result = run_nsq(["archive", command, str(table), *options])

    assert (result.status, "error" in result.err) == (0, False)
    [(root, names)] = table_files([LocalPlace(table)]).items()
    rows = [row for name in names for row in pq.read_table(root.path / name).to_pylist()]
    bodies = sorted(row["body"] for row in rows)
    assert bodies == (["0", "1", "7", "7"] if command == "compact" else ["0", "7", "7"])
    first = {"large": "x", "category": "x", "raw": b"x", "nested": {"a": "x"}}
    first |= {"at": datetime.fromtimestamp(BEGIN_NS // SECOND, UTC)}
    for row in rows:
        if row["at"] is not None:  # Parquet of a folder keeps a time without a zone.
            row["at"] = row["at"].replace(tzinfo=UTC)
        values = {name: row[name] for name in OF_OTHERS}
        assert values == (dict.fromkeys(OF_OTHERS) if row["body"] == "7" else first)


@pytest.mark.parametrize("in_place", [True, False])
def test_files_have_the_types_of_a_delta_table(tmp_path: Path, in_place: bool) -> None:
    """Another program made the table, with the types that it has for these values."""
    table = tmp_path / "t"
    for n in range(2):
        at = pyarrow.array([BEGIN_NS // 1000], pyarrow.timestamp("us"))
        columns: dict[str, Any] = {"topic": ["clicks"], "date": [DAY], "nsqd": ["n:1"]}
        columns |= {"id": [f"{n}"], "timestamp": at, "ts_ns": [BEGIN_NS], "attempts": [1]}
        columns |= {"body": ["text"], "file": ["a.log"], "pos": [n]}
        rows = pyarrow.table(columns)
        write_deltalake(table, rows, mode="append", partition_by=["topic", "date"])
    schema = DeltaCatalog(str(table)).schema()

    if in_place:
        compact(table, None, delta=True)
    else:
        compact(write_archive(tmp_path / "a.gz", [message(0)]), table, delta=True)

    names = ["body_bytes"] if not in_place else []
    assert {*DeltaCatalog(str(table)).schema().names} == {*schema.names, *names}
    written = pq.read_schema(next(table.rglob("compacted-*.parquet")))
    for column in schema:
        if column.name not in ("topic", "date"):
            assert written.field(column.name).type == column.type
    rows = DeltaTable(table).to_pyarrow_table()
    assert sorted(rows["pos"].drop_null().to_pylist()) == [0, 1]
    assert in_place or rows["body_bytes"].drop_null().to_pylist() == [message(0).body]


def test_files_are_removed_by_the_paths_that_another_program_has_logged(tmp_path: Path) -> None:
    """Spark escapes fewer characters of a path than nsqtools and delta-rs."""
    table, city = tmp_path / "t", "a+b (c), d&e"
    columns = [*message_schema(), pyarrow.field("date", "date32"), pyarrow.field("city", "string")]
    DeltaCatalog(str(table)).create(pyarrow.schema(columns), ["topic", "date", "city"])
    for n in range(2):
        folder = f"topic=clicks/date={DAY}/city={city}"
        (table / folder).mkdir(parents=True, exist_ok=True)
        rows = exact_columns([encode_many("clicks", "n:1", [message(n + 1)])])[0]
        batch = pyarrow.record_batch(rows).drop_columns(["topic"])
        pq.write_table(pyarrow.table(batch), table / folder / f"{n}.parquet")
        add = {
            "path": f"{folder}/{n}.parquet".replace(" ", "%20"),
            "partitionValues": {"topic": "clicks", "date": str(DAY), "city": city},
            "size": (table / folder / f"{n}.parquet").stat().st_size,
            "modificationTime": 1,
            "dataChange": True,
        }
        log = table / "_delta_log" / f"{n + 1:020}.json"
        log.write_text(json.dumps({"add": add}) + "\n")

    compact(table, None, delta=True)

    assert DeltaTable(table).to_pyarrow_table()["body"].to_pylist() == ["body 1", "body 2"]


def test_a_boolean_partition_keeps_its_value(tmp_path: Path) -> None:
    fields = {"type": "object", "properties": {"paid": {"type": "boolean"}}}
    plan = TablePlan(str(tmp_path / "t"), True, "h", BodyKind.json, fields, ("paid",))
    for n in range(2):
        archive = write_archive(tmp_path / f"{n}.gz", clicks(n, '{"paid": true}'))
        list(convert(find_archives([archive]), plan, tmp_path))

    compact(tmp_path / "t", None, delta=True)

    [file] = DeltaCatalog(str(tmp_path / "t")).files()
    assert file.path.startswith(f"topic=clicks/date={DAY}/paid=true/")
    log = sorted((tmp_path / "t" / "_delta_log").glob("*.json"))[-1].read_text()
    assert (log.count('"paid": "true"'), log.count('"True"')) == (3, 0)


def test_a_value_without_a_place_in_a_delta_table_ends_a_compaction_in_place(
    tmp_path: Path,
) -> None:
    """The files that have it would be removed."""
    for n in range(2):
        archive = write_archive(tmp_path / f"{n}.gz", [message(n)])
        list(convert(find_archives([archive]), TablePlan(str(tmp_path / "t"), True, "h"), tmp_path))
    [(root, names)] = table_files([LocalPlace(tmp_path / "t")]).items()
    DeltaCatalog(str(root)).add_columns([pyarrow.field("n", pyarrow.int64())])
    for name in names:
        rows = pq.read_table(root.path / name, partitioning=None)
        pq.write_table(rows.append_column("n", [["no number"]]), root.path / name)
    with pytest.raises(NsqError, match="its n is string, not int64"):
        compact(root, None, delta=True)
    assert table_files([root]) == {root: names}


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_folder_of_parquet_is_compacted_in_place_while_archivers_land(
    tmp_path: Path, bucket: Bucket, is_remote: bool
) -> None:
    lake = parse_place(f"{bucket.url}/lake") if is_remote else LocalPlace(tmp_path / "lake")
    paths = [write_archive(tmp_path / f"a/{n}.gz", [message(n), message(n + 3)]) for n in range(3)]
    for path in paths[:2]:
        land(path, lake)

    def while_one_lands(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        for result in in_parallel(1)(jobs):
            land(paths[2], lake)
            land(paths[0], lake)
            yield result

    in_files = list(table_files([lake]).values())
    compaction = compact(lake, None, run=while_one_lands)
    assert done(compaction) == (4, 0)
    assert content(lake) == expected(range(6), "clicks")
    assert len(in_files[0]) == len(table_files([lake])[lake]) == 2
    land(tmp_path / "a", lake)
    assert done(compact(lake, None)) == (6, 0)
    assert content(lake) == expected(range(6), "clicks")
    assert len(table_files([lake])[lake]) == 1
    assert done(compact(lake, None)) == (0, 0)
    with pytest.raises(ConfigurationError, match="is a part of"):
        compact(lake / "topic=clicks", None)


@pytest.mark.parametrize("delta", [False, True])
def test_archives_in_a_bucket_are_compacted_and_deleted(
    tmp_path: Path, bucket: Bucket, delta: bool
) -> None:
    writer = Writer(tmp_path)
    writer.write([message(n) for n in range(100)], [message(n) for n in range(50)])
    path = writer.finish()
    for file in (path, index_of(path)):
        bucket.storage.put_file(f"archive/{file.name}", file)
    archive, output = parse_place(f"{bucket.url}/archive"), parse_place(f"{bucket.url}/lake")
    with pytest.raises(NsqError, match="there is no"):
        find_inputs([output])
    compaction = compact(archive, output, delta=delta)

    assert done(compaction) == (150, 50)
    assert content(output) == expected(range(100), "clicks")
    assert done(compact(archive, output, delta=delta)) == (0, 0)
    inputs = find_inputs([archive, output])
    assert (inputs.archives, inputs.delta if delta else inputs.parquet) == ((archive,), (output,))
    assert [delete_archive(source) for source in compaction.deletable()[0]] == [True]
    assert not [name for name in bucket.names() if name.startswith("archive/")]


def test_a_run_that_lost_the_lock_commits_nothing(tmp_path: Path, bucket: Bucket) -> None:
    write_archive(tmp_path / "a" / "clicks.gz", [message(0)])
    output = parse_place(f"{bucket.url}/lake")

    def while_it_slept(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        numbers = NumberedObjects(output / NOTES / "lock")
        numbers.number = numbers.latest()
        numbers.append(b"{}")  # as a run does that waited for the end of the lease
        yield from in_parallel(1)(jobs)

    with pytest.raises(OutputError, match="another run writes to"):
        compact(tmp_path / "a", output, delta=True, run=while_it_slept)

    assert content(output) == []


def clicks(first: int, *bodies: str) -> list[WireMessage]:
    return [
        WireMessage(BEGIN_NS + n * SECOND, 1, b"%016x" % n, body.encode())
        for n, body in enumerate(bodies, first)
    ]


def typed_rows(output: Path) -> list[dict[str, object]]:
    """The body and its columns, without those of the message, of all rows in order of time."""
    names = table_files([LocalPlace(output)])[LocalPlace(output)]
    tables = (pq.ParquetFile(output / name).read() for name in names)
    rows = [row for table in tables for row in table.to_pylist()]
    rows.sort(key=lambda row: row.pop("ts_ns") or 0)
    message_columns = ("nsqd", "id", "timestamp", "attempts", "body_bytes")
    return [{key: row[key] for key in row if key not in message_columns} for row in rows]


@pytest.mark.parametrize("delta", [False, True])
def test_columns_of_bodies_are_merged_by_name(tmp_path: Path, delta: bool) -> None:
    """Two archivers landed the same topic; in the second one's lake a field has another type."""
    output = tmp_path / "output"
    lakes = [
        clicks(0, '{"user": 1, "x": 1.5}', '{"user": 2}'),
        clicks(2, '{"user": "three", "page": "/"}', '{"page": "/b"}'),
    ]
    for number, messages in enumerate(lakes):
        archive, lake = tmp_path / f"a{number}", tmp_path / f"lake{number}"
        write_archive(archive / "clicks.gz", messages)
        plan = TablePlan(str(lake), False, "h", BodyKind.json)
        [(*_, problem, _)] = convert(find_archives([archive]), plan, archive)
        assert problem == ""
        compact(lake, output, delta=delta)

    none = {"user": None, "x": None, "page": None, "_error": None}
    rows = typed_rows(output)
    assert [none | row for row in rows] == [
        none | {"body": '{"user": 1, "x": 1.5}', "user": 1, "x": 1.5},
        none | {"body": '{"user": 2}', "user": 2},
        none
        | {"body": '{"user": "three", "page": "/"}', "page": "/", "_error": "user is not int64"},
        none | {"body": '{"page": "/b"}', "page": "/b"},
    ]
    if delta:
        assert DeltaCatalog(str(output)).schema().field("user").type == pyarrow.int64()
        compaction = compact(output, None)
        assert sum(len(partition.files) for partition in compaction.work) == 1
        assert [none | row for row in typed_rows(output)] == [none | row for row in rows]


def test_a_schema_adds_columns_for_bodies_of_archives(tmp_path: Path) -> None:
    archive, output = tmp_path / "archive", tmp_path / "output"
    write_archive(archive / "a.gz", clicks(0, '{"user": 1, "new": 2}', "no JSON", '{"user": "x"}'))
    (archive / "bare.log").write_bytes(b'{"user": 4}\n')
    fields = {"properties": {"user": {"type": "integer"}}}
    compaction = compact(archive, output, body=BodyKind.json, fields=fields)

    parsed = {str(row["body"]): (row["user"], row["_error"]) for row in typed_rows(output)}
    assert parsed == {
        '{"user": 1, "new": 2}': (1, None),
        "no JSON": (None, "it is not JSON"),
        '{"user": "x"}': (None, "user is not int64"),
        '{"user": 4}': (4, None),
    }
    assert sum(result.misfits for partition in compaction.work for result in partition.results) == 2
    assert compaction.without_columns == []
    more_fields = {"properties": {"user": {"type": "integer"}, "new": {"type": "integer"}}}
    second = compact(archive, output, body=BodyKind.json, fields=more_fields)
    # The days that are already compacted keep their columns.
    assert len(second.without_columns) == 2


def test_a_replacement_without_its_new_files_is_abandoned(tmp_path: Path) -> None:
    """0.3.0 empties the folder of staged files."""
    for number in range(2):
        land(write_archive(tmp_path / f"{number}.gz", [message(number)]), tmp_path / "lake")
    lake = LocalPlace(tmp_path / "lake")
    old = dict.fromkeys(table_files([lake])[lake], 1)
    folder = Path(next(iter(old))).parent
    staged = {f"{folder}/{n}.parquet": Staged(f"{NOTES}/staging/{n}", 1, "{}") for n in "ab"}
    lake.put(f"{NOTES}/staging/a", b"x")
    replace_files(lake, staged, old)
    assert content(lake) == expected(range(2), "clicks")
    assert {entry.name for entry in lake.list() if entry.name.endswith(".parquet")} == {*old}
    (lake.path / next(iter(old))).unlink()
    with pytest.raises(OutputError, match="lacks files that replaced others"):
        replace_files(lake, staged, old)


def test_a_folder_keeps_its_kind_of_bodies_in_place(tmp_path: Path) -> None:
    for number in range(2):
        path = write_archive(tmp_path / f"{number}.gz", [message(number)])
        plan = TablePlan(str(tmp_path / "lake"), False, "h", BodyKind.binary)
        list(convert(find_archives([path]), plan, tmp_path))
    compact(tmp_path / "lake", None)
    [file] = (tmp_path / "lake" / "topic=clicks").rglob("*.parquet")
    assert pq.ParquetFile(file).schema_arrow.field("body").type == pyarrow.binary()


@pytest.mark.parametrize(("first", "then"), [("binary", "json"), ("string", "binary")])
def test_an_output_keeps_its_kind_of_bodies(tmp_path: Path, first: str, then: str) -> None:
    archive, output = tmp_path / "archive", tmp_path / "output"
    write_archive(archive / "a.gz", clicks(1, '{"user": 1}'))
    compact(archive, output, body=BodyKind(first))
    write_archive(archive / "b.gz", clicks(2, '{"user": 1}'))
    with pytest.raises(ConfigurationError, match=f"are {first}, not {then}"):
        compact(archive, output, body=BodyKind(then))
