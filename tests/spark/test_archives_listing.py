"""The files of an archive, in a bucket and in directories, while they appear, move and vanish."""

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from plugins.archives import Writer, numbered, values_of, write_archive
from plugins.object_store import BetweenPages, Bucket
from plugins.waiting import patience_s

from nsqtools.archive.catalog import find_sources
from nsqtools.archive.finding import find_archives, table_files
from nsqtools.archive.layout import INDEX, TimeRange, index_of, owner_of, part_of
from nsqtools.archive.part_file import Directories, recover_parts
from nsqtools.archive.place import LocalPlace, Place, StoredObject
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.storage_objects import BucketPlace
from nsqtools.archive.upload import UploadPlan
from nsqtools.archive.upload import upload as upload_file
from nsqtools.cli.main import main
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.files.opening import open_to_read
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives import archive_files
from nsqtools.spark.archives.archive_files import CATALOG, Listing, StoredListing
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.archives.offsets import Offset
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import BatchLimits, ReadSettings, StreamSettings
from nsqtools.spark.jobs.replay_job import sizes_of
from nsqtools.spark.spark_settings import SparkSettings, needed_packages, spark_home

HOUR_NS = 3600 * 10**9


def upload(bucket: Bucket, directory: Path) -> Place:
    bucket.take(directory, "archive/")
    return parse_place(f"{bucket.url}/archive")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "archive"
    (directory / "old").mkdir(parents=True)
    writer = Writer(directory, topic="clicks")
    for number in range(4):
        writer.write(numbered(number * 10, number * 10 + 5))
        writer.write(numbered(number * 10 + 5, number * 10 + 10))
        writer.finish()
    orders = Writer(directory / "old", topic="orders")
    orders.write(numbered(100, 107))
    orders.finish()
    return directory


def ids(settings: ReadSettings) -> list[str]:
    return sorted(values_of(pickle.loads(pickle.dumps(plan_batch(settings))), settings, "id"))


def test_a_bucket_has_the_rows_of_the_directory_and_stores_damage_reports(
    bucket: Bucket, local: Path
) -> None:
    assert ids(ReadSettings((bucket.url,))) == []
    place, all_ids = upload(bucket, local), ids(ReadSettings((str(local),)))
    orders = ReadSettings((str(place),), topics=frozenset(["orders"]))

    assert ids(ReadSettings((str(place),))) == all_ids
    assert ids(orders) == [f"{n:016x}" for n in range(100, 107)]
    # The copy of a file in the bucket and the directory is one file, identified by its head.
    assert ids(ReadSettings((str(local), f"{place}/old/orders-000001.log.gz"))) == all_ids
    with pytest.raises(NotFoundError, match=f"there is no archive in {place}/nothing"):
        plan_batch(ReadSettings((f"{place}/nothing",)))
    for name in ("one", "two"):  # Without an index they cannot be told apart.
        bucket.storage.put(f"{name}/bare.log", f"{name}\n".encode())
    with pytest.raises(NsqError, match=r"two/bare\.log: not read: .*/one/bare\.log has the same"):
        plan_batch(ReadSettings((f"{bucket.url}/one", f"{bucket.url}/two"), raw=True))
    torn, reports = "archive/old/orders-000001.log.gz", parse_place(f"{bucket.url}/damage")
    bucket.storage.put(torn, bucket.storage.read(torn)[:-20])
    assert 40 <= len(ids(ReadSettings((str(place),), damage_path=reports))) < 47
    assert {damage.file for damage in read_damage(reports)} == {f"{bucket.url}/{torn}"}


def uploaded(writer: Writer, plan: UploadPlan, first: int) -> None:
    writer.write(numbered(first, first + 3))
    upload_file(writer.finish(), plan)


def read_on(
    stream: ArchiveStream, start: Offset, settings: ReadSettings
) -> tuple[list[str], Offset]:
    end = stream.latest(start, BatchLimits())
    return sorted(values_of(stream.plan(start, end), settings, "id")), end


def test_a_file_uploaded_while_it_is_listed_is_read_once(
    tmp_path: Path, bucket: Bucket, between_pages: BetweenPages
) -> None:
    plan = UploadPlan(tmp_path, bucket.storage, "host", by_topic_and_date=True)
    clicks, late = Writer(tmp_path), Writer(tmp_path)
    late.number = 100  # so that its names sort last
    for number in range(5):
        uploaded(clicks, plan, 10 * number)
    settings = ReadSettings((bucket.url,))
    stream = ArchiveStream(settings, StreamSettings())
    _, offset = read_on(stream, stream.initial(), settings)
    between_pages(lambda: uploaded(late, plan, 100))

    message_ids, offset = read_on(stream, offset, settings)

    assert message_ids == [f"{n:016x}" for n in range(100, 103)]
    assert read_on(stream, offset, settings) == ([], offset)
    assert not offset.files


def test_an_object_deleted_after_it_was_listed_is_left_out(
    bucket: Bucket, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = upload(bucket, local)
    list_all = BucketPlace.list

    def list_and_delete(storage: BucketPlace, prefix: str = "") -> Iterator[StoredObject]:
        entries = list(list_all(storage, prefix))
        for entry in entries:
            if "orders" in entry.name:
                storage.delete(entry.name)
        return iter(entries)

    monkeypatch.setattr(BucketPlace, "list", list_and_delete)

    assert len(StoredListing(ReadSettings((str(place),))).files(lambda damage: None)) == 4


def test_a_planned_batch_is_read_after_its_files_moved_but_not_if_replaced(
    tmp_path: Path, bucket: Bucket
) -> None:
    work, output = tmp_path / "work", tmp_path / "out"
    for folder in (work, output):
        folder.mkdir()
    (output / "clicks-000001.log.gz").touch()
    settings = ReadSettings((str(output), bucket.url), work_dir=work)
    writer = Writer(work, output=output)
    writer.write(numbered(0, 10))
    plans = [plan_batch(settings)]
    path = writer.finish()
    assert path.name == "clicks-000001-000001.log.gz"
    plans.append(plan_batch(settings))
    assert values_of(plans[0], settings, "id") == [f"{n:016x}" for n in range(10)]
    upload_file(path, UploadPlan(output, bucket.storage, "host", deletes=True))
    for plan in plans:
        assert values_of(plan, settings, "id") == [f"{n:016x}" for n in range(10)]

    settings = ReadSettings((f"{bucket.url}/bare.log",), raw=True, partition_bytes=2500)
    bucket.storage.put("bare.log", 1000 * b"one\n")
    first, *others = plan_batch(settings)
    assert {*values_of([first], settings, "body")} == {b"one"}
    bucket.storage.put("bare.log", 1000 * b"another\n")
    with pytest.raises(NsqError, match="changed while it was read"):
        values_of(others, settings, "body")


def requests_of(call: Callable[[], object]) -> tuple[list[str], list[str]]:
    """The names that are listed and read during a call."""
    names = ("children", "list", "read", "read_range")
    with ExitStack() as stack:
        seen = [
            stack.enter_context(
                patch.object(BucketPlace, name, autospec=True, side_effect=vars(BucketPlace)[name])
            ).call_args_list
            for name in names
        ]
        call()
    keys = [[(*call.args[1:], "")[0] for call in calls] for calls in seen]
    return keys[0] + keys[1], keys[2] + keys[3]


def test_other_topics_and_times_cost_no_requests(tmp_path: Path, bucket: Bucket) -> None:
    plan = UploadPlan(tmp_path, bucket.storage, "host", by_topic_and_date=True)
    writers = [Writer(tmp_path, topic=topic) for topic in ("clicks", "orders")]
    for hour in range(20):
        for writer in writers:
            at = [(hour + 1) * HOUR_NS + n for n in range(3)]
            writer.write([WireMessage(ns, 1, b"%016x" % ns, b"x") for ns in at])
            upload_file(writer.finish(), plan)
    hour_5 = TimeRange(5 * HOUR_NS, 6 * HOUR_NS)
    settings = ReadSettings((bucket.url,), topics=frozenset(["clicks"]), within=hour_5)

    listing = StoredListing(ReadSettings((bucket.url,)))
    listing.files(lambda damage: None)
    # Metadata of an object is not requested again.
    assert requests_of(lambda: listing.files(lambda damage: None))[1] == []
    for name in bucket.names():
        if name.endswith(CATALOG):
            bucket.storage.delete(name)

    listed, read = requests_of(lambda: plan_batch(settings))
    listed_again, read_again = requests_of(lambda: plan_batch(settings))

    assert listed == ["", "topic=clicks"] == listed_again
    assert len(read) == 20 + 2  # the manifests, and the index and the beginning of one file
    assert len(read_again) == 3  # the catalog in place of the manifests
    assert len(ids(settings)) == 3
    writers[0].write([WireMessage(5 * HOUR_NS, 1, b"f" * 16, b"late")])
    upload_file(writers[0].finish(), plan)
    assert len(ids(settings)) == 4  # that the catalog lacks


def test_the_log_of_a_table_is_searched_once_and_sizes_are_read_concurrently(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, together = [f"topic=a/{n}.parquet" for n in range(4)], threading.Barrier(4)
    for name in names:
        bucket.storage.put(name, b"PAR1")
    places = [parse_place(f"{bucket.url}/{name}") for name in names]
    assert requests_of(lambda: table_files(places))[0].count("_delta_log") == 2
    stat = BucketPlace.stat
    monkeypatch.setattr(BucketPlace, "stat", lambda *at: (together.wait(60), stat(*at))[1])
    assert [*sizes_of(map(str, places)).values()] == [4] * 4


def test_a_folder_named_like_a_file_is_read_by_its_log(bucket: Bucket) -> None:
    for name in ("a", "b"):
        bucket.storage.put(f"clicks.parquet/{name}.parquet", b"PAR1")
    bucket.storage.put("clicks.parquet/_spark_metadata/0", b'v1\n{"path": "s3a://b/a.parquet"}\n')
    place = parse_place(f"{bucket.url}/clicks.parquet")
    assert [archive.name for archive in find_archives([str(place)])] == ["a.parquet"]
    assert table_files([place]) == {place: ["a.parquet"]}


def test_requests_for_each_file_are_made_concurrently(
    bucket: Bucket, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in local.rglob("*.gz"):
        upload_file(path, UploadPlan(local, bucket.storage, "host"))
    settings, together = ReadSettings((bucket.url,)), threading.Barrier(5)
    read_range, read = BucketPlace.read_range, BucketPlace.read

    def read_beginning(*args: Any) -> bytes:
        together.wait(patience_s(10))
        return read_range(*args)

    def read_index(storage: BucketPlace, name: str) -> bytes:
        if name.endswith(INDEX):
            together.wait(patience_s(10))
        return read(storage, name)

    monkeypatch.setattr(BucketPlace, "read_range", read_beginning)
    monkeypatch.setattr(BucketPlace, "read", read_index)

    assert plan_batch(settings)
    stream = ArchiveStream(settings, StreamSettings())
    assert len(stream.latest(Offset(), BatchLimits()).read) == 2
    assert len(find_sources([parse_place(bucket.url)])) == 5


def test_archives_in_a_bucket_need_no_jar(
    bucket: Bucket,
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    own_logging: None,
) -> None:
    """Only Python reads from the bucket."""

    def spark_session(given: SparkSettings) -> None:
        raise NsqError(f"{needed_packages(given.places, spark_home())}, {given.python_places}")

    monkeypatch.setattr("nsqtools.spark.session.spark_session", spark_session)
    place = upload(bucket, local)
    to = ["-o", str(tmp_path / "lake"), "--checkpoint", str(tmp_path / "checkpoint")]
    for command, options in ((["report"], []), (["sql", "SELECT 1"], []), (["ingest"], to)):
        main(["spark", *command, str(place), *options])
        assert f"nsq: error: [], ({place!r},)" in capfd.readouterr().err


MESSAGE = WireMessage(10**18, 1, b"%016x" % 1, b"x")


def listing_of(*roots: Path) -> Listing:
    return Listing(ReadSettings(tuple(map(str, roots))))


def paths(listing: Listing) -> list[str]:
    return [file.place.name for file in listing.files([].append).values()]


def test_only_recently_changed_directories_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[Path] = []
    scandir = os.scandir
    monkeypatch.setattr(archive_files.os, "scandir", lambda at: scanned.append(at) or scandir(at))
    write_archive(tmp_path / "a.log.gz", [MESSAGE])
    os.utime(tmp_path, (time.time() - 60,) * 2)  # unchanged for a minute
    listing = listing_of(tmp_path)

    assert paths(listing) == ["a.log.gz"]
    assert paths(listing) == ["a.log.gz"]
    assert len(scanned) == 1

    write_archive(tmp_path / "b.log.gz", [MESSAGE])
    assert paths(listing) == ["a.log.gz", "b.log.gz"]
    (tmp_path / "a.log.gz").unlink()
    assert paths(listing) == ["b.log.gz"]

    for change in ((tmp_path / "old").mkdir, (tmp_path / "old").rmdir):
        change()
        assert paths(listing) == ["b.log.gz"]
    assert set(listing._folders) == {tmp_path}
    os.utime(tmp_path, (time.time() + 60,) * 2)  # a recent change even if the listing is late
    assert paths(listing) == ["b.log.gz"]
    changed_ns = tmp_path.stat().st_mtime_ns
    (tmp_path / "c.log").touch()
    os.utime(tmp_path, ns=(changed_ns, changed_ns))  # within the granularity of the clock
    assert paths(listing) == ["b.log.gz", "c.log"]


def test_links_in_an_archive_are_reported_and_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link may lead to files that only the reader may read, or to the whole disk."""
    root, outside = tmp_path / "root", tmp_path / "other"
    for folder in (root / "day", root / "z", outside, tmp_path / "b"):
        write_archive(folder / "x.log.gz", [MESSAGE], is_finished=False)
    (root / "a-other").symlink_to(outside)
    (root / "b").symlink_to(tmp_path / "b")
    (root / "b" / "cycle").symlink_to(root)
    (root / "day" / "self").symlink_to(".")
    (root / "latest").symlink_to("day")
    (root / "nowhere").symlink_to("nothing")
    (root / "loop").symlink_to("loop")
    (tmp_path / "secret").write_text("password\n")
    (root / "x.log").symlink_to(tmp_path / "secret")
    (root / "root").symlink_to("/")
    (tmp_path / "given").symlink_to(root)
    expected = [root / name / "x.log.gz" for name in ("day", "z")]

    for step in ("in progress", "finished"):
        damages: list[ArchiveDamage] = []
        listed = listing_of(root).files(damages.append).values()
        assert [Path(file.shown) for file in listed] == expected
        archives = [archive.path.resolve() for archive in find_archives([tmp_path / "given"])]
        assert sorted(map(owner_of, archives) if step == "in progress" else archives) == expected
        assert not damages
        if step == "in progress":  # An archiver may finish the files that it writes.
            recovered = [root / name / "x.log.gz" for name in ("a-other", "b")]
            (root / "root").unlink()
            assert sorted(recover_parts(Directories(root, root))) == [*recovered, *expected]
    assert f"{root / 'a-other'} is a link, which is not followed (and" in caplog.text
    with open_to_read(root / "x.log") as file:  # as for a file that the user names
        assert file.read() == b"password\n"


def test_a_file_that_is_being_finished_is_listed_once_and_its_replacement_noticed(
    tmp_path: Path,
) -> None:
    listing = listing_of(tmp_path)
    first = Writer(tmp_path)
    path = first.write([MESSAGE], name="a.log.gz")
    os.link(part_of(path), path)
    [file] = listing_of(tmp_path).files([].append).values()
    assert file.place == LocalPlace(path)
    path.unlink()
    inode = part_of(path).stat().st_ino
    assert list(listing.files([].append)) == [(first.writer, 1)]

    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    second = Writer(elsewhere)
    replacement = second.write([MESSAGE, MESSAGE], name="a.log.gz")
    # The replacement may have the same inode.
    part_of(path).write_bytes(part_of(replacement).read_bytes())
    index_of(path).write_bytes(index_of(replacement).read_bytes())
    assert part_of(path).stat().st_ino == inode

    files = listing.files([].append)

    assert list(files) == [(second.writer, 1)]
    [file] = files.values()
    assert [member.messages for member in file.members()] == [2]


def test_an_unreadable_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a.log").touch()
    locked = tmp_path / "locked"
    for folder in (locked, tmp_path / "lost+found"):  # lost+found belongs to fsck and is ignored
        folder.mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if path in (locked, tmp_path / "lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(archive_files.os, "scandir", refuse)
    damages: list[ArchiveDamage] = []

    [file] = listing_of(tmp_path).files(damages.append).values()
    assert file.place.name == "a.log"
    assert set(damages) == {ArchiveDamage(str(locked), 0, "cannot be listed (Permission denied)")}


def test_other_topics_and_times_are_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Mock(side_effect=archive_files.decode_index)
    monkeypatch.setattr(archive_files, "decode_index", noted)
    for topic in ("clicks", "orders"):
        for hour in range(4):
            times = [10**18 + (3600 * hour + n) * 10**9 for n in range(60)]
            members = [[WireMessage(ns, 1, b"%016x" % ns, b"x")] for ns in times]
            write_archive(tmp_path / f"topic={topic}" / f"{hour}.gz", *members, topic=topic)
    hour_3 = TimeRange(10**18 + 3 * 3600 * 10**9, 10**18 + 3 * 3600 * 10**9 + 10**9)
    settings = ReadSettings((str(tmp_path),), topics=frozenset(["clicks"]), within=hour_3)

    [partition] = plan_batch(settings)

    [file_range] = partition
    assert (file_range.shown, len(file_range.members)) == (
        str(tmp_path / "topic=clicks" / "3.gz"),
        1,
    )
    assert sum(len(call.args[0]) > 1000 for call in noted.call_args_list) == 1

    grown = tmp_path / "topic=clicks" / "0.gz"
    grown.write_bytes(2 * grown.read_bytes())  # more than its index has
    assert [len(partition) for partition in plan_batch(settings)] == [2]
