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
    bodies_at,
    ended,
    killed_again_and_again,
    numbered,
    to_file,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.examples import slow
from plugins.object_store import Bucket
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s

from nsqtools.archive.catalog import find_inputs
from nsqtools.archive.compaction import Compaction, Selection, in_processes
from nsqtools.archive.landing import DRAFTS, Lander
from nsqtools.archive.slices import Settings
from nsqtools.archive.table import TablePlan

DAY_NS = 86_400 * 10**9
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
    writer, paths, messages = Writer(directory, topic=TOPIC), [], numbered(0, 5)
    later = [each._replace(timestamp_ns=each.timestamp_ns + DAY_NS) for each in messages[3:]]
    for some in (messages[:2], [messages[2], *later]):
        writer.write(some)
        paths.append(writer.finish())
    return paths


ALL = [b"body %d" % number for number in range(5)]


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


def compacted(place: Path, output: Path | None) -> None:
    if place.exists():
        compaction = Compaction(find_inputs([place]), output, Selection(), Settings())
        with compaction.locked():
            compaction.plan()
            compaction.run(in_processes(1))


SHORT = [
    ("delta", False, 4),
    ("parquet bucket", False, 6),
    ("delta", True, 7),
    ("parquet", True, 6),
]
LONG = [(place, False, 1) for place in ("delta", "delta bucket", "parquet", "parquet bucket")]
LONG += [("delta", True, 1), ("parquet", True, 1)]


@pytest.mark.parametrize(
    ("store", "compacts", "every"),
    [*SHORT, *(slow(*each) for each in LONG)],
)
def test_killed_at_each_step_every_message_lands_once(
    tmp_path: Path, bucket: Bucket, nsq_env: dict[str, str], store: str, compacts: bool, every: int
) -> None:
    """Also when it is compacted before it goes on. What was compacted is even removed, as who
    compacts to another place may do."""
    for step in range(0, 100, every):
        table, logs = tmp_path / f"table-{step}", tmp_path / f"logs-{step}"
        place = f"{bucket.url}/{step}" if "bucket" in store else str(table)
        output = None if "delta" in store else tmp_path / f"output-{step}"
        logs.mkdir()
        plan = TablePlan(place, "delta" in store, "web1")
        is_over = landed_until_killed(plan, step, logs, nsq_env)
        if compacts:
            compacted(table, output)
            if output is not None:
                shutil.rmtree(table, ignore_errors=True)

        Lander(plan, logs).land(list(logs.glob("*.log.gz")))
        if compacts:
            compacted(table, output)
            place = str(output or table)

        assert bodies_at(place) == ALL, f"killed at step {step}"
        assert list(logs.rglob("*.log.gz")) == []
        assert {path.name for path in (logs / DRAFTS).iterdir()} == {"lock", "state.json"}
        if is_over:
            assert step > 8
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize(
    ("store", "is_stored", "kills", "count"),
    [
        ("delta", False, 2, 3000),
        *(
            slow(store, is_stored, 10, 40_000)
            for store in ("parquet", "delta")
            for is_stored in (False, True)
        ),
    ],
)
def test_killed_while_it_lands_every_message_is_in_the_table_once(
    go_nsqd: MakeNsqd,
    spawn_nsq: SpawnNsq,
    bucket: Bucket,
    tmp_path: Path,
    store: str,
    is_stored: bool,
    kills: int,
    count: int,
) -> None:
    nsqd, out = go_nsqd("-msg-timeout=2s"), tmp_path / "out"
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = (json.dumps({"n": n, "text": "x" * 100}).encode() for n in range(count))
    args = to_file(nsqd.tcp_address, out, "--store", store, "--body", "json")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    place, logs = str(out), out / ".nsq-log"
    if is_stored:
        place, logs = f"{bucket.url}/lake", out
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
