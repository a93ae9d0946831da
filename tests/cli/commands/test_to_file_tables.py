"""``nsq to-file --store``, and what of it lands in a table."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import Writer, write_archive
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd
from plugins.object_store import Bucket
from plugins.waiting import patience_s

from nsqtools.archive.body_columns import json_schema
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.finding import find_archives
from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import Head
from nsqtools.archive.reader import read_messages
from nsqtools.archive.table import TablePlan
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind

TOPIC, CHANNEL = "clicks", "archive"
BASE_NS = 1_700_000_000_000_000_123
BODIES = [b'{"user": 1, "country": "de"}', b'{"user": "x"}', b"text", b"\xff\x00", b'{"new": 2.5}']


@pytest.fixture
def nsqd(go_nsqd: Callable[..., GoNsqd]) -> GoNsqd:
    nsqd = go_nsqd()
    nsqd.create_channel(TOPIC, CHANNEL)
    return nsqd


def clicks(*bodies: bytes) -> list[WireMessage]:
    return [WireMessage(BASE_NS + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]


@pytest.mark.parametrize(("store", "where"), [("parquet", "directory"), ("delta", "bucket")])
def test_what_was_archived_is_in_the_table_before_the_command_ends(
    nsqd: GoNsqd, tmp_path: Path, bucket: Bucket, run_nsq: RunNsq, store: str, where: str
) -> None:
    nsqd.publish(TOPIC, *BODIES)
    place = str(tmp_path / "out") if where == "directory" else f"{bucket.url}/lake"
    upload = [] if where == "directory" else ["--upload", place]
    (tmp_path / "note").write_text(f'echo "$1" >> {tmp_path / "paths"}')
    command = ["to-file", "-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", nsqd.tcp_address]
    command += ["--output-dir", str(tmp_path / "out"), "-n", "5", "--store", store, *upload]
    command += ["--body", "json", "--json", "--on-file", f"sh {tmp_path / 'note'} {{path}}"]

    result = run_nsq(command)

    assert result.status == 0, result.err
    document = json.loads(result.out)
    names = ("uploaded", "not_uploaded", "on_file_failures", "misfits")
    assert [document[name] for name in names] == [1, 0, 0, 3]
    printed = run_nsq(["archive", "cat", place])
    assert (printed.status, printed.err) == (0, "")
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row.get("body") for row in rows] == [
        body.decode() if body != BODIES[3] else None for body in BODIES
    ]
    assert rows[3]["body64"] == "/wA="
    assert {(row["topic"], row["attempts"]) for row in rows} == {(TOPIC, 1)}
    (info,) = json.loads(run_nsq(["archive", "info", place, "--json"]).out)
    assert (info["messages"], info["topics"], info["format"]) == (5, TOPIC, "parquet")
    assert (tmp_path / "paths").read_text() == f"{info['file']}\n"
    verified = run_nsq(["archive", "verify", place])
    assert (verified.status, verified.err) == (0, "nsq: 1 file, 5 messages, 0 damaged\n")
    assert list(tmp_path.rglob("*.log")) == []


def test_a_log_that_is_damaged_does_not_land_and_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(clicks(b"1"), clicks(b"2"))
    damaged = writer.finish()
    writer.write(clicks(b"3"))
    good = writer.finish()
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-30] + bytes(30))

    lander = Lander(TablePlan(str(tmp_path / "table"), False, "web1"), tmp_path)
    files, refused, _ = lander.land([damaged, good])

    assert ([each.rows for each in files], list(refused)) == ([1], [damaged])
    assert "it is damaged" in refused[damaged]
    assert (damaged.exists(), good.exists()) == (True, False)


@pytest.mark.parametrize("is_delta", [False, True], ids=["parquet", "delta"])
def test_every_value_of_a_partition_is_kept(tmp_path: Path, is_delta: bool) -> None:
    values = ["\u00e9 x/y", "a=b%20", "", None, "..", "__HIVE_DEFAULT_PARTITION__", "x"]
    writer, table = Writer(tmp_path), str(tmp_path / "table")
    bodies = [json.dumps({"c": value}).encode() for value in values]
    writer.write(clicks(*bodies))
    fields = {"properties": {"c": {"type": "string"}}}
    plan = TablePlan(table, is_delta, "web1", BodyKind.json, fields, ("c",))

    assert Lander(plan, tmp_path).land([writer.finish()]).refused == {}
    found = [
        message.body
        for archive in find_archives([table])
        for message in read_messages(archive, lambda *problem: pytest.fail(str(problem)))
    ]
    assert sorted(found) == sorted(bodies)


@pytest.mark.parametrize("is_delta", [False, True], ids=["parquet", "delta"])
def test_what_lands_after_a_return_to_a_snapshot_is_not_taken_for_what_had_landed(
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

    assert sum(each.messages or 0 for each in find_archives([plan.url])) == 3


def test_a_column_that_another_writer_made_keeps_its_type(tmp_path: Path) -> None:
    table = str(tmp_path / "table")

    def land(body: bytes) -> None:
        directory = tmp_path / body.hex()
        directory.mkdir()
        writer = Writer(directory)
        writer.write(clicks(body))
        plan = TablePlan(table, True, "web1", BodyKind.json)
        misfits.append(Lander(plan, directory).land([writer.finish()]).misfits)

    misfits: list[int] = []
    for body in (b'{"n": 1}', b'{"n": "one"}', b'{"n": 2, "m": true}'):
        land(body)

    assert misfits == [0, 1, 0]
    fields = [each for each in DeltaCatalog(table).schema() if each.name in ("n", "m")]
    assert json_schema(fields)["properties"] == {"n": {"type": "integer"}, "m": {"type": "boolean"}}


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_the_process_that_lands_ends_cleanly_each_time(
    tmp_path: Path, nsq_env: dict[str, str], count: int
) -> None:
    plan = TablePlan(str(tmp_path / "table"), True, "web1")
    code = "from nsqtools.archive.landing import main; main()"
    for number in range(count):
        directory = tmp_path / str(number)
        directory.mkdir()
        writer = Writer(directory)
        writer.write(clicks(b"%d" % number))
        ended = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=pickle.dumps((plan, directory)) + pickle.dumps([writer.finish()]),
            env=os.environ | nsq_env,
            capture_output=True,
            timeout=patience_s(30),
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert pickle.loads(ended.stdout).refused == {}
