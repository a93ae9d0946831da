"""``nsq to-file --upload`` and ``--store``: uploads, landing in tables, and failures."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    bodies_at,
    ended,
    finished_files,
    to_file,
    unfinished,
    wait_until_archived,
    write_archive,
)
from plugins.cli import RunNsq, SpawnNsq
from plugins.object_store import Bucket
from plugins.servers import GoNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.body_schema import json_schema
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.finding import find_archives
from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import Head
from nsqtools.archive.table_writer import TablePlan
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind

DEADLINE_S = patience_s(60.0)
BLOCKED = ["--filename-format", "blocked/<TOPIC>.<HOST><REV>.<DATETIME>.log"]
"""Put files into the folder ``blocked`` of the store."""


@pytest.fixture
def nsqd(go_nsqd: MakeNsqd) -> GoNsqd:
    nsqd = go_nsqd("-msg-timeout=10s")
    nsqd.create_channel(TOPIC, CHANNEL)
    return nsqd


def messages_at(url: str) -> int:
    return sum(archive.messages or 0 for archive in find_archives([url]))


def test_a_failed_upload_is_status_6_and_the_next_run_uploads_it(
    nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.archive.upload.CLOSE_FAILURE_S", 0.5)
    out, blocked = tmp_path / "out", tmp_path / "lake" / "blocked"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    nsqd.publish(TOPIC, b"one")
    upload = ["--upload", str(blocked.parent), *BLOCKED]

    result = run_nsq(to_file(nsqd.tcp_address, out, "-n", "1", *upload))

    assert result.status == 6
    assert "1 file not uploaded; the next run continues" in result.err
    assert str(blocked) in result.err
    assert len(finished_files(out)) == 1
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0

    blocked.unlink()
    assert run_nsq(to_file(nsqd.tcp_address, out, "--for=500ms", *upload)).status in (0, 7)
    assert messages_at(str(blocked.parent)) == 1


def test_consumption_pauses_at_the_limit_until_the_store_is_back(
    nsqd: GoNsqd, tmp_path: Path, spawn_nsq: SpawnNsq
) -> None:
    out, blocked = tmp_path / "out", tmp_path / "lake" / "blocked"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    sent = 60
    limits = ["--rotate-text-size", "10KB", "--max-in-flight", "10", "--max-local-bytes", "100KB"]
    nsqd.publish(TOPIC, *[b"x" * 1000] * sent)
    options = ["--upload", str(blocked.parent), *BLOCKED, *limits, "--listen-http", "0", "-v"]
    process = spawn_nsq(to_file(nsqd.tcp_address, out, *options))
    health_line = next(line for line in iter(process.stderr.readline, b"") if b"/health" in line)
    (url,) = re.findall(r"http://\S+/metrics", health_line.decode())
    wait_until_archived(nsqd)

    def is_paused() -> bool:
        nonlocal sent
        if (left := unfinished(nsqd, TOPIC, CHANNEL)) < 20:
            nsqd.publish(TOPIC, *[b"x" * 1000] * 5)
            sent += 5
            return False
        time.sleep(0.5)
        return unfinished(nsqd, TOPIC, CHANNEL) == left

    wait_until(is_paused, what="a pause", timeout_s=DEADLINE_S)
    assert sum(path.stat().st_size for path in finished_files(out)) >= 100_000
    assert httpx.get(url.replace("metrics", "health"), timeout=DEADLINE_S).status_code == 503

    blocked.unlink()
    wait_until_archived(nsqd)
    stderr = ended(process)

    assert "consumption pauses" in stderr
    assert "consumption resumes" in stderr
    reasons = re.findall("cannot upload .*", stderr)  # a repair meanwhile may add another
    assert 0 < len(reasons) == len(set(reasons))
    assert messages_at(str(blocked.parent)) == sent


@pytest.mark.parametrize("small_disk", ["400k"], indirect=True)
def test_uploads_free_a_disk_that_is_full_of_waiting_files(
    nsqd: GoNsqd, tmp_path: Path, small_disk: Path, spawn_nsq: SpawnNsq
) -> None:
    blocked = tmp_path / "lake" / "blocked"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    nsqd.publish(TOPIC, *[b"x" * 10_000] * 60)
    upload = ["--upload", str(blocked.parent), "--delete-uploaded", *BLOCKED]
    limits = ["--rotate-text-size", "60KB", "--consumer-opt", "max_backoff_duration=1s"]
    limits += ["--max-in-flight", "2"]
    process = spawn_nsq(to_file(nsqd.tcp_address, small_disk, *upload, *limits))
    assert process.stderr is not None
    next(line for line in iter(process.stderr.readline, b"") if b"No space left" in line)
    with suppress(OSError), (small_disk / "filler").open("wb", 0) as filler:
        while True:
            filler.write(bytes(4096))

    blocked.unlink()
    wait_until_archived(nsqd)
    ended(process)

    assert messages_at(str(blocked.parent)) == 60


def test_a_missing_bucket_is_reported_before_any_message_is_consumed(
    run_nsq: RunNsq, nsqd: GoNsqd, bucket: Bucket, tmp_path: Path
) -> None:
    nsqd.publish(TOPIC, b"one")

    result = run_nsq(to_file(nsqd.tcp_address, tmp_path, "--upload", "s3://nope/nsq"))

    error = "nsq: error: cannot use s3://nope/nsq (bucket nope does not exist)\n"
    assert (result.status, result.err) == (3, error)
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"], stats["requeue_count"]) == (1, 0)


BASE_NS = 1_700_000_000_000_000_123
BODIES = [b'{"user": 1, "country": "de"}', b'{"user": "x"}', b"text", b"\xff\x00", b'{"new": 2.5}']


def clicks(*bodies: bytes) -> list[WireMessage]:
    return [WireMessage(BASE_NS + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]


def log_of(path: Path, number: int, *bodies: bytes) -> Path:
    """Write a finished log with the number in its writer's sequence."""
    return write_archive(path, clicks(*bodies), head=Head("a" * 32, number))


@pytest.mark.parametrize("store", ["parquet", "delta"])
def test_archived_messages_are_in_the_table_before_the_command_ends(
    nsqd: GoNsqd, tmp_path: Path, bucket: Bucket, run_nsq: RunNsq, store: str
) -> None:
    """Parquet goes to a directory, Delta to a bucket."""
    nsqd.publish(TOPIC, *BODIES)
    place = str(tmp_path / "out") if store == "parquet" else f"{bucket.url}/lake"
    upload = [] if store == "parquet" else ["--upload", place]
    (tmp_path / "note").write_text(f'echo "$1" >> {tmp_path / "paths"}')
    options = ["-n", "5", "--store", store, *upload, "--body", "json", "--json", "--fail-on-misfit"]
    options += ["--on-file", f"sh {tmp_path / 'note'} {{path}}"]
    letters = tmp_path / "dead.jsonl"
    options += ["--dead-letter-file", str(letters)]

    result = run_nsq(to_file(nsqd.tcp_address, tmp_path / "out", *options))

    assert result.status == 6, result.err  # as some bodies did not fit
    assert "3 bodies did not fit the columns" in result.err
    document = json.loads(result.out)
    names = ("uploaded", "not_uploaded", "on_file_failures", "misfits")
    assert [document[name] for name in names] == [1, 0, 0, 3]
    redriven = run_nsq(["redrive", str(letters), "--dry-run"])
    assert redriven.out.count(b"1 message for clicks: ") == 3
    printed = run_nsq(["archive", "cat", place])
    assert (printed.status, printed.err) == (0, "")
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert rows.pop(3)["body64"] == "/wA="
    assert [row["body"].encode() for row in rows] == [*BODIES[:3], BODIES[4]]
    assert {(row["topic"], row["attempts"]) for row in rows} == {(TOPIC, 1)}
    (info,) = json.loads(run_nsq(["archive", "info", place, "--json"]).out)
    assert (info["messages"], info["topics"], info["format"]) == (5, TOPIC, "parquet")
    assert (tmp_path / "paths").read_text() == f"{info['file']}\n"
    verified = run_nsq(["archive", "verify", place])
    assert (verified.status, verified.err) == (0, "nsq: 1 file, 5 messages, 0 damaged\n")
    assert list(tmp_path.rglob("*.log.arrow")) == []


@pytest.mark.parametrize("suffix", [".gz", ".arrow"])
def test_a_damaged_log_does_not_land_and_is_kept(tmp_path: Path, suffix: str) -> None:
    damaged = log_of(tmp_path / f"a.log{suffix}", 1, b"1")
    good = log_of(tmp_path / f"b.log{suffix}", 2, b"3")
    bare = log_of(tmp_path / "c.log.gz", 3, b"5")  # as of --format raw, or damaged at its beginning
    bare.write_bytes(b"x" + bare.read_bytes().replace(b"\n", b"x")[1:])
    damaged.write_bytes(damaged.read_bytes()[:-30] + bytes(30))

    lander = Lander(TablePlan(str(tmp_path / "table"), False, "web1"), tmp_path)
    landed = lander.land([damaged, bare, good])
    refused = landed.refused

    assert (bodies_at(landed.files[0].path), list(refused)) == ([b"3"], [damaged, bare])
    assert "it is damaged" in refused[damaged]
    assert refused[bare] == "it has bare bodies, which have no topic"
    assert (damaged.exists(), bare.exists(), good.exists()) == (True, True, False)


@pytest.mark.parametrize("is_delta", [False, True], ids=["parquet", "delta"])
def test_every_value_of_a_partition_is_kept(tmp_path: Path, is_delta: bool) -> None:
    values = ["\u00e9 x/y", "a=b%20", "", None, "..", "__HIVE_DEFAULT_PARTITION__", "x"]
    table = str(tmp_path / "table")
    bodies = [json.dumps({"c": value}).encode() for value in values]
    fields = {"properties": {"c": {"type": "string"}}}
    plan = TablePlan(table, is_delta, "web1", BodyKind.json, fields, ("c",))

    assert Lander(plan, tmp_path).land([log_of(tmp_path / "a.log", 1, *bodies)]).refused == {}
    assert bodies_at(table) == sorted(bodies)


@pytest.mark.parametrize("is_delta", [False, True], ids=["parquet", "delta"])
def test_a_log_number_used_again_after_restoring_a_snapshot_lands(
    tmp_path: Path, is_delta: bool
) -> None:
    plan = TablePlan(str(tmp_path / "table"), is_delta, "web1")
    logs, snapshot = tmp_path / "logs", tmp_path / "snapshot"

    def land(number: int, at: int) -> None:
        log = write_archive(
            logs / f"{number}.log", clicks(*[b""] * at, b"x")[at:], head=Head("a" * 32, number)
        )
        assert len(Lander(plan, logs).land([log]).files) == 1

    land(1, 0)
    shutil.copytree(logs, snapshot)
    land(2, 1)
    shutil.rmtree(logs)
    snapshot.rename(logs)
    land(2, 2)

    assert messages_at(plan.url) == 3


def test_a_column_that_another_writer_made_keeps_its_type(tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    plan, misfits = TablePlan(table, True, "web1", BodyKind.json), []
    odd = b'{"n": 2, "m": true, "\\u0000": 1}'  # Delta truncates such a name
    for number, body in enumerate((b'{"n": 1}', b'{"n": "one"}', odd)):
        log = log_of(tmp_path / f"{number}.log", number, body)
        misfits.append(Lander(plan, tmp_path).land([log]).unfit.bodies)

    assert misfits == [0, 1, 0]
    fields = [field for field in DeltaCatalog(table).schema() if field.name in ("n", "m")]
    assert json_schema(fields)["properties"] == {"n": {"type": "integer"}, "m": {"type": "boolean"}}


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_the_landing_process_ends_cleanly(
    tmp_path: Path, nsq_env: dict[str, str], count: int
) -> None:
    plan = TablePlan(str(tmp_path / "table"), True, "web1")
    code = "from nsqtools.archive.landing import main; main()"
    for number in range(count):
        log = log_of(tmp_path / f"{number}.log", number, b"%d" % number)
        job = pickle.dumps((plan, tmp_path)) + pickle.dumps([log])
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=job,
            env=os.environ | nsq_env,
            capture_output=True,
            timeout=patience_s(30),
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert pickle.loads(done.stdout).refused == {}


def test_topics_with_columns_get_their_own_tables(
    nsqd: GoNsqd, tmp_path: Path, run_nsq: RunNsq
) -> None:
    lake = tmp_path / "lake"
    nsqd.create_channel("other", CHANNEL)
    nsqd.publish(TOPIC, b'{"id": 7}')
    nsqd.publish("other", b'{"id": "7"}')
    typed = ["-t", "other", "--store", "delta", "--body", "json", "-n", "2"]

    result = run_nsq(to_file(nsqd.tcp_address, lake, *typed))

    assert result.status == 0, result.err
    assert f"each topic has its own table and columns: {lake}/{{topic}}" in result.err
    for topic, kind in ((TOPIC, "int64"), ("other", "string")):
        assert DeltaCatalog(str(lake / topic)).schema().field("body_id").type == kind
    assert messages_at(str(lake)) == 2
