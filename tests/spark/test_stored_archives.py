"""Archives in an object store are read as those of a directory: in batches and as a stream."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import Writer
from plugins.object_store import BetweenPages, Bucket
from plugins.waiting import patience_s

from nsqtools.archive.catalog import Inputs, sources_of
from nsqtools.archive.layout import TimeRange
from nsqtools.archive.location import StoredPlace, parse_place
from nsqtools.archive.storage import Entry
from nsqtools.archive.storage_objects import ObjectStorage
from nsqtools.archive.upload import UploadPlan
from nsqtools.archive.upload import upload as upload_file
from nsqtools.cli.main import main
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.archive_files import CATALOG, StoredListing
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.archives.offsets import Offset, decode_offset
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.partitions import ReadPartition, plan_batch
from nsqtools.spark.archives.read_settings import BatchLimits, ReadSettings, StreamSettings
from nsqtools.spark.spark_settings import SparkSettings, needed_packages, spark_home

BEGIN, HOUR_NS = 1_790_000_000_000_000_000, 3600 * 10**9


def messages(first: int, count: int) -> list[WireMessage]:
    numbers = range(first, first + count)
    return [WireMessage(BEGIN + n, 1, b"%016x" % n, b"body %d" % n) for n in numbers]


def upload(bucket: Bucket, directory: Path, prefix: str = "archive") -> StoredPlace:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            bucket.storage.put_file(f"{prefix}/{path.relative_to(directory)}", path)
    place = parse_place(f"{bucket.url}/{prefix}")
    assert isinstance(place, StoredPlace)
    return place


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "archive"
    (directory / "old").mkdir(parents=True)
    writer = Writer(directory, topic="clicks")
    for number in range(4):
        writer.write(messages(number * 10, 5))
        writer.write(messages(number * 10 + 5, 5))
        writer.finish()
    orders = Writer(directory / "old", topic="orders")
    orders.write(messages(100, 7))
    orders.finish()
    return directory


def ids(settings: ReadSettings) -> list[str]:
    return ids_of(pickle.loads(pickle.dumps(plan_batch(settings))), settings)


def ids_of(plan: list[ReadPartition], settings: ReadSettings) -> list[str]:
    batches = [batch for each in plan for batch in read_partition(each, settings, ["id"])]
    return sorted(row["id"] for batch in batches for row in batch.to_pylist())


def test_a_bucket_gives_the_rows_of_the_directory(bucket: Bucket, local: Path) -> None:
    place, all_ids = upload(bucket, local), ids(ReadSettings((str(local),)))
    orders = ReadSettings((str(place),), topics=frozenset(["orders"]))

    assert ids(ReadSettings((str(place),))) == all_ids
    assert ids(orders) == [f"{n:016x}" for n in range(100, 107)]
    # a file of it beside the directory is the same file, known by its head
    assert ids(ReadSettings((str(local), f"{place}/old/orders-000001.log.gz"))) == all_ids
    for nothing in (f"{bucket.url}/nothing", f"{bucket.url}/archive/nothing"):
        with pytest.raises(NotFoundError, match=f"there is no archive in {nothing}"):
            plan_batch(ReadSettings((nothing,)))


def test_damage_is_reported_into_the_bucket(bucket: Bucket, local: Path) -> None:
    torn = local / "old" / "orders-000001.log.gz"
    torn.write_bytes(torn.read_bytes()[:-20])
    place = upload(bucket, local)
    reports = parse_place(f"{bucket.url}/damage")
    settings = ReadSettings((str(place),), damage_path=reports)

    with pytest.raises(NsqError, match=f"cannot read {place}/old/{torn.name}"):
        ids(ReadSettings((str(place),)))
    assert 40 <= len(ids(settings)) < 47
    assert {damage.file for damage in read_damage(reports)} == {f"{place}/old/{torn.name}"}


def uploaded(writer: Writer, plan: UploadPlan, first: int) -> None:
    writer.write(messages(first, 3))
    upload_file(writer.finish(), plan)


def read_on(
    stream: ArchiveStream, start: Offset, settings: ReadSettings
) -> tuple[list[str], Offset]:
    end = stream.latest(start, BatchLimits())
    return ids_of(stream.plan(start, end), settings), end


def test_a_file_uploaded_while_it_is_listed_is_read_once(
    tmp_path: Path, bucket: Bucket, between_pages: BetweenPages
) -> None:
    plan = UploadPlan(tmp_path, bucket.storage, "host", by_topic_and_date=True)
    clicks, other = Writer(tmp_path), Writer(tmp_path)
    other.number = 100  # whose names come after the others
    for number in range(5):
        uploaded(clicks, plan, 10 * number)
    settings = ReadSettings((bucket.url,))
    stream = ArchiveStream(settings, StreamSettings())
    _, offset = read_on(stream, stream.initial(), settings)
    between_pages(lambda: uploaded(other, plan, 100))

    found, offset = read_on(stream, offset, settings)

    assert found == [f"{n:016x}" for n in range(100, 103)]
    assert read_on(stream, offset, settings) == ([], offset)
    assert not offset.files


def test_a_batch_that_names_a_file_listed_without_its_index_is_read_once(
    tmp_path: Path, bucket: Bucket
) -> None:
    plan = UploadPlan(tmp_path, bucket.storage, "host")
    uploaded(Writer(tmp_path), plan, 0)
    [name] = [name for name in bucket.names() if name[0] != "."]
    size = bucket.storage.stat(name).size
    settings = ReadSettings((bucket.url,))
    stream = ArchiveStream(settings, StreamSettings())
    # what version 0.2 wrote into its checkpoint before it failed
    end = decode_offset({"version": 1, "writers": {}, "files": {name: size}})

    assert len(ids_of(stream.plan(stream.initial(), end), settings)) == 3
    assert read_on(stream, end, settings) == ([], end)


def test_an_object_deleted_after_it_was_listed_is_left_out(
    bucket: Bucket, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = upload(bucket, local)
    list_all = ObjectStorage.list

    def list_and_delete(storage: ObjectStorage, prefix: str = "") -> Iterator[Entry]:
        entries = list(list_all(storage, prefix))
        for entry in entries:
            if "orders" in entry.name:
                storage.delete(entry.name)
        return iter(entries)

    monkeypatch.setattr(ObjectStorage, "list", list_and_delete)

    assert len(StoredListing([place]).files(lambda damage: None)) == 4


def requests_of(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> tuple[list[str], list[str]]:
    """What is listed and what is read while something is asked for."""
    listed: list[str] = []
    read: list[str] = []

    def noted(original: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
        def call(storage: ObjectStorage, key: str = "", *rest: Any) -> Any:
            seen.append(key)
            return original(storage, key, *rest)

        return call

    with monkeypatch.context() as patch:
        for name in ("list", "children", "read", "read_range"):
            seen = read if "read" in name else listed
            patch.setattr(ObjectStorage, name, noted(getattr(ObjectStorage, name), seen))
        ask()
    return listed, read


def test_other_topics_and_times_cost_no_requests(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = UploadPlan(tmp_path, bucket.storage, "host", by_topic_and_date=True)
    writers = [Writer(tmp_path, topic=topic) for topic in ("clicks", "orders")]
    for hour in range(20):
        for writer in writers:
            at = [(hour + 1) * HOUR_NS + n for n in range(3)]
            writer.write([WireMessage(ns, 1, b"%016x" % ns, b"x") for ns in at])
            upload_file(writer.finish(), plan)
    hour_5 = TimeRange(5 * HOUR_NS, 6 * HOUR_NS)
    settings = ReadSettings((bucket.url,), topics=frozenset(["clicks"]), within=hour_5)

    listing = StoredListing([parse_place(bucket.url)])  # type: ignore[list-item]
    listing.files(lambda damage: None)
    # what is known of an object is not asked for again
    assert requests_of(monkeypatch, lambda: listing.files(lambda damage: None))[1] == []
    for name in bucket.names():
        if name.endswith(CATALOG):
            bucket.storage.delete(name)

    listed, read = requests_of(monkeypatch, lambda: plan_batch(settings))
    listed_again, read_again = requests_of(monkeypatch, lambda: plan_batch(settings))

    assert listed == ["", "topic=clicks"] == listed_again
    assert len(read) == 20 + 2  # the manifests, and index and beginning of one file
    assert len(read_again) == 3  # the catalog in place of the manifests
    assert len(ids(settings)) == 3
    writers[0].write([WireMessage(5 * HOUR_NS, 1, b"f" * 16, b"late")])
    upload_file(writers[0].finish(), plan)
    assert len(ids(settings)) == 4  # which no catalog has


def test_what_plans_ask_of_each_file_is_asked_of_many_at_a_time(
    bucket: Bucket, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in local.rglob("*.gz"):
        upload_file(path, UploadPlan(local, bucket.storage, "host"))
    settings, together = ReadSettings((bucket.url,)), threading.Barrier(5)
    real = ObjectStorage.read_range

    def read_range(*args: Any) -> bytes:
        together.wait(patience_s(10))
        return real(*args)

    monkeypatch.setattr(ObjectStorage, "read_range", read_range)

    assert plan_batch(settings)
    stream = ArchiveStream(settings, StreamSettings())
    assert len(stream.latest(Offset(), BatchLimits()).read) == 2
    assert len(sources_of(Inputs((parse_place(bucket.url),)))) == 5


def test_archives_in_a_bucket_need_no_jar(
    bucket: Bucket,
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    own_logging: None,
) -> None:
    """Only Python reads them."""

    def spark_session(settings: SparkSettings) -> None:
        raise NsqError(
            f"{needed_packages(settings.places, spark_home())}, {settings.python_places}"
        )

    monkeypatch.setattr("nsqtools.spark.session.spark_session", spark_session)
    place = upload(bucket, local)
    to = ["-o", str(tmp_path / "lake"), "--checkpoint", str(tmp_path / "checkpoint")]
    for before, after in ((["report"], []), (["sql", "SELECT 1"], []), (["ingest"], to)):
        main(["spark", *before, str(place), *after])
        assert f"nsq: error: [], ({place!r},)" in capfd.readouterr().err
