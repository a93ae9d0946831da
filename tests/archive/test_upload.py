"""Uploading finished files: whole, verified, under one name, continued after any interruption."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store
from plugins.archives import Writer
from plugins.object_store import Bucket

from nsqtools.archive import upload as upload_module
from nsqtools.archive.finding import find_archives
from nsqtools.archive.layout import index_of
from nsqtools.archive.reader import read_messages
from nsqtools.archive.storage import Storage
from nsqtools.archive.storage_objects import ObjectStorage, open_storage
from nsqtools.archive.upload import (
    NotUploadable,
    UploadPlan,
    UploadRecord,
    Uploads,
    files_to_upload,
    upload,
    uploaded_of,
    uploading_of,
)
from nsqtools.protocol.frames import WireMessage

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND  # 2026-09-21


def messages(count: int, first: int = 0) -> list[WireMessage]:
    numbers = range(first, first + count)
    return [WireMessage(BEGIN + n * SECOND, 1, b"%016x" % n, b"body %d" % n) for n in numbers]


@pytest.fixture(params=["directory", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "directory":
        return open_storage(str(tmp_path / "lake"))
    return open_storage(f"{request.getfixturevalue(request.param).url}/lake")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


@pytest.fixture
def writer(out: Path) -> Writer:
    return Writer(out, writer="5b1c2f0e8d9a4e6f" * 2)


def finished(writer: Writer, count: int = 10, name: str = "") -> Path:
    writer.write(messages(count), name=name)
    return writer.finish()


def plan(out: Path, storage: Storage, **more: bool) -> UploadPlan:
    return UploadPlan(out, storage, "web1", **more)


def data_names(storage: Storage) -> list[str]:
    names = (entry.name for entry in storage.list())
    return sorted(name for name in names if not name.rpartition("/")[2].startswith("."))


def test_a_file_is_stored_with_its_index_and_a_manifest_that_says_what_it_is(
    out: Path, storage: Storage, writer: Writer
) -> None:
    path = finished(writer)

    assert upload(path, plan(out, storage)) == path.stat().st_size

    name = "clicks-000001.web1-5b1c2f0e8d9a4e6f-1.log.gz"
    assert sorted(entry.name for entry in storage.list()) == [
        f".{name}.index",
        f".{name}.manifest",
        name,
    ]
    assert storage.read(name) == path.read_bytes()
    assert storage.read(f".{name}.index") == index_of(path).read_bytes()
    manifest = json.loads(storage.read(f".{name}.manifest"))
    assert manifest["size"] == path.stat().st_size
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (manifest["writer"], manifest["number"]) == (writer.writer, 1)
    assert (manifest["messages"], manifest["min_ts"]) == (10, BEGIN)
    [archive] = find_archives([storage.url])
    assert len(list(read_messages(archive, lambda *problem: pytest.fail(str(problem))))) == 10


def test_what_is_stored_is_not_stored_again(out: Path, storage: Storage, writer: Writer) -> None:
    path = finished(writer)
    upload(path, plan(out, storage))
    before = {entry.name: entry.modified_ns for entry in storage.list()}

    assert upload(path, plan(out, storage)) == 0
    uploaded_of(path).unlink()  # the record is lost
    upload(path, plan(out, storage))

    assert {entry.name: entry.modified_ns for entry in storage.list()} == before
    assert uploaded_of(path).exists()


OTHER = UploadRecord("file:///", "clicks.web1-5b1c2f0e8d9a4e6f-17.log.gz").encode()


@pytest.mark.parametrize("record", [b"", OTHER])
def test_a_file_stays_until_a_whole_record_says_that_it_is_uploaded(
    out: Path, storage: Storage, writer: Writer, record: bytes
) -> None:
    path = finished(writer)
    size = path.stat().st_size
    uploaded_of(path).write_bytes(record)

    assert upload(path, plan(out, storage, deletes=True)) == size

    assert len(data_names(storage)) == 1
    assert (path.exists(), index_of(path).exists()) == (False, True)  # for the journal
    assert upload(path, plan(out, storage, deletes=True)) == 0


def test_prefixes_name_topic_and_date(out: Path, storage: Storage, writer: Writer) -> None:
    path = finished(writer, name="deep.log.gz")

    upload(path, plan(out, storage, by_topic_and_date=True))

    assert data_names(storage) == [
        "topic=clicks/date=2026-09-21/deep.web1-5b1c2f0e8d9a4e6f-1.log.gz"
    ]


def test_a_kill_between_the_upload_and_the_removal_leaves_the_removal_to_the_next_run(
    out: Path, storage: Storage, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = finished(writer), finished(writer)
    upload(other, plan(out, storage))  # by a run that was to keep it
    with monkeypatch.context() as killed:
        killed.setattr(upload_module, "_clear_up", lambda path, plan: None)
        upload(path, plan(out, storage, deletes=True))

    assert list(files_to_upload(out)) == [path]
    assert upload(path, plan(out, storage, deletes=True)) == 0
    assert (path.exists(), other.exists()) == (False, True)
    assert list(files_to_upload(out)) == []


STEPS = ["put_file", "verify", "put_if_absent"]
LATER_STEPS = ["read"]  # of one that is continued


@pytest.mark.parametrize("step", [*STEPS, *LATER_STEPS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_that_broke_off_anywhere_is_continued_under_its_name(
    out: Path,
    storage: Storage,
    writer: Writer,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    when: str,
) -> None:
    path = finished(writer)
    for breaking in ["put_file", step] if step in LATER_STEPS else [step]:
        real = getattr(type(storage), breaking)

        def breaks(*args: object, real: Callable[..., object] = real) -> object:
            if when == "after":
                with suppress(FileNotFoundError):
                    real(*args)
            raise ConnectionResetError(104, "broken off")

        with monkeypatch.context() as broken:
            broken.setattr(type(storage), breaking, breaks)
            with pytest.raises(OSError, match="broken off"):
                upload(path, plan(out, storage))
    assert path.exists()
    assert not uploaded_of(path).exists()
    assert uploading_of(path).exists()

    elsewhere = UploadPlan(out, storage, "renamed-host")
    assert upload(path, elsewhere) == path.stat().st_size

    [name] = data_names(storage)
    assert "web1-" in name
    assert storage.read(name) == path.read_bytes()
    assert not uploading_of(path).exists()


def test_data_that_arrives_changed_is_not_published(
    out: Path, storage: Storage, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished(writer)
    real = type(storage).put_file

    def spoils(self: Storage, name: str, source: Path) -> None:
        changed = bytearray(source.read_bytes())
        changed[30] ^= 1
        self.put(name, bytes(changed))

    monkeypatch.setattr(type(storage), "put_file", spoils)
    with pytest.raises(OSError, match="differs"):
        upload(path, plan(out, storage, deletes=True))
    assert path.exists()
    assert not any("manifest" in entry.name for entry in storage.list())

    monkeypatch.setattr(type(storage), "put_file", real)
    upload(path, plan(out, storage, deletes=True))
    assert len(data_names(storage)) == 1


@pytest.mark.parametrize("when", ["later", "meanwhile"])
def test_a_file_of_another_archiver_is_never_overwritten(
    out: Path,
    storage: Storage,
    writer: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    path, real = finished(writer), type(storage).put_file
    (tmp_path / "clone").mkdir()
    clone = Writer(tmp_path / "clone", writer=writer.writer)  # an image with its lock file, say
    other = finished(clone, count=11)

    def upload_other() -> None:
        with pytest.raises(NotUploadable, match="another file"):
            upload(other, plan(tmp_path / "clone", storage, deletes=True))

    def put_file(self: Storage, *args: Any) -> str:
        version = real(self, *args)
        monkeypatch.setattr(type(storage), "put_file", real)
        upload_other()
        return version

    if when == "meanwhile":
        monkeypatch.setattr(type(storage), "put_file", put_file)
    data = path.read_bytes()
    upload(path, plan(out, storage, deletes=True))
    upload_other()

    assert other.exists()
    assert storage.read(data_names(storage)[0]) == data


def test_two_processes_do_not_upload_one_file(out: Path, storage: Storage, writer: Writer) -> None:
    path = finished(writer)
    other = os.open(uploading_of(path), os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)

    assert upload(path, plan(out, storage)) == 0
    assert data_names(storage) == []

    os.close(other)
    assert upload(path, plan(out, storage)) > 0


def test_encryption_is_asked_of_the_store(out: Path, bucket: Bucket, writer: Writer) -> None:
    options = {"server_side_encryption": "aws:kms", "sse_kms_key_id": "alias/lake"}
    storage = open_storage(bucket.url, options)
    path = finished(writer)

    upload(path, plan(out, storage))

    [name] = data_names(storage)
    headers, _ = bucket.ask("HEAD", f"/{name}")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/lake"


def test_a_small_file_takes_three_requests(
    out: Path, bucket: Bucket, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index, data and manifest: the store's answers are their checksums."""
    asked: list[str] = []
    for name in ("put", "get", "head", "list", "delete"):
        real = getattr(S3Store, name)

        def counted(*args: object, name: str = name, real: Any = real, **more: object) -> object:
            asked.append(name)
            return real(*args, **more)

        monkeypatch.setattr(S3Store, name, counted)
    path = finished(writer)
    upload(path, plan(out, bucket.storage))

    assert asked == ["put", "put", "put"]


def test_where_the_etag_is_no_checksum_the_content_is_read_back(
    out: Path, bucket: Bucket, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = ObjectStorage.read_range

    def counted(
        self: ObjectStorage, name: str, start: int, length: int, version: str = ""
    ) -> bytes:
        read.append(name)
        return real(self, name, start, length, version)

    monkeypatch.setattr(ObjectStorage, "read_range", counted)
    monkeypatch.setattr("nsqtools.archive.storage_objects._md5_tag", lambda *args: "")
    upload(finished(writer), plan(out, bucket.storage))

    assert read == data_names(bucket.storage)


def test_what_earlier_runs_left_is_uploaded_first(
    out: Path, storage: Storage, writer: Writer
) -> None:
    odd = finished(writer, name="caf\udce9.log")  # no object is called so
    left = [finished(writer) for _ in range(3)]
    (out / "README").write_text("not an archive")
    uploads = Uploads(plan(out, storage, deletes=True))

    uploads.start()
    late = finished(writer)
    uploads.put(late)
    uploads.put(late)

    assert uploads.close() == odd.exists() == isinstance(storage, ObjectStorage)
    assert len(data_names(storage)) == 5 - odd.exists()
    assert (uploads.totals.files, uploads.totals.waiting_bytes) == (5 - odd.exists(), 0)
    assert [path for path in (*left, late) if path.exists()] == []
    assert (out / "README").exists()
