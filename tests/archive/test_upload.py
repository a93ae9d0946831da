"""Uploading finished files: complete, verified, under one name, resumed after any interruption."""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import Request, urlopen

import pytest
from obstore.store import S3Store
from plugins.archives import BEGIN_NS, Writer, bodies_at, numbered
from plugins.object_store import Bucket
from plugins.waiting import patience_s, wait_for_threads, wait_until

from nsqtools.archive import upload as upload_module
from nsqtools.archive.layout import index_of
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.storage_objects import BucketPlace
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


@pytest.fixture
def storage(lake_url: str) -> Place:
    return parse_place(lake_url)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def writer(out: Path) -> Writer:
    return Writer(out, writer="5b1c2f0e8d9a4e6f" * 2)


def finished(writer: Writer, count: int = 10, name: str = "") -> Path:
    writer.write(numbered(0, count), name=name)
    return writer.finish()


def plan(out: Path, storage: Place, **flags: bool) -> UploadPlan:
    return UploadPlan(out, storage, "web1", **flags)


def data_names(storage: Place) -> list[str]:
    names = (entry.name for entry in storage.list())
    return sorted(name for name in names if not name.rpartition("/")[2].startswith("."))


def test_a_file_is_stored_once_with_its_manifest(out: Path, storage: Place, writer: Writer) -> None:
    path, to = finished(writer), plan(out, storage, by_topic_and_date=True)
    lock_descriptor = os.open(uploading_of(path), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock_descriptor, fcntl.LOCK_EX)  # as another process does while it uploads the file
    assert upload(path, to) is None
    assert data_names(storage) == []
    os.close(lock_descriptor)

    assert upload(path, to) == path.stat().st_size

    folder, name = "topic=clicks/date=2026-09-21", "clicks-000001.web1-5b1c2f0e8d9a4e6f-1.log.gz"
    index, manifest, data = names = sorted(entry.name for entry in storage.list())
    assert names == [f"{folder}/{file}" for file in (f".{name}.index", f".{name}.manifest", name)]
    assert storage.read(data) == path.read_bytes()
    assert storage.read(index) == index_of(path).read_bytes()
    fields = json.loads(storage.read(manifest))
    assert fields["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (fields["size"], fields["messages"], fields["min_ts"]) == (
        path.stat().st_size,
        10,
        BEGIN_NS,
    )
    assert (fields["writer"], fields["number"]) == (writer.writer, 1)
    assert len(bodies_at(storage.url)) == 10
    times_of_objects = {entry.name: entry.modified_ns for entry in storage.list()}
    assert upload(path, to) is None
    uploaded_of(path).unlink()  # The record is lost.
    upload(path, to)
    assert {entry.name: entry.modified_ns for entry in storage.list()} == times_of_objects
    assert uploaded_of(path).exists()


OTHER = UploadRecord("file:///", "clicks.web1-5b1c2f0e8d9a4e6f-17.log.gz").encode()


@pytest.mark.parametrize("record", [b"", OTHER])
def test_a_file_is_kept_until_it_has_a_complete_upload_record(
    out: Path, storage: Place, writer: Writer, record: bytes
) -> None:
    path = finished(writer)
    size = path.stat().st_size
    uploaded_of(path).write_bytes(record)
    assert upload(path, plan(out, storage, deletes=True)) == size
    assert len(data_names(storage)) == 1
    # The journal still needs the index.
    assert (path.exists(), index_of(path).exists()) == (False, True)
    assert upload(path, plan(out, storage, deletes=True)) is None


def test_a_kill_between_upload_and_removal_leaves_the_removal_to_the_next_run(
    out: Path, storage: Place, writer: Writer
) -> None:
    path, other = finished(writer), finished(writer)
    upload(other, plan(out, storage))  # by a run that keeps files
    upload(path, plan(out, storage))
    uploading_of(path).touch()  # as left by a kill of a version that removes this file last
    assert list(files_to_upload(out)) == [path]
    assert upload(path, plan(out, storage, deletes=True)) is None
    assert (path.exists(), other.exists()) == (False, True)
    assert list(files_to_upload(out)) == []


@pytest.mark.parametrize("step", ["put_file", "verify", "put_if_absent", "read", "conflict"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_that_was_interrupted_anywhere_resumes_under_its_name(
    out: Path, storage: Place, writer: Writer, step: str, when: str
) -> None:
    path = finished(writer)
    # Only an upload that resumes reads.
    for breaking in {"read": ["put_file", step], "conflict": ["put_if_absent"]}.get(step, [step]):
        real = getattr(type(storage), breaking)

        def breaks(*args: object, real: Callable[..., object] = real) -> object:
            if step == "conflict":
                if str(args[1]).endswith(".index"):
                    return real(*args)
                raise FileExistsError(17, "broken off")
            if when == "after":
                with suppress(FileNotFoundError):
                    real(*args)
            raise ConnectionResetError(104, "broken off")

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(type(storage), breaking, breaks)
            with pytest.raises(OSError, match="broken off"):
                upload(path, plan(out, storage))
    assert [path_of(path).exists() for path_of in (uploading_of, uploaded_of)] == [True, False]

    assert upload(path, UploadPlan(out, storage, "renamed-host")) == path.stat().st_size

    [name] = data_names(storage)
    assert "web1-" in name
    assert storage.read(name) == path.read_bytes()
    assert not uploading_of(path).exists()


@pytest.mark.parametrize("has_checksum", [True, False])
def test_data_that_was_changed_in_transit_is_not_published(
    out: Path, storage: Place, writer: Writer, monkeypatch: pytest.MonkeyPatch, has_checksum: bool
) -> None:
    path = finished(writer)
    if not has_checksum:  # Without a checksum in the ETag, the content is read back.
        monkeypatch.setattr("nsqtools.archive.storage_objects._md5_tag", lambda *args: "")

    def spoils(self: Place, name: str, source: Path) -> None:
        changed = bytearray(source.read_bytes())
        changed[30] ^= 1
        self.put(name, bytes(changed))

    with monkeypatch.context() as spoiled:
        spoiled.setattr(type(storage), "put_file", spoils)
        with pytest.raises(OSError, match="differs"):
            upload(path, plan(out, storage, deletes=True))
    assert path.exists()
    assert not any("manifest" in entry.name for entry in storage.list())

    upload(path, plan(out, storage, deletes=True))
    assert len(data_names(storage)) == 1


@pytest.mark.parametrize("when", ["later", "meanwhile"])
def test_a_file_of_another_archiver_is_never_overwritten(
    out: Path, storage: Place, writer: Writer, tmp_path: Path, when: str
) -> None:
    path, real = finished(writer), type(storage).put_file
    (tmp_path / "clone").mkdir()
    # From an image that contains the lock file, for example.
    clone = Writer(tmp_path / "clone", writer=writer.writer)
    other = finished(clone, count=11)

    def upload_other() -> None:
        with pytest.raises(NotUploadable, match="another file"):
            upload(other, plan(tmp_path / "clone", storage, deletes=True))

    def put_file(self: Place, *args: Any) -> str:
        version = real(self, *args)
        upload_other()
        return version

    data = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        if when == "meanwhile":
            patch.setattr(type(storage), "put_file", put_file)
        upload(path, plan(out, storage, deletes=True))
    upload_other()

    assert other.exists()
    assert storage.read(data_names(storage)[0]) == data


def test_a_small_file_takes_three_requests_with_encryption_headers(
    out: Path, bucket: Bucket, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index, data and manifest: the store's responses have their checksums."""
    methods = {name: Mock(wraps=getattr(S3Store, name)) for name in ("put", "get", "head", "list")}
    for name, method in methods.items():
        monkeypatch.setattr(
            S3Store, name, lambda *args, method=method, **options: method(*args, **options)
        )
    options = {"server_side_encryption": "aws:kms", "sse_kms_key_id": "alias/lake"}
    storage = parse_place(bucket.url, options)
    upload(finished(writer), plan(out, storage))
    counts = {name: method.call_count for name, method in methods.items()}
    assert counts == {"put": 3, "get": 0, "head": 0, "list": 0}
    # The store checks only the form of the header.
    authorization = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
    place = f"{bucket.endpoint}/{bucket.name}/{data_names(storage)[0]}"
    with urlopen(Request(place, method="HEAD", headers={"Authorization": authorization})) as answer:
        assert answer.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert answer.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/lake"


def test_files_of_earlier_runs_are_uploaded_first(
    out: Path, storage: Place, writer: Writer
) -> None:
    odd = finished(writer, name="caf\udce9.log")  # An object cannot have this name.
    files = [finished(writer) for _ in range(3)]
    files[0].write_bytes(b"")  # as a file without messages and compression
    (out / "README").write_text("not an archive")
    uploaded_of(out / "gone.log").symlink_to("nowhere")  # An odd entry does not stop the upload.
    uploads = Uploads(plan(out, storage, deletes=True))

    uploads.start()
    files.append(finished(writer))
    for _ in range(2):
        uploads.put(files[-1])

    assert uploads.close() == odd.exists() == isinstance(storage, BucketPlace)
    assert len(data_names(storage)) == uploads.totals.files == 5 - odd.exists()
    assert uploads.totals.waiting_bytes == 0
    assert [path for path in files if path.exists()] == []
    assert (out / "README").exists()


def test_a_file_that_cannot_be_uploaded_does_not_block_others(
    out: Path, storage: Place, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "RETRY_BASE_S", 0.01)
    monkeypatch.setattr(upload_module, "CLOSE_FAILURE_S", 0.1)
    bad = finished(writer)
    uploading_of(bad).mkdir()
    uploads = Uploads(plan(out, storage))
    uploads.start()
    wait_until(lambda: uploads.totals.failures, what="a failure")

    uploads.put(finished(writer))

    wait_until(lambda: uploads.totals.files, what="the other", timeout_s=60)
    assert uploads.close() == 1
    wait_for_threads("nsq-upload-")


def test_concurrent_upload_failures_increase_the_backoff_once(
    out: Path, storage: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "RETRY_BASE_S", 0.5)
    monkeypatch.setattr(upload_module, "RETRY_MAX_S", 1000.0)
    together, failing = threading.Barrier(Uploads.THREADS), True

    def try_upload(path: Path, plan: UploadPlan) -> int:
        if failing:
            together.wait(patience_s(10))
            raise ConnectionResetError(104, "broken off")
        return 0

    monkeypatch.setattr(upload_module, "upload", try_upload)
    uploads = Uploads(plan(out, storage))
    for number in range(Uploads.THREADS):
        (out / str(number)).touch()
        uploads.put(out / str(number))
    uploads.start()
    wait_until(lambda: uploads.totals.failures == Uploads.THREADS, what="the failures")
    failing = False

    wait_until(lambda: not uploads.totals.waiting_files, what="all of them", timeout_s=20)
    assert uploads.close() == 0
