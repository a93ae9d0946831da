"""Archives in an object store are found, listed, verified, printed and replayed like local ones."""

import errno
import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from plugins.archives import BEGIN_NS, Writer, numbered, write_archive
from plugins.cli import RunNsq
from plugins.daemons import EmbeddedServer
from plugins.http_server import MakeServer
from plugins.object_store import BetweenPages, Bucket

from nsqtools.archive import storage_objects
from nsqtools.archive.finding import find_archives, find_inputs
from nsqtools.archive.layout import Head, Index, TimeRange, index_of, part_of
from nsqtools.archive.members import scan_members
from nsqtools.archive.place import DeniedError, LocalPlace, StoredObject
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import read_messages, scan_archive
from nsqtools.archive.storage_objects import BucketPlace
from nsqtools.archive.upload import UploadPlan
from nsqtools.archive.upload import upload as upload_file
from nsqtools.errors import RefusedError

SECOND = 10**9


@pytest.fixture
def lake(tmp_path: Path, bucket: Bucket) -> Path:
    """A directory and its copy in the bucket: two topics, one of them in Arrow, and bare bodies."""
    lake = tmp_path / "lake"
    write_archive(lake / "clicks.log.gz", numbered(0, 10), numbered(10, 20))
    write_archive(lake / "views" / "v.log.arrow", numbered(20, 30), topic="views")
    (lake / "zz.raw").write_bytes(b"one\ntwo\n")
    bucket.take(lake)
    return lake


@pytest.mark.parametrize("command", [["cat"], ["cat", "--bodies"], ["verify"], ["info", "--json"]])
def test_a_command_prints_the_same_for_a_url_and_a_directory(
    lake: Path, bucket: Bucket, run_nsq: RunNsq, command: list[str]
) -> None:
    for scheme, name in (("", ""), ("file://", "/views/v.log.arrow")):
        local = run_nsq(["archive", *command, f"{scheme}{lake}{name}"])
        stored = run_nsq(["archive", *command, f"{bucket.url}{name}"])
        assert local.status == stored.status == 0
        assert stored.out.replace(bucket.url.encode(), str(lake).encode()) == local.out
        assert stored.err == local.err


def test_folders_that_a_console_makes_in_a_bucket_are_not_files(
    lake: Path, bucket: Bucket, run_nsq: RunNsq
) -> None:
    for key in ("", "views/", "empty/", "out/"):
        put = Request(f"{bucket.endpoint}/{bucket.name}/lake/{key}", b"", method="PUT")
        urlopen(put).close()
    bucket.take(lake, "lake/")
    output = f"{bucket.url}/lake/out"

    listed = run_nsq(["archive", "info", f"{bucket.url}/lake", "--json"])
    assert [row["messages"] for row in json.loads(listed.out)] == [20, 2, 10]
    for command in (["convert"], ["compact", "--open-days"]):
        done = run_nsq(["archive", *command, str(lake / "views"), "-o", output])
        assert (done.status, "10 messages" in done.err) == (0, True)
        for name in [name for name in bucket.names() if name.startswith("lake/out/")]:
            bucket.storage.delete(name)
    converted = run_nsq(["archive", "convert", f"{bucket.url}/lake/views", "-o", output])
    assert (converted.status, "1 archive of 1" in converted.err) == (0, True)


def test_an_empty_object_is_converted_to_nothing(
    bucket: Bucket, run_nsq: RunNsq, tmp_path: Path
) -> None:
    bucket.storage.put("empty.log", b"")
    command = ["archive", "convert", f"{bucket.url}/empty.log", "-o", str(tmp_path / "t")]
    converted = run_nsq(command)
    assert (converted.status, "0 archives of 1, 0 messages" in converted.err) == (0, True)


def test_an_archive_in_a_bucket_is_replayed(
    lake: Path, bucket: Bucket, quick_nsqd: EmbeddedServer, run_nsq: RunNsq, tmp_path: Path
) -> None:
    place = ["--nsqd-tcp-address", quick_nsqd.tcp_address, "--topic", "all"]
    command = ["replay", bucket.url, *place, "--checkpoint", str(tmp_path / "checkpoint"), "--json"]
    assert run_nsq(command).status == 0
    second = run_nsq(command)
    assert quick_nsqd.topic_stats("all")["message_count"] == 32
    assert json.loads(second.out)["confirmed"] == 0


def test_a_file_uploaded_while_it_is_listed_is_found_with_its_index(
    tmp_path: Path, bucket: Bucket, between_pages: BetweenPages
) -> None:
    assert (find_archives([bucket.url]), find_inputs([parse_place(bucket.url)]).parquet) == ([], ())
    plan = UploadPlan(tmp_path, bucket.storage, "host")
    clicks, ads = Writer(tmp_path, topic="clicks"), Writer(tmp_path, topic="ads")
    for number in range(5):
        clicks.write(numbered(number, number + 1))
        upload_file(clicks.finish(), plan)
    ads.write(numbered(0, 3))
    late = ads.finish()
    between_pages(lambda: upload_file(late, plan))

    archives = find_archives([bucket.url])

    assert [archive.messages for archive in archives] == [3, 1, 1, 1, 1, 1]
    assert all(archive.head for archive in archives)


@pytest.mark.parametrize(
    ("method", "denied", "found"),
    [
        # Without the permission to list, S3 denies access to missing objects.
        ("read", ".zz.raw.index", 4),
        ("read", ".clicks.log.gz.index", 0),
        ("list", "_delta_log", 1),
        ("list", "day=1/_delta_log", 0),
    ],
)
@pytest.mark.usefixtures("lake")
def test_a_denied_object_counts_as_missing_unless_it_was_listed_or_requested(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, method: str, denied: str, found: int
) -> None:
    bucket.storage.put("day=1/a.raw", b"one\n")
    call = getattr(BucketPlace, method)

    def deny(storage: BucketPlace, name: str = "") -> object:
        if str(storage / name) == f"{bucket.url}/{denied}":
            raise DeniedError(errno.EACCES, "it is not allowed", name)
        return call(storage, name)

    monkeypatch.setattr(BucketPlace, method, deny)
    with nullcontext() if found else pytest.raises(RefusedError, match="it is not allowed"):
        assert len(find_archives([bucket.url + "/day=1" * (method == "list")])) == found


@pytest.mark.parametrize(
    ("command", "place", "status", "said"),
    [
        ("cat", "/nothing", 3, "there is no URL/nothing"),
        ("cat", "-missing/x", 3, "there is no URL-missing/x"),
        ("compact", "-missing/x", 3, "there is no URL-missing/x"),
        ("repair", "", 2, "not a local file"),
    ],
)
def test_a_missing_object_and_an_unsupported_command_are_reported(
    bucket: Bucket, run_nsq: RunNsq, command: str, place: str, status: int, said: str
) -> None:
    bucket.storage.put("x.log.gz", b"\x1f\x8brubbish")
    result = run_nsq(["archive", command, bucket.url + place])
    assert (result.status, said.replace("URL", bucket.url) in result.err) == (status, True)


def test_an_unreachable_or_refusing_store_is_reported_in_one_line(
    bucket: Bucket,
    run_nsq: RunNsq,
    nsq_env: dict[str, str],
    dead_address: str,
    http_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_objects, "RETRY", {"max_retries": 0})
    reasons = {4: "(cannot connect to the store)", 5: "403 Forbidden"}
    for address in (dead_address, http_server(403).address):
        nsq_env["AWS_ENDPOINT_URL"] = f"http://{address}"
        result = run_nsq(["archive", "info", f"{bucket.url}/x"])
        [line] = result.err.splitlines()
        assert f"cannot read {bucket.url}/x" in line
        assert reasons.pop(result.status) in line
    assert reasons == {}


def test_only_the_members_of_the_time_range_are_fetched(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fetched_bytes, read_range = tmp_path / "clicks.log", [], BucketPlace.read_range

    def counted(storage: BucketPlace, name: str, start: int, length: int, *version: str) -> bytes:
        fetched_bytes.append(length)
        return read_range(storage, name, start, length, *version)

    long = [message._replace(body=message.body * 30) for message in numbered(0, 20_000)]
    write_archive(path, *(long[begin : begin + 1000] for begin in range(0, 20_000, 1000)))
    bucket.take(tmp_path)
    monkeypatch.setattr(BucketPlace, "read_range", counted)
    [archive] = find_archives([bucket.url])

    within = TimeRange(BEGIN_NS + 10_000 * SECOND, BEGIN_NS + 10_100 * SECOND)
    messages = list(read_messages(archive, lambda path, problem: None, within=within))

    assert [int(message.id, 16) for message in messages] == list(range(10_000, 10_100))
    expected_bytes = max(path.stat().st_size // 2, 3 * archive.members[10].length)
    assert sum(fetched_bytes) < expected_bytes + (600 << 10)


@pytest.mark.parametrize("place", ["directory", "bucket"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [("changes", "changed while it was read"), ("vanishes", "removed before it was read")],
)
def test_a_file_that_changes_or_vanishes_before_it_is_read_is_damage(
    tmp_path: Path, bucket: Bucket, place: str, fault: str, said: str
) -> None:
    first = write_archive(tmp_path / "lake" / "a.log.gz", numbered(0, 10))
    write_archive(tmp_path / "lake" / "b.log.gz", numbered(10, 20))
    bucket.take(tmp_path / "lake")
    archives = find_archives([tmp_path / "lake" if place == "directory" else bucket.url])

    storage = archives[0].storage
    if fault == "vanishes":
        storage.delete("a.log.gz")
    else:
        content = bytearray(first.read_bytes())
        content[20] ^= 1
        storage.put("a.log.gz", bytes(content))
    problems: list[tuple[str, str]] = []
    messages = [
        message
        for archive in archives
        for message in read_messages(archive, lambda *p: problems.append(p))
    ]

    assert said in scan_archive(archives[0]).damage
    [(name, problem)] = problems
    assert (name, said in problem) == (str(storage / "a.log.gz"), True)
    assert len(messages) == 10


def test_a_file_that_is_finished_while_it_is_listed_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, list_all = Writer(tmp_path), LocalPlace.list
    writer.write(numbered(0, 10))
    [archive] = find_archives([tmp_path])
    assert archive.is_in_progress
    path = writer.finish()
    assert len(list(read_messages(archive, lambda *problem: pytest.fail(str(problem))))) == 10
    assert index_of(path).exists()

    output, work = tmp_path / "output", tmp_path / "work"
    for folder in (output, work):
        folder.mkdir()
    writer = Writer(work, output=output)
    writer.write(numbered(0, 10))

    def list_and_finish(storage: LocalPlace, prefix: str = "") -> Iterator[StoredObject]:
        if storage.path == work and part_of(work / path.name).exists():
            writer.finish()
        return list_all(storage, prefix)

    monkeypatch.setattr(LocalPlace, "list", list_and_finish)
    [archive] = find_archives([output, work])  # It has moved, which is reported.
    problems: list[str] = []
    assert not list(read_messages(archive, lambda _, problem: problems.append(problem)))
    assert problems == ["it was removed before it was read"]


def test_a_file_in_progress_with_the_head_of_another_one_is_read(tmp_path: Path) -> None:
    """Two machines that were cloned from one image number their files alike."""
    head = Head("a" * 32, 1)
    write_archive(tmp_path / "one.gz", numbered(0, 10), head=head)
    write_archive(tmp_path / "two.gz", numbered(10, 15), head=head, is_finished=False)
    assert [archive.messages for archive in find_archives([tmp_path])] == [10, 5]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("cut off", "its manifest has a size of"),
        ("another index", "not the one that was uploaded"),
        ("no index", "no such object"),
        ("torn manifest", "its manifest cannot be read"),
        ("another byte", "its content is not what was uploaded"),
    ],
)
def test_verify_compares_stored_files_with_their_manifest(
    tmp_path: Path, bucket: Bucket, run_nsq: RunNsq, spoil: str, said: str
) -> None:
    writer = Writer(tmp_path)
    writer.write(numbered(0, 10), numbered(10, 20))
    path = writer.finish()
    if spoil == "another byte":  # Plain text has no checksum of its own.
        path.write_bytes(gzip.decompress(path.read_bytes()))
        index_of(path).write_bytes(Index(None, scan_members(path)).encode())
    upload_file(path, UploadPlan(tmp_path, bucket.storage, "host"))
    assert run_nsq(["archive", "verify", bucket.url]).status == 0
    storage = bucket.storage
    index, manifest, name = bucket.names()

    data, lines = storage.read(name), storage.read(index).splitlines(keepends=True)
    if spoil == "cut off":
        storage.put(name, data[: int(lines[1].split()[1])])
        storage.put(index, b"".join(lines[:2]))
    elif spoil == "no index":
        storage.delete(index)
    else:
        replacements = {
            "another index": (index, b"".join(lines).replace(b"writer ", b"writer 0")),
            "another byte": (name, data.replace(b'body 7"}', b'body 8"}')),
            "torn manifest": (manifest, b"{"),
        }
        storage.put(*replacements[spoil])

    result = run_nsq(["archive", "verify", bucket.url])
    assert (result.status, said in result.out.decode()) == (1, True)
