"""Landing in a table, killed at every step: each message is there once, and nothing is half there.

The process that lands kills itself before or after the steps that change something, one after the
other; then it runs again. The long form also kills ``nsq to-file`` under load, again and again.
"""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from plugins.archives import (
    CHANNEL,
    KILLING_ITSELF,
    TOPIC,
    Writer,
    assert_each_once,
    ended,
    killed_again_and_again,
    to_file,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.object_store import Bucket
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s

from nsqtools.archive.catalog import find_inputs
from nsqtools.archive.compaction import Compaction, Selection, in_processes
from nsqtools.archive.finding import find_archives
from nsqtools.archive.landing import DRAFTS, Lander
from nsqtools.archive.reader import read_messages
from nsqtools.archive.slices import Settings
from nsqtools.archive.table import TablePlan
from nsqtools.protocol.frames import WireMessage

DAY_NS = 86_400 * 10**9
BASE_NS = 20_000 * DAY_NS
DEADLINE_S = patience_s(90.0)

LANDING = f"""
{KILLING_ITSELF}
import pickle
from pathlib import Path
from nsqtools.archive import landing, parquet
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.storage import LocalStorage
from nsqtools.archive.storage_objects import ObjectStorage

around(parquet.ParquetWriter, "close")
around(landing, "replace_file", "sync_folder")
around(DeltaCatalog, "create", "commit")
around(LocalStorage, "put_file", "put")
around(ObjectStorage, "put_file", "put")
plan = pickle.loads(bytes.fromhex(sys.argv[2]))
landing.Lander(plan, Path(sys.argv[3])).land(list(map(Path, sys.argv[4:])))
print("landed")
"""


def logs_of(directory: Path) -> list[Path]:
    """Two logs: one spans two days."""
    writer, paths = Writer(directory, topic=TOPIC), []
    for number, times in enumerate([(0, 1), (2, DAY_NS, DAY_NS + 1)]):
        messages = [
            WireMessage(BASE_NS + at, 1, b"%016d" % (number * 10 + n), b"%d %d" % (number, n))
            for n, at in enumerate(times)
        ]
        writer.write(messages)
        paths.append(writer.finish())
    return paths


def bodies_at(place: str) -> list[bytes]:
    problems: list[tuple[str, str]] = []
    found = [
        message.body
        for archive in find_archives([place])
        for message in read_messages(archive, lambda *problem: problems.append(problem))
    ]
    assert problems == []
    return sorted(found)


ALL = [b"0 0", b"0 1", b"1 0", b"1 1", b"1 2"]


def landed_until_killed(plan: TablePlan, step: int, logs: Path, env: dict[str, str]) -> bool:
    """Land the logs in another process, which kills itself; tell whether it came to its end."""
    paths = map(str, logs_of(logs))
    killed = subprocess.run(
        [sys.executable, "-c", LANDING, str(step), pickle.dumps(plan).hex(), str(logs), *paths],
        env=env,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert killed.returncode in (0, -signal.SIGKILL), killed.stderr.decode()
    return killed.returncode == 0


@pytest.mark.parametrize(
    ("is_delta", "where", "every"),
    [
        pytest.param(True, "directory", 4, id="delta"),
        pytest.param(False, "bucket", 6, id="parquet-bucket"),
        pytest.param(True, "directory", 1, id="delta-all", marks=pytest.mark.slow),
        pytest.param(True, "bucket", 1, id="delta-bucket-all", marks=pytest.mark.slow),
        pytest.param(False, "directory", 1, id="parquet-all", marks=pytest.mark.slow),
        pytest.param(False, "bucket", 1, id="parquet-bucket-all", marks=pytest.mark.slow),
    ],
)
def test_killed_at_each_step_every_message_lands_once(
    tmp_path: Path, bucket: Bucket, nsq_env: dict[str, str], is_delta: bool, where: str, every: int
) -> None:
    for step in range(0, 100, every):
        place = str(tmp_path / f"table-{step}") if where == "directory" else bucket.url
        place += f"/{step}"
        logs = tmp_path / f"logs-{step}"
        logs.mkdir()
        plan = TablePlan(place, is_delta, "web1")
        is_over = landed_until_killed(plan, step, logs, nsq_env)

        Lander(plan, logs).land(list(logs.glob("*.log.gz")))

        assert bodies_at(place) == ALL, f"killed at step {step}"
        assert list(logs.rglob("*.log.gz")) == []
        assert {path.name for path in (logs / DRAFTS).iterdir()} == {"lock", "state.json"}
        if is_over:
            assert step > 8
            return
    pytest.fail("it never came to its end")


def compacted(place: Path, output: Path | None) -> None:
    if not place.exists():
        return
    compaction = Compaction(find_inputs([place]), output, Selection(), Settings())
    with compaction.locked():
        compaction.plan()
        compaction.run(in_processes(1))


@pytest.mark.parametrize(
    ("is_delta", "every"),
    [
        pytest.param(True, 7, id="delta"),
        pytest.param(False, 6, id="parquet"),
        pytest.param(True, 1, id="delta-all", marks=pytest.mark.slow),
        pytest.param(False, 1, id="parquet-all", marks=pytest.mark.slow),
    ],
)
def test_killed_and_compacted_before_it_goes_on_every_message_is_there_once(
    tmp_path: Path, nsq_env: dict[str, str], is_delta: bool, every: int
) -> None:
    """What was compacted is even removed, as who compacts to another place may do."""
    for step in range(1, 100, every):
        place, logs = tmp_path / f"table-{step}", tmp_path / f"logs-{step}"
        output = None if is_delta else tmp_path / f"output-{step}"
        logs.mkdir()
        plan = TablePlan(str(place), is_delta, "web1")
        is_over = landed_until_killed(plan, step, logs, nsq_env)
        compacted(place, output)
        if output is not None and place.exists():
            shutil.rmtree(place)

        Lander(plan, logs).land(list(logs.glob("*.log.gz")))
        compacted(place, output)

        assert bodies_at(str(output or place)) == ALL, f"killed at step {step}"
        if is_over:
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize(
    ("store", "where", "kills", "count"),
    [
        ("delta", "directory", 2, 3000),
        *(
            pytest.param(store, where, 10, 40_000, marks=pytest.mark.slow)
            for store in ("parquet", "delta")
            for where in ("directory", "bucket")
        ),
    ],
)
def test_killed_while_it_lands_every_message_is_in_the_table_once(
    go_nsqd: MakeNsqd,
    spawn_nsq: SpawnNsq,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    store: str,
    where: str,
    kills: int,
    count: int,
) -> None:
    nsqd, out = go_nsqd("-msg-timeout=2s"), tmp_path / "out"
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = (json.dumps({"n": n, "text": "x" * 100}).encode() for n in range(count))
    args = to_file(nsqd.tcp_address, out, "--store", store, "--body", "json")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    place, logs = str(out), out / ".nsq-log"
    if where == "bucket":
        place, logs = f"{request.getfixturevalue('bucket').url}/lake", out
        args += ["--upload", place]
    landed = logs / DRAFTS / "state.json"
    share = -(-count // (kills + 1))
    published: list[bytes] = []

    def start() -> subprocess.Popen[bytes]:
        more = list(islice(bodies, share))
        nsqd.publish(TOPIC, *more)
        published.extend(more)
        return spawn_nsq(args)

    process = killed_again_and_again(
        start, lambda: landed.read_bytes() if landed.exists() else b"", kills
    )
    wait_until_archived(nsqd)
    assert "not uploaded" not in ended(process)
    assert_each_once(bodies_at(place), published)
    assert list(logs.rglob("*.log")) == []
