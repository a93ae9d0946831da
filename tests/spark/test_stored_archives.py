"""Archives in an object store are read as those of a directory: in batches and as a stream."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from plugins.archives import Writer, write_archive
from plugins.hdfs import Store
from plugins.object_store import Bucket

from nsqtools.archive.layout import index_of
from nsqtools.archive.storage_objects import ObjectStorage
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.protocol.message import WireMessage
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    FileFormat,
    OnDamage,
    ReadSettings,
    StreamSettings,
)
from nsqtools.spark.archives.stored_archives import StoredListing
from nsqtools.spark.location import StoredPlace, parse_place

BEGIN = 1_790_000_000_000_000_000


def messages(first: int, count: int) -> list[WireMessage]:
    numbers = range(first, first + count)
    return [WireMessage(BEGIN + n, 1, b"%016x" % n, b"body %d" % n) for n in numbers]


def upload(store: Store, directory: Path, prefix: str = "archive") -> StoredPlace:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.storage.put_file(f"{prefix}/{path.relative_to(directory)}", path)
    place = parse_place(f"{store.url}/{prefix}")
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
    plan = pickle.loads(pickle.dumps(plan_batch(settings)))
    batches = [batch for each in plan for batch in read_partition(each, settings, ["id", "file"])]
    return sorted(row["id"] for batch in batches for row in batch.to_pylist())


def test_a_bucket_gives_the_rows_of_the_directory(store: Store, local: Path) -> None:
    place = upload(store, local)

    assert ids(ReadSettings((str(place),))) == ids(ReadSettings((str(local),)))
    assert ids(ReadSettings((str(place),), topics=frozenset(["orders"]))) == [
        f"{n:016x}" for n in range(100, 107)
    ]


def test_a_file_of_a_bucket_is_read_beside_a_directory(store: Store, local: Path) -> None:
    [name] = [path.name for path in (local / "old").iterdir() if path.name[0] != "."]
    place = upload(store, local / "old", "old") / name

    found = ids(ReadSettings((str(local), str(place))))

    assert found == ids(ReadSettings((str(local),)))  # the same file, known by its head


def test_files_without_an_index_are_read_whole(store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = write_archive(tmp_path / "in" / "clicks.gz", messages(0, 9))
    index_of(path).unlink()
    (tmp_path / "in" / "bare.log").write_bytes(b"one\ntwo\n")
    place = upload(store, tmp_path / "in")

    settings = ReadSettings((str(place),), format=FileFormat.raw)
    batches = [b for each in plan_batch(settings) for b in read_partition(each, settings)]

    assert sorted(row["body"] for batch in batches for row in batch.to_pylist()) == sorted(
        [b"one", b"two", *(message.body for message in messages(0, 9))]
    )


def test_damage_is_reported_into_the_bucket(store: Store, local: Path) -> None:
    [torn] = [path for path in (local / "old").iterdir() if path.name[0] != "."]
    torn.write_bytes(torn.read_bytes()[:-20])
    place = upload(store, local)
    reports = parse_place(f"{store.url}/damage")
    settings = ReadSettings((str(place),), on_damage=OnDamage.report, damage_path=reports)

    with pytest.raises(NsqError, match=f"cannot read {place}/old/{torn.name}"):
        ids(ReadSettings((str(place),)))
    assert 40 <= len(ids(settings)) < 47
    assert {damage.file for damage in read_damage(reports)} == {f"{place}/old/{torn.name}"}


def test_a_place_without_archives_is_refused(store: Store) -> None:
    with pytest.raises(NotFoundError, match=f"there is no archive in {store.url}"):
        plan_batch(ReadSettings((store.url,)))
    with pytest.raises(NotFoundError, match=f"there is no archive in {store.url}/nothing"):
        plan_batch(ReadSettings((f"{store.url}/nothing",)))


def test_a_stream_reads_what_is_uploaded_once(store: Store, local: Path) -> None:
    place = upload(store, local)
    stream = ArchiveStream(ReadSettings((str(place),)), StreamSettings())
    first = stream.latest(stream.initial(), BatchLimits())
    later = local / "later"
    later.mkdir()
    write_archive(later / "late.gz", messages(200, 3))
    upload(store, later, "archive/later")

    end = stream.latest(first, BatchLimits())

    settings = ReadSettings((str(place),))
    rows = [b for each in stream.plan(first, end) for b in read_partition(each, settings)]
    assert sum(batch.num_rows for batch in rows) == 3
    assert stream.latest(end, BatchLimits()) == end


def test_an_object_deleted_unread_fails_the_stream(store: Store, local: Path) -> None:
    place = upload(store, local)
    stream = ArchiveStream(ReadSettings((str(place),)), StreamSettings())
    first = stream.latest(stream.initial(), BatchLimits(files=1))
    for name in store.names():
        if "old/" in name:
            store.storage.delete(name)

    with pytest.raises(NsqError, match="was deleted before it was read"):
        stream.latest(first, BatchLimits())


def test_what_is_known_of_an_object_is_not_asked_for_again(
    bucket: Bucket, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = StoredListing([upload(bucket, local)])
    listing.files(lambda damage: None)

    def refuse(*_: object) -> bytes:
        raise AssertionError("asked again")

    monkeypatch.setattr(ObjectStorage, "read", refuse)
    monkeypatch.setattr(ObjectStorage, "read_range", refuse)

    assert len(listing.files(lambda damage: None)) == 5
