"""``nsq to-file`` killed as it drains an nsqd, lands and uploads, and stopped for long.

No message is lost or doubled, every finished file is stored once and unchanged, and no partial file
remains. The long forms, with 20 kills while a million messages of a Go nsqd drain, run with
``-m slow``.
"""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    Writer,
    assert_each_once,
    bodies_at,
    ended,
    filled,
    finished_files,
    killed_again_and_again,
    killing,
    lines_of,
    messages_of,
    numbered,
    parts,
    to_file,
    unfinished,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.examples import slow
from plugins.network import TO_CLIENT, ProxyTo
from plugins.object_store import Bucket
from plugins.servers import EmbeddedServer, MakeNsqd, Nsqd
from plugins.waiting import wait_until

from nsqtools.archive.compaction import Compaction
from nsqtools.archive.compaction_jobs import in_parallel
from nsqtools.archive.compaction_plan import Selection
from nsqtools.archive.finding import find_archives, find_inputs
from nsqtools.archive.landing import DRAFTS, Lander
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.slices import Settings
from nsqtools.archive.storage_objects import PART_SIZE
from nsqtools.archive.table_writer import TablePlan
from nsqtools.archive.upload import uploaded_of
from nsqtools.client.connection import MIN_HANDSHAKE_S
from nsqtools.protocol.frames import WireMessage

FORMS = ["raw none", "raw gzip", "jsonl gzip", "raw zstd"]
SHORT_FORMS = ["raw none", "raw zstd"]  # fleets and uploads are killed as they write jsonl gzip


@pytest.mark.parametrize(
    ("form", "messages", "kills", "rotate"),
    [
        *((form, 20_000, 3, ["--rotate-text-size", "300KB"]) for form in SHORT_FORMS),
        *(slow(form, 1_000_000, 20, ["--rotate-size", "8MB"]) for form in FORMS),
    ],
)
def test_kills_at_random_points_neither_lose_nor_double_messages(
    quick_nsqd: EmbeddedServer,
    go_nsqd: MakeNsqd,
    spawn_nsq: SpawnNsq,
    tmp_path: Path,
    form: str,
    messages: int,
    kills: int,
    rotate: list[str],
) -> None:
    nsqd: Nsqd = quick_nsqd
    if messages > 100_000:
        nsqd = go_nsqd("-mem-queue-size=1000000", "-msg-timeout=2s")
    bodies = [b"%08d some text that a message may have" % number for number in range(messages)]
    published = filled(nsqd, bodies)
    out = tmp_path / "out"
    format, compression = form.split()
    flags = ["--format", format, "--compression", compression, "--max-in-flight", "100", *rotate]
    args = to_file(nsqd.tcp_address, out, *flags)

    process = killed_again_and_again(
        lambda: spawn_nsq(args), lambda: unfinished(nsqd, TOPIC, CHANNEL), kills
    )
    nsqd.publish(TOPIC, b"the last one")  # its arrival shows that the last run has begun
    wait_until_archived(nsqd)
    ended(process)

    is_raw = format == "raw"
    archived = lines_of(out) if is_raw else [message["body"] for message in messages_of(out)]
    assert_each_once(archived, [*published, b"the last one"])
    assert parts(out) == []


def test_a_suspended_archiver_writes_no_row_twice(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    archiver = spawn_nsq(to_file(nsqd.tcp_address, tmp_path))
    stats = partial(nsqd.channel_stats, TOPIC, CHANNEL)
    wait_until(lambda: any(c["ready_count"] for c in stats()["clients"]), what="RDY", timeout_s=20)
    os.kill(archiver.pid, signal.SIGSTOP)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(50)])
    wait_until(lambda: stats()["timeout_count"], what="messages that time out", timeout_s=20)
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until_archived(nsqd)
    ended(archiver)
    ids = [message["id"] for message in messages_of(tmp_path)]
    assert len(ids) == len(set(ids)) == 50


def test_a_suspended_archiver_survives_the_handshake_timeout(
    quick_nsqd: EmbeddedServer, proxy_to: ProxyTo, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    """Suspending the machine stops nsqd as well, whose answer then arrives after the timeout."""
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    proxy = proxy_to(nsqd.tcp_address)
    proxy.pause(TO_CLIENT)
    archiver = spawn_nsq(to_file(proxy.address, tmp_path, "-X", "dial_timeout=100ms"))
    magic = "desired protocol magic"
    wait_until(lambda: magic in nsqd.log, what="the archiver", timeout_s=20)
    os.kill(archiver.pid, signal.SIGSTOP)
    time.sleep(MIN_HANDSHAKE_S + 2)  # beyond the timeout of the handshake
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until(lambda: archiver.poll() or nsqd.log.count(magic) > 1, what="a try", timeout_s=20)
    proxy.resume(TO_CLIENT)
    wait_until_archived(nsqd)
    ended(archiver)
    assert [message["body"] for message in messages_of(tmp_path)] == [b"x"]


def left_by_an_earlier_run(directory: Path, *, small: int, large: int) -> list[bytes]:
    """Leave finished files that were not uploaded; the large ones are uploaded in parts."""
    writer, rng, bodies = Writer(directory, topic=TOPIC), random.Random(7), []
    for number in range(small + large):
        is_large = number >= small
        size = 600_000 + PART_SIZE // 2 if is_large else 100  # bytes, which hex doubles
        for index in range(2 if is_large else 10):
            body = b"%06d %02d " % (number, index) + rng.randbytes(size).hex().encode()
            writer.write([WireMessage(1, 1, b"%08d%08d" % (number, index), body)])
            bodies.append(body)
        writer.finish()
    return bodies


@pytest.mark.parametrize(
    ("kills", "small", "large", "live", "deletes"),
    [
        (1, 8, 1, 2000, True),
        slow(10, 60, 6, 20_000, False, id="kept"),
        slow(10, 60, 6, 20_000, True, id="deleted"),
    ],
)
def test_kills_during_uploads_store_every_file_once(
    quick_nsqd: EmbeddedServer,
    spawn_nsq: SpawnNsq,
    bucket: Bucket,
    tmp_path: Path,
    kills: int,
    small: int,
    large: int,
    live: int,
    deletes: bool,
) -> None:
    nsqd, out = quick_nsqd, tmp_path / "out"
    out.mkdir()
    expected = left_by_an_earlier_run(out, small=small, large=large)
    published = filled(nsqd, [b"live %06d %s" % (n, b"x" * 300) for n in range(live)])
    args = to_file(nsqd.tcp_address, out, "--upload", f"{bucket.url}/lake", "--gzip")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    args += ["--delete-uploaded"] if deletes else []

    process = killed_again_and_again(
        lambda: spawn_nsq(args), lambda: {*out.rglob(".*.upload*")}, kills
    )
    nsqd.publish(TOPIC, b"the last one")  # its arrival shows that the last run has begun
    published.append(b"the last one")
    wait_until_archived(nsqd)
    wait_until(
        lambda: all(uploaded_of(path).exists() for path in finished_files(out)),
        what="all uploads",
        timeout_s=90,
    )
    assert "not uploaded" not in ended(process)

    stored = find_archives([bucket.url])
    assert_each_once(bodies_at(bucket.url), expected + published)
    assert len({archive.head for archive in stored}) == len(stored), "a file is stored twice"
    names = bucket.names()
    assert len(names) == 3 * len(stored), "each file has its index and its manifest, and no more"
    if deletes:
        assert finished_files(out) == []
        return
    contents = Counter(path.read_bytes() for path in finished_files(out))
    assert contents == Counter(bucket.storage.read(archive.name) for archive in stored)


DAY_NS = 86_400 * 10**9

LANDING_STEPS = """
from nsqtools.archive import landing, parquet
from nsqtools.archive.delta import DeltaCatalog
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.storage_objects import BucketPlace

around(parquet.ParquetWriter, "close")
around(landing, "replace_file", "sync_folder")
around(DeltaCatalog, "create", "commit")
around(LocalPlace, "put_file", "put")
around(BucketPlace, "put_file", "put")
"""

LANDING = """
import pickle
from pathlib import Path
plan, logs, *paths = words
landing.Lander(pickle.loads(bytes.fromhex(plan)), Path(logs)).land(list(map(Path, paths)))
"""


LOG_FILES = "[!.]*.log.*"


def logs_of(directory: Path) -> list[Path]:
    """Write two logs: a log of 0.3.0, and an Arrow log that spans two days."""
    writer, paths, messages = Writer(directory, topic=TOPIC), [], numbered(0, 5)
    later = [
        message._replace(timestamp_ns=message.timestamp_ns + DAY_NS) for message in messages[3:]
    ]
    for batch, name in ((messages[:2], "a.log.gz"), ([messages[2], *later], "b.log.arrow")):
        writer.write(batch, name=name)
        paths.append(writer.finish())
    return paths


def compacted(place: Path, output: Path | None) -> None:
    if place.exists():
        target = None if output is None else LocalPlace(output)
        inputs = find_inputs([LocalPlace(place)])
        compaction = Compaction(inputs, target, Selection(), Settings())
        with compaction.locked():
            compaction.plan()
            compaction.run(in_parallel(1))


SHORT = [("delta", False, 4), ("parquet bucket", False, 6)]
SHORT += [("delta", True, 7), ("parquet", True, 6)]
LONG = [(place, False, 1) for place in ("delta", "delta bucket", "parquet", "parquet bucket")]
LONG += [("delta", True, 1), ("parquet", True, 1)]


@pytest.mark.parametrize(
    ("store", "compacts", "every"), [*SHORT, *(slow(*parameters) for parameters in LONG)]
)
def test_a_kill_at_any_step_of_landing_lands_every_message_once(
    tmp_path: Path, bucket: Bucket, nsq_env: dict[str, str], store: str, compacts: bool, every: int
) -> None:
    """The archive may be compacted before the next run, and the compacted logs removed."""
    with killing(LANDING_STEPS, LANDING, nsq_env) as killed_at:
        for step in range(0, 100, every):
            table, logs = tmp_path / f"table-{step}", tmp_path / f"logs-{step}"
            place = f"{bucket.url}/{step}" if "bucket" in store else str(table)
            output = None if "delta" in store else tmp_path / f"output-{step}"
            logs.mkdir()
            plan = TablePlan(place, "delta" in store, "web1")
            is_over = not killed_at(step, pickle.dumps(plan).hex(), logs, *logs_of(logs))
            if compacts:
                compacted(table, output)
                if output is not None:
                    shutil.rmtree(table, ignore_errors=True)

            Lander(plan, logs).land(list(logs.glob(LOG_FILES)))
            if compacts:
                compacted(table, output)
                place = str(output or table)

            assert bodies_at(place) == [b"body %d" % n for n in range(5)], f"killed at step {step}"
            assert list(logs.glob(LOG_FILES)) == []
            assert {path.name for path in (logs / DRAFTS).iterdir()} == {"lock", "state.json"}
            if is_over:
                assert step > 8
                return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize(
    ("store", "kills", "count"),
    [("delta", 2, 3000), slow("delta", 10, 40_000), slow("parquet", 10, 40_000)],
)
def test_random_kills_during_landing_land_every_message_once(
    go_nsqd: MakeNsqd, spawn_nsq: SpawnNsq, tmp_path: Path, store: str, kills: int, count: int
) -> None:
    nsqd, out = go_nsqd("-msg-timeout=2s"), tmp_path / "out"
    nsqd.create_channel(TOPIC, CHANNEL)
    bodies = (json.dumps({"n": n, "text": "x" * 100}).encode() for n in range(count))
    args = to_file(nsqd.tcp_address, out, "--store", store, "--body", "json")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    logs = out / ".nsq-log"
    landed = logs / DRAFTS / "state.json"
    share = -(-count // (kills + 1))
    published: list[bytes] = []

    def start() -> subprocess.Popen[bytes]:
        batch = list(islice(bodies, share))
        nsqd.publish(TOPIC, *batch)
        published.extend(batch)
        return spawn_nsq(args)

    process = killed_again_and_again(
        start, lambda: landed.read_bytes() if landed.exists() else b"", kills
    )
    wait_until_archived(nsqd)
    ended(process)
    assert_each_once(bodies_at(out), published)
    assert list(logs.rglob("*.log.arrow")) == []
