"""A stream over an archive that is being written, without Spark: each message is read once."""

import gzip
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.archives import Writer, values_of, write_archive
from plugins.examples import examples

from nsqtools.archive.layout import Head, TimeRange, index_of, part_of
from nsqtools.archive.place import LocalPlace
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many
from nsqtools.records.units import parse_time
from nsqtools.spark.archives import archive_stream
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.archives.offsets import (
    Offset,
    decode_offset,
    format_spans,
    has_number,
    numbers_beyond,
    parse_spans,
    unite,
)
from nsqtools.spark.archives.partitions import ReadPartition
from nsqtools.spark.archives.read_settings import BatchLimits, ReadSettings, StreamSettings

BASE_NS = 1_700_000_000_000_000_000
ALL = BatchLimits()


def messages(begin: int, end: int) -> list[WireMessage]:
    return [WireMessage(BASE_NS + n, 1, b"%016x" % n, b"%d" % n) for n in range(begin, end)]


def stream_of(directory: Path, *, read: Any = None, **stream: Any) -> ArchiveStream:
    reading = ReadSettings((str(directory),), **(read or {}))
    return ArchiveStream(reading, StreamSettings(**stream))


def bodies(partitions: list[ReadPartition], settings: ReadSettings | None = None) -> list[int]:
    return list(map(int, values_of(partitions, settings or ReadSettings(("/",)), "body")))


def through_json(offset: Offset) -> Offset:
    return decode_offset(json.loads(json.dumps(offset.encode())))


def drain(
    stream: ArchiveStream, start: Offset, limits: BatchLimits = ALL
) -> tuple[list[int], Offset]:
    numbers: list[int] = []
    while (end := through_json(stream.latest(start, limits))) != start:
        numbers += bodies(stream.plan(start, end))
        start = end
    return numbers, start


KINDS = ("batch", "batch planned twice", "new reader", "available now")
events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.integers(0, 2), st.just(0)),
        st.tuples(st.sampled_from(KINDS), st.integers(1, 12), st.just(0)),
    ),
    max_size=40,
)


@given(what=events)
@settings(max_examples=examples(25))
def test_every_message_is_read_once_in_any_order_of_events(
    what: list[tuple[str, int, int]],
) -> None:
    with TemporaryDirectory() as directory:
        work, output = Path(directory, "work"), Path(directory, "out")
        work.mkdir()
        output.mkdir()
        writers = [
            Writer(work, output=output, topic=f"t{n}", suffix=suffix)
            for n, suffix in enumerate(("gz", "arrow", "zst"))
        ]
        open_writers: set[int] = set()
        written: list[int] = []
        received: list[int] = []

        def reader() -> ArchiveStream:
            return stream_of(output, read={"work_dir": work})

        stream, offset = reader(), Offset(is_start=True)
        for event, number, count in what:
            if event == "write":
                sent = messages(len(written), len(written) + count)
                writers[number].write(sent)
                open_writers.add(number)
                written += [int(message.body) for message in sent]
            elif event == "finish" and number in open_writers:
                writers[number].finish()
                open_writers.remove(number)
            elif event.startswith("batch"):
                end = through_json(stream.latest(offset, BatchLimits(rows=number)))
                read = bodies(stream.plan(offset, end))
                if event == "batch planned twice":
                    for writer in sorted(open_writers):
                        writers[writer].finish()
                    open_writers.clear()
                    stream = reader()
                    assert sorted(bodies(stream.plan(offset, end))) == sorted(read)
                assert len(read) <= max(number, 5)
                received += read
                offset = end
            elif event == "new reader":
                stream = reader()
            elif event == "available now":
                bounded = reader()
                bounded.freeze()
                already = len(written)
                writers[0].write(messages(already, already + 1))
                open_writers.add(0)
                written.append(already)
                more, offset = drain(bounded, offset, BatchLimits(rows=number))
                received += more
                assert sorted(received) == written[:-1]
        more, offset = drain(stream, offset)

        assert sorted(received + more) == written


def test_latest_starts_after_existing_messages_even_when_planned_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(messages(0, 10))
    first, again = (stream_of(tmp_path, starting_offsets="latest") for _ in range(2))
    start = through_json(first.initial())
    writer.write(messages(10, 15))
    end = through_json(first.latest(start, ALL))
    writer.write(messages(15, 20))

    for stream, begin in ((first, start), (again, through_json(again.initial()))):
        assert bodies(stream.plan(begin, end)) == list(range(10, 15))
    assert drain(again, end)[0] == list(range(15, 20))


def test_a_stream_starts_at_a_time_or_an_offset_and_refuses_an_invalid_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(messages(0, 10))
    end = stream_of(tmp_path).latest(Offset(is_start=True), ALL)
    writer.write(messages(10, 20))
    writer.finish()
    writer.write(messages(20, 30), messages(30, 40))

    for begin, starting in (
        (10, {"starting_offsets": json.dumps(end.encode())}),
        (20, {"starting_timestamp_ns": BASE_NS + 25}),  # Only complete members are left out.
    ):
        stream = stream_of(tmp_path, **starting)
        assert drain(stream, stream.initial())[0] == list(range(begin, 40))
    for start in ("soon", '{"version": 7, "writers": {}}'):
        with pytest.raises(ConfigurationError):
            stream_of(tmp_path, starting_offsets=start).initial()
    with pytest.raises(NotFoundError, match=r"there is no .*/none"):
        stream_of(tmp_path / "none").latest(Offset(), ALL)


def test_limits_are_exact_to_the_member_and_the_oldest_are_read_first(tmp_path: Path) -> None:
    one, other = Writer(tmp_path, topic="a"), Writer(tmp_path, topic="b")
    one.write(messages(0, 5), messages(10, 15))
    other.write(messages(5, 10), messages(15, 20))
    stream = stream_of(tmp_path)
    start = Offset(is_start=True)
    first = stream.latest(start, BatchLimits(rows=12))
    second = stream.latest(first, BatchLimits(rows=12))

    assert bodies(stream.plan(start, first)) == list(range(10))
    assert bodies(stream.plan(first, second)) == list(range(10, 20))
    for writer in (one, other):
        writer.finish()
    one.write(messages(20, 25))
    size = min(path.stat().st_size for path in tmp_path.glob("*.gz"))
    one_file = stream.latest(start, BatchLimits(files=1))
    some_bytes = stream.latest(start, BatchLimits(bytes=size * 3 // 4))
    assert bodies(stream.plan(start, one_file)) == [*range(5), *range(10, 15)]
    assert bodies(stream.plan(start, some_bytes)) == list(range(5))


def test_files_of_other_programs_are_read_once_when_finished(tmp_path: Path) -> None:
    write_archive(tmp_path / "old.log.gz", messages(0, 10), messages(10, 20))
    in_progress = write_archive(tmp_path / "now.log.gz", messages(20, 30), is_finished=False)
    stream = stream_of(tmp_path)
    first, offset = drain(stream, stream.initial(), BatchLimits(rows=1))
    part_of(in_progress).rename(in_progress)
    more, offset = drain(stream, offset)

    assert (first, more) == (list(range(20)), list(range(20, 30)))
    assert list(offset.files) == ["now.log.gz", "old.log.gz"]
    limits = BatchLimits(rows=sum(offset.files.values()))  # A row has at least one byte.
    assert stream.latest(stream.initial(), limits).files == offset.files


def test_a_file_whose_index_is_copied_after_it_is_read_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(messages(0, 10))
    path = writer.finish()
    index = index_of(path).read_bytes()
    index_of(path).unlink()
    stream = stream_of(tmp_path)
    start = stream.initial()
    end = through_json(stream.latest(start, ALL))
    index_of(path).write_bytes(index)

    assert bodies(stream_of(tmp_path).plan(start, end)) == list(range(10))
    more, offset = drain(stream_of(tmp_path), end)
    path.unlink()
    index_of(path).unlink()
    writer.write(messages(10, 15), name=path.name)
    writer.finish()

    assert (more, drain(stream_of(tmp_path), offset)[0]) == ([], list(range(10, 15)))


def test_a_file_that_vanishes_after_a_pattern_matched_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / "gone.gz"), str(write_archive(tmp_path / "a.gz", messages(0, 5)))]
    monkeypatch.setattr("glob.glob", lambda pattern: paths)
    stream = stream_of(tmp_path / "*.gz")
    assert drain(stream, stream.initial())[0] == list(range(5))


def test_a_file_that_was_empty_for_long_is_read_when_it_has_content(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl.gz"
    path.touch()
    os.utime(tmp_path, (0, 0))  # so that the directory counts as unchanged
    stream = stream_of(tmp_path)
    offset = stream.latest(stream.initial(), ALL)
    path.write_bytes(gzip.compress(encode_many("clicks", "nsqd:4150", messages(0, 5))))

    assert drain(stream, offset)[0] == list(range(5))


def test_growth_of_a_file_after_it_was_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "bodies.log"
    path.write_bytes(b"1\n2\n")
    reports = tmp_path.parent / "reports"
    stream = stream_of(tmp_path, read={"raw": True, "damage_path": LocalPlace(reports)})
    first, offset = drain(stream, stream.initial())
    path.write_bytes(b"1\n2\n3\n")

    assert (first, drain(stream, offset)[0]) == ([1, 2], [])
    (damage,) = read_damage(LocalPlace(reports))
    assert damage[:2] == (str(path), 4)
    assert "it has 6 bytes, and had 4 when it was read" in damage.problem


def gone(path: Path) -> None:
    for file in (part_of(path), index_of(path)):
        file.unlink()


def another_index(path: Path) -> None:
    first = index_of(path).read_bytes().splitlines(keepends=True)[0]
    index_of(path).write_bytes(first + b"0 7 1 0 0\n7 5000 1 0 0\n")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (gone, "is gone: messages of .* are lost"),
        (lambda path: os.truncate(part_of(path), 10), r"has no member that ends at .* \(of 10\)"),
        (another_index, "has no member that ends at byte"),
    ],
)
def test_missing_data_is_named(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    path = Writer(tmp_path).write(messages(0, 5), messages(5, 10))
    stream = stream_of(tmp_path)
    _, offset = drain(stream, stream.initial())
    damage(path)

    with pytest.raises(NsqError, match=rf"clicks-000001\.log\.gz {complaint}"):
        stream.latest(offset, ALL)


def test_a_stream_may_skip_missing_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(tmp_path)
    path = writer.write(messages(0, 5))
    stream = stream_of(tmp_path, fail_on_data_loss=False)
    start = stream.latest(stream.initial(), ALL)
    writer.write(messages(5, 10))
    end = stream.latest(start, ALL)
    gone(path)
    Writer(tmp_path, topic="other").write(messages(10, 15))

    assert bodies(stream.plan(start, end)) == []
    remaining, offset = drain(stream, end)
    assert remaining == list(range(10, 15))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert drain(stream, offset)[0] == []


def test_a_file_deleted_before_it_was_read_fails_the_stream_or_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, writer, one_file = [], Writer(tmp_path), BatchLimits(files=1)
    for n in range(0, 35, 5):
        writer.write(messages(n, n + 5))
        files.append(writer.finish())

    def delete(*numbers: int) -> None:
        for path in (files[number - 1] for number in numbers):
            path.unlink()
            index_of(path).unlink()

    delete(3)
    received, _ = drain(stream_of(tmp_path), Offset(is_start=True), one_file)
    assert received == [*range(10), *range(15, 35)]
    [record] = caplog.records
    assert "file 3 of writer" in record.getMessage()
    assert "deleted before this stream saw it, or never written" in record.getMessage()

    offset = through_json(stream_of(tmp_path).latest(Offset(is_start=True), one_file))
    delete(1, 5, 6)  # The first file was read.
    with pytest.raises(NsqError, match=r"file 5-6 of writer [0-9a-f]{32} was deleted before it"):
        stream_of(tmp_path).latest(offset, one_file)
    caplog.clear()
    received, end = drain(stream_of(tmp_path, fail_on_data_loss=False), offset)

    assert (received, end.unread) == ([*range(5, 10), *range(15, 20), *range(30, 35)], frozenset())
    assert caplog.text.count("file 5-6 of writer") == 1


def test_a_file_that_is_being_moved_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    path = writer.write(messages(0, 5))
    away = tmp_path.parent / "away"
    away.mkdir()
    stream = stream_of(tmp_path)
    _, offset = drain(stream, stream.initial())
    for file in (part_of(path), index_of(path)):
        shutil.move(file, away)

    def bring_back(seconds: float) -> None:
        for file in list(away.iterdir()):
            shutil.move(file, tmp_path)

    monkeypatch.setattr(archive_stream, "sleep", bring_back)

    assert stream.latest(offset, ALL) == offset


def test_the_lag_counts_rows_after_the_offset_as_of_the_last_listing(tmp_path: Path) -> None:
    Writer(tmp_path).write(messages(0, 10), messages(10, 20))
    stream = stream_of(tmp_path)
    offset = stream.latest(Offset(is_start=True), BatchLimits(rows=10))

    lag = stream.lag()

    assert (lag["rows_behind"], lag["bytes_behind"] > 0) == (10, True)
    assert lag["seconds_behind"] > 86_400  # The messages were published in 2023.
    stream.latest(offset, ALL)
    assert stream.lag() == {"rows_behind": 0, "bytes_behind": 0, "seconds_behind": 0}


def test_other_topics_and_times_are_skipped_also_by_offsets(tmp_path: Path) -> None:
    Writer(tmp_path, topic="a").write(messages(0, 10), messages(10, 20))
    Writer(tmp_path, topic="b").write(messages(100, 110))
    read = {"topics": frozenset({"a"}), "within": TimeRange(BASE_NS + 5, BASE_NS + 12)}
    stream = stream_of(tmp_path, read=read)
    end = stream.latest(Offset(), ALL)
    chosen = replace(ReadSettings((str(tmp_path),)), **read)

    assert bodies(stream.plan(Offset(), end), chosen) == list(range(5, 12))
    assert stream.latest(end, ALL) == end


def test_a_checkpoint_accepts_the_same_or_a_narrower_time_range(tmp_path: Path) -> None:
    def stream(since: int | None, until: int | None = None) -> ArchiveStream:
        bounds = (None if seconds is None else BASE_NS + seconds for seconds in (since, until))
        return stream_of(tmp_path, read={"within": TimeRange(*bounds)})

    offset = Offset(is_start=True)
    for since in (None, 5, 5, 6):
        Writer(tmp_path, topic=f"at-{since}").write(messages(0, 10), name=f"{uuid.uuid4()}.gz")
        offset = through_json(stream(since, 12).latest(offset, ALL))

    assert offset.within == TimeRange(BASE_NS + 6, BASE_NS + 12)
    for wider in (None, 5):
        with pytest.raises(ConfigurationError, match=r"option since was 2023-11-14T.* do not"):
            stream(wider, 12).latest(offset, ALL)
    with pytest.raises(ConfigurationError, match="option until was"):
        stream(6, 13).latest(offset, ALL)
    for bounds in ((None, 12), (6, None)):  # The message has a time that is accepted.
        with pytest.raises(ConfigurationError) as caught:
            stream(*bounds).latest(offset, ALL)
        suggested = parse_time(str(caught.value).split()[3], now_ns=0) - BASE_NS
        stream(bounds[0] or suggested, 12 if bounds[1] else suggested).latest(offset, ALL)


def test_a_truncated_index_is_followed_and_a_file_read_to_its_end_is_forgotten(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path)
    path = writer.write(messages(0, 5))
    stream = stream_of(tmp_path)
    _, offset = drain(stream, stream.initial())
    content = index_of(path).read_bytes()
    position = part_of(path).stat().st_size
    with index_of(path).open("ab") as index:
        index.write(b"%d 9 1 0 0\n" % position)  # Its flush fails, and the line is removed again.
    stream.latest(offset, ALL)
    index_of(path).write_bytes(content)
    writer.write(messages(5, 10))
    numbers, offset = drain(stream, offset)
    assert (numbers, bool(offset.under_way)) == (list(range(5, 10)), True)
    writer.finish()

    numbers, offset = drain(stream, offset)

    assert numbers == []
    assert offset.encode()["writers"] == {writer.writer: {"read": "1", "under_way": {}}}
    assert not stream._names  # A stream may run for years.


def test_a_batch_waits_for_enough_rows_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    write_archive(tmp_path / "a.gz", messages(0, 5))
    monkeypatch.setattr(archive_stream, "monotonic", lambda: clock[0])
    stream = stream_of(tmp_path, min_rows=8, max_delay_s=60)
    start = stream.initial()

    assert stream.latest(start, BatchLimits()) == start
    write_archive(tmp_path / "b.gz", messages(5, 10))
    enough = stream.latest(start, BatchLimits())
    assert enough != start
    write_archive(tmp_path / "c.gz", messages(10, 11))
    assert stream.latest(enough, BatchLimits()) == enough
    clock[0] = 61
    assert stream.latest(enough, BatchLimits()) != enough
    write_archive(tmp_path / "d.gz", messages(11, 12))
    stream.freeze()
    assert stream.latest(enough, BatchLimits()) != enough


WRITER, OTHER = "a" * 32, "b" * 32

numbers = st.sets(st.integers(1, 60))
heads = st.builds(Head, st.sampled_from([WRITER, OTHER]), st.integers(1, 60))


@given(some=numbers, before=numbers)
def test_spans_hold_exactly_their_numbers(some: set[int], before: set[int]) -> None:
    spans, earlier = (unite((number, number) for number in numbers) for numbers in (some, before))

    assert {number for number in range(62) if has_number(spans, number)} == some
    assert parse_spans(format_spans(spans)) == spans
    assert numbers_beyond(spans, earlier) == sorted(some - before)


@given(read=st.sets(heads), under_way=st.dictionaries(heads, st.integers(1)), started=st.booleans())
def test_an_offset_survives_a_round_trip(
    read: set[Head], under_way: dict[Head, int], started: bool
) -> None:
    offset = Offset({}, under_way, {"old.log": 7}, is_start=started).with_read(read)

    decoded = decode_offset(json.loads(json.dumps(offset.encode())))

    assert decoded == offset
    assert json.dumps(decoded.encode()) == json.dumps(offset.encode())
    assert all(decoded.has_read(head) for head in read)
    assert set(decoded.under_way) == set(under_way) - read


def test_an_offset_of_ten_thousand_files_is_small() -> None:
    files = {f"host/clicks.2026-11-21_{n:05}.log.gz": 4000 + n * 7919 % 5000 for n in range(10_000)}
    numbered = Offset().with_read([Head(WRITER, number) for number in range(1, 10_001)])
    assert numbered.encode() == {
        "version": 1,
        "writers": {WRITER: {"read": "1-10000", "under_way": {}}},
    }

    text = json.dumps(Offset(files=files).encode())

    assert decode_offset(json.loads(text)) == Offset(files=files)
    assert len(text) < len(json.dumps(files)) / 5
    assert json.dumps(decode_offset(json.loads(text)).encode()) == text


WRITERS = [{}, *({"read": spans, "under_way": {}} for spans in ("9-1", "1-5,4"))]
WRITERS += [{"read": "", "under_way": {"x": 1}}]


NO_OFFSETS: list[Any] = [{}, [], None, {"version": 1}]
NO_OFFSETS += ({"version": 1, "writers": {WRITER: writer}} for writer in WRITERS)
NO_OFFSETS += (
    {"version": 2, "writers": {}, "packed_files": packed} for packed in ("", "AAA!", "AAAA", 7)
)


@pytest.mark.parametrize("document", NO_OFFSETS)
def test_an_invalid_offset_is_refused(document: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not an offset"):
        decode_offset(document)
    with pytest.raises(ConfigurationError, match="version 3, this program knows 2"):
        decode_offset({"version": 3, "writers": {}})
