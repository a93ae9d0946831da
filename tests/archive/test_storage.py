"""Place: the same behavior on a directory and on an object store."""

import errno
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.object_store import Bucket

from nsqtools.archive import place
from nsqtools.archive.place import ChangedError, LocalPlace, Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.storage_objects import PART_SIZE, RangeFile, s3_settings
from nsqtools.errors import NsqError, OutputError
from nsqtools.spark.spark_settings import store_conf, store_environ


@pytest.fixture(params=["file URL", "s3a"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A storage below a prefix, which does not exist yet."""
    if request.param == "file URL":
        return parse_place(f"file://{tmp_path}/with%20space")
    return parse_place(f"s3a://{request.getfixturevalue('bucket').name}/pre/fix")


def names(storage: Place, prefix: str = "") -> list[str]:
    return sorted(entry.name for entry in storage.list(prefix))


def test_files_are_written_read_listed_and_deleted(storage: Place, tmp_path: Path) -> None:
    assert names(storage) == []
    big = tmp_path / "big"
    big.write_bytes(os.urandom(PART_SIZE + 17))
    storage.put("topic=a b/.x.index", b"one")
    with ThreadPoolExecutor(4) as pool:  # Concurrent writes do not disturb each other.
        list(pool.map(storage.put_file, ["topic=a b/x", *["y.log"] * 5], [big] * 6))
    storage = pickle.loads(pickle.dumps(storage))  # It is sent to other processes.

    assert names(storage) == ["topic=a b/.x.index", "topic=a b/x", "y.log"]
    assert names(storage, "topic=a b/") == ["topic=a b/.x.index", "topic=a b/x"]
    assert names(storage, "topic=a") == []
    assert storage.read("topic=a b/.x.index") == b"one"
    assert storage.read_range("y.log", PART_SIZE, 100) == big.read_bytes()[PART_SIZE:]
    assert storage.read_range("y.log", 5, 3) == big.read_bytes()[5:8]
    for start in (PART_SIZE + 17, PART_SIZE + 18):
        assert storage.read_range("y.log", start, 3) == b""
    [entry] = [entry for entry in storage.list() if entry.name == "y.log"]
    assert entry == storage.stat("y.log")
    assert entry.size == PART_SIZE + 17
    assert entry.version

    for _ in range(2):
        storage.delete("y.log")
    assert names(storage) == ["topic=a b/.x.index", "topic=a b/x"]


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"5",
        b"null",
        b'{"version": 99}',
        b'{"rows": 1e999}',
        b'{"rows": NaN}',
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
)
def test_a_file_that_is_no_object_of_version_1_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "note.json").write_bytes(content)
    with pytest.raises(OutputError, match=r"^cannot read .*note\.json \("):
        LocalPlace(tmp_path).read_json("note.json")


def test_drafts_of_killed_writers_are_not_listed_and_removed_later(tmp_path: Path) -> None:
    storage, big = LocalPlace(tmp_path), tmp_path / "big"
    big.write_bytes(b"whole")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_bytes(b"old")
    drafts = [tmp_path / "d" / f".x.{number}.tmp" for number in ("0" * 16, "1" * 16)]
    for path in (*drafts, tmp_path / "d/.x.copy"):
        path.write_bytes(b"half of what was written before")
    os.utime(drafts[0], (0, 0))
    assert names(storage, "d") == ["d/x"]

    umask = os.umask(0o077)
    storage.put_file("d/x", big)
    os.umask(umask)

    assert storage.read("d/x") == b"whole"
    assert (tmp_path / "d/x").stat().st_mode & 0o777 == 0o600
    # The second may still have a writer.
    assert [path.exists() for path in drafts] == [False, True]
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(OSError, match="not a name below"):
            storage.put(name, b"")


def test_a_file_that_is_removed_while_its_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    status_of = place.status_of

    def status_after_removal(path: Path) -> os.stat_result:
        if path.name == "a":
            path.unlink()
        return status_of(path)

    monkeypatch.setattr(place, "status_of", status_after_removal)
    entries, folders = LocalPlace(tmp_path).children()
    assert ([entry.name for entry in entries], folders) == (["b"], ["folder"])


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_an_object_is_put_only_by_the_first_writer(
    storage: Place, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool
) -> None:
    if not has_hard_links:  # as on FAT or on some network file systems
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "no")))
    storage.put_if_absent("d/m", b"one")
    with pytest.raises(FileExistsError) as caught:
        storage.put_if_absent("d/m", b"two")
    assert caught.value.filename == str(storage / "d/m")
    assert storage.read("d/m") == b"one"
    assert names(storage) == ["d/m"]


def test_a_changed_byte_is_reported_and_a_range_of_a_replaced_object_refused(
    storage: Place, tmp_path: Path
) -> None:
    for size in (3, PART_SIZE + 5):
        file = tmp_path / "file"
        file.write_bytes(os.urandom(size))
        storage.put_file("x", file)
        storage.verify("x", file)

        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(ChangedError):
            storage.verify("x", file)
    storage.put("x", b"one")
    version = storage.stat("x").version
    assert storage.read_range("x", 0, 3, version) == b"one"
    storage.put("x", b"two")
    with pytest.raises(ChangedError):
        storage.read_range("x", 0, 3, version)
    assert storage.read_range("x", 0, 3) == b"two"


def test_an_object_reads_like_a_file_and_a_missing_one_is_named(storage: Place) -> None:
    content = b"".join(b"%d\n" % number for number in range(100_000))
    storage.put("x", content)
    file = storage.open("x")

    assert file.seek(0, os.SEEK_END) == len(content)
    assert file.read(5) == b""
    file.seek(400_000)
    assert file.read(10) == content[400_000:400_010]
    assert file.read() == content[400_010:]
    file.seek(3)
    lines = file.readlines(1000)
    assert b"".join(lines) == content[3 : file.tell()]
    file.close()
    with pytest.raises(ChangedError):  # of a store without versions, where the object was replaced
        RangeFile(storage, "x", len(content) + 1, "").read()
    storage.put("there", b"")
    for call in (storage.read, storage.stat, storage.open, lambda n: storage.read_range(n, 0, 1)):
        with pytest.raises(FileNotFoundError) as caught:
            call("d/nothing")
        assert caught.value.filename == str(storage / "d/nothing")


def test_without_obstore_the_hint_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(NsqError, match="obstore") as caught:
        parse_place("s3://bucket/x")
    assert "nsqtools[object-store]" in caught.value.hint


@pytest.fixture
def aws_home(tmp_path: Path) -> dict[str, str]:
    aws = tmp_path / ".aws"
    aws.mkdir()
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = ds\n"
        "[lake]\naws_access_key_id=l\naws_secret_access_key=ls\naws_session_token=lt\n"
    )
    (aws / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile lake]\nendpoint_url = http://lake:9000\n"
    )
    return {"HOME": str(tmp_path)}


def test_keys_come_from_options_environment_or_profile_also_for_spark(
    aws_home: dict[str, str],
) -> None:
    default = s3_settings({}, aws_home)
    assert (default.access_key_id, default.secret_access_key, default.region) == (
        "d",
        "ds",
        "eu-west-1",
    )
    lake = s3_settings({}, aws_home | {"AWS_PROFILE": "lake", "AWS_REGION": "r"})
    assert (lake.access_key_id, lake.session_token) == ("l", "lt")
    assert (lake.endpoint, lake.region) == ("http://lake:9000", "r")
    keys = {"AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "es"}
    assert s3_settings({}, aws_home | {"AWS_PROFILE": "lake"} | keys).session_token == ""
    option = {"access_key_id": "o", "secret_access_key": "os"}
    assert s3_settings(option, aws_home | keys).secret_access_key == "os"
    assert "ls" not in repr(lake)
    conf = store_conf(lake)
    secrets = {lake.access_key_id, lake.secret_access_key, lake.session_token}
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "http://lake:9000"
    assert conf["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "false"
    assert secrets <= set(store_environ(lake).values())
    assert not secrets & set(conf.values())
    conf = store_conf(default)
    assert conf["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"
    assert "spark.hadoop.fs.s3a.endpoint" not in conf


def test_keys_that_are_rotated_in_the_profile_are_used_immediately(
    aws_home: dict[str, str], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", aws_home["HOME"])
    storage = bucket.storage
    storage.put("a", b"1")
    assert storage._store.config["access_key_id"] == "d"
    assert storage._store is storage._store

    new_file = Path(aws_home["HOME"], ".aws", "new")
    new_file.write_text("[default]\naws_access_key_id = n\naws_secret_access_key = ns\n")
    new_file.replace(new_file.with_name("credentials"))
    storage.put("a", b"2")

    assert storage._store.config["access_key_id"] == "n"
    assert storage.read("a") == b"2"


@pytest.mark.parametrize(
    ("url", "kind"),
    [("gs://b/p", "GCS"), ("az://c/p", "Azure"), ("abfss://c@a.dfs.core.windows.net/p", "Azure")],
)
def test_other_stores_open(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    storage = parse_place(url)
    assert type(storage._store).__name__ == f"{kind}Store"
    assert (storage.name, storage.parent.name) == ("p", "")
